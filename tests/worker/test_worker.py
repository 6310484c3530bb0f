"""One worker, command by command, in this process: how each work ends and what is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilework
import tiny
from commands import MODEL, decode, encode, import_state, steps
from stages import STAGES
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.commands import Calibrate, Execute, Forget, ImportState, Quit, StartOver
from tilework.core.wire.reports import Calibrated, Ended, Ending, Failed, Progress, Report, StartedOver
from tilework.core.wire.spec import Image
from tilework.pipelines import serialization
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.worker.hardware import DeviceFailed, has_failed
from worker.worker_bench import WorkerBench

JOB = 5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "dpm")
    return directory


@pytest.fixture(scope="module")
def family(directory: Path) -> Family:
    return load(ModelSource(path=str(directory)))


@pytest.fixture(scope="module")
def twin(directory: Path) -> Family:
    return load(ModelSource(path=str(directory)))


@pytest.fixture(scope="module")
def stock(directory: Path) -> Callable[..., np.ndarray]:
    pipeline = tilework.reference(str(directory))
    return lambda **changes: tiny.run_stock(pipeline, tiny.spec(**changes)).pixels


@pytest.fixture
def bench(family: Family, tmp_path: Path) -> WorkerBench:
    return WorkerBench(family, tmp_path)


@pytest.fixture
def broken(bench: WorkerBench, family: Family, monkeypatch: pytest.MonkeyPatch) -> WorkerBench:
    """A bench whose model breaks down in the second iteration of each job."""

    def predict(states: list[Any], *_: Any) -> list[torch.Tensor]:
        if states[0].iteration_index == 1:
            raise RuntimeError("out of luck")
        return type(family).predict(family, states)

    monkeypatch.setattr(family, "predict", predict)
    return bench


def image_of(report: Report) -> np.ndarray:
    assert isinstance(report, Ended)
    (image,) = report.images.values()
    return tiny.pixels(image)


def end_of(report: Report) -> tuple[int, bool]:
    assert isinstance(report, Ended), report
    return report.steps_done, report.ending is Ending.STOPPED


def reason_of(report: Report) -> str:
    assert isinstance(report, Failed), report
    return report.reason


def test_a_request_in_chunks_equals_the_stock_pipeline(bench: WorkerBench, stock: Callable[..., np.ndarray]) -> None:
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 3), steps(3, ((JOB, 3),), 1), decode(4, JOB))
    assert [report.work_id for report in reports if isinstance(report, Ended)] == [1, 2, 3, 4]
    assert reports[1:3] == [Progress(2, 1), Progress(2, 2)]
    assert [end_of(reports[index]) for index in (0, 3, 4, 5)] == [(1, False), (3, False), (1, False), (1, False)]
    assert np.array_equal(image_of(reports[-1]), stock())


def test_times_are_of_the_work_alone(bench: WorkerBench) -> None:
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), decode(3, JOB))
    ended = [report for report in reports if isinstance(report, Ended)]
    assert all(report.start_ns < report.end_ns for report in ended)
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(ended))


def test_every_report_has_the_memory_in_use(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[int | None]:
        reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), decode(3, JOB))
        return [report.memory_bytes for report in reports if isinstance(report, Ended)]

    assert told() == [None] * 3, "a CPU has none of its own"
    monkeypatch.setattr("tilework.worker.work_run.memory_in_use", lambda device: 1 << 30)
    assert told() == [1 << 30] * 3


def test_a_worker_that_starts_over_knows_no_job(bench: WorkerBench, stock: Callable[..., np.ndarray]) -> None:
    """The next server may give another request the same number."""
    bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 3))
    assert bench.run(StartOver()) == [StartedOver()]
    assert len(bench.worker.jobs) == 0
    (left_out,) = bench.run(steps(3, ((JOB, 3),), 1))
    assert isinstance(left_out, Failed | Ended)
    assert isinstance(left_out, Failed) or left_out.absent
    other = tiny.spec(seed=4)
    reports = bench.run(encode(1, JOB, other), steps(2, ((JOB, 0),), 4), decode(3, JOB))
    assert np.array_equal(image_of(reports[-1]), stock(seed=4))


def test_jobs_that_take_turns_do_not_touch_each_other(bench: WorkerBench, stock: Callable[..., np.ndarray]) -> None:
    changes: list[dict[str, Any]] = [{}, {"width": 96, "steps": 3, "guidance_scale": 1.0, "seed": 2}]
    for job, change in enumerate(changes):
        bench.run(encode(job, job, tiny.spec(**change)))
    for turn in range(3):
        bench.run(steps(10 + turn, ((0, turn),), 1), steps(20 + turn, ((1, turn),), 1))
    bench.run(steps(14, ((0, 3),), 1))
    for job, change in enumerate(changes):
        assert np.array_equal(image_of(bench.run(decode(30 + job, job, tiny.spec(**change).steps))[0]), stock(**change))


def test_a_stop_ends_a_work_between_steps_and_the_rest_can_follow(
    bench: WorkerBench, stock: Callable[..., np.ndarray]
) -> None:
    bench.on_report = lambda report: bench.works.stop(2) if report == Progress(2, 1) else None
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4))
    assert end_of(reports[-1]) == (2, True)
    assert end_of(bench.run(steps(3, ((JOB, 2),), 2))[-1]) == (2, False)
    assert np.array_equal(image_of(bench.run(decode(4, JOB))[0]), stock())


def test_a_work_that_was_stopped_in_the_queue_is_skipped(bench: WorkerBench) -> None:
    bench.on_report = lambda report: [bench.works.stop(work) for work in (2, 3)] and None
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), decode(3, JOB), steps(4, ((JOB, 0),), 4))
    assert [end_of(report) for report in reports[1:3]] == [(0, True), (0, True)]
    assert end_of(reports[-1]) == (4, False)


def test_a_late_or_unknown_stop_has_no_effect(bench: WorkerBench) -> None:
    bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 1))
    for work_id in range(100):
        bench.works.stop(work_id)
    assert len(bench.works) == 0
    assert end_of(bench.run(steps(3, ((JOB, 1),), 2))[-1]) == (2, False)
    assert len(bench.works) == 0


def test_a_work_does_no_more_steps_than_its_request_has(bench: WorkerBench) -> None:
    reports = bench.run(encode(1, JOB, tiny.spec(steps=2)), steps(2, ((JOB, 0),), 9))
    assert [end_of(report) for report in reports if isinstance(report, Ended)] == [(1, False), (2, False)]


def test_an_error_is_contained(broken: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = broken.run(
        encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), steps(3, ((JOB, 4),), 1), decode(4, JOB)
    )
    assert reason_of(reports[-3]) == "RuntimeError: out of luck"
    assert "work 2 failed with RuntimeError: out of luck" in reason_of(reports[-2])
    assert reason_of(reports[-1]) == reason_of(reports[-2])
    assert len(broken.worker.jobs) == len(broken.works) == 0
    monkeypatch.undo()
    again = broken.run(encode(5, JOB, tiny.spec()), steps(6, ((JOB, 0),), 4), decode(7, JOB))
    assert image_of(again[-1]).shape == (64, 64, 3)


def test_an_error_of_one_job_spares_the_others(broken: WorkerBench) -> None:
    broken.run(encode(1, 1, tiny.spec()), steps(2, ((1, 0),), 1), encode(3, 2, tiny.spec()))
    assert isinstance(broken.run(steps(4, ((1, 1),), 1))[0], Failed)
    assert end_of(broken.run(steps(5, ((2, 0),), 1))[0]) == (1, False)


def test_a_decode_before_the_last_step_fails(bench: WorkerBench) -> None:
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 3), decode(3, JOB))
    assert "the state of job 5 here is at position 4, not 5" in reason_of(reports[-1])


def test_a_work_does_not_begin_anywhere_but_where_it_was_meant_to(bench: WorkerBench) -> None:
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 2), steps(3, ((JOB, 1),), 2))
    assert "is at position 3, not 2" in reason_of(reports[-1])
    assert end_of(bench.run(steps(4, ((JOB, 2),), 1))[-1]) == (1, False), "the state itself is as good as before"


def test_works_of_a_job_that_was_never_here_fail(bench: WorkerBench) -> None:
    for report in bench.run(steps(1, ((JOB, 0),), 1), decode(2, JOB)):
        assert "job 5 is not on this worker: it was never begun" in reason_of(report)


@pytest.mark.parametrize("steps_before", range(5))
def test_a_job_moves_between_workers(
    family: Family, twin: Family, stock: Callable[..., np.ndarray], tmp_path: Path, steps_before: int
) -> None:
    source, target = WorkerBench(family, tmp_path), WorkerBench(twin, tmp_path)
    source.run(encode(1, JOB, tiny.spec()))
    if steps_before:
        source.run(steps(2, ((JOB, 0),), steps_before))
    target.run(import_state(JOB, tiny.spec(), steps_before, source.latest({1}), source.latest({2})))
    if steps_before < 4:
        assert end_of(target.run(steps(3, ((JOB, steps_before),), 4))[-1]) == (4 - steps_before, False)
    assert np.array_equal(image_of(target.run(decode(4, JOB))[0]), stock())


def test_a_returning_job_finds_its_conditioning(
    family: Family, twin: Family, stock: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    here, there = WorkerBench(family, tmp_path), WorkerBench(twin, tmp_path)
    here.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 1))
    there.run(import_state(JOB, tiny.spec(), 1, here.latest({1}), here.latest({2})), steps(3, ((JOB, 1),), 1))
    here.run(import_state(JOB, tiny.spec(), 2, None, there.latest({3})), steps(4, ((JOB, 2),), 2))
    assert np.array_equal(image_of(here.run(decode(5, JOB))[0]), stock())
    heavy, light = here.latest({1}), here.latest({2})
    assert heavy is not None
    assert light is not None
    assert heavy.num_bytes > sum(tensor.nbytes for tensor in family.encode(tiny.spec()).tensors.values())
    assert light.num_bytes < heavy.num_bytes, "the conditioning travels with every state"


def test_a_stopped_work_puts_its_state_down_too(
    family: Family, twin: Family, stock: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    here, there = WorkerBench(family, tmp_path), WorkerBench(twin, tmp_path)
    here.on_report = lambda report: here.works.stop(2) if report == Progress(2, 1) else None
    here.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4))
    there.run(import_state(JOB, tiny.spec(), 2, here.latest({1}), here.latest({2})), steps(3, ((JOB, 2),), 2))
    assert np.array_equal(image_of(there.run(decode(4, JOB))[0]), stock())


def test_a_missing_blob_drops_the_job_on_this_device(bench: WorkerBench) -> None:
    bench.run(encode(1, JOB, tiny.spec()), import_state(JOB, tiny.spec(), 1, None, StateBlob("gone", 1)))
    for report in bench.run(steps(2, ((JOB, 0),), 1), decode(3, JOB)):
        assert "a blob of its state is missing" in reason_of(report)
        assert isinstance(report, Failed)
        assert report.state_lost
    assert end_of(bench.run(encode(4, JOB, tiny.spec()), steps(5, ((JOB, 0),), 1))[-1]) == (1, False)


def test_a_blob_that_is_no_state_loses_the_job_here(bench: WorkerBench) -> None:
    rubbish = bench.blobs.write(serialization.SerializedState(b"rubbish", []))
    bench.run(encode(1, JOB, tiny.spec()), import_state(JOB, tiny.spec(), 1, None, rubbish))
    assert "a blob of its state is missing or damaged" in reason_of(bench.run(steps(2, ((JOB, 0),), 1))[0])


def test_a_move_without_conditioning_to_a_stranger_loses_the_job(family: Family, twin: Family, tmp_path: Path) -> None:
    source, target = WorkerBench(family, tmp_path), WorkerBench(twin, tmp_path)
    source.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 1))
    target.run(import_state(JOB, tiny.spec(), 1, None, source.latest({2})))
    [failed] = target.run(steps(3, ((JOB, 1),), 1))
    assert "moved without its conditioning to a worker that has none of it" in reason_of(failed)


@pytest.mark.parametrize("known", [True, False])
def test_a_job_moves_to_its_decode_without_its_conditioning(
    family: Family, twin: Family, stock: Callable[..., np.ndarray], tmp_path: Path, known: bool
) -> None:
    """The latents are all that is left of it, also on a worker that has known nothing else of the job."""
    source, target = WorkerBench(family, tmp_path), WorkerBench(twin, tmp_path)
    source.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4))
    conditioning, latents = source.latest({1}), source.latest({2})
    assert conditioning is not None
    assert latents is not None
    source.blobs.remove(conditioning)
    target.run(ImportState(JOB, MODEL, tiny.spec(), 5, (SavedState(1, 5, latents),), known))
    assert np.array_equal(image_of(target.run(decode(3, JOB))[0]), stock())
    contents = serialization.deserialize(target.blobs.read(latents), torch.device("cpu"))
    assert contents.keys() == {"latents"}


def test_a_job_does_not_return_to_steps_whose_conditioning_is_dropped(bench: WorkerBench) -> None:
    bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 3))
    before_last = bench.latest({2})
    bench.run(steps(3, ((JOB, 3),), 1), import_state(JOB, tiny.spec(), 3, None, before_last))
    assert "moved without its conditioning" in reason_of(bench.run(steps(4, ((JOB, 3),), 1))[0])
    bench.run(import_state(JOB, tiny.spec(), 3, bench.latest({1}), before_last))
    assert end_of(bench.run(steps(5, ((JOB, 3),), 1))[0]) == (1, False)


def test_a_state_that_cannot_be_serialized_fails_the_work(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(encode(1, JOB, tiny.spec()))

    def full(_serialized: serialization.SerializedState) -> StateBlob:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.blobs, "write", full)
    assert "No space left on device" in reason_of(bench.run(steps(2, ((JOB, 0),), 1))[0])


def test_results_are_made_when_the_report_is_sent(
    family: Family, tmp_path: Path, stock: Callable[..., np.ndarray]
) -> None:
    """The sender makes them beside the next work, which may be of the same model and size."""
    to_make: list[Callable[[], Report]] = []
    bench = WorkerBench(family, tmp_path, emit_made=to_make.append)
    bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), decode(3, JOB))
    assert [report.work_id for report in bench.reports if isinstance(report, Ended)] == [1, 2]
    other = tiny.spec(seed=1)
    bench.run(encode(4, 6, other), steps(5, ((6, 0),), 4), decode(6, 6))
    first, second = (make() for make in to_make)
    assert np.array_equal(image_of(first), stock())
    assert np.array_equal(image_of(second), stock(seed=1))


def test_results_that_cannot_be_made_fail_the_work(
    bench: WorkerBench, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image(*_: Any) -> Image:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(family, "image", image)
    reports = bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 4), decode(3, JOB))
    assert reports[-1] == Failed(3, "RuntimeError: out of luck", by_model=True)
    assert isinstance(bench.run(encode(4, 6, tiny.spec()))[0], Ended), "the worker goes on"


def test_a_device_that_has_failed_ends_the_worker(bench: WorkerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would fail every request that comes, and quickly, so that it is always free for the next."""
    bench.run(encode(1, JOB, tiny.spec()))

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("tilework.worker.hardware.has_failed", lambda _: True)
    monkeypatch.setattr("tilework.worker.work_run.Steps.run", fails)
    with pytest.raises(DeviceFailed, match="its device has failed: RuntimeError: CUDA error: an illegal memory"):
        bench.run(steps(2, ((JOB, 0),), 1))
    monkeypatch.setattr("tilework.worker.jobs.Jobs._read", fails)
    with pytest.raises(DeviceFailed, match="an illegal memory"):
        bench.run(ImportState(JOB, MODEL, tiny.spec(), 0, (), known=False))


