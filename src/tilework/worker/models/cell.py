"""The weights of a component in a cell: several devices act as one, for a model that exceeds one of them.

Each device holds a piece of every block of a component. A block is gathered before it runs and freed after it, so
that no device has more than one whole block. The pieces are gathered in the group of the work that runs: if that
breaks off, no device waits for another.

Source: fully sharded data parallelism (ZeRO, stage 3). Rejected: torch's own (`torch.distributed.fsdp`). Its group is
formed once and knows no works: where a work broke off, one device would gather the next block of that work, another
the first one of the next work, and each would take the other's bytes for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.comm import Comm
from tilework.core.component import Component, WeightBlocks, piece_bytes
from tilework.core.model import ModelInfo
from tilework.core.work import Group
from tilework.pipelines.components import blocks_of, parts_of, weights_of
from tilework.pipelines.errors import UnsupportedModel
from tilework.worker.models.shared_weights import Form, WeightsFile, laid_out, placed


class Cell:
    """The place of this device among the `ranks` of its cell, and the group in which the cell runs a work now."""

    def __init__(self, ranks: Group, device_id: int) -> None:
        self.ranks = ranks
        self.rank = ranks.index(device_id)
        self.size = len(ranks)
        self._comm: Comm | None = None

    @contextmanager
    def running(self, comm: Comm, devices: Group) -> Iterator[None]:
        """Gather blocks in a group of these devices, of which the cell is a part, while entered."""
        self._comm = comm.among([devices.index(rank) for rank in self.ranks])
        try:
            yield
        finally:
            self._comm = None

    def gather(self, piece: Tensor) -> Tensor | None:
        """Gather the bytes of a block from the devices' pieces; return None if the cell runs no work now.

        Raises:
            GroupBroken: a device of the cell is lost, or the work was broken off.
        """
        if self._comm is None:
            return None
        whole = piece.new_empty(self.size * piece.numel())
        self._comm.all_gather(whole, piece)
        return whole

    def serves(self, info: ModelInfo) -> ModelInfo:
        """Return a model's info in this cell: the cell counts as one device, and requests share no forward pass.

        Raises:
            UnsupportedModel: the devices of a cell cannot share its steps.
        """
        if info.max_degree < self.size:
            raise UnsupportedModel(
                f"{info.name} runs on at most {info.max_degree} devices at once, and a cell has {self.size}; give a "
                "smaller --cell, or none (docs/models.md says of each class how many devices a cell may have)"
            )
        stages = tuple(replace(stage, batchable=False) for stage in info.stages)
        return replace(info, cell=self.size, max_degree=info.max_degree // self.size, stages=stages)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredBlock:
    """A module that is gathered at once: its weights, by their index among those of the component.

    The weights lie at `offsets` in the block's bytes, of which each device has `piece_bytes`.
    """

    module: nn.Module
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    piece_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SplitModule:
    """Layout of a module's weights in a cell: some in `blocks`, and those at `whole` complete on every device."""

    cell: Cell
    weights: Sequence[Tensor]
    forms: Sequence[Form]
    blocks: Sequence[GatheredBlock]
    whole: Sequence[int]

    @staticmethod
    def of(module: nn.Module, forms: Sequence[Form], cell: Cell) -> SplitModule:
        blocks: list[GatheredBlock] = []
        split = set[int]()
        for block, indices in _own_weights(module):
            offsets, num_bytes = laid_out([forms[index] for index in indices])
            blocks.append(GatheredBlock(block, indices, tuple(offsets), piece_bytes(num_bytes, cell.size)))
            split.update(indices)
        return SplitModule(cell, weights_of(module), forms, blocks, [i for i in range(len(forms)) if i not in split])

    def bring(self, weight: Callable[[int], Tensor], pieces: list[Tensor]) -> Iterator[None]:
        """Copy this device's part of the weights, which are on the host: a piece of a block after each `next`."""
        for index in self.whole:
            self.weights[index].data = weight(index).detach().clone().to(self.forms[index].device)
        for block in self.blocks:
            yield
            pieces.append(self._piece(block, weight))

    def _piece(self, block: GatheredBlock, weight: Callable[[int], Tensor]) -> Tensor:
        piece = torch.zeros(block.piece_bytes, dtype=torch.uint8)
        first = self.cell.rank * block.piece_bytes
        for index, offset in zip(block.indices, block.offsets, strict=True):
            memory = weight(index).detach().contiguous().reshape(-1).view(torch.uint8)
            begin, end = max(first, offset), min(first + block.piece_bytes, offset + memory.numel())
            if begin < end:
                piece[begin - first : end - first] = memory[begin - offset : end - offset]
        return piece.to(self.forms[block.indices[0]].device)

    def gather_into(self, pieces: Sequence[Tensor], on_host: Callable[[], WeightsFile | None]) -> None:
        """Give each block its weights while it runs, from the `pieces` that lie on this device then.

        A block that runs outside of works gets them from the host: some models call one when they get a state, and the
        other devices do not wait for that.
        """
        for index, block in enumerate(self.blocks):
            block.module.register_forward_pre_hook(partial(self._bring_block, pieces, on_host, index))
            block.module.register_forward_hook(partial(self._let_go, block), always_call=True)

    @contextmanager
    def shaped(self) -> Iterator[None]:
        """Give the weights of blocks their shapes without memory, while entered."""
        indices = [index for block in self.blocks for index in block.indices]
        for index in indices:
            self.weights[index].data = self.forms[index].shaped()
        try:
            yield
        finally:
            for index in indices:
                self.weights[index].data = self.forms[index].empty()

    def _bring_block(
        self,
        pieces: Sequence[Tensor],
        on_host: Callable[[], WeightsFile | None],
        number: int,
        _module: nn.Module,
        _args: Any,
    ) -> None:
        block = self.blocks[number]
        memory = self.cell.gather(pieces[number])
        file = on_host() if memory is None else None
        for index, offset in zip(block.indices, block.offsets, strict=True):
            form = self.forms[index]
            if memory is not None:
                self.weights[index].data = placed(memory, offset, form)
            elif file is not None:
                self.weights[index].data = file.weight(index).to(form.device)
            else:
                raise RuntimeError("a model is split among devices, and the host has no copy of it to run it alone")

    def _let_go(self, block: GatheredBlock, _module: nn.Module, _args: Any, _output: Any) -> None:
        for index in block.indices:
            self.weights[index].data = self.forms[index].empty()


