"""Devices that have the weights of a model together: its pictures, what each of them holds, and how a work ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import Ranks, Threads
from tilework.comm.exchange import ExchangeComm, Piece
from tilework.core.comm import Comm, GroupBroken
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.family import Family
from tilework.pipelines.stock.answers import rebuilt
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.worker.models.cell import Cell
from tilework.worker.models.shared_weights import NoRoom, SharedWeights, weights_of
from tilework.worker.models.sizes import size_of
from tilework.worker.models.skeleton import leave_skeleton
from tilework.worker.models.weights import KeptWeights, Weights
from worker.test_weights import bring, never, num_bytes
from worker.tied import Tied
from zoo import cells, requests
from zoo.registry import ZOO, build

TOLERANCE = 1e-5
BUILDING = Lock()
QUICK = ("flux", "sd3")
SLOW = ("wan21", "wan22")
IN_CELLS = ("sd3", "hunyuan-video-guided", "modular-ltx-image", "qwen-image")


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def family_of(name: str) -> Family:
    with BUILDING:  # Its weights are drawn.
        return _family_of(name)


def _family_of(name: str) -> Family:
    texts = {"max_sequence_length": tiny.TEXT_LENGTH}
    if name == "flux":
        return Flux(tiny.build_flux(), name, texts, "")
    if name == "sd3":
        return StableDiffusion3(tiny.build_sd3(), name, texts, "")
    return StockPipeline(build(ZOO[name]), name, {}, "")


def spec_of(name: str, family: Family) -> Spec:
    return tiny.spec() if name in QUICK else requests.spec_of(ZOO[name], family, seed=1)


class Watched:
    """The most that the weights of a module take on this device at any time while it runs."""

    def __init__(self, module: nn.Module, pieces: list[torch.Tensor]) -> None:
        self.most_bytes = 0
        self._module, self._pieces = module, pieces
        for part in module.modules():
            part.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        there = sum(one.untyped_storage().nbytes() for one in self._pieces)
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in weights_of(self._module)}
        self.most_bytes = max(self.most_bytes, there + sum(one.nbytes() for one in storages.values()))


def drawn(family: Family, spec: Spec) -> tuple[Tensor, Tensor]:
    """The last latents of a request, and its pixels."""
    values: dict[str, Any] = {}
    for stage in family.info.graph.itinerary(spec.steps).stages:
        if stage.has_steps:
            state = family.begin(stage.name, spec, values)
            while state.steps_done < state.num_steps:
                family.step([state])
            exported = family.export(state)
            values.update(family.finish(state))
        else:
            values.update(family.run(stage.name, [spec], [values])[0])
    picture = family.image(spec, values)
    return _latents(exported), torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).int()


def _latents(exported: Mapping[str, Any]) -> Tensor:
    if "latents" in exported:
        return exported["latents"]
    answer = rebuilt(exported["samplers"][0])
    return answer[0] if isinstance(answer, tuple) else answer["prev_sample"]


def draw_in_cells(
    comm: Comm, name: str, directory: Path, size: int
) -> tuple[Tensor, Tensor, dict[str, tuple[int, int]]]:
    """What cells of this size draw together; of each denoiser the most bytes here, and those that are planned for."""
    family, first = family_of(name), comm.rank // size * size
    cell = Cell(tuple(range(first, first + size)), comm.rank)
    weights = Weights(SharedWeights(directory), cell)
    watched = dict[str, tuple[Watched, int]]()
    for part, module in family.modules.items():
        planned = weights.component(module, KeptWeights.of(module))
        weights.add(module, never)
        bring(weights, planned.digest)
        if part.startswith("transformer"):
            watched[part] = Watched(module, weights._known[planned.digest].pieces), planned.num_bytes
    spec = spec_of(name, family)
    with cell.running(comm, tuple(range(comm.size))):
        family.join(comm, spec)
        latents, pixels = drawn(family, spec)
        family.parallel.leave()
    return latents, pixels, {part: (one.most_bytes, planned) for part, (one, planned) in watched.items()}


@pytest.mark.parametrize("name", QUICK)
def test_cells_draw_the_picture_of_one_device_and_no_device_has_more_than_its_part(name: str, tmp_path: Path) -> None:
    assert_draw_alike(Threads(), name, 2, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_ranks"), [(2, 4), (3, 3)])
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_several_cells_and_larger_ones_draw_it_too(
    ranks: Ranks, name: str, size: int, num_ranks: int, tmp_path: Path
) -> None:
    assert_draw_alike(ranks, name, size, num_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CELLS)
def test_a_cell_draws_what_one_device_draws_of_models_that_it_reads_itself(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """`python -m zoo.support cells` looks at all of the zoo that several devices can share."""
    cells.check(ZOO[name], ranks, tmp_path)


def assert_draw_alike(ranks: Ranks | Threads, name: str, size: int, num_ranks: int, directory: Path) -> None:
    """Cells of this size draw what one device draws, and each has what is planned for, and no more than its part."""
    alone = family_of(name)
    stock, stock_pixels = drawn(alone, spec_of(name, alone))
    results = ranks.run(num_ranks, draw_in_cells, name, directory, size)
    for latents, pixels, held in results:
        assert torch.equal(latents, results[0][0]), "ranks would drift apart"
        assert (latents - stock).abs().max() <= TOLERANCE * stock.abs().max()
        assert (pixels - stock_pixels).abs().max() <= 1
        assert held
        for part, (most, planned) in held.items():
            assert 0 < most <= planned <= bound(alone.modules[part], size)


def bound(module: nn.Module, size: int) -> int:
    """A part of the weights, and the largest block; each weight may begin at the next multiple of 64 bytes."""
    blocks = [one for child in module.children() for one in (child if isinstance(child, nn.ModuleList) else [child])]
    padding = 64 * size * (len(weights_of(module)) + len(blocks))
    return num_bytes(module) // size + max(map(num_bytes, blocks)) + padding


class Seen(Tied):
    """Gives its weights as it sees them while it runs."""

    def forward(self) -> list[Tensor]:
        return [one.detach().clone() for one in weights_of(self)]


class Blocks(nn.Module):
    """Blocks with weights that are tied among them, tied with what is in none, unaligned, turned and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Seen(), Seen(), nn.Linear(3, 5, bias=False)])
        self.beside = nn.Linear(3, 5)
        self.own = nn.Parameter(torch.randn(3))
        self.blocks[1].brief = self.blocks[0].brief
        self.beside.weight = self.blocks[2].weight

    def forward(self) -> list[Tensor]:
        return [*self.blocks[0](), *self.blocks[1](), self.beside(self.own).detach()]


