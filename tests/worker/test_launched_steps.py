"""A host that runs ahead of its device by one step, with a device that does nothing until something waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from builders import PIPELINE, table
from commands import encode, steps
from lazy_streams import LazyStreams
from tilework.core.model import SimulatedSource
from tilework.core.wire.reports import Ended, Ending, Failed, Preview, Progress, Report
from tilework.pipelines.family import Values
from tilework.worker import launched_steps
from tilework.worker.launched_steps import LaunchedSteps
from tilework.worker.simulated import SimulatedFamily, SimulatedState
from tilework.worker.synchronize import Wait, events_on
from worker.test_groups import GROUP, EchoGroups
from worker.worker_bench import WorkerBench

JOB = 5
IN_TURN = ["launch 1", "done 1", "progress 1", "launch 2", "done 2", "progress 2"]
"""Two steps, of which each is waited for."""
AHEAD = [*IN_TURN[:3], "launch 2", "launch 3", "done 2", "progress 2", "launch 4", "done 3", "progress 3", "done 4"]


class Queued(SimulatedFamily):
    """Steps go into the queue of a device; `happened` is what host and device have done, in order.

    `react` is told of each entry, and may raise: the host's error, or the device's, which its waits raise.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(SimulatedSource(pipeline=PIPELINE, hardware="h", steps=4, rows=tuple(rows)))
        self.device_queue = LazyStreams()
        self.happened: list[str] = []
        self.react: Callable[[str], None] = lambda entry: None

    def mark(self) -> Wait:
        event = self.device_queue.event()
        event.record(self.device_queue.current())
        return event.synchronize

    def step(self, states: Sequence[SimulatedState], *args: Any) -> None:
        number = states[0].steps_done + 1
        self.note(f"launch {number}")
        super().step(states, *args)
        self.device_queue.current().queue.append(partial(self.note, f"done {number}"))

    def export(self, state: SimulatedState) -> Values:
        stream = self.device_queue.current()
        assert stream.num_done == len(stream.queue), "a state is written that the device has not computed"
        return super().export(state)

    def note(self, entry: str) -> None:
        self.happened.append(entry)
        self.react(entry)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Queued:
    """All steps are short."""
    family = Queued(table(1e-6, 1e-6, 1e-6, degrees=(1, 2)).rows)
    monkeypatch.setattr("tilework.worker.work_run.events_on", lambda device: family.mark)
    monkeypatch.setattr(launched_steps, "SHORT_STEP_NS", float("inf"))
    return family


@pytest.fixture
def bench(family: Queued, tmp_path: Path) -> WorkerBench:
    """A request is encoded; what happens is noted from now on."""

    def note(report: Report) -> None:
        if isinstance(report, Progress):
            family.note(f"progress {report.steps_done}")

    bench = WorkerBench(family, tmp_path, note)
    bench.run(encode(1, JOB, tiny.spec()))
    return bench


def failing(at: str, error: Exception) -> Callable[[str], None]:
    def react(entry: str) -> None:
        if entry == at:
            raise error

    return react


def end(reports: Sequence[Report]) -> tuple[int, Ending, bool]:
    """Return the steps of a work, how it ended, and whether a state was written."""
    ended = reports[-1]
    assert isinstance(ended, Ended), ended
    return ended.steps_done, ended.ending, bool(ended.blobs)


def test_a_short_step_is_launched_before_the_last_is_done_and_never_two(bench: WorkerBench, family: Queued) -> None:
    reports = bench.run(steps(2, ((JOB, 0),), 4))
    assert family.happened == AHEAD
    assert end(reports) == (4, Ending.DONE, True)


def test_loads_begin_before_each_step(bench: WorkerBench, family: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.worker.loads, "_ahead", lambda: family.happened.append("loads") or ())
    bench.run(steps(2, ((JOB, 0),), 4))
    launches = [index for index, entry in enumerate(family.happened) if entry.startswith("launch")]
    assert [family.happened[index - 1] for index in launches] == ["loads"] * 4


def test_each_long_step_is_waited_for(bench: WorkerBench, family: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_steps, "SHORT_STEP_NS", 0)
    bench.run(steps(2, ((JOB, 0),), 3))
    assert family.happened == [*IN_TURN, "launch 3", "done 3"]


@pytest.mark.parametrize(("asked_at", "steps_done"), [("progress 1", 2), ("launch 3", 3), ("done 2", 3)])
def test_a_stop_ends_a_work_after_the_step_that_was_launched_last(
    bench: WorkerBench, family: Queued, asked_at: str, steps_done: int
) -> None:
    family.react = lambda entry: bench.works.stop(2) if entry == asked_at else None
    reports = bench.run(steps(2, ((JOB, 0),), 4))
    assert end(reports) == (steps_done, Ending.STOPPED, True)
    assert family.happened[-1] == f"done {steps_done}"
    assert end(bench.run(steps(3, ((JOB, steps_done),), 4)))[0] == 4 - steps_done, "it goes on there"


