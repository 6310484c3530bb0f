"""Data that blocks leave of a batch's pictures: rows of patches, which move along when a picture changes batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import ref

import torch
from torch import Tensor

from tilework.core.packing import Reuse

Key = tuple["ref[Reuse]", int]
"""A picture: its request, and the index of its half of guidance."""


@dataclass(slots=True, eq=False)
class KeptBlock:
    """Data that a block leaves of P patches: inputs, with their sums of `squares` (P), outputs, and `sites`.

    `sites` are what the operators in the block, in order, see of a patch from others: keys and values, edges, moments.
    All have P rows. `has` says for each picture whether its rows are there; other pictures must be computed anew.

    They change in place from pass to pass. Later blocks of a pass also read the outputs, so they copy their inputs.
    """

    states: list[Tensor]
    squares: Tensor
    outputs: list[Tensor]
    sites: list[Tensor]
    has: list[bool] = field(default_factory=list)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(rows.untyped_storage().nbytes() for rows in self._all)

    def copied(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Copy further inputs into the memory of the present ones: allocating costs more than copying."""
        return [old.copy_(new) for old, new in zip(self.states, states, strict=True)]

    def replace(self, patches: Tensor, states: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Write the new rows of the patches that were computed."""
        old, new = (*self.states, self.squares, *self.outputs), (*states, square_sums(states), *outputs)
        for rows, changed in zip(old, new, strict=True):
            rows.index_copy_(0, patches, changed)

    @property
    def _all(self) -> list[Tensor]:
        return [*self.states, self.squares, *self.outputs, *self.sites]

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeptBlock | None, int, slice]]) -> KeptBlock | None:
        """Join pictures: from each batch the block, the picture's place and its rows. Return None if none has it."""
        has = [block is not None and block.has[place] for block, place, _ in parts]
        if not any(has):
            return None
        example = next(block for (block, *_), is_there in zip(parts, has, strict=True) if block and is_there)

        def rows(place: int) -> Tensor:
            model = example._all[place]
            return torch.cat(
                [
                    block._all[place][span] if block and is_there else model.new_zeros(_length(span), *model.shape[1:])
                    for (block, _, span), is_there in zip(parts, has, strict=True)
                ]
            )

        whole = [rows(place) for place in range(len(example._all))]
        num_states, num_outputs = len(example.states), len(example.outputs)
        states, (squares, *others) = whole[:num_states], whole[num_states:]
        return cls(states, squares, others[:num_outputs], others[num_outputs:], has)


@dataclass(slots=True, eq=False)
class KeptBatch:
    """Data that the blocks left of these pictures, by block index; `num_patches` has the patches of each picture."""

    keys: tuple[Key, ...]
    num_patches: tuple[int, ...]
    blocks: dict[int, KeptBlock] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks.values())

    def span(self, place: int) -> slice:
        """Return the rows of a picture."""
        ends = list(accumulate(self.num_patches, initial=0))
        return slice(ends[place], ends[place + 1])

    def without(self, keys: frozenset[Key]) -> list[int]:
        """Return the places of pictures that are not in `keys` and whose requests live."""
        return [place for place, key in enumerate(self.keys) if key not in keys and key[0]() is not None]


def joined(sources: Sequence[tuple[KeptBatch, int]]) -> KeptBatch:
    """Join pictures into one batch; each comes from some place of another. Pictures of a new batch bring nothing."""
    batch = KeptBatch(
        keys=tuple(source.keys[place] for source, place in sources),
        num_patches=tuple(source.num_patches[place] for source, place in sources),
    )
    for index in sorted({index for source, _ in sources for index in source.blocks}):
        parts = [(source.blocks.get(index), place, source.span(place)) for source, place in sources]
        if (block := KeptBlock.joined(parts)) is not None:
            batch.blocks[index] = block
    return batch


def square_sums(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each patch over several tensors (P, ...): (P), of float32, and never zero."""
    sums = [torch.linalg.vector_norm(one.flatten(1), dim=1, dtype=torch.float32).square() for one in rows]
    return torch.stack(sums).sum(0).clamp_min(torch.finfo(torch.float32).tiny)


def _length(span: slice) -> int:
    return int(span.stop - span.start)
