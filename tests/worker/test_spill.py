"""What a worker keeps of jobs between their works: which of them spill, and how they return."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greenlet import getcurrent, greenlet

import tiny
from commands import decode, encode, import_state, steps
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import SavedState
from tilework.core.wire.commands import Execute, Forget, NoteSaved
from tilework.core.wire.reports import Ended, Ending, Failed, KeptStates, Report
from tilework.core.wire.spec import Image
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.stock.coroutine import StockCall
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.worker.held_bytes import held_bytes
from worker.test_groups import GROUP, EchoGroups
from worker.worker_bench import WorkerBench
from zoo import requests
from zoo.registry import ZOO, build

SPEC = tiny.spec()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "dpm")
    return load(ModelSource(path=str(directory)))


@pytest.fixture(scope="module")
def one_job(family: Family) -> int:
    """What a job keeps after its encode."""
    return held_bytes(family.run("encode", [SPEC], [{}])[0])


@pytest.fixture
def bench(family: Family, tmp_path: Path) -> WorkerBench:
    """Everything spills."""
    return WorkerBench(family, tmp_path, states_bytes=0)


def picture(bench: WorkerBench, job_id: int) -> np.ndarray:
    """Of a job that is encoded."""
    *_, ended = bench.run(steps(100 + job_id, ((job_id, 0),), 4), decode(200 + job_id, job_id))
    assert isinstance(ended, Ended), ended
    return tiny.pixels(ended.images[job_id])


def encode_all(bench: WorkerBench, *job_ids: int) -> None:
    for job_id in job_ids:
        bench.run(encode(job_id, job_id, SPEC))


def num_returns(bench: WorkerBench, command: Execute) -> int:
    before = bench.worker.jobs.kept.num_returns
    bench.run(command)
    return bench.worker.jobs.kept.num_returns - before


def test_the_jobs_that_ran_the_longest_ago_spill(family: Family, tmp_path: Path, one_job: int) -> None:
    bench = WorkerBench(family, tmp_path, states_bytes=2 * one_job)
    encode_all(bench, 1, 2)
    assert bench.worker.jobs.kept == KeptStates(2 * one_job, 0, 0)
    encode_all(bench, 3)
    assert bench.worker.jobs.kept == KeptStates(2 * one_job, 1, 0)
    returns = {job_id: num_returns(bench, steps(10 + job_id, ((job_id, 0),), 1)) for job_id in (3, 2, 1)}
    assert returns == {3: 0, 2: 1, 1: 1}, "2 was dropped when 3 had made a step, and 1 at first"


def test_a_job_that_has_run_again_is_not_the_next_to_spill(family: Family, tmp_path: Path, one_job: int) -> None:
    bench = WorkerBench(family, tmp_path, states_bytes=3 * one_job)
    encode_all(bench, 1, 2)
    bench.run(steps(10, ((1, 0),), 1))
    encode_all(bench, 3)
    assert num_returns(bench, steps(11, ((1, 1),), 1)) == 0


def test_a_job_whose_work_was_received_keeps_all(family: Family, tmp_path: Path, one_job: int) -> None:
    bench = WorkerBench(family, tmp_path, states_bytes=one_job)
    encode_all(bench, 1)
    bench.run(encode(2, 2, SPEC), steps(3, ((1, 0),), 1), steps(4, ((2, 0),), 1))
    assert bench.worker.jobs.kept.num_returns == 0
    assert bench.worker.jobs.kept.num_spills == 2, "when all works had ended, each was too large"


def test_a_state_that_fits_is_kept(family: Family, tmp_path: Path) -> None:
    bench = WorkerBench(family, tmp_path)
    encode_all(bench, 1)
    for index in range(3):
        bench.run(steps(2 + index, ((1, index),), 1))
    assert (bench.worker.jobs.kept.num_spills, bench.worker.jobs.kept.num_returns) == (0, 0)
    bench.run(steps(7, ((1, 3),), 1), decode(8, 1))
    assert bench.worker.jobs.kept.num_bytes == 0, "nothing waits for a picture that was reported"


def test_what_was_spilled_is_freed(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    begin = bench.family.begin

    def keep(*arguments: Any) -> Any:
        state = begin(*arguments)
        held.append(weakref.ref(state.sampler))
        return state

    monkeypatch.setattr(bench.family, "begin", keep)
    encode_all(bench, 1)
    gc.disable()
    try:
        bench.run(steps(2, ((1, 0),), 1))
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_shared_work_finds_jobs_that_were_spilled(bench: WorkerBench, num_before: int) -> None:
    encode_all(bench, 1, 2)
    for job_id in (1, 2):
        if num_before:
            bench.run(steps(10 + job_id, ((job_id, 0),), num_before))
    bench.run(steps(20, ((1, num_before), (2, num_before)), 1))
    ended = bench.reports[-1]
    assert isinstance(ended, Ended)
    assert ended.absent == ()
    assert ended.blobs.keys() == {1, 2}


def test_a_work_that_was_stopped_before_it_began_reads_nothing(bench: WorkerBench) -> None:
    encode_all(bench, 1)
    bench.works.open(2, (1,), is_stopped=True)
    bench.worker.execute(steps(2, ((1, 0),), 1))
    ended = bench.reports[-1]
    assert isinstance(ended, Ended)
    assert (ended.ending, bench.worker.jobs.kept.num_returns) == (Ending.STOPPED, 0)


def test_a_spilled_job_whose_blob_is_gone_is_not_here_but_may_be_elsewhere(bench: WorkerBench) -> None:
    """The engine has discarded the blob, as the job goes on elsewhere. It may come back from there."""
    encode_all(bench, 1)
    conditioning = bench.latest({1})
    bench.run(steps(2, ((1, 0),), 1))
    state = bench.latest({2})
    assert state is not None
    again = bench.blobs.write(bench.blobs.read(state))
    bench.blobs.remove(state)
    failed = bench.run(steps(3, ((1, 1),), 1))[-1]
    assert isinstance(failed, Failed)
    assert "a blob of its state is missing" in failed.reason
    assert not failed.state_lost, "another device may have it"
    bench.run(import_state(1, SPEC, 1, conditioning, again), steps(4, ((1, 1),), 3))
    assert isinstance(bench.run(decode(5, 1))[-1], Ended)


def test_an_import_finds_what_was_spilled_before(family: Family, tmp_path: Path, bench: WorkerBench) -> None:
    """The conditioning is known here, so only the state comes."""
    expected = WorkerBench(family, tmp_path)
    encode_all(expected, 1)
    encode_all(bench, 1)
    other = WorkerBench(family, tmp_path)
    other.run(import_state(1, SPEC, 0, bench.latest({1}), None), steps(2, ((1, 0),), 2))
    bench.run(import_state(1, SPEC, 2, None, other.latest({2})), steps(3, ((1, 2),), 2), decode(4, 1))
    ended = bench.reports[-1]
    assert isinstance(ended, Ended), ended
    assert np.array_equal(tiny.pixels(ended.images[1]), picture(expected, 1))


def test_a_job_that_was_imported_onto_what_was_here_can_spill(family: Family, tmp_path: Path) -> None:
    bench = WorkerBench(family, tmp_path)
    encode_all(bench, 1)
    other = WorkerBench(family, tmp_path)
    other.run(import_state(1, SPEC, 0, bench.latest({1}), None), steps(2, ((1, 0),), 2))
    bench.worker.jobs._most_bytes = 0
    bench.run(import_state(1, SPEC, 2, None, other.latest({2})), steps(3, ((1, 2),), 1))
    assert (bench.worker.jobs.kept.num_bytes, bench.worker.jobs.kept.num_spills) == (0, 1)


def test_a_spilled_job_can_be_forgotten_and_begun_again(bench: WorkerBench) -> None:
    encode_all(bench, 1)
    assert len(bench.worker.jobs) == 1
    bench.run(Forget(1))
    assert len(bench.worker.jobs) == 0
    failed = bench.run(steps(2, ((1, 0),), 1))[-1]
    assert isinstance(failed, Failed)
    assert "never begun or imported here" in failed.reason
    encode_all(bench, 1)
    assert picture(bench, 1).any()


def test_a_follower_spills_when_it_knows_the_blob_of_its_group(family: Family, tmp_path: Path) -> None:
    """Until then nothing else has what it has."""
    leader = WorkerBench(family, tmp_path)
    encode_all(leader, 1)
    follower = WorkerBench(family, tmp_path, states_bytes=0)
    follower.run(import_state(1, SPEC, 0, leader.latest({1}), None))
    for bench, rank in ((leader, 0), (follower, 1)):
        bench.worker._groups = EchoGroups(rank)  # type: ignore[assignment]
        bench.run(steps(2, ((1, 0),), 2, GROUP))
    blob = leader.latest({2})
    assert blob is not None
    assert follower.worker.jobs.kept.num_spills == 0
    follower.run(NoteSaved(7, SavedState(1, 3, blob)))  # Of a job that it does not have.
    assert follower.worker.jobs.kept.num_spills == 0
    follower.run(NoteSaved(1, SavedState(1, 3, blob)))
    assert (follower.worker.jobs.kept.num_bytes, follower.worker.jobs.kept.num_spills) == (0, 1)
    assert end_of(leader.run(steps(3, ((1, 2),), 2))) == end_of(follower.run(steps(3, ((1, 2),), 2)))
    assert np.array_equal(last_picture(leader.run(decode(4, 1))), last_picture(follower.run(decode(4, 1))))


def end_of(reports: list[Report]) -> int:
    ended = reports[-1]
    assert isinstance(ended, Ended), ended
    return ended.steps_done


def last_picture(reports: list[Report]) -> np.ndarray:
    ended = reports[-1]
    assert isinstance(ended, Ended), ended
    found: Image = ended.images[1]
    return tiny.pixels(found)


# How much is held.


def test_memory_is_counted_once_and_as_a_whole() -> None:
    whole = torch.zeros(100)
    assert held_bytes(whole) == 400
    assert held_bytes([whole, {"part": whole[:10]}, (whole.view(10, 10),)]) == 400
    assert held_bytes(whole[:10]) == 400, "a part keeps all of it"
    assert held_bytes(whole, whole.clone(), torch.zeros(2, device="meta")) == 800
    assert held_bytes({"array": np.zeros(10)[2:], "text": "x" * 1000, "none": None}) == 80


def test_models_are_not_counted(family: Family) -> None:
    assert held_bytes(family.modules) == 0


def test_a_cycle_ends() -> None:
    values: list[Any] = [torch.zeros(1)]
    values.append({"again": values})
    assert held_bytes(values) == 4


def _pauses() -> None:
    """A coroutine that has 1000 numbers at first and 10 later."""
    numbers = torch.zeros(1000)
    getcurrent().parent.switch(weakref.ref(numbers))
    numbers = torch.zeros(10)
    _ask_within(torch.zeros(5))
    assert numbers.numel() == 10


def _ask_within(_numbers: torch.Tensor) -> None:
    getcurrent().parent.switch()


def test_what_a_paused_coroutine_has_is_counted_and_not_kept_from_then_on() -> None:
    """Before Python 3.13 a frame that was asked for its variables keeps a copy of them."""
    call = greenlet(_pauses)
    first = call.switch()
    assert held_bytes({"live": call}) == 4000
    call.switch()
    assert first() is None
    assert held_bytes(call) == 60, "also of what it has called"
    call.switch()
    assert held_bytes(call) == 0, "it has ended"


@pytest.mark.slow
def test_a_stock_call_that_was_spilled_is_freed(tmp_path: Path) -> None:
    """All that its frames hold was counted: more than its blobs have."""
    tiny.prepare()
    made = StockPipeline(build(ZOO["sd1-ancestral"]), "sd1", {}, "")
    spec = requests.spec_of(ZOO["sd1-ancestral"], made, 1)
    before = _num_calls()
    roomy, tight = (WorkerBench(made, tmp_path, states_bytes=most) for most in (1 << 40, 0))
    for bench in (roomy, tight):
        bench.run(encode(1, 1, spec), steps(2, ((1, 0),), 1))
    written = [bench.latest({work_id}) for bench, work_id in ((roomy, 1), (roomy, 2))]
    assert roomy.worker.jobs.kept.num_bytes > sum(blob.num_bytes for blob in written if blob is not None)
    assert _num_calls() == before + 1, "that of the worker with room"


def _num_calls() -> int:
    gc.collect()
    return sum(isinstance(one, StockCall) for one in gc.get_objects())
