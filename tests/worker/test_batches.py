"""Works of several members on one worker: shared forward passes, everybody's steps whole, nobody hurt by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from commands import decode, decode_all, encode, import_state, steps
from tilework.core.packing import Pack
from tilework.core.request import Refusal
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget
from tilework.core.wire.reports import Absent, Ended, Ending, Failed, Preview, Progress, Report
from tilework.core.wire.spec import Spec
from tilework.pipelines import serialization
from tilework.pipelines.errors import RequestRefused
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.family import Family
from worker.worker_bench import WorkerBench

SPECS = {
    1: tiny.spec(height=96, width=64, steps=6, seed=1, guidance_scale=2.0),
    2: tiny.spec(height=64, width=64, steps=3, seed=2, negative_prompt="a green square"),
    3: tiny.spec(height=64, width=96, steps=4, seed=3, guidance_scale=1.0, preview_every=2),
}
OUTPUTS = "latents"


def build(sampler: str) -> StableDiffusion3:
    tiny.prepare()
    return StableDiffusion3(tiny.build_sd3(sampler), "tiny", {"max_sequence_length": tiny.TEXT_LENGTH}, "")


@pytest.fixture
def family() -> StableDiffusion3:
    return build("euler")


@pytest.fixture
def bench(family: Family, tmp_path: Path) -> WorkerBench:
    """One on which all are encoded."""
    bench = WorkerBench(family, tmp_path)
    bench.run(*(encode(100 + job_id, job_id, spec) for job_id, spec in SPECS.items()))
    return bench


def passes(monkeypatch: pytest.MonkeyPatch, family: Family) -> list[tuple[list[int], bool]]:
    """The seeds of those that each call predicts, and whether they may be packed."""
    seen: list[tuple[list[int], bool]] = []

    def predict(states: list[LatentState], pack: Pack | None = None) -> list[torch.Tensor]:
        seen.append(([state.spec.seed for state in states], pack is not None))
        return type(family).predict(family, states, pack)

    monkeypatch.setattr(family, "predict", predict)
    return seen


def ended(reports: list[Report]) -> Ended:
    assert isinstance(reports[-1], Ended), reports
    return reports[-1]


def iterations(bench: WorkerBench, end: Ended) -> dict[int, int | str]:
    """Where the states that a work has put down stand; OUTPUTS of those that have no steps left."""
    found: dict[int, int | str] = {}
    for job_id, blob in end.blobs.items():
        contents = serialization.deserialize(bench.blobs.read(blob), torch.device("cpu"))
        found[job_id] = OUTPUTS if contents.keys() == {OUTPUTS} else contents["iteration_index"]
    return found


def assert_drawn(bench: WorkerBench, family: StableDiffusion3, specs: dict[int, Spec] = SPECS) -> None:
    """The pictures are those of the stock pipeline, up to the rounding of a shared pass."""
    for job_id, spec in specs.items():
        image = ended(bench.run(decode(200 + job_id, job_id, spec.steps))).images[job_id]
        stock = tiny.run_stock(family._pipeline, spec).pixels.astype(int)
        assert np.abs(tiny.pixels(image).astype(int) - stock).max() <= 1, f"job {job_id} differs"


def test_members_join_and_leave_and_get_their_own_pictures(
    bench: WorkerBench, family: StableDiffusion3, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = passes(monkeypatch, family)
    bench.run(steps(1, ((1, 0),), 1))
    both = bench.run(steps(2, ((1, 1), (2, 0)), 3))
    assert [type(report) for report in both] == [Progress, Progress, Ended]
    assert (ended(both).steps_done, ended(both).ending, ended(both).absent) == (3, Ending.DONE, ())
    assert iterations(bench, ended(both)) == {1: 4, 2: OUTPUTS}
    bench.run(steps(3, ((3, 0), (1, 4)), 2), steps(4, ((3, 2),), 2))
    together = [([1, 2], True)] * 3 + [([3, 1], True)] * 2
    assert seen == [([1], False), *together, ([3], False), ([3], False)], "alone is as ever"
    assert_drawn(bench, family)


def test_each_preview_names_its_job(bench: WorkerBench) -> None:
    reports = bench.run(steps(1, ((1, 0), (3, 0)), 4))
    previews = [report for report in reports if isinstance(report, Preview)]
    assert [(one.job_id, one.steps_done) for one in previews] == [(3, 2)]


def test_a_member_with_fewer_iterations_per_step_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heun's last step has one iteration, the others two."""
    family = build("heun")
    bench = WorkerBench(family, tmp_path)
    bench.run(*(encode(100 + job_id, job_id, spec) for job_id, spec in SPECS.items()))
    bench.run(steps(1, ((1, 0),), 4))
    seen = passes(monkeypatch, family)
    end = ended(bench.run(steps(2, ((1, 4), (2, 0)), 2)))
    assert end.steps_done == 2
    assert [seeds for seeds, _ in seen] == [[1, 2], [1, 2], [1, 2], [2]]
    assert iterations(bench, end) == {1: OUTPUTS, 2: 4}
    bench.run(steps(3, ((2, 2), (3, 0)), 1), steps(4, ((3, 1),), 3))
    assert_drawn(bench, family)


