"""Memory: budgets that are held, works that run out of it, and what is learnt from them."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import tilework
import tiny
from commands import MODEL, decode, encode, import_state, steps
from runtime.rig import PingPong
from stages import DECODE, DIFFUSE, ENCODE, STAGES, stage_of
from tilework.cli.options.common import parse_bytes
from tilework.comm.groups import Groups
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Reject, RunWork
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.request import RefusalCode, Shape, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire.reports import Ended, Ending, Failed, Report
from tilework.core.wire.spec import Spec
from tilework.cost.memory import FORGET_NS, MemoryLimits
from tilework.cost.table import CostTable
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.policy import registry
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.ticket import Outcome
from tilework.worker.memory import Budget, is_out_of_memory
from tilework.worker.models.models import Models
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker
from tilework.worker.works import OpenWorks
from waiting import until

MIB = 1 << 20
STEPS, PICTURE = stage_of("m", DIFFUSE), stage_of("m", DECODE)


def no_memory() -> RuntimeError:
    """As torch says it. A new one each time: an error holds the frames it came through."""
    return RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


# Sizes, errors, budgets.


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("800MB", 800 * 10**6), ("2GiB", 2 << 30), ("1.5 gib", 3 << 29), ("4194304B", 4 << 20)]
)
def test_sizes_are_written_with_their_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["2", "GiB", "2 GX", "-1GiB", "1e9B", "", "1KiB"])
def test_an_invalid_size_is_named(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"give at least 1MiB|as in 800MB or 2GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (no_memory(), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("out of luck"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_a_budget_is_held_around_a_work_only() -> None:
    process = multiprocessing.get_context("fork").Process(target=_hold_budget)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _hold_budget() -> None:
    """Exit code 0: within the budget there is room, beyond it none, and afterwards again as much as one likes."""
    # More than the heap that the process was born with may have free, for it has that without asking.
    before, budget = resource.getrlimit(resource.RLIMIT_DATA), Budget(torch.device("cpu"), 1024 * MIB)
    fitted, error = None, None
    try:
        with budget.hold():
            fitted = torch.empty(768 * MIB, dtype=torch.uint8)
            torch.empty(768 * MIB, dtype=torch.uint8)
    except Exception as caught:
        error = caught
    more = torch.empty(4096 * MIB, dtype=torch.uint8)
    after = resource.getrlimit(resource.RLIMIT_DATA)
    right = fitted is not None and error is not None and is_out_of_memory(error) and after == before and len(more)
    os._exit(0 if right else 1)


@pytest.mark.parametrize(("memory_bytes", "is_exceeded"), [(64 * MIB, True), (None, False)])
def test_a_primitive_that_onednn_cannot_create_exceeds_a_budget(memory_bytes: int | None, is_exceeded: bool) -> None:
    """Without a budget it is an error of the model: oneDNN has the same words for what it cannot compute."""
    error = RuntimeError("could not create a primitive")
    assert Budget(torch.device("cpu"), memory_bytes).is_exceeded_by(error) == is_exceeded


# What is learnt.


def test_a_work_that_did_not_fit_excludes_larger_ones_and_fewer_devices() -> None:
    limits = MemoryLimits()
    assert limits.starved(STEPS, (Shape(64, 64),), 2, False, 0)
    assert not limits.starved(STEPS, (Shape(64, 64),), 2, False, 0), "that is known"
    assert not limits.starved(STEPS, (Shape(96, 64),), 1, False, 0), "and this follows from it"
    known = {
        (side, degree): limits.fits(STEPS, (Shape(side, 64),), degree) for side in (48, 64, 96) for degree in (1, 2, 4)
    }
    assert [place for place, fits in known.items() if not fits] == [(64, 1), (64, 2), (96, 1), (96, 2)]
    assert limits.fits(PICTURE, (Shape(96, 96),), 1), "another stage is another matter"


def test_slices_take_less_than_the_whole() -> None:
    limits = MemoryLimits()
    limits.starved(PICTURE, (Shape(64, 64),), 1, False, 0)
    assert limits.fits(PICTURE, (Shape(64, 64),), 1, sliced=True)
    limits.starved(PICTURE, (Shape(96, 64),), 1, True, 0)
    assert not limits.fits(PICTURE, (Shape(96, 64),), 1, sliced=True)
    assert not limits.fits(PICTURE, (Shape(96, 64),), 1)


def test_the_limit_of_a_smaller_work_does_not_loosen_that_of_a_larger_one() -> None:
    limits = MemoryLimits()
    limits.starved(PICTURE, (Shape(96, 96),), 1, False, 0)
    limits.starved(PICTURE, (Shape(64, 64),), 1, False, 0)
    assert limits.fitted(PICTURE, (Shape(80, 80),), 1, False), "it was no lasting limit"
    assert limits.fits(PICTURE, (Shape(64, 64),), 1)
    assert not limits.fits(PICTURE, (Shape(96, 96),), 1)


def test_limits_derived_from_another_outlive_it() -> None:
    """The slices did fit after all, but that the whole did not had been seen, too."""
    limits = MemoryLimits()
    limits.starved(PICTURE, (Shape(64, 64),), 1, True, 0)
    assert not limits.starved(PICTURE, (Shape(64, 64),), 1, False, 0), "it follows from the slices"
    assert limits.fitted(PICTURE, (Shape(96, 64),), 1, True)
    assert limits.fits(PICTURE, (Shape(64, 64),), 1, True)
    assert not limits.fits(PICTURE, (Shape(64, 64),), 1, False)


def test_a_limit_expires_or_is_dropped_when_disproved() -> None:
    limits = MemoryLimits()
    limits.starved(STEPS, (Shape(64, 64),), 1, False, 0)
    limits.starved(STEPS, (Shape(32, 64),), 2, False, NS_PER_S)
    assert not limits.forget(FORGET_NS - 1)
    assert limits.forget(FORGET_NS)
    assert limits.fits(STEPS, (Shape(48, 64),), 4)
    assert not limits.fits(STEPS, (Shape(48, 64),), 1), "the later one is still known"
    assert not limits.fitted(STEPS, (Shape(16, 64),), 2, False), "a smaller one says nothing"
    assert limits.fitted(STEPS, (Shape(48, 64),), 1, False)
    assert not limits


# Works.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "dpm")
    return directory


@pytest.fixture(scope="module")
def family(directory: Path) -> Family:
    return load(ModelSource(path=str(directory)))


@pytest.fixture
def run(family: Family, tmp_path: Path) -> Callable[..., list[Ended]]:
    """Executes commands on one worker; returns the ends that they came to."""
    reports: list[Report] = []
    worker = Worker(
        Models({MODEL: family}, family.device), OpenWorks(), Groups(0, ""), StateBlobs(tmp_path, 0), reports.append
    )

    def execute(*commands: Any) -> list[Ended]:
        known = len(reports)
        for command in commands:
            worker.execute(command)
        assert not any(isinstance(report, Failed) for report in reports), reports
        return [report for report in reports[known:] if isinstance(report, Ended)]

    return execute


def starving(monkeypatch: pytest.MonkeyPatch, family: Family, name: str, at: int) -> list[Any]:
    """Let this method run out of memory in its call number `at`; returns what it had taken each time."""
    taken: list[Any] = []
    method = getattr(family, name)

    def starved(*args: Any) -> Any:
        taken.append(None)
        if len(taken) == at:
            raise no_memory()
        return method(*args)

    monkeypatch.setattr(family, name, starved)
    return taken


def result(ended: Ended) -> tuple[int, bool, bool]:
    return ended.steps_done, ended.ending is Ending.OUT_OF_MEMORY, bool(ended.blobs)


def picture(ended: Ended) -> np.ndarray:
    (image,) = ended.images.values()
    return tiny.pixels(image)


def test_steps_that_were_done_are_kept_and_the_rest_follows(
    run: Callable[..., list[Ended]], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*_, whole] = run(encode(1, 1, tiny.spec()), steps(2, ((1, 0),), 4), decode(3, 1))
    with monkeypatch.context() as patch:
        starving(patch, family, "predict", 3)
        [encoded, cut] = run(encode(4, 2, tiny.spec()), steps(5, ((2, 0),), 4))
    assert result(cut) == (2, True, True)
    [rest, decoded] = run(
        import_state(2, tiny.spec(), 2, encoded.blobs[2], cut.blobs[2]), steps(6, ((2, 2),), 2), decode(7, 2)
    )
    assert result(rest) == (2, False, True)
    assert np.array_equal(picture(decoded), picture(whole))


def test_a_step_that_fails_half_way_leaves_no_state(
    run: Callable[..., list[Ended]], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that remembers earlier predictions has changed by then."""
    run(encode(1, 1, tiny.spec()))
    method = family.advance

    def torn(state: Any, prediction: Any) -> None:
        method(state, prediction)
        if state.iteration_index == 3:
            raise no_memory()

    monkeypatch.setattr(family, "advance", torn)
    [cut] = run(steps(2, ((1, 0),), 4))
    assert result(cut) == (0, True, False)


