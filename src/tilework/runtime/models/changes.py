"""Models and LoRAs that come and go while workers serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import AddLora, AddModel, Command, RemoveLora, RemoveModel, Site
from tilework.core.wire.reports import Loaded, LoadFailed, LoraAdded, ModelAdded, ModelRead, Report
from tilework.runtime.executor import ModelRefused, name_taken
from tilework.runtime.worker_process import WorkerProcess

_READER = -1  # Id in place of a device's: of a process that serves none.


@dataclass(slots=True, kw_only=True, eq=False)
class ModelChanges:
    """Tells the workers that are `up` which models and LoRAs are added or removed; one change at a time.

    CPU `slots` use no LoRAs. A process of its own reads a further model, leaves the weights in `directory` and answers
    with the rest, a skeleton, so that workers take the model over between two works. They are in cells of `cell_size`.
    """

    directory: Path
    timeout_s: float
    grace_s: float
    cell_size: int
    up: Callable[[], Sequence[int]]
    slots: Callable[[], Collection[int]]
    send: Callable[[int, Command], None]
    _skeletons: dict[str, bytes] = field(default_factory=dict)
    _answers: dict[int, asyncio.Future[Report | None]] = field(default_factory=dict)

    async def read(self, source: ModelSource, served: Collection[str]) -> Loaded:
        """Read a further model, the only one of the answer. Raises ModelRefused, also if its name is in `served`."""
        cell = tuple(range(_READER, _READER + self.cell_size)) if self.cell_size > 1 else ()
        site = Site(device_id=_READER, blobs=str(self.directory), for_others=True, cell=cell)
        answer: asyncio.Future[ModelRead] = asyncio.get_running_loop().create_future()

        def on_report(report: Report) -> None:
            if isinstance(report, ModelRead) and not answer.done():
                answer.set_result(report)
            elif isinstance(report, LoadFailed):
                reader.set_exit_reason(report.reason)

        def on_exit(reason: str) -> None:
            if not answer.done():
                answer.set_exception(ModelRefused(reason))

        reader = WorkerProcess(site, [source], on_report, on_exit)
        try:
            async with asyncio.timeout(self.timeout_s):
                read = await answer
        except TimeoutError:
            raise ModelRefused(f"it was not read within {self.timeout_s:g} s") from None
        finally:
            await reader.close(self.grace_s)
        (model,) = read.loaded.models
        if model.info.name in served:
            raise ModelRefused(name_taken(model.info.name))
        self._skeletons[model.info.name] = read.skeleton
        return read.loaded

    async def add(self, source: ModelSource) -> None:
        """Let workers serve a model that was read. Raises ModelRefused."""
        answers = await self._ask(AddModel(source, self._skeletons[source.name]), self.up)
        del self._skeletons[source.name]
        errors = [one.error for one in answers if isinstance(one, ModelAdded) and one.error]
        if errors:
            raise ModelRefused(errors[0])

    def remove(self, model: str) -> None:
        """Let no worker serve a model, and forget it if it was only read."""
        if self._skeletons.pop(model, None) is None:
            self.tell(RemoveModel(model))

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        """Let requests for a model use another LoRA. Raises ModelRefused."""
        asked = await self._ask(AddLora(model, lora), self._accelerators_up)
        answers = [one for one in asked if isinstance(one, LoraAdded)]
        found = [one.lora for one in answers if one.lora is not None]
        if not found or any(one.error for one in answers):
            self.tell(RemoveLora(model, lora.name))
            raise ModelRefused(next((one.error for one in answers if one.error), "no worker is up"))
        return found[0]

    def tell(self, command: Command) -> None:
        """Send a command to all workers."""
        for device_id in self.up():
            self.send(device_id, command)

    def answered(self, device_id: int, report: ModelAdded | LoraAdded) -> None:
        """Handle the answer of a worker. The change may have been given up meanwhile."""
        answer = self._answers.get(device_id)
        if answer is not None and not answer.done():
            answer.set_result(report)

    def lost(self, device_id: int) -> None:
        """Give up the answer of a lost worker. The next worker of its device has not been asked."""
        answer = self._answers.pop(device_id, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _accelerators_up(self) -> list[int]:
        return [device_id for device_id in self.up() if device_id not in self.slots()]

    async def _ask(self, command: Command, devices: Callable[[], Sequence[int]]) -> list[Report]:
        """Return the answers of these workers, also of those that come up meanwhile, but not of those that are lost."""
        loop = asyncio.get_running_loop()
        self._answers = {}
        while new := [device_id for device_id in devices() if device_id not in self._answers]:
            for device_id in new:
                self._answers[device_id] = loop.create_future()
                self.send(device_id, command)
            await asyncio.gather(*self._answers.values())
        answers = [answer.result() for answer in self._answers.values()]
        return [one for one in answers if one is not None]
