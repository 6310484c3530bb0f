"""The Compressed Sparse Patch format: the picture of each patch, and the patches around it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilework.core.packing import IMAGE, Size

DIRECTIONS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
"""Rows and columns to each of the eight neighbours; the opposite of direction i is 7 - i."""
NO_PATCH = -1


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Consecutive pictures of a batch whose attention is one call.

    `asking` has the first asking patch of each picture of the batch, and their number; `knowing` the same for patches
    that give keys and values.
    """

    pictures: slice
    asking: tuple[int, ...]
    knowing: tuple[int, ...]

    def asked(self, part: str) -> tuple[int, int, int]:
        """Return first, end and total of the run in a part of the queries, in patches for IMAGE, pictures for TEXT."""
        return self._span(self.asking) if part == IMAGE else self._texts

    def known(self, part: str) -> tuple[int, int, int]:
        """Return the same for keys and values."""
        return self._span(self.knowing) if part == IMAGE else self._texts

    def _span(self, offsets: tuple[int, ...]) -> tuple[int, int, int]:
        return offsets[self.pictures.start], offsets[self.pictures.stop], offsets[-1]

    @property
    def _texts(self) -> tuple[int, int, int]:
        return self.pictures.start, self.pictures.stop, len(self.knowing) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Csp:
    """The pictures of a batch as patches (P of them, all of one size), sorted so that equal sizes are adjacent.

    Pictures are sorted by their number of patches, then by size, then by given index. `order` has the given index of
    each picture in the batch; everything else is in the batch's order. `picture_offsets` has the first patch of each
    picture, and P; `resolution_offsets` the first picture of each size, and the number of pictures; `run_offsets` the
    same for each number of patches. `owners` (P) is the picture of each patch, `neighbours` (P, 8) the patches around
    it by DIRECTIONS, NO_PATCH outside of the picture. `sources` has the columns of `neighbours`, with P for NO_PATCH,
    where an operator may keep zeros; `averages` (pictures, P), of float64, takes the mean over each picture's patches.

    Source: PatchedServe section 4.1, whose request offsets are `picture_offsets`. Added: runs, since attention does
    not depend on how the patches of a picture are arranged.
    """

    patch: Size
    order: tuple[int, ...]
    grids: tuple[Size, ...]
    picture_offsets: tuple[int, ...]
    resolution_offsets: tuple[int, ...]
    run_offsets: tuple[int, ...]
    owners: Tensor
    neighbours: Tensor
    sources: tuple[Tensor, ...]
    averages: Tensor
    _places: dict[Size, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _frames: dict[Size, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Sequence[Size], patch: Size, device: torch.device) -> Csp:
        """Lay out pictures of `sizes`, which must be multiples of `patch`."""
        grids = [(rows // patch[0], columns // patch[1]) for rows, columns in sizes]
        order = sorted(range(len(sizes)), key=lambda index: (math.prod(grids[index]), grids[index], index))
        arranged = tuple(grids[index] for index in order)
        counts = [math.prod(grid) for grid in arranged]
        offsets = tuple(accumulate(counts, initial=0))
        neighbours = torch.cat([_around(grid, first) for grid, first in zip(arranged, offsets, strict=False)])
        sources = neighbours.where(neighbours != NO_PATCH, offsets[-1]).T.contiguous().to(device)
        numbers = torch.arange(len(sizes))
        owners = numbers.repeat_interleave(torch.tensor(counts))
        return cls(
            patch=patch,
            order=tuple(order),
            grids=arranged,
            picture_offsets=offsets,
            resolution_offsets=_offsets(arranged),
            run_offsets=_offsets(counts),
            owners=owners.to(device),
            neighbours=neighbours.to(device),
            sources=sources.unbind(),
            averages=(owners == numbers[:, None]).double().div(torch.tensor(counts)[:, None]).to(device),
        )

    @property
    def num_patches(self) -> int:
        return self.picture_offsets[-1]

    @property
    def is_plain(self) -> bool:
        return self.num_patches == len(self.order)

    def runs(self, num_asking: Sequence[int] | None = None) -> list[AttentionRun]:
        """Return runs of pictures that have equal numbers of patches and equal numbers of asking ones.

        `num_asking` has the number of asking patches of each picture, in the batch's order; None: all ask.
        """
        knowing, bounds = self.picture_offsets, self.run_offsets
        if num_asking is None:
            return [AttentionRun(slice(first, end), knowing, knowing) for first, end in pairwise(bounds)]
        counts = [end - first for first, end in pairwise(knowing)]
        asking = tuple(accumulate(num_asking, initial=0))
        bounds = _offsets(list(zip(counts, num_asking, strict=True)))
        return [AttentionRun(slice(first, end), asking, knowing) for first, end in pairwise(bounds)]

    def split(self, pictures: Sequence[Tensor]) -> Tensor:
        """Cut pictures (C, rows, columns), given in the original order, into patches (P, C, h, w).

        All have the sizes of the batch, or these divided by one number.
        """
        first = pictures[self.order[0]]
        height, width = first.shape[1] // self.grids[0][0], first.shape[2] // self.grids[0][1]
        pixels = torch.cat([pictures[index].flatten(1) for index in self.order], dim=1)
        places, _ = self._pixels((height, width))
        patches = pixels.index_select(1, places).view(-1, self.num_patches, height, width)
        return patches.transpose(0, 1).contiguous()

    def assemble(self, patches: Tensor) -> list[Tensor]:
        """Undo `split`; each picture has memory of its own."""
        height, width = patches.shape[2:]
        _, places = self._pixels((height, width))
        pixels = patches.transpose(0, 1).flatten(1).index_select(1, places)
        sizes = [(rows * height, columns * width) for rows, columns in self.grids]
        pieces = pixels.split_with_sizes([math.prod(size) for size in sizes], dim=1)
        given: list[Tensor] = [pixels] * len(pieces)
        for index, piece, size in zip(self.order, pieces, sizes, strict=True):
            given[index] = piece.clone(memory_format=torch.contiguous_format).view(-1, *size)
        return given

    def frames(self, patch: Size) -> Tensor:
        """Return where the pixels around each patch are in the concatenated `operators.edges` of all.

        (P, 2 w + 2 h + 4) for patches of h x w: the rows above and below with their corners, then the columns.
        """
        if patch not in self._frames:
            rows, columns = patch
            top, bottom = torch.arange(columns), torch.arange(columns, 2 * columns)
            left, right = (2 * columns + side * rows + torch.arange(rows) for side in range(2))
            shown = (bottom[-1:], bottom, bottom[:1], right, left, top[-1:], top, top[:1])  # By DIRECTIONS.
            outside = 2 * (rows + columns)
            sources = self.neighbours.cpu().T[:, :, None]
            found = [
                (source * (outside + 1) + pixels).where(source != NO_PATCH, outside)
                for source, pixels in zip(sources, shown, strict=True)
            ]
            order = (0, 1, 2, 5, 6, 7, 3, 4)
            self._frames[patch] = torch.cat([found[index] for index in order], dim=1).to(self.owners.device)
        return self._frames[patch]

    def _pixels(self, patch: Size) -> tuple[Tensor, Tensor]:
        """Return the place of each pixel of the patches in the concatenated pictures, and the inverse."""
        if patch not in self._places:
            area = math.prod(patch)
            places = torch.cat(
                [
                    torch.arange(first * area, first * area + math.prod(grid) * area)
                    .view(grid[0], patch[0], grid[1], patch[1])
                    .transpose(1, 2)
                    .flatten()
                    for grid, first in zip(self.grids, self.picture_offsets, strict=False)
                ]
            )
            device = self.owners.device
            self._places[patch] = places.to(device), places.argsort().to(device)
        return self._places[patch]


def _around(grid: Size, first: int) -> Tensor:
    """Return the neighbours of the patches of one picture, numbered row by row from `first` on; (patches, 8)."""
    rows, columns = grid
    numbers = torch.arange(first, first + rows * columns).view(rows, columns)
    framed = pad(numbers, (1, 1, 1, 1), value=NO_PATCH)
    moved = [framed[1 + down : 1 + down + rows, 1 + right : 1 + right + columns] for down, right in DIRECTIONS]
    return torch.stack(moved, dim=-1).flatten(0, 1)


def _offsets(sorted_keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return where each run of equal keys begins, and where the last one ends."""
    return tuple(accumulate((len(list(run)) for _, run in groupby(sorted_keys)), initial=0))
