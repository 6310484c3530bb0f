"""What a worker measures, alone and in a group, and how it tells its hardware and its model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tiny
from stages import DECODE, DIFFUSE, ENCODE, STAGES
from tilework.core.comm import GroupBroken
from tilework.core.cost_row import Batch, CostRow
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.pipelines.family import LIVE
from tilework.pipelines.identity import model_identity
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.worker import calibrate as calibrate_module
from tilework.worker.calibrate import calibrate
from tilework.worker.hardware import cpu_name, describe_hardware
from waiting import PATIENCE_S
from zoo.registry import ZOO, build

INFO = ModelInfo(
    name="toy",
    family="none",
    side_multiple=16,
    max_side=192,
    default_height=128,
    default_width=128,
    default_steps=50,
    default_guidance_scale=1.5,
    parameters=1,
    library="torch 2",
    max_degree=4,
)
SMALL, LARGE = Shape(64, 64), Shape(128, 128)
ONE_SMALL, ONE_LARGE = (SMALL,), (LARGE,)


# What a worker times.


class OwnTime(threading.local):
    """A clock of each thread, which goes on when the thread waits, and a little when it is read."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS_PER_S)


TIME = OwnTime()


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.worker.calibrate.time", TIME)


class Room:
    """Where the members of a group meet; nobody waits for ever.

    Who has met goes on, also if another one breaks off at once: `threading.Barrier` would let it fail.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.told = 0
        self._changed = threading.Condition()
        self._num_here = 0
        self._num_met = 0
        self._is_broken = False

    def meet(self) -> None:
        with self._changed:
            before = self._num_met
            self._num_here += 1
            if self._num_here == self.size and not self._is_broken:
                self._num_here, self._num_met = 0, before + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_met > before or self._is_broken, PATIENCE_S)
            if self._num_met == before:
                raise GroupBroken("somebody has gone")

    def break_off(self) -> None:
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()


@dataclass
class FakeComm:
    room: Room
    rank: int
    num_aborts: int = 0
    has_aborted_calls: bool = False

    @property
    def size(self) -> int:
        return self.room.size

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.rank == root:
            self.room.told = int(tensor.item())
        self.room.meet()
        tensor.fill_(self.room.told)

    def abort(self) -> None:
        self.num_aborts += 1
        self.room.break_off()


@dataclass
class FakeParallel:
    comm: FakeComm | None = None
    guided: bool | None = None
    num_left: int = 0

    def join(self, comm: FakeComm, guided: bool) -> None:
        self.comm, self.guided = comm, guided

    def leave(self) -> None:
        self.comm = None
        self.num_left += 1


@dataclass
class FakeFamily:
    """A model whose iterations take `iteration_s`, `order` of them per step; in a group each waits for the others.

    Its last step, which may be a shorter one, is the call "last". It makes no more than `most_steps`. An output that is
    live can be read once.
    """

    iteration_s: float = 0.0
    order: int = 1
    too_large: Shape | None = None
    most_decoded: int = 12
    most_steps: int = 1000
    info: ModelInfo = INFO
    parallel: FakeParallel = field(default_factory=FakeParallel)
    calls: list[str] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    decoded_in: list[int] = field(default_factory=list)
    wait: Callable[[float], None] = TIME.wait

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def join(self, comm: FakeComm, spec: Any) -> None:
        self.parallel.join(comm, spec.guidance_scale > 1)

    def run(self, stage: str, specs: Sequence[Any], values: Sequence[Any], sliced: bool = False) -> list[Any]:
        self.calls.append(stage)
        self.specs += specs
        for spec, of_spec in zip(specs, values, strict=True):
            assert stage == ENCODE or of_spec["latents"] == str(spec), "the outputs of the stages before"
            assert LIVE not in of_spec
        if stage == DECODE:
            self.decoded_in.append(1 if self.parallel.comm is None else self.parallel.comm.size)
        if stage == DECODE and len(specs) > self.most_decoded:
            raise MemoryError("too many")
        if stage == ENCODE:
            return [{"conditioning": str(spec), LIVE: object()} for spec in specs]
        return [{"picture": str(spec)} for spec in specs]

    def begin(self, stage: str, spec: Any, values: Any) -> Any:
        assert (stage, values["conditioning"]) == (DIFFUSE, str(spec))
        assert spec.steps <= self.most_steps
        assert LIVE not in values
        self.calls.append("begin")
        return SimpleNamespace(steps_done=0, iteration=0, spec=spec)

    def step(self, states: Sequence[Any], pack: Any = None) -> None:
        for _ in range(self.order):
            self.iterate(states, pack)

    def iterate(self, states: Sequence[Any], pack: Any) -> None:
        assert all(state.steps_done < state.spec.steps for state in states)
        assert (pack is None) == (len(states) == 1)
        if any(state.spec.shape == self.too_large for state in states):
            raise MemoryError("too large")
        if self.parallel.comm is not None:
            self.parallel.comm.room.meet()
        self.wait(self.iteration_s)
        self.batches.append(len(states))
        for state in states:
            self.calls.append(DIFFUSE if state.steps_done < state.spec.steps - 1 else "last")
            state.iteration += 1
            state.steps_done = state.iteration // self.order

    def export(self, state: Any) -> Any:
        return {"latents": torch.zeros(state.spec.height, state.spec.width)}

    def finish(self, state: Any) -> Any:
        assert state.steps_done == state.spec.steps
        return {"latents": str(state.spec), LIVE: object()}


def in_group(
    families: list[FakeFamily], *batches: Batch, num_runs: int | None = None, has_aborted_calls: bool = False
) -> list[tuple[CostRow, ...]]:
    room = Room(len(families))
    comms = [FakeComm(room, rank, has_aborted_calls=has_aborted_calls) for rank in range(len(families))]
    with ThreadPoolExecutor() as threads:
        futures = [
            threads.submit(calibrate, one, batches, comm, num_runs) for one, comm in zip(families, comms, strict=True)
        ]
        return [future.result(30) for future in futures]


def test_alone_every_stage_is_timed_as_often_as_asked() -> None:
    family = FakeFamily()
    rows = calibrate(family, (ONE_SMALL, ONE_LARGE), num_runs=7)
    assert [(row.stage, row.height, row.degree, row.num_runs) for row in rows] == [
        (stage, side, 1, 7) for side in (64, 128) for stage in STAGES
    ]
    encodes, diffuses, decodes = ([stage] * (3 + 7) for stage in STAGES)
    once = [*encodes, ENCODE, "begin", *diffuses, "last", *decodes]
    assert family.calls == once * 2, "three to warm up, then seven, and an encode that is read"
    assert all(spec.guidance_scale > 1 for spec in family.specs), "costs are those of guided steps"
    assert family.parallel.comm is None


def test_stages_that_are_known_are_run_but_not_timed() -> None:
    family = FakeFamily()
    rows = calibrate(family, (ONE_SMALL,), num_runs=1, known=frozenset({ENCODE, DIFFUSE}))
    assert [(row.stage, row.degree) for row in rows] == [(DECODE, 1)]
    assert calibrate(family, (ONE_SMALL,), known=frozenset({ENCODE, DIFFUSE, DECODE})) == ()


def test_a_pipeline_that_is_served_by_its_stock_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes what all steps have made, each time anew."""
    tiny.prepare()
    pipeline = build(ZOO["z-image"])
    decode, now_ns = pipeline.vae.decode, 0

    def slowly(*arguments: Any, **options: Any) -> Any:
        nonlocal now_ns
        now_ns += NS_PER_S // 4
        return decode(*arguments, **options)

    pipeline.vae.decode = slowly
    monkeypatch.setattr(calibrate_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    family = StockPipeline(pipeline, "z-image", {}, "")
    rows = calibrate(family, (ONE_SMALL,), num_runs=3)
    assert {row.stage for row in rows} == set(STAGES)
    assert {row.seconds for row in rows if row.stage == DECODE} == {0.25}, "not what is left of a call that has ended"
    decodes = calibrate(family, (ONE_SMALL,), num_runs=3, known=frozenset({ENCODE, DIFFUSE}))
    assert [row.stage for row in decodes] == [DECODE]


@pytest.mark.parametrize("most", [1, 2])
def test_a_model_of_few_steps_is_asked_for_no_more(most: int) -> None:
    family = FakeFamily(most_steps=most, info=replace(INFO, default_steps=most))
    rows = calibrate(family, (ONE_SMALL,), num_runs=5)
    assert [row.num_runs for row in rows] == [5, 5, 5]
    num_timed = family.calls.count(DIFFUSE) + (family.calls.count("last") if most == 1 else 0)
    assert num_timed == 3 + 5, "whole steps"


def test_what_a_move_takes_with_it_is_measured_alone() -> None:
    rows = calibrate(FakeFamily(), (ONE_SMALL, ONE_LARGE, ONE_SMALL * 2), num_runs=1)
    sizes = {(row.stage, row.height, row.batch): row.state_bytes for row in rows}
    assert 64 * 64 * 4 < (sizes[DIFFUSE, 64, 1] or 0) < 64 * 64 * 4 + 500
    assert 128 * 128 * 4 < (sizes[DIFFUSE, 128, 1] or 0) < 128 * 128 * 4 + 500
    assert 100 < (sizes[ENCODE, 64, 1] or 0) < 1000
    assert sizes[DECODE, 64, 1] is None, "nothing is left to do"
    assert sizes[DIFFUSE, 64, 2] is None


@pytest.mark.parametrize(("iteration_ms", "num_runs"), [(0, 5), (300, 3), (2000, 1)])
def test_a_short_calibration_stops_after_a_second(
    iteration_ms: int, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, now_ns = FakeFamily(), 0

    def wait(_seconds: float) -> None:
        nonlocal now_ns
        now_ns += iteration_ms * 1_000_000

    family.wait = wait
    monkeypatch.setattr(calibrate_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    step = next(row for row in calibrate(family, (ONE_SMALL,)) if row.stage == DIFFUSE)
    assert step.num_runs == num_runs
    assert family.calls.count(DIFFUSE) == 1 + num_runs, "one to warm up"


def test_the_median_and_the_longest_of_a_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    family, now_ns = FakeFamily(), 0
    durations_ms = iter([90] * 3 + [10, 50, 10, 20, 30, 90])

    def wait(_seconds: float) -> None:
        nonlocal now_ns
        now_ns += next(durations_ms) * 1_000_000

    family.wait = wait
    monkeypatch.setattr(calibrate_module, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    step = next(row for row in calibrate(family, (ONE_SMALL,), num_runs=5) if row.stage == DIFFUSE)
    assert (step.seconds, step.p99_seconds) == (0.02, 0.05)


def test_the_p99_of_many_runs_is_the_nearest_rank() -> None:
    assert calibrate_module._p99(list(range(1, 201))) == 198
    assert calibrate_module._p99([3, 9, 1]) == 9


def test_a_step_has_all_the_iterations_of_its_sampler() -> None:
    family = FakeFamily(iteration_s=0.02, order=2)
    step = next(row for row in calibrate(family, (ONE_SMALL,), num_runs=3) if row.stage == DIFFUSE)
    assert 0.04 <= step.seconds < 0.08
    assert family.calls.count(DIFFUSE) == 2 * (3 + 3)


@pytest.mark.parametrize("order", [1, 2])
def test_calibration_times_a_step_and_a_decode_of_the_whole_batch(order: int) -> None:
    """Only outputs of one size are decoded together."""
    family = FakeFamily(order=order)
    rows = calibrate(family, ((LARGE, SMALL, SMALL), (SMALL,) * 4), num_runs=2)
    assert [(row.stage, row.shapes, row.degree, row.num_runs) for row in rows] == [
        (DIFFUSE, (SMALL, SMALL, LARGE), 1, 2),
        (DIFFUSE, (SMALL,) * 4, 1, 2),
        (DECODE, (SMALL,) * 4, 1, 2),
    ]
    assert family.batches == [3] * 5 * order + [4] * (5 + 1) * order, "three to warm up, then two; one before a decode"
    assert family.calls.count(DIFFUSE) == (3 + 4) * 5 * order, "each member goes on by as many steps"
    assert family.calls.count(DECODE) == 5
    assert len(family.specs) == 2 + 1 + 4 * 5, "each shape is encoded once"


def test_a_batch_that_cannot_be_decoded_may_share_its_steps() -> None:
    said: list[str] = []
    rows = calibrate(FakeFamily(most_decoded=1), ((SMALL, SMALL),), num_runs=1, on_error=said.append)
    assert [(row.stage, row.batch) for row in rows] == [(DIFFUSE, 2)]
    assert said == ["64x64 + 64x64 cannot run here (MemoryError: too many)"]
    assert not calibrate(FakeFamily(most_decoded=0), (ONE_SMALL,), num_runs=1), "a picture needs all stages"


def test_a_batch_of_which_one_does_not_fit_is_left_out() -> None:
    said: list[str] = []
    batches = ((SMALL, LARGE), (SMALL, SMALL))
    rows = calibrate(FakeFamily(too_large=LARGE), batches, num_runs=1, on_error=said.append)
    assert [(row.stage, row.batch) for row in rows] == [(DIFFUSE, 2), (DECODE, 2)]
    assert said == ["64x64 + 128x128 cannot run here (MemoryError: too large)"]


def test_a_group_times_steps_only_and_leaves_afterwards() -> None:
    families = [FakeFamily(info=replace(INFO, two_passes=two_passes)) for two_passes in (True, False)]
    results = in_group(families, ONE_SMALL, ONE_LARGE, num_runs=4)
    for family, rows in zip(families, results, strict=True):
        assert [(row.stage, row.height, row.degree, row.num_runs) for row in rows] == [
            (DIFFUSE, 64, 2, 4),
            (DIFFUSE, 128, 2, 4),
        ]
        assert family.parallel.guided
        assert (family.parallel.comm, family.parallel.num_left) == (None, 2)
        assert DECODE not in family.calls


def test_a_group_times_a_decode_that_it_can_share() -> None:
    stages = tuple(replace(one, degrees=None) if one.name == DECODE else one for one in INFO.stages)
    families = [FakeFamily(info=replace(INFO, stages=stages)) for _ in range(2)]
    for family, rows in zip(families, in_group(families, ONE_SMALL, num_runs=2), strict=True):
        assert [(row.stage, row.degree, row.num_runs) for row in rows] == [(DIFFUSE, 2, 2), (DECODE, 2, 2)]
        assert family.decoded_in == [2] * (3 + 2), "a group made it"
        assert not family.parallel.guided
        assert (family.parallel.comm, family.parallel.num_left) == (None, 2)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_all_members_of_a_group_make_the_same_number_of_runs(slow_rank: int) -> None:
    """One of them is held up in the first run that counts. By its own clock, the other would go on without it."""
    families = [FakeFamily(), FakeFamily()]
    slow = families[slow_rank]
    slow.wait = lambda _seconds: TIME.wait(0.6 if slow.calls.count(DIFFUSE) == 1 else 0)
    results = in_group(families, ONE_SMALL)
    expected = 1 if slow_rank == 0 else 5
    assert [[row.num_runs for row in rows] for rows in results] == [[expected], [expected]], "by the first one's clock"
    assert families[0].calls == families[1].calls


def test_a_member_that_fails_breaks_the_group_and_keeps_what_was_measured() -> None:
    families = [FakeFamily(), FakeFamily(too_large=LARGE)]
    results = in_group(families, ONE_SMALL, ONE_LARGE, ONE_SMALL, num_runs=2)
    assert [[row.height for row in rows] for rows in results] == [[64], [64]]
    assert [family.parallel.comm for family in families] == [None, None]


def test_what_was_measured_of_messages_that_may_be_wrong_is_not_used() -> None:
    assert in_group([FakeFamily(), FakeFamily()], ONE_SMALL, num_runs=2, has_aborted_calls=True) == [(), ()]


def test_a_shape_that_does_not_fit_is_left_out_and_its_traceback_is_for_the_debug_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[str] = []
    with caplog.at_level("DEBUG", "tilework.worker"):
        rows = calibrate(FakeFamily(too_large=SMALL), (ONE_SMALL, ONE_LARGE), num_runs=1, on_error=said.append)
    assert {row.height for row in rows} == {128}
    assert said == ["64x64 cannot run here (MemoryError: too large)"]
    (record,) = [one for one in caplog.records if one.name == "tilework.worker.calibrate"]
    assert record.levelname == "DEBUG"
    assert record.exc_info


def test_an_error_of_many_lines_is_told_by_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    family = FakeFamily()
    monkeypatch.setattr(family, "step", Mock(side_effect=RuntimeError("no kernel\nmore\n")))
    assert calibrate(family, (ONE_SMALL,), on_error=said.append) == ()
    assert said == ["64x64 cannot run here (RuntimeError: no kernel)"]


@pytest.mark.parametrize("num_members", [1, 2])
def test_what_is_only_warmed_up_runs_every_stage_and_says_how_long_the_last_warm_up_took(num_members: int) -> None:
    families = [FakeFamily() for _ in range(num_members)]
    results = (
        [calibrate(families[0], (ONE_SMALL,), num_runs=0)]
        if num_members == 1
        else in_group(families, ONE_SMALL, num_runs=0)
    )
    stages = STAGES if num_members == 1 else (DIFFUSE,)
    assert [[(row.stage, row.num_runs) for row in rows] for rows in results] == [[(one, 0) for one in stages]] * (
        num_members
    )
    assert all(row.seconds > 0 for rows in results for row in rows)
    for family in families:
        assert {ENCODE, DIFFUSE} <= set(family.calls)
        assert (family.calls[-1] == DECODE) == (num_members == 1), "a group does what it shares"
    said: list[str] = []
    assert calibrate(FakeFamily(most_decoded=0), (ONE_SMALL,), num_runs=0, on_error=said.append) == ()
    assert said == ["64x64 cannot run here (MemoryError: too many)"]


# Which hardware, which model.


def test_a_cpu_has_a_name_and_a_number_of_cores(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU: fast @ 2 GHz\n\nmodel name\t: other\n")
    assert cpu_name(cpuinfo) == "Some CPU: fast @ 2 GHz"
    assert cpu_name(tmp_path / "absent") == os.uname().machine
    assert describe_hardware(torch.device("cpu")) == f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    (directory / "transformer").mkdir(parents=True)
    (directory / "model_index.json").write_text("{}")
    (directory / "transformer" / "config.json").write_text('{"layers": 2}')
    (directory / "transformer" / "weights.safetensors").write_bytes(b"123")
    return directory


def identity(directory: Path) -> str:
    return model_identity(ModelSource(path=str(directory)))


def test_the_identity_of_a_directory_changes_with_its_files_only(model: Path) -> None:
    before = identity(model)
    assert before.startswith("my-model@")
    assert identity(model / "." / "transformer" / "..") == before
    config = model / "transformer" / "config.json"
    config.write_text('{"layers": 3}')
    assert identity(model) != before
    config.write_text('{"layers": 2}')
    config.rename(config.with_name("other.json"))
    assert identity(model) != before


def test_the_identity_of_the_shipped_model_and_of_one_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_identity(ModelSource(path="shapes")).startswith("shapes@")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_identity(ModelSource(path="some/model")) == "some/model"
    cache, commit = tmp_path / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "snapshots" / commit / "model_index.json").write_text("{}")
    assert model_identity(ModelSource(path="some/model")) == "some/model@0123456789ab"
