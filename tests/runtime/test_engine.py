"""The live engine: real worker processes, real pipelines, every picture equal to the stock pipeline's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

import tilework
import tiny
from quick import quick
from runtime.rig import PingPong, Rig, assert_nothing_is_left, kill
from stages import DIFFUSE
from tilework.control.log import replay
from tilework.core.actions import Action, Reject
from tilework.core.cost_row import CostRow
from tilework.core.events import Event
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import OnMiss, Status, Terms
from tilework.core.time import NS_PER_MS
from tilework.core.wire.spec import Spec
from tilework.core.work import Plan
from tilework.policy import registry
from tilework.runtime.control_loop import FAILED
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """The policy of these tests, for these tests only."""
    registry._GIVEN["ping-pong"] = PingPong
    yield
    del registry._GIVEN["ping-pong"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "dpm")
    return directory


@pytest.fixture(scope="module")
def stock(directory: Path) -> Callable[[Spec], np.ndarray]:
    pipeline = tilework.reference(str(directory))
    return lambda spec: tiny.run_stock(pipeline, spec).pixels


@pytest.fixture(scope="module")
def start(directory: Path) -> Iterator[Callable[..., Rig]]:
    """Starts rigs on the tiny model; all of them end with the module."""
    rigs: list[Rig] = []

    def start(policy: str = "edf", num_workers: int = 2) -> Rig:
        rig = Rig(ModelSource(path=str(directory)), policy, num_workers)
        rigs.append(rig)
        rig.start()
        return rig

    yield start
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="module")
def rig(start: Callable[..., Rig]) -> Rig:
    return start()


def mixed_specs(prefix: str) -> dict[str, Spec]:
    sizes = [(64, 64), (64, 96), (128, 64), (96, 96), (64, 64), (80, 112)]
    return {
        f"{prefix}{index}": tiny.spec(height=height, width=width, seed=index, steps=4 + index % 3)
        for index, (height, width) in enumerate(sizes)
    }


def assert_equal_to_stock(outcomes: list[Outcome], specs: dict[str, Spec], stock: Callable[[Spec], np.ndarray]) -> None:
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(tiny.pixels(outcome.image), stock(specs[outcome.uid])), f"{outcome.uid} differs"


@pytest.mark.slow
def test_pictures_of_many_sizes_equal_the_stock_pipelines(rig: Rig, stock: Callable[[Spec], np.ndarray]) -> None:
    specs = mixed_specs("mix")
    outcomes = rig.outcomes(specs)
    assert_equal_to_stock(outcomes, specs, stock)
    assert {device_id for outcome in outcomes for segment in outcome.segments for device_id in segment.devices} == {
        0,
        1,
    }


def test_pictures_that_move_after_every_step_equal_the_stock_pipelines(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray]
) -> None:
    rig = start("ping-pong")
    specs = mixed_specs("pong")
    outcomes = rig.outcomes(specs)
    assert_equal_to_stock(outcomes, specs, stock)
    for outcome in outcomes:
        devices = [segment.devices for segment in outcome.segments]
        assert all(first != second for first, second in pairwise(devices))
    assert replay(rig.log.getvalue().splitlines())[1] is None


def test_the_outcome_lists_what_ran_where_and_when(rig: Rig) -> None:
    async def scenario() -> tuple[Ticket, Outcome]:
        ticket = rig.submit(tiny.spec(steps=6), "story")
        assert isinstance(ticket, Ticket)
        return ticket, await ticket.outcome

    ticket, outcome = rig.run(scenario())
    assert [s.stage for s in outcome.segments if s.stage != DIFFUSE] == ["encode", "decode"]
    assert sum(s.num_steps for s in outcome.segments if s.stage == DIFFUSE) == ticket.steps_done == 6
    times = [t for segment in outcome.segments for t in (segment.start_ns, segment.end_ns)]
    assert times == sorted(times)
    assert ticket.request.arrival_ns <= times[0]
    assert times[-1] <= outcome.finished_ns
    assert ticket.queue_ns is not None
    assert 0 <= ticket.queue_ns < 500 * NS_PER_MS


def test_a_cancelled_request_ends_at_once_and_frees_its_device_at_the_next_step(rig: Rig) -> None:
    async def scenario() -> tuple[Outcome, Outcome]:
        endless = rig.submit(tiny.spec(steps=1000, height=128, width=128), "endless")
        other = rig.submit(tiny.spec(steps=1000, height=128, width=128), "other")
        assert isinstance(endless, Ticket)
        assert isinstance(other, Ticket)
        await until(lambda: endless.steps_done > 2 and other.steps_done > 2)
        rig.engine.cancel("endless", "not wanted")
        rig.engine.cancel("endless", "twice")
        rig.engine.cancel("never heard of", "nobody")
        outcome = await endless.outcome
        following = await rig.outcome(tiny.spec(), "following")
        rig.engine.cancel("other", "not wanted")
        await other.outcome
        return outcome, following

    outcome, following = rig.run(scenario())
    assert (outcome.status, outcome.reason, outcome.image) == (Status.CANCELLED, "not wanted", None)
    assert following.status is Status.DONE
    stops = [line for line in rig.log.getvalue().splitlines() if '"is":"Stopped"' in line]
    assert stops, "a running work ends early, not with its chunk"


def test_a_deadline_out_of_reach_is_refused_at_once(rig: Rig) -> None:
    async def scenario() -> Ticket | Reject:
        deadline_ns = rig.engine.now_ns() + NS_PER_MS
        return rig.submit(
            tiny.spec(steps=50), "unreachable", deadline_ns=deadline_ns, terms=Terms(on_miss=OnMiss.REJECT)
        )

    refusal = rig.run(scenario())
    assert isinstance(refusal, Reject)
    assert refusal.earliest_ns is not None
    assert refusal.earliest_ns > rig.engine.now_ns()
    assert rig.engine.status.health().num_jobs == 0


def test_the_log_of_everything_so_far_replays(rig: Rig) -> None:
    count, difference = replay(rig.log.getvalue().splitlines())
    assert difference is None
    assert count > 10
    assert "circle" not in rig.log.getvalue(), "prompts stay out of the log"


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick((0,), range(2)))
def test_a_killed_worker_costs_time_but_no_picture(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray], seed: int
) -> None:
    """Killed at a random step; the picture is made elsewhere, another request is not disturbed, the worker rejoins."""
    rig = start()
    specs = {"a": tiny.spec(steps=40, height=96, width=96), "b": tiny.spec(steps=40, height=96, width=96, seed=8)}

    async def scenario() -> list[Outcome]:
        tickets = [rig.submit(spec, uid) for uid, spec in specs.items()]
        first, second = tickets
        assert isinstance(first, Ticket)
        assert isinstance(second, Ticket)
        steps = Random(seed).randrange(2, 35)
        await until(lambda: first.steps_done >= steps)
        kill(rig, first.segments[0].devices[0])
        outcomes = [await first.outcome, await second.outcome]
        await until(lambda: rig.engine.status.health().num_devices_up == 2)
        return outcomes

    killed, other = rig.run(scenario())
    assert_equal_to_stock([killed, other], specs, stock)
    assert_nothing_is_left(rig.engine)
    for outcome, spec in zip((killed, other), specs.values(), strict=True):
        assert sum(segment.stage == "encode" for segment in outcome.segments) == 1, "it began from the start again"
        assert sum(segment.num_steps for segment in outcome.segments if segment.stage == DIFFUSE) == spec.steps
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.slow
def test_a_worker_killed_while_states_move_costs_no_picture(
    start: Callable[..., Rig], stock: Callable[[Spec], np.ndarray]
) -> None:
    """With a move after every step, some state is on its way out of the killed worker, or into it."""
    rig = start("ping-pong")
    specs = {f"m{index}": tiny.spec(steps=12, seed=index) for index in range(4)}

    async def scenario() -> list[Outcome]:
        tickets = [rig.submit(spec, uid) for uid, spec in specs.items()]
        first = tickets[0]
        assert isinstance(first, Ticket)
        await until(lambda: first.steps_done >= 5)
        kill(rig, 0)
        return [await ticket.outcome for ticket in tickets if isinstance(ticket, Ticket)]

    assert_equal_to_stock(rig.run(scenario()), specs, stock)
    assert_nothing_is_left(rig.engine)


@pytest.mark.slow
def test_when_no_worker_can_be_started_again_open_requests_end(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.symlink_to(directory)
    rig = Rig(ModelSource(path=str(model)), "edf", num_workers=1)
    rig.start()

    async def scenario() -> Outcome:
        ticket = rig.submit(tiny.spec(steps=1000), "orphan")
        assert isinstance(ticket, Ticket)
        model.unlink()  # From now on no worker can load.
        kill(rig, 0)
        return await ticket.outcome

    outcome = rig.run(scenario())
    assert outcome.status is Status.CANCELLED
    assert outcome.reason.startswith("every worker that a stage needs was lost")
    assert rig.engine.status.health().num_devices_up == 0
    rig.close()


def test_a_model_that_cannot_be_loaded_gives_the_reason(tmp_path: Path) -> None:
    rig = Rig(ModelSource(path=str(tmp_path / "nowhere")), "edf")
    with pytest.raises(WorkerStartFailed, match="nowhere"):
        rig.start()
    rig.runner.close()


@pytest.mark.slow
def test_stopping_ends_open_requests_and_all_processes(start: Callable[..., Rig]) -> None:
    rig = start()
    pids = [rig.executor.pids.get(str(device_id)) for device_id in range(2)]

    async def scenario() -> Outcome:
        ticket = rig.submit(tiny.spec(steps=1000), "open")
        assert isinstance(ticket, Ticket)
        await until(lambda: ticket.steps_done > 0)
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGSTOP)  # One that hangs is killed.
        await rig.engine.stop()
        return await ticket.outcome

    outcome = rig.run(scenario())
    assert (outcome.status, outcome.reason) == (Status.CANCELLED, "the server was stopped")
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_when_the_scheduler_fails_requests_end_and_the_engine_can_only_be_stopped(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()

    def handle(event: Event, now_ns: int) -> tuple[Action, ...]:
        raise AssertionError("a work begins twice")

    async def scenario() -> list[Outcome]:
        tickets = [rig.submit(tiny.spec(steps=1000), uid) for uid in "ab"]
        assert all(isinstance(ticket, Ticket) for ticket in tickets)
        monkeypatch.setattr(rig.engine._controller, "handle", handle)  # Before the encodes have ended.
        return await asyncio.gather(*(ticket.outcome for ticket in tickets if isinstance(ticket, Ticket)))

    rig.runner.get_loop().set_exception_handler(lambda loop, context: None)  # What a callback raises is logged there.
    outcomes = rig.run(scenario())
    assert [(one.status, one.reason) for one in outcomes] == [(Status.FAILED, FAILED)] * 2
    assert rig.engine.failed.is_set()
    assert rig.engine.failure == "the scheduler failed (AssertionError: a work begins twice)"
    assert rig.engine.draining
    assert isinstance(rig.submit(tiny.spec(), "c"), Reject)
    rig.engine.cancel("a", "it is gone")
    rig.run(rig.engine.stop())


def test_a_policy_that_fails_in_its_first_plan_ends_the_start_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fails(PingPong):
        def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
            raise ZeroDivisionError("of the policy")

    monkeypatch.setitem(registry._GIVEN, "fails", Fails)
    rows = (CostRow(pipeline="p", stage=DIFFUSE, height=64, width=64, seconds=0.01),)
    rig = Rig(SimulatedSource(pipeline="p", hardware="none", steps=5, rows=rows), "fails")
    with pytest.raises(ZeroDivisionError, match="of the policy"):
        rig.start()
    assert not rig.executor.resident_bytes, "its workers have ended"
    rig.runner.close()