@pytest.mark.parametrize("stage", [ENCODE, DECODE])
def test_a_stage_that_does_not_fit_can_be_tried_again(
    run: Callable[..., list[Ended]], family: Family, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    commands: list[Any] = [encode(1, 1, tiny.spec()), steps(2, ((1, 0),), 4), decode(3, 1)]
    at = STAGES.index(stage)
    run(*commands[:at])
    with monkeypatch.context() as patch:
        starving(patch, family, "run", 1)
        [cut] = run(commands[at])
    assert result(cut) == (0, True, False)
    assert picture(run(*commands[at:])[-1]).shape == (64, 64, 3)


def test_memory_of_a_work_is_freed_before_its_state_is_serialized(
    run: Callable[..., list[Ended]], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[weakref.ref[torch.Tensor]] = []
    method = family.predict

    def predict(states: Any, *_: Any) -> Any:
        if states[0].steps_done == 1:
            large = torch.zeros(1)
            taken.append(weakref.ref(large))
            raise no_memory()
        return method(states)

    def export(state: Any) -> Any:
        assert taken[0]() is None
        return type(family).export(family, state)

    run(encode(1, 1, tiny.spec()))
    monkeypatch.setattr(family, "predict", predict)
    monkeypatch.setattr(family, "export", export)
    assert result(run(steps(2, ((1, 0),), 4))[0]) == (1, True, True)


# The live engine.


class Watching(Observer):
    def __init__(self) -> None:
        self.works: list[EndedWork] = []

    def on_work_ended(self, ended: EndedWork) -> None:
        self.works.append(ended)

    def endings(self, uid: str) -> list[tuple[str, int, bool, str]]:
        """Stage, degree, whether in slices, and ending of the works of a request."""
        mine = [ended for ended in self.works if ended.requests[0].uid == uid]
        return [
            (ended.work.stage.name, len(ended.work.devices), ended.work.sliced, ended.ending.value) for ended in mine
        ]


class Rig:
    """An engine over real worker processes."""

    def __init__(self, source: ModelSource | SimulatedSource, table: CostTable, policy: str, num_workers: int) -> None:
        self.runner, self.watching = asyncio.Runner(), Watching()
        self.executor = LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,), stop_grace_s=1.0))
        config = EngineConfig(controller=ControllerConfig(policy=policy), table=table)
        starting = EngineStart(config, self.executor).start(self.watching)
        self.engine = self.runner.run(asyncio.wait_for(starting, 60))

    def outcomes(self, specs: dict[str, Spec]) -> list[Outcome]:
        async def all_of_them() -> list[Outcome]:
            tickets = [answer for uid, spec in specs.items() for answer in self.submit(uid, spec)]
            return await asyncio.gather(*(ticket.outcome for ticket in tickets))

        return self.runner.run(asyncio.wait_for(all_of_them(), 120))

    def submit(self, uid: str, spec: Spec) -> Any:
        return self.engine.submit({uid: spec})

    def refusal(self, spec: Spec) -> Reject:
        async def ask() -> Any:
            return self.submit("refused", spec)

        answer = self.runner.run(ask())
        assert isinstance(answer, Reject)
        return answer

    def close(self) -> None:
        self.runner.run(asyncio.wait_for(self.engine.stop(), 60))
        self.runner.close()


