"""Sharing of one request's forward pass by the ranks of a group: guidance halves, then the sequence (Ulysses)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilework.core.comm import Comm


class Parallel:
    """The degree at which a loaded model runs now. The model's hooks ask it in every forward pass.

    `join` alone decides the layout: with guidance and an even degree d, ranks [0, d/2) run the negative pass and [d/2,
    d) the positive one, and each half splits the sequence d/2 ways; otherwise all ranks run all rows and split the
    sequence d ways. Lengths and heads need not divide evenly, and may be fewer than the ranks.

    A pipeline that makes its two passes one after the other is joined without guidance; each half of the group can then
    run one of them at the same time (`halved`, `trade`).

    After a forward pass every rank has the whole prediction of both passes, bit-equal on all ranks, so that each
    advances its own sampler. Per attention there are two all-to-alls over the whole group, in which the other half's
    pieces are empty; per prediction, of which most models make one, there is one all-gather.

    A stop is agreed upon without a separate collective: `wants_stop` is what this rank asks for, set before a forward
    pass; `stop_agreed` is what rank 0 asked for in the latest one, the same on all ranks.

    Source: DeepSpeed-Ulysses, with uneven pieces. Rejected: sub-groups for the halves, which would have to be formed
    for every change of the degree.
    """

    def __init__(self) -> None:
        self.wants_stop = False
        self.leave()

    def join(self, comm: Comm, guided: bool) -> None:
        """Run at degree `comm.size` from now on; `guided` is True if the requests have a negative pass."""
        self._comm: Comm | None = comm
        self._flag: Tensor | None = None
        self.degree = comm.size
        self._num_passes = 2 if guided and comm.size % 2 == 0 else 1
        self._width = comm.size // self._num_passes
        self._pass_index, self._index = divmod(comm.rank, self._width)
        self._is_halved = False

    def leave(self) -> None:
        """Return to degree 1: nothing is shared, and the stock code runs as it is."""
        self._comm = None
        self._flag = None
        self.degree = self._num_passes = self._width = 1
        self._pass_index = self._index = 0
        self._is_halved = False
        self._lengths: dict[str, list[int]] = {}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run at degree 1 while entered: every rank computes the same, and shares nothing."""
        joined = vars(self).copy()
        self.leave()
        try:
            yield
        finally:
            vars(self).update(joined)

    @contextmanager
    def halved(self) -> Iterator[int]:
        """Let each half of the group run its own forward pass; yields the index of this rank's half.

        The degree must be even, and the group joined without guidance. Afterwards `trade` the results of the passes.
        """
        assert self._comm is not None
        assert self.degree % 2 == 0
        assert self._num_passes == 1
        self._num_passes = 2
        self._width = self.degree // 2
        self._is_halved = True
        self._pass_index, self._index = divmod(self._comm.rank, self._width)
        try:
            yield self._pass_index
        finally:
            self._num_passes = 1
            self._width = self.degree
            self._is_halved = False
            self._pass_index, self._index = 0, self._comm.rank

    def trade(self, output: Tensor) -> list[Tensor]:
        """Return the tensors of both halves of the group, the first half's first; both have the shape of `output`.

        The ranks of a half, which have the same, send a part each.
        """
        width = self.degree // 2
        assert self._comm is not None
        flat = output.reshape(-1)
        length = -(-flat.numel() // width)
        start = self._comm.rank % width * length
        pieces = self._gather_flat(flat[start : start + length].unsqueeze(0), length)
        return [half.reshape(-1)[: flat.numel()].view(output.shape) for half in pieces[:, :length].chunk(2)]

    @property
    def comm(self) -> Comm | None:
        """Group itself; None at degree 1."""
        return self._comm

    @property
    def width(self) -> int:
        """Number of ranks that have a piece each of the same sequence."""
        return self._width

    @property
    def splits_sequence(self) -> bool:
        return self._width > 1

    @property
    def stop_agreed(self) -> bool:
        """True if a stop is agreed: at degree 1 by this rank; in a group False until the first forward pass.

        Waits for the device.
        """
        if self.degree == 1:
            return self.wants_stop
        return self._flag is not None and bool(self._flag)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor whose first dimension is [negative, positive]."""
        if self._num_passes == 1:
            return tensor
        assert tensor.shape[0] == 2, f"joined with guidance, but the batch is {tensor.shape[0]}"
        return tensor.chunk(2)[self._pass_index]

    def begin_pass(self) -> None:
        """Begin a forward pass: forget the lengths of the latest one."""
        self._lengths = {}

    def split(self, tensor: Tensor, sequence: str, dim: int = 1) -> Tensor:
        """Return this rank's piece of a sequence along `dim`; its lengths are kept under the name `sequence`.

        Raises:
            RuntimeError: another tensor of this sequence had another length in this forward pass.
        """
        lengths = split_evenly(tensor.shape[dim], self._width)
        known = self._lengths.setdefault(sequence, lengths)
        if known != lengths:
            raise RuntimeError(
                f"a tensor of {sum(lengths)} positions belongs to the sequence {sequence} of {sum(known)} tokens"
            )
        return tensor.split_with_sizes(lengths, dim=dim)[self._index].contiguous()

    def pick(self, tensor: Tensor, sequences: Sequence[str], dim: int) -> Tensor:
        """Return this rank's piece of a tensor that concatenates sequences, which were split before, along `dim`."""
        wholes = tensor.split_with_sizes([sum(self._lengths[sequence]) for sequence in sequences], dim=dim)
        return torch.cat(
            [
                whole.split_with_sizes(self._lengths[sequence], dim=dim)[self._index]
                for whole, sequence in zip(wholes, sequences, strict=True)
            ],
            dim=dim,
        )

    def leading(self, num_tokens: int, sequence: str) -> int:
        """Return how many of the first `num_tokens` tokens of a split sequence are in this rank's piece."""
        lengths = self._lengths[sequence]
        return min(max(num_tokens - sum(lengths[: self._index]), 0), lengths[self._index])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Tensor | None,
        queries: Sequence[str],
        keys: Sequence[str],
        pairs: bool = False,
    ) -> Tensor:
        """Attend over sequences of which each rank has a piece: `queries` ask, and `keys` answer.

        Ranks trade tokens for heads, attend with a few heads each, and trade back. The pieces of the sequences may lie
        in any order, as long as it is the same in the tensors. Each rank has the mask of its own keys, and sends it
        along with them. With `pairs` the mask is that of queries and keys, m x m' for a mask m of tokens.

        Args:
            query, key, value: (batch, heads, tokens, width).
            mask: (batch, 1, 1, keys), or with `pairs` (batch, 1, queries, keys); bool, or to be added.

        Raises:
            RuntimeError: the mask has another form.
        """
        batch, num_heads, num_tokens, width = query.shape
        assert key.shape == value.shape == (batch, num_heads, key.shape[2], width)
        heads = split_evenly(num_heads, self._width)
        asking, answering = self._lengths_of(queries), self._lengths_of(keys)
        assert asking[self._index] == num_tokens, f"attention over {num_tokens} tokens, not {asking[self._index]}"
        assert answering[self._index] == key.shape[2], f"{key.shape[2]} keys, not {answering[self._index]}"
        kept = [] if mask is None else [_of_keys(mask, key.shape[2], pairs)]
        traded = self._exchange(
            [
                [part, *(own.to(query.dtype) for own in kept)]
                for part in torch.cat([query, key, value], dim=2).split_with_sizes(heads, dim=1)
            ],
            [
                [(batch, heads[self._index], count + 2 * other, width), *((len(own), 1, 1, other) for own in kept)]
                for count, other in zip(asking, answering, strict=True)
            ],
        )
        parts = [
            tokens.split_with_sizes([count, other, other], dim=2)
            for (tokens, *_), count, other in zip(traded, asking, answering, strict=True)
        ]
        query, key, value = (torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))
        if mask is not None:
            whole = torch.cat([own for _, own in traded], dim=3)
            whole = whole != 0 if mask.dtype == torch.bool else whole
            mask = whole.transpose(2, 3) * whole if pairs else whole
        # A rank without heads calls no kernel.
        attended = scaled_dot_product_attention(query, key, value, mask, scale=scale) if query.numel() else query
        returned = self._exchange(
            [[part] for part in attended.split_with_sizes(asking, dim=2)],
            [[(batch, count, num_tokens, width)] for count in heads],
        )
        return torch.cat([part for (part,) in returned], dim=1)

    def gather(self, output: Tensor, sequence: str | None, dim: int = 1) -> Tensor:
        """Return the whole output, all rows and all tokens; each rank has its rows and its piece of `sequence`.

        In a pass that is `halved`, all rows are those of this half. `dim` is that of the tokens. With `sequence` None
        the pieces are whole, and spare ranks have repeated the work of the first rank of their half.
        """
        if self._is_halved and self._width == 1:
            return output
        moved = output.movedim(dim, 1)
        lengths = [moved.shape[1]] if sequence is None else self._lengths[sequence]
        if sequence is not None:
            assert lengths[self._index] == moved.shape[1], f"{moved.shape[1]} tokens, not {lengths[self._index]}"
        pieces = self._gather_flat(moved, max(lengths))
        batch, _, *rest = moved.shape
        token = batch * math.prod(rest)
        halves = pieces.chunk(self._num_passes)
        passes = [
            [piece[: length * token].view(batch, length, *rest) for piece, length in zip(half, lengths, strict=False)]
            for half in (halves if not self._is_halved else halves[self._pass_index : self._pass_index + 1])
        ]
        return torch.cat([torch.cat(half, dim=1) for half in passes]).movedim(1, dim)

    def _lengths_of(self, sequences: Sequence[str]) -> list[int]:
        """Return for each rank of this half the number of its tokens of all `sequences`."""
        return [sum(counts) for counts in zip(*(self._lengths[name] for name in sequences), strict=True)]

    def _gather_flat(self, output: Tensor, longest: int) -> Tensor:
        """Return one row per rank: its output, padded to `longest` tokens, and whether it wants to stop."""
        assert self._comm is not None
        source = output.new_zeros(longest * output.shape[0] * math.prod(output.shape[2:]) + 1)
        source[: output.numel()] = output.reshape(-1)
        source[-1] = float(self.wants_stop)
        gathered = output.new_empty(self.degree * source.numel())
        self._comm.all_gather(gathered, source)
        rows = gathered.view(self.degree, -1)
        self._flag = rows[0, -1] != 0
        return rows

    def _exchange(
        self, pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send the i-th tensors to the i-th rank of this half; return the tensors received, of these shapes."""
        assert self._comm is not None
        source = torch.cat([tensor.reshape(-1) for tensors in pieces for tensor in tensors])
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        totals = [sum(of_rank) for of_rank in sizes]
        output = source.new_empty(sum(totals))
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in pieces]
        self._comm.all_to_all(output, source, self._in_group(totals), self._in_group(counts))
        return [
            [part.view(shape) for part, shape in zip(received.split_with_sizes(parts), of_rank, strict=True)]
            for received, parts, of_rank in zip(output.split_with_sizes(totals), sizes, shapes, strict=True)
        ]

    def _in_group(self, sizes: list[int]) -> list[int]:
        before = self._pass_index * self._width
        return [0] * before + sizes + [0] * (self.degree - before - self._width)


def split_evenly(total: int, num_parts: int) -> list[int]:
    """Return parts that differ by one at most, the longer ones first; some are 0 if there are more parts than units."""
    quotient, remainder = divmod(total, num_parts)
    return [quotient + (index < remainder) for index in range(num_parts)]


def _of_keys(mask: Tensor, num_keys: int, pairs: bool) -> Tensor:
    """Return the mask of this rank's keys, (batch, 1, 1, keys); see `Parallel.attend`."""
    if mask.ndim == 4 and pairs and mask.shape[1:] == (1, num_keys, num_keys):
        return mask.diagonal(dim1=2, dim2=3).unsqueeze(2)
    if mask.ndim == 4 and not pairs and mask.shape[1:] == (1, 1, num_keys):
        return mask
    raise RuntimeError(
        f"an attention over {num_keys} keys of this rank has a mask of shape {tuple(mask.shape)}, which cannot be "
        "shared; use degree 1"
    )
