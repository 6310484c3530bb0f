"""Collaborative stages: parts that the members of a group make, and that all of them merge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch import Tensor

import tilework
import tiny
from tilework.core.graph.graph import BadGraph, Graph
from tilework.core.graph.stage import DeviceKind, StageSpec
from tilework.pipelines.errors import InvalidWorkflow
from tilework.pipelines.workflow.definition import Function
from tilework.pipelines.workflow.exchange import from_all
from tilework.pipelines.workflow.functions import LoadedFunction, StageFailed, StageRefused
from tilework.pipelines.workflow.pictures import from_user
from waiting import PATIENCE_S

CPU = torch.device("cpu")
PICTURE = Picture.fromarray(np.random.default_rng(0).integers(0, 256, (37, 11, 3), dtype=np.uint8))


class Threads:
    """The comm of one of `size` threads that meet in each collective; `all_gather` is the only one."""

    def __init__(self, size: int) -> None:
        self.size, self._sent = size, dict[int, Tensor]()
        self._meet = threading.Barrier(size, timeout=PATIENCE_S)

    def of(self, rank: int) -> Any:
        return _Rank(self, rank)

    def gather(self, rank: int, output: Tensor, source: Tensor) -> None:
        self._sent[rank] = source.clone()
        self._meet.wait()
        output.copy_(torch.cat([self._sent[one] for one in range(self.size)]))
        self._meet.wait()


class _Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._threads.gather(self.rank, output, source)


def together(degree: int, run: Callable[[Any], object]) -> list[Any]:
    """What each rank of a group of threads returns or raises."""
    threads = Threads(degree)
    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(run, threads.of(rank)) for rank in range(degree)]
        return [future.exception() or future.result() for future in futures]


def below(strips: list[Picture.Image]) -> Picture.Image:
    return Picture.fromarray(np.concatenate([np.asarray(one) for one in strips]))


def strip(part: int, parts: int, height: int) -> tuple[int, int]:
    return part * height // parts, (part + 1) * height // parts


@tilework.stage(mode="collaborative", parts=5, merge=below)
def inverted(picture: Picture.Image, part: int, parts: int) -> Picture.Image:
    first, last = strip(part, parts, picture.height)
    return Picture.fromarray(255 - np.asarray(picture)[first:last])


def loaded(function: Callable[..., object]) -> LoadedFunction:
    return LoadedFunction.of(Function.of(function), CPU)


def run(function: Callable[..., object], comm: Any = None) -> Any:
    (outputs,) = loaded(function).run([tiny.spec()], [{"picture": from_user(PICTURE)}], comm)
    return next(iter(outputs.values()))


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
def test_the_value_is_the_same_at_every_degree_bit_for_bit(degree: int) -> None:
    expected = torch.from_numpy(255 - np.asarray(PICTURE))
    found = [run(inverted)] if degree == 1 else together(degree, lambda comm: run(inverted, comm))
    assert len(found) == degree
    assert all(torch.equal(one, expected) for one in found)


def test_each_part_is_made_once() -> None:
    made = list[int]()

    @tilework.stage(mode="collaborative", parts=5)
    def numbers(picture: object, part: int) -> int:
        made.append(part)
        return 10 * part

    assert together(3, lambda comm: run(numbers, comm)) == [[0, 10, 20, 30, 40]] * 3
    assert sorted(made) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("torn"), StageFailed, "stage 'spoilt' raises ValueError: torn"),
        (tilework.Refused("too red"), StageRefused, "stage 'spoilt' has refused it: too red"),
    ],
)
def test_what_one_member_raises_all_raise(raised: Exception, kind: type[Exception], message: str) -> None:
    @tilework.stage(mode="collaborative", parts=3)
    def spoilt(picture: object, part: int) -> int:
        if part == 1:
            raise raised
        return part

    for error in together(3, lambda comm: run(spoilt, comm)):
        assert (type(error), str(error)) == (kind, message)


def test_an_error_of_merge_names_the_stage() -> None:
    @tilework.stage(mode="collaborative", merge=lambda parts: parts[99])
    def made(picture: object, part: int) -> int:
        return part

    with pytest.raises(StageFailed, match="stage 'made' raises IndexError"):
        run(made)


def test_values_of_any_form_reach_all_members() -> None:
    def values(rank: int) -> dict[str, Any]:
        tensors = [torch.full((rank * 700, 3), rank / 3, dtype=torch.float64), torch.tensor([rank])]
        return {"tensors": tensors[: rank + 1], "text": "ü" * rank, "number": -0.0, "none": {}}

    for found in together(3, lambda comm: from_all(comm, values(comm.rank), CPU)):
        for rank, one in enumerate(found):
            expected = values(rank)
            assert len(one["tensors"]) == len(expected["tensors"])
            assert all(map(torch.equal, one.pop("tensors"), expected.pop("tensors")))
            assert one == expected


def test_it_is_a_stage_of_any_degree_that_reads_what_its_function_names() -> None:
    spec = Function.of(inverted).spec(frozenset({"picture"}))
    assert (spec.inputs, spec.degrees, spec.batchable) == (("picture",), None, False)

    @tilework.stage(memory=3000)
    def alone(picture: object, part: int = 0) -> None: ...

    spec = Function.of(alone).spec(frozenset({"picture"}))
    assert (spec.inputs, spec.degrees, spec.memory_bytes) == (("picture",), (1,), 3000)
    graph = Graph("x", (spec,))
    assert Graph.parse("x", graph.to_json()) == graph


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shared"}, 'mode is \'shared\'; choose "individual" or "collaborative"'),
        ({"parts": 2}, 'parts or merge are given, and mode is "individual"'),
        ({"merge": max}, 'parts or merge are given, and mode is "individual"'),
        ({"mode": "collaborative", "parts": 1}, "parts is 1; give a whole number of at least 2"),
        ({"mode": "collaborative", "merge": 7}, "merge is 7; give a function"),
        ({"mode": "collaborative", "batch": 2}, "leave out batch and devices, or mode"),
        ({"mode": "collaborative", "devices": "cpu"}, "leave out batch and devices, or mode"),
        ({"memory": -1}, "memory is -1; give a whole number of at least 0"),
        ({"memory": 5, "devices": "cpu"}, 'memory is 5 with devices "cpu", and a CPU slot has memory that is not'),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        tilework.stage(**options)


def test_a_collaborative_stage_must_know_its_part() -> None:
    @tilework.stage(mode="collaborative")
    def blind(picture: object) -> None: ...

    with pytest.raises(InvalidWorkflow, match="stage 'blind' is collaborative and does not read part"):
        Function.of(blind)


@pytest.mark.parametrize("fields", [{"memory_bytes": -1}, {"memory_bytes": 5, "device_kind": DeviceKind.CPU}])
def test_a_graph_with_memory_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadGraph, match="memory_bytes"):
        Graph("x", (StageSpec(name="one", outputs=("end",), **fields),))
