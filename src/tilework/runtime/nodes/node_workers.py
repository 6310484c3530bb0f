"""The workers of a node, which may outlive the server that it belongs to.

Pipes are first in, first out: nothing of the old session comes after a worker's answer to `StartOver`, and what comes
before it is passed on to no server. Rejected: to go on with works that run. Their numbers, and those of their jobs, are
of a controller that is gone, and what they have not reported is no part of its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from tilework.core.component import Component
from tilework.core.model import Source
from tilework.core.wire.commands import DropWeights, GroupRef, StartOver
from tilework.core.wire.reports import LoadedModel, Report, StartedOver, WeightsRead
from tilework.runtime.executor import Listener
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.nodes.messages import BeginNode

_log = logging.getLogger(__name__)
_END_WORKS_S = 5.0  # Longer than most steps.


class NodeWorkers(Listener):
    """The workers that the latest server asked for. It is the `Listener` of their executor.

    A session with a server has them from `attach` on. When it breaks off, they `wait` for the next one: they stop their
    works, forget all jobs, and keep their models and blobs. Their reports of the old session reach no server. The next
    session has them if it asks for the same; otherwise, or after `wait_s` without a session, they end.
    """

    def __init__(self, wait_s: float = 0.0) -> None:
        self._wait_s = wait_s
        self._executor: LocalExecutor | None = None
        self._begun: BeginNode | None = None
        self._models: tuple[LoadedModel, ...] | None = None  # None until all have loaded.
        self._has_changed = False
        self._session: Listener | None = None
        self._on_loading: Callable[[int], None] = lambda _num_ready: None
        self._left: Collection[int] | None = None  # The rest of the workers, if some were given up.
        self._awaited: dict[int, asyncio.Future[None]] = {}  # By device that is told to start over.
        self._chore: asyncio.Task[None] | None = None  # Task between two sessions.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """Models that they serve, once they are up."""
        assert self._models is not None
        return self._models

    async def begin(self, begin: BeginNode, on_loading: Callable[[int], None]) -> LocalExecutor:
        """Return workers as `begin` asks for: those that wait, or new ones, whose loading `on_loading` follows.

        Raises WorkerStartFailed, OSError.
        """
        await self._finish_chore()
        if self._executor is not None and (self._begun != begin or self._has_changed):
            await self.end()
        if self._executor is None:
            self._executor = executor = LocalExecutor(_config(begin))
            self._begun = begin
            self._has_changed = False
            self._on_loading = on_loading
            self._models = await executor.start(self)
        return self._executor

    def attach(self, session: Listener) -> None:
        """Report to this session from now on, also earlier losses."""
        assert self._executor is not None
        self._session = session
        up = {*self._executor.devices_up, *self._executor.slots_up}
        for device_id in range(self._executor.num_devices + self._executor.num_slots):
            if device_id not in up:
                session.on_lost(device_id, "its worker is started again")
        session.on_links_changed()
        if self._left is not None:
            session.on_given_up(self._left)

    def note_change(self) -> None:
        """Note that the session changes the models: the next session cannot have these workers."""
        self._has_changed = True

    def wait(self, groups: Iterable[GroupRef]) -> None:
        """Let the workers wait, since their session, which had these groups, broke off.

        If they wait already, the session never had them.
        """
        if self._timer is not None:
            return
        was_attached, self._session = self._session is not None, None
        if self._models is None or not self._wait_s:
            self._begin_chore(self.end())
            return
        _log.warning("the workers of this node wait %g s for a server", self._wait_s)
        if was_attached:
            self._begin_chore(self._start_over(tuple(groups)))
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    async def let_go(self) -> None:
        """End the workers, since the server lets the node go; those that wait, and that it never had, go on waiting."""
        if self._timer is None:
            await self.close()

    def _give_up(self) -> None:
        self._timer = None
        _log.warning("no server has come within %g s: the workers of this node end", self._wait_s)
        self._begin_chore(self.end())

    async def end(self) -> None:
        """End all workers, with all that they keep."""
        self._session = None
        executor = self._executor
        self._executor = self._begun = self._models = self._left = None
        if executor is not None:
            await executor.stop()

    async def close(self) -> None:
        """End all workers, also those that wait."""
        for device_id in self._awaited:
            self._answered(device_id)
        await self._finish_chore()
        await self.end()

    def _begin_chore(self, chore: Coroutine[Any, Any, None]) -> None:
        self._chore = asyncio.get_running_loop().create_task(_after(self._chore, chore))

    async def _finish_chore(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._chore is not None:
            await asyncio.shield(self._chore)  # It goes on if a session that waits for it breaks off.
            self._chore = None

    async def _start_over(self, groups: tuple[GroupRef, ...]) -> None:
        """Let all workers that are up forget the session; those that do not end their works in time are killed."""
        executor = self._executor
        loop = asyncio.get_running_loop()
        assert executor is not None
        await executor.end_calibration()
        for ref in groups:  # The server may have told only some of its members.
            executor.break_off(ref)
        weights = tuple({one.digest for model in self.models for one in _components(model)})
        self._awaited = {device_id: loop.create_future() for device_id in (*executor.devices_up, *executor.slots_up)}
        for device_id in self._awaited:
            executor.send(device_id, DropWeights(weights))
            executor.send(device_id, StartOver())
        await executor.end_reads()
        if self._awaited:
            await asyncio.wait(self._awaited.values(), timeout=_END_WORKS_S)
        for device_id, answer in self._awaited.items():
            if not answer.done():
                executor.kill(device_id, f"it did not end its works within {_END_WORKS_S:g} s of its server")
        await asyncio.gather(*self._awaited.values())

    def _answered(self, device_id: int) -> None:
        answer = self._awaited.get(device_id)
        if answer is not None and not answer.done():
            answer.set_result(None)

    # For the executor.

    def on_loading(self, num_ready: int) -> None:
        self._on_loading(num_ready)

    def on_report(self, device_id: int, report: Report) -> None:
        if isinstance(report, StartedOver):
            self._answered(device_id)
        elif self._session is not None:
            self._session.on_report(device_id, report)

    def on_lost(self, device_id: int, reason: str) -> None:
        self._answered(device_id)
        if self._session is not None:
            self._session.on_lost(device_id, reason)

    def on_joined(self, device_id: int) -> None:
        if self._session is not None:
            self._session.on_joined(device_id)

    def on_links_changed(self) -> None:
        if self._session is not None:
            self._session.on_links_changed()

    def on_read(self, read: WeightsRead) -> None:
        if self._session is not None:
            self._session.on_read(read)

    def on_given_up(self, left: Collection[int]) -> None:
        self._left = left
        if self._session is not None:
            self._session.on_given_up(left)


async def _after(before: asyncio.Task[None] | None, chore: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        await before
    await chore


def _components(model: LoadedModel) -> list[Component]:
    loras = (one.component for one in model.loras.values())
    return [*model.components.values(), *(one for one in loras if one is not None)]


def _config(begin: BeginNode) -> LocalConfig:
    sources: tuple[Source, ...] = (*begin.models, *begin.simulated)
    return LocalConfig(
        num_workers=begin.num_workers,
        sources=sources,
        num_slots=begin.num_slots,
        weights_bytes=begin.weights_bytes,
        states_bytes=begin.states_bytes,
        cache_bytes=begin.cache_bytes,
        cell_size=begin.cell_size,
        collectives=begin.collectives,
    )