def see_blocks(comm: Comm, directory: Path, has_room: bool) -> tuple[list[Tensor], int, int]:
    """What blocks see of their weights in a cell; what is here between their runs, and after a drop."""
    module = blocks()
    cell, files = Cell(tuple(range(comm.size)), comm.rank), SharedWeights(directory)
    files.keep = files.keep if has_room else no_room  # type: ignore[method-assign]
    weights = Weights(files, cell)
    digest = weights.add(module, blocks).digest
    pieces = weights._known[digest].pieces
    for _ in range(2):
        bring(weights, digest)
        with cell.running(comm, tuple(range(comm.size))):
            seen = module()
        here = sum(one.untyped_storage().nbytes() for one in (*weights_of(module), *pieces))
        weights.drop((digest,))
    return seen, here, sum(one.untyped_storage().nbytes() for one in (*weights_of(module), *pieces))


def blocks() -> Blocks:
    with BUILDING:
        torch.manual_seed(3)
        return Blocks()


def no_room(*_: Any) -> None:
    raise NoRoom("there is none")


@pytest.mark.parametrize("has_room", [True, False], ids=["host has a copy", "read from the disk"])
def test_weights_of_every_form_come_back_as_they_were(has_room: bool, tmp_path: Path) -> None:
    whole = blocks()
    expected = whole()
    for seen, here, after in Threads().run(3, see_blocks, tmp_path, has_room):
        assert [one.stride() for one in seen] == [one.stride() for one in expected]
        assert all(map(torch.equal, seen, expected))
        assert 0 < here < num_bytes(whole)
        assert after == 0


def test_a_block_that_runs_outside_of_works_has_the_weights_of_the_host(tmp_path: Path) -> None:
    module, weights = blocks(), Weights(SharedWeights(tmp_path), Cell((4, 5), 5))
    expected = module()
    bring(weights, weights.add(module, never).digest)
    for _ in range(2):
        assert all(map(torch.equal, module(), expected))
        assert not module.blocks[0].turned.numel(), "it does not keep them"
    shutil.rmtree(tmp_path)
    with pytest.raises(RuntimeError, match="the host has no copy of it to run it alone"):
        module()


def test_a_lost_device_breaks_the_work_off(tmp_path: Path) -> None:
    module, cell = blocks(), Cell((4, 5), 5)
    weights = Weights(SharedWeights(tmp_path), cell)
    bring(weights, weights.add(module, never).digest)
    with cell.running(Lost(), (4, 5)), pytest.raises(GroupBroken):
        module()
    assert not module.blocks[0].turned.numel(), "nothing is left of it"


class Lost(ExchangeComm):
    """A group whose other rank is gone."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        raise GroupBroken("the other rank is gone")

    def abort(self) -> None: ...
    def close(self) -> None: ...


def test_a_model_in_a_cell_shares_no_batches_and_runs_on_as_many_cells_as_its_ranks_allow() -> None:
    info = replace(family_of("flux").info, max_degree=5)
    served = Cell((0, 1), 0).serves(info)
    assert (served.cell, served.max_degree) == (2, 2)
    assert any(stage.batchable for stage in info.stages)
    assert not any(stage.batchable for stage in served.stages)
    with pytest.raises(UnsupportedModel, match="flux runs on at most 5 devices at once, and a cell has 6"):
        Cell(tuple(range(6)), 0).serves(info)


@pytest.mark.parametrize("cell_size", [2, 3])
@pytest.mark.parametrize(("name", "build"), [("flux", tiny.build_flux), ("sd3", tiny.build_sd3)])
def test_how_large_a_model_is_said_to_be_in_a_cell_is_what_is_planned_for(
    name: str, build: Callable[[], Any], cell_size: int, tmp_path: Path
) -> None:
    tiny.save(build(), tmp_path / "model", name)
    source = ModelSource(path=str(tmp_path / "model"))
    size = size_of(source)
    weights = Weights(SharedWeights(tmp_path), Cell(tuple(range(cell_size)), 0))
    split, _ = leave_skeleton(source, weights)
    whole, _ = leave_skeleton(source, Weights(SharedWeights(tmp_path)))
    for found, held in ((split, size.held_bytes(cell_size)), (whole, size.held_bytes(1))):
        assert {stage: sum(one.num_bytes for one in parts) for stage, parts in found.needed().items()} == held
    assert size.max_degree == whole.info.max_degree
