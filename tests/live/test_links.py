"""Groups as parts of their node's communicator, while workers are lost: what needs no lost worker goes on."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import tiny
from builders import Idle
from stages import DECODE, DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.control.log import replay
from tilework.control.watchdog import WatchdogConfig
from tilework.core.cost_row import CostRow
from tilework.core.model import SimulatedSource
from tilework.core.policy import ClusterView, CostModel, DeviceView
from tilework.core.request import Status
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Group, Plan, Start
from tilework.cost.table import CostTable
from tilework.policy import registry
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Outcome, Ticket
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
NUM_WORKERS = 4
SMALL, WIDE, LARGE = 64, 128, 256  # LARGE decodes for longer than a test waits; WIDE steps do not fit on two devices.
ROWS = (
    *(
        CostRow(pipeline="p", stage=DIFFUSE, height=side, width=side, degree=degree, seconds=0.02, peak_bytes=peak)
        for side, peaks in ((SMALL, {1: 1, 2: 1}), (WIDE, {1: 1, 2: 100}), (LARGE, {1: 1, 2: 1}))
        for degree, peak in peaks.items()
    ),
    *(
        CostRow(pipeline="p", stage=DECODE, height=side, width=side, seconds=seconds)
        for side, seconds in ((SMALL, 0.01), (WIDE, 0.01), (LARGE, 4 * PATIENCE_S))
    ),
)
SOURCE = SimulatedSource(pipeline="p", hardware="h", steps=20, rows=ROWS, memory_bytes=10)


@dataclass(frozen=True)
class Pairs(Idle):
    """Runs steps on two idle devices that can form a group, if there are any, five at a time; LARGE on one."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        idle = {device.device_id: device for device in view.devices if not device.works}
        starts: list[Start] = []
        for job in view.waiting():
            if not idle or job.left.stage is None:
                break
            pair = _pair(list(idle.values())) if job.left.stage.has_steps and job.request.shape.height < LARGE else None
            group = pair or (min(idle),)
            if pair and not costs.fits(job.left.stage, job.request.shape, 2):
                group = group[:1]
            steps = min(5, job.left.num_left_here)
            starts.append(
                Start(stage=job.left.stage, job_ids=(job.job_id,), devices=group, num_steps=steps, why="pairs")
            )
            for one in group:
                del idle[one]
        return Plan(starts=tuple(starts))


def _pair(idle: list[DeviceView]) -> Group | None:
    first = {device.pool: device.device_id for device in reversed(idle)}
    for device in idle:
        if first[device.pool] != device.device_id:
            return first[device.pool], device.device_id
    return None


@dataclass
class Rig:
    engine: Engine
    executor: LocalExecutor
    log: io.StringIO

    def submit(self, uid: str, side: int, steps: int = 20) -> Ticket:
        answer = self.engine.submit({uid: tiny.spec(height=side, width=side, steps=steps, guidance_scale=1.0)})
        assert isinstance(answer, tuple), answer
        return answer[0]

    async def begin_long(self) -> int:
        """Let a device decode for longer than the test waits; returns it."""
        self.submit("long", LARGE, steps=1)
        found: list[int] = []

        def look() -> list[int]:
            tracker = self.engine._controller.tracker
            found[:] = [one.device_id for one in tracker.devices if one.works and one.works[0].stage.name == DECODE]
            return found

        await until(look)
        await until(lambda: self.engine._controller.tracker.devices[found[0]].works[0].num_steps == 1)
        return found[0]

    async def done(self, *tickets: Ticket) -> list[Outcome]:
        outcomes = await asyncio.gather(*(ticket.outcome for ticket in tickets))
        assert [outcome.status for outcome in outcomes] == [Status.DONE] * len(tickets), outcomes
        return outcomes

    async def running_pair(self, ticket: Ticket) -> Group:
        """The devices of a group that runs steps of it now."""
        found: list[Group] = []

        def look() -> bool:
            for device in self.engine._controller.tracker.devices:
                for work in device.works[:1]:
                    if len(work.devices) > 1 and ticket.steps_done > 2:
                        found.append(work.devices)
            return bool(found)

        await until(look)
        return found[0]

    @property
    def pids(self) -> dict[int, int | None]:
        return {one: self.executor.pids.get(str(one)) for one in range(NUM_WORKERS)}

    def signal(self, device_id: int, number: signal.Signals) -> None:
        pid = self.executor.pids.get(str(device_id))
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def registered() -> Iterator[None]:
    registry._GIVEN["pairs"] = Pairs
    yield
    del registry._GIVEN["pairs"]


