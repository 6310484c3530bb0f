"""Forward passes that are recorded and done again, with a recorder that works on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import tiny
from tilework.core.model import ModelSource
from tilework.core.packing import Pack
from tilework.patches.layout import pack
from tilework.pipelines.cuda.graphs import CudaRecorder, StepGraphs, record_steps
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from zoo import requests
from zoo.registry import ZOO


@dataclass
class Recorder:
    """Does a call again on the memory of its inputs, and overwrites its results, as a CUDA graph does."""

    num_records: int = 0
    num_replays: int = 0
    refuses: bool = False

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.num_records += 1
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = call()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                leaf.fill_(torch.nan)  # A graph that is recorded has not run.

        def replay() -> None:
            self.num_replays += 1
            for mine, new in zip(tree_leaves(result), tree_leaves(call()), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(new)

        return replay, result


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.num_eager = 0

    def forward(self, x: Tensor, scale: float | None = None, more: dict[str, Tensor] | None = None) -> tuple[Tensor]:
        self.num_eager += 1
        return (x * self.weight * (scale or 1) + (more or {"y": torch.zeros(1)})["y"],)


@dataclass
class Recorded:
    is_off: bool = False
    context: object = None
    recorder: Recorder = field(default_factory=Recorder)
    module: Doubled = field(default_factory=Doubled)
    most: int = 4

    def __post_init__(self) -> None:
        self.graphs = StepGraphs(
            self.module, self.recorder, lambda: self.is_off, lambda: self.context, self.most
        ).install()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        (result,) = self.module(*args, **kwargs)
        assert isinstance(result, Tensor)
        return result


def test_the_second_call_of_a_kind_is_recorded_and_each_has_a_result_of_its_own() -> None:
    recorded = Recorded()
    results = [recorded(torch.full((3,), float(value)), more={"y": torch.ones(1)}) for value in range(5)]
    assert [result.tolist() for result in results] == [[2.0 * value + 1] * 3 for value in range(5)]
    assert (recorded.recorder.num_records, recorded.recorder.num_replays) == (1, 4)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(4)},
        {"x": torch.ones(3, dtype=torch.float64)},
        {"x": torch.ones(6)[::2]},
        {"more": {"y": torch.ones(1)}},
    ],
)
def test_calls_of_another_kind_have_a_graph_of_their_own(other: dict[str, Any]) -> None:
    recorded = Recorded()
    usual: dict[str, Any] = {"x": torch.ones(3)}
    for _ in range(3):
        for arguments in (usual, usual | other):
            expected = arguments["x"] * 2 + (1 if "more" in arguments else 0)
            assert torch.equal(recorded(**arguments), expected)
    assert recorded.recorder.num_records == 2


def test_numbers_that_may_change_from_step_to_step_are_not_recorded() -> None:
    recorded = Recorded()
    for scale in (1.0, 1.0, 2.0):
        assert recorded(torch.ones(3), scale=scale).tolist() == [2.0 * scale] * 3
    assert recorded.recorder.num_records == 0


def test_what_is_off_or_has_another_context_is_not_answered_by_an_old_graph() -> None:
    recorded = Recorded(context=object())
    for _ in range(3):
        recorded(torch.ones(3))
    before = recorded.recorder.num_replays
    recorded.context = object()
    recorded(torch.ones(3))
    recorded.is_off = True
    recorded(torch.ones(3))
    assert recorded.recorder.num_replays == before


def test_weights_that_have_moved_are_recorded_anew() -> None:
    recorded = Recorded()
    for _ in range(3):
        recorded(torch.ones(3))
    recorded.module.weight.data = torch.tensor(5.0)
    assert [recorded(torch.ones(3)).tolist() for _ in range(3)] == [[5.0] * 3] * 3
    assert recorded.recorder.num_records == 2


class OfParts(Doubled):
    """A quantised weight has no memory of its own: its parts have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.tensor(2.0), torch.tensor(0.0)), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (x * self.weight.a,)


def test_quantised_weights_that_have_moved_are_recorded_anew() -> None:
    recorded = Recorded(module=OfParts())
    for _ in range(3):
        recorded(torch.ones(3))
    weight: Any = recorded.module.weight
    weight.a.data = torch.tensor(5.0)
    assert [recorded(torch.ones(3)).tolist() for _ in range(3)] == [[5.0] * 3] * 3
    assert recorded.recorder.num_records == 2


def test_where_recording_fails_the_stream_is_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does it: its context leaves the stream of the recording current if its end raises an error."""
    current = ["usual"]

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        current[0] = "of the recording"
        with suppress(RuntimeError):
            yield
        raise RuntimeError("operation failed due to a previous error during capture")

    def failing() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for name, value in (
        ("CUDAGraph", object),
        ("current_stream", lambda: current[0]),
        ("stream", entered),
        ("graph", graph),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaRecorder(pool=None).record(failing)
    assert current == ["usual"]


def test_a_kind_that_cannot_be_recorded_stays_eager_and_is_tried_once() -> None:
    recorded = Recorded(recorder=Recorder(refuses=True))
    assert [recorded(torch.ones(3)).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert recorded.recorder.num_records == 1


def test_the_graphs_that_are_kept_are_few() -> None:
    recorded = Recorded()
    for size in range(1, 20):
        for _ in range(2):
            recorded(torch.ones(size))
        assert recorded.graphs.num_graphs <= recorded.most
    recorded(torch.ones(19))
    assert recorded.recorder.num_records == 19


@pytest.mark.parametrize(
    ("build", "packs"),
    [(tiny.build_sd3, None), (tiny.build_sdxl, None), (tiny.build_flux, None), (tiny.build_sdxl, pack)],
)
def test_steps_of_a_family_are_recorded_and_are_those_of_eager_passes(
    build: Callable[[], Any], packs: Pack | None, tmp_path: Path
) -> None:
    tiny.prepare()
    tiny.save(build(), tmp_path, "tiny")
    eager, recorded = (load(ModelSource(path=str(tmp_path))) for _ in range(2))
    recorder = Recorder()
    record_steps(recorded, recorder)
    sides = ((64, 64), (64, 32)) if packs else ((64, 64),)
    expected, states = (_begin(family, sides) for family in (eager, recorded))
    for _ in range(4):
        eager.step(expected, packs)
        recorded.step(states, packs)
    assert all(torch.equal(mine.latents, other.latents) for mine, other in zip(states, expected, strict=True))
    assert recorder.num_replays == 3
    assert recorder.num_records == 1


def _begin(family: Family, sides: tuple[tuple[int, int], ...]) -> list[Any]:
    return [begin_steps(family, tiny.spec(height=height, width=width)) for height, width in sides]


@pytest.mark.parametrize("name", ["qwen-image", "z-image", "wan22"])
def test_steps_of_any_pipeline_are_recorded_and_are_those_of_eager_passes(name: str, tmp_path: Path) -> None:
    eager, recorded = (requests.family(ZOO[name], tmp_path) for _ in range(2))
    recorder, spec = Recorder(), requests.spec_of(ZOO[name], eager, seed=1)
    record_steps(recorded, recorder)
    assert np.array_equal(requests.alone(recorded, spec), requests.alone(eager, spec))
    assert recorder.num_replays > 0