def test_without_memory_for_a_step_the_one_that_runs_still_counts(bench: WorkerBench, family: Queued) -> None:
    family.react = failing("launch 3", torch.OutOfMemoryError("CUDA out of memory"))
    assert end(bench.run(steps(2, ((JOB, 0),), 4))) == (2, Ending.OUT_OF_MEMORY, True)
    assert family.happened[-2:] == ["launch 3", "done 2"]


@pytest.mark.parametrize("at", ["done 1", "done 2", "done 3", "done 4"])
def test_no_step_counts_if_the_device_fails_in_one(bench: WorkerBench, family: Queued, at: str) -> None:
    """One that is queued behind it has read what it wrote."""
    family.react = failing(at, RuntimeError("CUDA error: out of memory"))
    assert end(bench.run(steps(2, ((JOB, 0),), 4))) == (0, Ending.OUT_OF_MEMORY, False)


def test_no_step_counts_if_the_device_fails_in_one_while_the_next_is_refused(
    bench: WorkerBench, family: Queued
) -> None:
    refused = failing("launch 3", torch.OutOfMemoryError("CUDA out of memory"))
    failed = failing("done 2", RuntimeError("CUDA error: an illegal memory access was encountered"))

    def react(entry: str) -> None:
        refused(entry)
        failed(entry)

    family.react = react
    report = bench.run(steps(2, ((JOB, 0),), 4))[-1]
    assert isinstance(report, Failed)
    assert "illegal memory access" in report.reason
    assert len(bench.worker.jobs) == 0


def test_a_group_waits_for_each_step(bench: WorkerBench, family: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its messages brought is right only if none was broken off by the time the device was waited for."""
    monkeypatch.setattr("tilework.worker.work_run.events_on", lambda device: pytest.fail)
    monkeypatch.setattr("tilework.worker.work_run.synchronize", lambda *_: family.device_queue.current().synchronize())
    monkeypatch.setattr(bench.worker, "_groups", EchoGroups())
    bench.run(steps(2, ((JOB, 0),), 3, GROUP))
    assert family.happened == [*IN_TURN, "launch 3", "done 3"]


def test_previews_are_of_their_steps(bench: WorkerBench, family: Queued) -> None:
    spec = tiny.spec(preview_every=1)
    bench.run(encode(2, 6, spec))
    reports = bench.run(steps(3, ((6, 0),), 4))
    previews = [report.steps_done for report in reports if isinstance(report, Preview)]
    assert previews == [1, 2, 3]
    assert [report.steps_done for report in reports if isinstance(report, Progress)] == [1, 2, 3]


class Clock:
    """A device whose steps take these milliseconds, by a clock that nothing else moves."""

    def __init__(self, *steps_ms: int) -> None:
        self.now_ns, self._steps_ms = 0, iter(steps_ms)

    def mark(self) -> Wait:
        return self._pass

    def _pass(self) -> None:
        self.now_ns += next(self._steps_ms) * 1_000_000


@pytest.mark.parametrize(
    ("steps_ms", "ahead"),
    [((20, 20, 20), [0, 1, 1]), ((99, 100, 99), [0, 1, 0]), ((100, 101, 5), [0, 0, 0]), ((300, 20, 20), [0, 0, 1])],
)
def test_a_host_runs_ahead_by_the_time_of_the_latest_step_that_is_done(
    steps_ms: tuple[int, ...], ahead: list[int]
) -> None:
    clock = Clock(*steps_ms)
    launched = LaunchedSteps(pytest.fail, clock.mark, lambda: clock.now_ns)
    assert list(_ahead(launched, len(steps_ms))) == ahead


def test_without_marks_a_host_waits_for_each_step() -> None:
    clock = Clock(1, 1, 1)
    launched = LaunchedSteps(clock.mark(), None, lambda: clock.now_ns)
    assert list(_ahead(launched, 3)) == [0, 0, 0]


def _ahead(launched: LaunchedSteps, num_steps: int) -> Iterator[int]:
    """After each launch, by how much the host may be ahead."""
    for number in range(1, num_steps + 1):
        launched.add()
        launched.wait(most_left=1)
        most_ahead = launched.most_ahead
        launched.wait(most_left=most_ahead)
        assert launched.num_done == number - most_ahead
        yield most_ahead


def test_events_are_waited_for_and_not_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyStreams()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: {torch.device("cuda", 1): device.current()}[of])
    mark, done = events_on(torch.device("cuda", 1)), list[int]()
    assert mark is not None
    device.current().queue.append(partial(done.append, 1))
    wait = mark()
    device.current().queue.append(partial(done.append, 2))
    assert not done
    wait()
    assert done == [1]


def test_a_cpu_has_no_events_and_its_steps_come_in_turn(
    bench: WorkerBench, family: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilework.worker.work_run.events_on", events_on)
    assert events_on(torch.device("cpu")) is None
    bench.run(steps(2, ((JOB, 0),), 3))
    assert family.happened == [one for one in [*IN_TURN, "launch 3"] if not one.startswith("done")]