def play(scenario: Callable[[Rig], Any]) -> None:
    async def run() -> None:
        config = LocalConfig(
            num_workers=NUM_WORKERS, sources=(SOURCE,), collectives="gloo", restart_delay_s=0.05, stop_grace_s=0.1
        )
        executor, log = LocalExecutor(config), io.StringIO()
        table = CostTable(hardware="h", rows=ROWS)
        watchdog = WatchdogConfig(tick_ns=100 * NS_PER_MS, least_ns=2 * NS_PER_S)
        controller = ControllerConfig(policy="pairs")
        engine = await EngineStart(
            EngineConfig(controller=controller, table=table, watchdog=watchdog), executor, log
        ).start()
        try:
            await asyncio.wait_for(scenario(Rig(engine, executor, log)), 2 * PATIENCE_S)
        finally:
            await engine.stop()
        assert replay(log.getvalue().splitlines())[1] is None

    with registered():
        asyncio.run(run())


async def goes_on(rig: Rig, busy: int, lost: set[int], before: dict[int, int | None]) -> None:
    """While one device decodes, others are served, first alone and soon in groups; no healthy worker was killed."""
    await rig.done(*(rig.submit(f"after {number}", SMALL) for number in range(4)))
    await until(lambda: not rig.executor.alone)
    (outcome,) = await rig.done(rig.submit("in a group", SMALL))
    assert {len(one.devices) for one in outcome.segments if one.stage == DIFFUSE} == {2}
    assert busy not in {one for segment in outcome.segments for one in segment.devices}
    assert {one for one, pid in rig.pids.items() if pid != before[one]} == lost


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("where", ["in a group", "idle"])
def test_a_loss_while_another_worker_decodes_for_minutes_stops_nobody(fault: signal.Signals, where: str) -> None:
    """Each worker waited for that decode to form the next communicator, and was killed for it one after the other."""

    async def scenario(rig: Rig) -> None:
        busy, before = await rig.begin_long(), rig.pids
        tickets = [rig.submit(f"before {number}", SMALL, steps=60) for number in range(2)]
        group = await rig.running_pair(tickets[0])
        lost = group[1]
        if where == "idle":
            await rig.done(*tickets)
            if fault is signal.SIGSTOP:
                tickets = [rig.submit("finds it", SMALL)]
        rig.signal(lost, fault)
        await rig.done(*tickets)
        if fault is signal.SIGSTOP and where == "idle":
            lost_now = {one for one, pid in rig.pids.items() if pid != before[one]}
            assert lost_now <= {lost}
            if not lost_now:  # Nothing was to run on it yet.
                rig.signal(lost, signal.SIGKILL)
        await until(lambda: rig.pids[lost] not in (None, before[lost]))
        await goes_on(rig, busy, {lost}, before)

    play(scenario)


def test_the_second_of_two_losses_ends_its_own_group_too() -> None:
    """The first retires the node while the other group still runs in it: its healthy member waited, and was killed."""

    async def scenario(rig: Rig) -> None:
        before = rig.pids
        tickets = [rig.submit(f"before {number}", SMALL, steps=200) for number in range(2)]
        for ticket in tickets:
            await rig.running_pair(ticket)
        tracker = rig.engine._controller.tracker
        pairs = {work.devices for device in tracker.devices for work in device.works[:1] if len(work.devices) > 1}
        lost = {pair[1] for pair in pairs}
        for device_id in lost:
            rig.signal(device_id, signal.SIGKILL)
            await until(lambda device_id=device_id: rig.pids[device_id] != before[device_id])
        await rig.done(*tickets)
        await until(lambda: not rig.executor.alone)
        assert {one for one, pid in rig.pids.items() if pid != before[one]} == lost

    play(scenario)


def test_a_group_without_memory_ends_itself_alone() -> None:
    """Its communicator has to be aborted on its members, and with it the node's: others go on meanwhile."""

    async def scenario(rig: Rig) -> None:
        busy, before = await rig.begin_long(), rig.pids
        await rig.done(rig.submit("too large for two", WIDE))
        assert '"is":"OutOfMemory"' in rig.log.getvalue()
        await goes_on(rig, busy, set(), before)

    play(scenario)


def test_a_worker_lost_while_the_node_forms_is_waited_for_by_nobody() -> None:
    """Twice: the second as soon as the next node should form."""

    async def scenario(rig: Rig) -> None:
        busy, before = await rig.begin_long(), rig.pids
        first, second, *_ = (one for one in range(NUM_WORKERS) if one != busy)
        rig.signal(first, signal.SIGKILL)
        await until(lambda: rig.executor.is_linking)
        rig.signal(second, signal.SIGKILL)
        await until(lambda: all(rig.pids[one] not in (None, before[one]) for one in (first, second)))
        await goes_on(rig, busy, {first, second}, before)

    play(scenario)