@pytest.mark.parametrize("answers", [True, False])
def test_cuda_says_whether_it_has_failed(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        if not answers:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    assert has_failed(torch.device("cuda", 0)) == (not answers)
    assert not has_failed(torch.device("cpu"))


def test_forget_frees_what_a_job_held(bench: WorkerBench, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            held.append(
                weakref.ref(result.sampler if hasattr(result, "sampler") else next(iter(result.tensors.values())))
            )
            return result

        return call

    monkeypatch.setattr(family, "encode", keep(family.encode))
    monkeypatch.setattr(family, "begin", keep(family.begin))
    bench.run(encode(1, JOB, tiny.spec()), steps(2, ((JOB, 0),), 1))
    assert [reference() is not None for reference in held] == [True, True]
    bench.run(Forget(JOB), Forget(99))
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert len(bench.worker.jobs) == 0


def test_what_no_later_stage_reads_is_dropped(
    bench: WorkerBench, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, weakref.ref[Any]] = {}

    def keep(name: str, of_result: Callable[[Any], Any]) -> None:
        function = getattr(family, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            held[name] = weakref.ref(of_result(result))
            return result

        monkeypatch.setattr(family, name, call)

    def kept_after(command: Execute) -> set[str]:
        assert end_of(bench.run(command)[-1])[1] is False
        gc.collect()
        return {name for name, reference in held.items() if reference() is not None}

    keep("encode", lambda conditioning: next(iter(conditioning.tensors.values())))
    keep("begin", lambda state: state.sampler)
    keep("finish", lambda outputs: outputs["latents"])
    assert kept_after(encode(1, JOB, tiny.spec())) == {"encode"}
    assert kept_after(steps(2, ((JOB, 0),), 3)) == {"encode", "begin"}
    assert kept_after(steps(3, ((JOB, 3),), 1)) == {"finish"}
    assert not kept_after(decode(4, JOB))


def test_reasons_of_lost_jobs_are_bounded(bench: WorkerBench) -> None:
    for job in range(3000):
        bench.run(import_state(job, tiny.spec(), 0, StateBlob("gone", 1), None))
    assert len(bench.worker.jobs._lost) == 1024
    assert "a blob of its state is missing" in reason_of(bench.run(decode(1, 2999))[0])
    assert "is not on this worker" in reason_of(bench.run(decode(2, 0))[0])


def test_calibration_times_every_stage_of_every_shape_and_steps_of_batches(bench: WorkerBench) -> None:
    shapes = (Shape(64, 64), Shape(64, 96), Shape(72, 72))
    [report] = bench.run(Calibrate(MODEL, (*((shape,) for shape in shapes), shapes[:2])))
    assert isinstance(report, Calibrated)
    assert [(row.shapes, row.stage) for row in report.rows] == [
        *(((shape,), stage) for shape in shapes[:2] for stage in STAGES),
        (shapes[:2], "diffuse"),
    ], "72 px is no multiple of 16: the shape is left out"
    assert all(row.pipeline == "tiny-sd3" and 0 < row.seconds < 1 for row in report.rows)
    assert len(bench.worker.jobs) == 0


def test_a_command_for_the_receiver_is_not_executed(bench: WorkerBench) -> None:
    with pytest.raises(TypeError, match="does not execute Quit"):
        bench.run(Quit())