@pytest.mark.parametrize("sliced", [False, True])
def test_members_are_decoded_together_without_those_that_are_lacking(tmp_path: Path, sliced: bool) -> None:
    family, specs = build("euler"), {job_id: tiny.spec(seed=job_id) for job_id in (1, 2, 3)}
    bench = WorkerBench(family, tmp_path)
    bench.run(*(encode(100 + job_id, job_id, spec) for job_id, spec in specs.items()))
    bench.run(steps(1, ((1, 0), (2, 0)), 4), steps(2, ((3, 0),), 3))
    end = ended(bench.run(decode_all(3, dict.fromkeys((1, 2, 3), 4), sliced=sliced)))
    assert [one.job_id for one in end.absent] == [3]
    assert end.images.keys() == {1, 2}
    for job_id, image in end.images.items():
        alone = tiny.begin(family, specs[job_id])
        tiny.finish(family, alone)
        difference = tiny.pixels(image).astype(int) - tiny.pixels(tiny.decode(family, alone))
        assert np.abs(difference).max() <= 1


def test_a_stop_is_for_all(bench: WorkerBench, family: StableDiffusion3) -> None:
    bench.on_report = lambda report: bench.works.stop(1) if isinstance(report, Progress) else None
    end = ended(bench.run(steps(1, ((1, 0), (2, 0)), 3)))
    assert (end.steps_done, end.ending) == (2, Ending.STOPPED)
    assert iterations(bench, end) == {1: 2, 2: 2}
    bench.on_report = lambda report: None
    bench.run(steps(2, ((1, 2),), 4), steps(3, ((2, 2), (3, 0)), 1), steps(4, ((3, 1),), 3))
    assert_drawn(bench, family)


def test_a_member_whose_state_is_lacking_is_left_out(bench: WorkerBench, family: StableDiffusion3) -> None:
    bench.run(steps(1, ((1, 0),), 2))
    end = ended(bench.run(steps(2, ((1, 0), (2, 0), (9, 4)), 3)))
    assert [(one.job_id, one.state_lost) for one in end.absent] == [(1, False), (9, False)]
    assert "at position 3, not 1" in end.absent[0].reason
    assert (end.steps_done, iterations(bench, end)) == (3, {2: OUTPUTS})
    bench.run(steps(3, ((1, 2),), 4), steps(4, ((3, 0),), 4))
    assert_drawn(bench, family)


def test_a_work_without_members_ends_at_once(bench: WorkerBench) -> None:
    bench.run(Forget(2))
    end = ended(bench.run(steps(1, ((1, 3), (2, 0)), 3)))
    assert (end.steps_done, end.ending, [one.job_id for one in end.absent]) == (0, Ending.STOPPED, [1, 2])


def test_a_missing_state_is_reported_for_its_job_alone(bench: WorkerBench) -> None:
    bench.run(import_state(1, SPECS[1], 0, StateBlob("gone", 1), None))
    end = ended(bench.run(steps(1, ((1, 0), (2, 0)), 1)))
    assert [(one.job_id, one.state_lost) for one in end.absent] == [(1, True)]