def component_in(cell: Cell, module: nn.Module, component: Component, forms: Sequence[Form]) -> Component:
    """Return a component with the bytes that a device of the cell needs for it."""
    return replace(component, num_bytes=divided(module, forms).held_bytes(cell.size))


def divided(module: nn.Module, forms: Sequence[Form]) -> WeightBlocks:
    """Return how the weights of a module are divided in cells of any size."""
    blocks = [indices for _, indices in _own_weights(module)]
    in_blocks = {index for indices in blocks for index in indices}
    sizes = [form.num_bytes for form in forms]
    return WeightBlocks(
        num_bytes=sum(sizes),
        whole_bytes=sum(size for index, size in enumerate(sizes) if index not in in_blocks),
        block_bytes=tuple(laid_out([forms[index] for index in indices])[1] for indices in blocks),
    )


def _own_weights(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """Yield the blocks of a module with the indices of their weights, except weights that are also used elsewhere."""
    weights = weights_of(module)
    found = list(blocks_of(module))
    uses = Counter(id(weight) for block in found for weight in weights_of(block))
    uses.update(id(weight) for weight in _outside(module, found))
    for block in found:
        own = {id(weight) for weight in weights_of(block) if uses[id(weight)] == 1}
        if own:
            yield block, tuple(index for index, weight in enumerate(weights) if id(weight) in own)


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the weights of a module that no block has."""
    within = {one for block in blocks for one in block.modules()}
    for one in module.modules():
        if one not in within:
            for weight in (*one.parameters(recurse=False), *one.buffers(recurse=False)):
                yield from parts_of(weight)