def costs(pipeline: str, sides: tuple[int, ...], degrees: tuple[int, ...], **peaks: int) -> CostTable:
    """A table of one second and less; `peaks` are bytes by stage at degree 1, half of it at degree 2."""
    rows = [
        CostRow(
            pipeline=pipeline,
            stage=stage,
            height=side,
            width=side,
            degree=degree,
            seconds=0.05 / degree,
            peak_bytes=peaks[stage] * side * side // (512 * 512) // degree if stage in peaks else None,
        )
        for side in sides
        for stage in STAGES
        for degree in (degrees if stage == DIFFUSE else (1,))
    ]
    return CostTable(hardware="h", rows=tuple(rows), steps=4)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Any]]:
    """Two workers that may take 28 MiB: of 256 px a decode fits only in slices, of 512 px not at all."""
    tiny.prepare()
    directory = tmp_path_factory.mktemp("wide")
    pipeline = tiny.build_sd3("euler", max_side=512)
    pipeline.vae = tiny.AutoencoderKL(
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    tiny.save(pipeline, directory, "wide")
    source = ModelSource(path=str(directory), memory_bytes=28 * MIB)
    rig = Rig(source, costs("wide", (64, 256, 512), (1,)), "edf", 2)
    yield rig, tilework.reference(str(directory))
    rig.close()


def test_a_decode_that_does_not_fit_is_made_in_slices(tight: tuple[Rig, Any]) -> None:
    rig, pipeline = tight
    spec, small = tiny.spec(height=256, width=256, steps=2), tiny.spec()
    [large, other] = rig.outcomes({"large": spec, "small": small})
    endings = rig.watching.endings("large")
    assert endings[-2:] == [("decode", 1, False, "out_of_memory"), ("decode", 1, True, "done")]
    assert sum(ending == "out_of_memory" for *_, ending in endings) == 1
    for outcome, asked in ((large, spec), (other, small)):
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        difference = tiny.pixels(outcome.image).astype(int) - tiny.run_stock(pipeline, asked).pixels
        assert np.abs(difference).max() <= 1
        assert (difference != 0).mean() < 1e-3
    [again] = rig.outcomes({"again": spec})
    assert rig.watching.endings("again")[-1] == ("decode", 1, True, "done")
    assert "out_of_memory" not in {ending for *_, ending in rig.watching.endings("again")}, "that is known by now"
    assert again.image == large.image
    assert not any(segment.sliced for segment in other.segments)
    assert again.segments[-1].sliced


def test_a_picture_that_fits_in_no_way_fails_once_and_is_refused_then(tight: tuple[Rig, Any]) -> None:
    rig, _ = tight
    huge = tiny.spec(height=512, width=512, steps=1)
    [failed, *others] = rig.outcomes({"huge": huge} | {f"other{index}": tiny.spec(seed=index) for index in range(6)})
    assert failed.status is Status.FAILED
    assert "there was not enough memory" in failed.reason
    assert [outcome.status for outcome in others] == [Status.DONE] * 6
    refusal = rig.refusal(huge)
    assert refusal.code is RefusalCode.MEMORY
    assert "512x512" in refusal.reason
    assert rig.engine.status.health().num_devices_up == 2
    assert not [ended for ended in rig.watching.works if ended.ending is Ending.LOST]


def test_a_request_restarts_when_its_blobs_are_missing(
    directory: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._GIVEN, "ping-pong", PingPong)  # Every step reads what the one before put down.
    spec = tiny.spec(steps=60, seed=3)
    state = tiny.begin(family, spec)
    tiny.finish(family, state)
    rig = Rig(ModelSource(path=str(directory)), costs("tiny-sd3", (64,), (1,)), "ping-pong", 2)

    def encodings(ticket: Any) -> int:
        return sum(isinstance(action, RunWork) and action.work.stage.name == ENCODE for _, action in ticket.history)

    async def disturbed() -> Outcome:
        """Whatever is put down is taken away, until the request has had to begin anew."""
        [ticket] = rig.submit("disturbed", spec)
        await until(lambda: ticket.steps_done >= 2)

        def begins_anew() -> bool:
            for path in rig.executor._blobs.path.iterdir():
                if path.name[0].isdigit():
                    path.unlink(missing_ok=True)
            return encodings(ticket) == 2

        await until(begins_anew)
        outcome: Outcome = await ticket.outcome
        return outcome

    try:
        outcome = rig.runner.run(disturbed())
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image == tiny.decode(family, state)
        assert [segment.stage for segment in outcome.segments].count("encode") == 2
    finally:
        rig.close()


@pytest.mark.parametrize("budget", [300 * MIB, 140 * MIB])
def test_steps_that_do_not_fit_on_one_device_go_to_two(budget: int) -> None:
    """At 256 px steps take 50 MiB of each of two pretended devices, at 512 px 200; a decode 250, in slices half."""
    table = costs("p", (256, 512), (1, 2), diffuse=400 * MIB if budget == 300 * MIB else 200 * MIB, decode=250 * MIB)
    source = SimulatedSource(pipeline="p", hardware="h", steps=4, rows=table.rows, memory_bytes=budget)
    rig = Rig(source, table, "tetriserve", 2)
    try:
        [outcome] = rig.outcomes({"a": tiny.spec(height=512, width=512, guidance_scale=1.0)})
        assert outcome.status is Status.DONE, outcome.reason
        works = rig.watching.endings("a")
        assert {degree for stage, degree, _, ending in works if (stage, ending) == ("diffuse", "done")} == {2}
        assert works[-1] == ("decode", 1, budget < 250 * MIB, "done")
        [small] = rig.outcomes({"b": tiny.spec(height=256, width=256, guidance_scale=1.0)})
        assert small.status is Status.DONE
    finally:
        rig.close()