def test_an_error_costs_the_members_and_no_others(
    bench: WorkerBench, family: StableDiffusion3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(family, "predict", lambda *_: 1 / 0)
        [failed] = bench.run(steps(1, ((1, 0), (2, 0)), 3))
    assert isinstance(failed, Failed)
    end = ended(bench.run(steps(2, ((1, 0), (3, 0)), 4)))
    assert isinstance(end.absent[0], Absent)
    assert "work 1 failed with ZeroDivisionError" in end.absent[0].reason
    assert_drawn(bench, family, {3: SPECS[3]})


@pytest.mark.slow
@pytest.mark.parametrize(("part", "calls", "steps_done"), [("predict", 3, 2), ("advance", 6, 0), ("advance", 5, 0)])
def test_steps_count_only_if_all_members_have_done_them(
    bench: WorkerBench,
    family: StableDiffusion3,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    part: str,
    calls: int,
    steps_done: int,
) -> None:
    """Without memory for the third step; in the midst of advancing, one is ahead or between two steps."""
    usual, num_calls = getattr(family, part), 0

    def starving(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == calls:
            raise MemoryError
        return usual(*arguments)

    known = set(tmp_path.iterdir())
    with monkeypatch.context() as starved:
        starved.setattr(family, part, starving)
        end = ended(bench.run(steps(1, ((1, 0), (2, 0), (9, 0)), 3)))
    assert (end.ending, end.steps_done, [one.job_id for one in end.absent]) == (Ending.OUT_OF_MEMORY, steps_done, [9])
    assert iterations(bench, end) == ({1: 2, 2: 2} if steps_done else {})
    assert {path.name for path in set(tmp_path.iterdir()) - known} == {one.name for one in end.blobs.values()}


def test_states_are_serialized_for_all_members_or_none(
    bench: WorkerBench, family: StableDiffusion3, tmp_path: Path
) -> None:
    usual, known, num_writes = bench.blobs.write, set(tmp_path.iterdir()), 0

    def write(load: serialization.SerializedState) -> Any:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 2:
            raise OSError("no room")
        return usual(load)

    bench.blobs.write = write  # type: ignore[method-assign]
    [*_, failed] = bench.run(steps(1, ((1, 0), (2, 0)), 3))
    assert isinstance(failed, Failed)
    assert set(tmp_path.iterdir()) == known, "a blob of which nobody knows stays for ever"


def test_what_a_pipeline_refuses_is_reported_as_such(
    family: StableDiffusion3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RequestRefused("the stock call does not take it: 7")

    monkeypatch.setattr(family, "run", refuse)
    (failed,) = WorkerBench(family, tmp_path).run(encode(1, 4, tiny.spec()))
    assert isinstance(failed, Failed)
    assert (failed.refuses, failed.refusal) == (4, Refusal.VALUE)
    assert failed.reason == "the stock call does not take it: 7"


def test_a_picture_that_is_no_number_is_an_error_of_its_job_alone(
    family: StableDiffusion3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails by its model, so each is decoded alone then, as after any error; previews alone end no steps."""
    specs = {job_id: tiny.spec(steps=3, seed=job_id, preview_every=1) for job_id in (1, 2)}
    advance = family.advance

    def spoil(state: LatentState, prediction: torch.Tensor) -> None:
        advance(state, prediction)
        if state.spec.seed == 2:
            state.latents = state.latents * torch.nan

    monkeypatch.setattr(family, "advance", spoil)
    bench = WorkerBench(family, tmp_path)
    bench.run(*(encode(100 + job_id, job_id, spec) for job_id, spec in specs.items()))
    end = ended(bench.run(steps(1, ((1, 0), (2, 0)), 3)))
    (both,) = bench.run(decode_all(2, dict.fromkeys((1, 2), 3)))
    assert isinstance(both, Failed)
    assert both.by_model
    assert both.refuses is None
    assert "NotFinite: the decoded image has values that are NaN or infinite" in both.reason
    for job_id, spec in specs.items():
        bench.run(import_state(job_id, spec, 3, None, end.blobs[job_id]))
    assert ended(bench.run(decode(3, 1, 3))).images.keys() == {1}
    assert [report.by_model for report in bench.run(decode(4, 2, 3)) if isinstance(report, Failed)] == [True]
