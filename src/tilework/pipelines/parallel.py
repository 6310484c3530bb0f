"""How the ranks of a group share one request's forward pass: guidance halves, then the sequence (Ulysses)."""

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

    The layout, decided in `join` alone: with guidance and an even degree d, ranks [0, d/2) run the negative pass and
    [d/2, d) the positive one, and each half splits the sequence d/2 ways; otherwise all ranks run all rows and split
    the sequence d ways. Lengths and heads need not divide evenly, and may be fewer than the ranks.

    After a forward pass every rank has the whole prediction of both passes, bit-equal on all ranks, so that each
    advances a sampler of its own. Per attention there are two all-to-alls over the whole group, in which the other
    half's pieces are empty; per forward pass there is one all-gather.

    A stop is agreed upon without a collective of its own: `wants_stop` is what this rank asks for, set before a
    forward pass; `stop_agreed` is what rank 0 asked for in the latest one, the same on all ranks.

    Source: DeepSpeed-Ulysses, with uneven pieces. Rejected: sub-groups for the halves, which would
    have to be formed for every change of the degree.
    """

    def __init__(self) -> None:
        self.wants_stop = False
        self.leave()

    def join(self, comm: Comm, guided: bool) -> None:
        """Run at degree `comm.size` from now on; `guided` says that the requests have a negative pass."""
        self._comm: Comm | None = comm
        self._flag: Tensor | None = None
        self.degree = comm.size
        self._num_passes = 2 if guided and comm.size % 2 == 0 else 1
        self._width = comm.size // self._num_passes
        self._pass_index, self._index = divmod(comm.rank, self._width)

    def leave(self) -> None:
        """Back to degree 1: nothing is shared, and the stock code runs as it is."""
        self._comm, self._flag = None, None
        self.degree = self._num_passes = self._width = 1
        self._pass_index = self._index = 0
        self._lengths: dict[str, list[int]] = {}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run at degree 1 for a while: what follows is the same on every rank, and shared with none."""
        joined = vars(self).copy()
        self.leave()
        try:
            yield
        finally:
            vars(self).update(joined)

    @property
    def splits_sequence(self) -> bool:
        return self._width > 1

    @property
    def stop_agreed(self) -> bool:
        """At degree 1 what this rank wants; in a group False until the first forward pass. Waits for the device."""
        if self.degree == 1:
            return self.wants_stop
        return self._flag is not None and bool(self._flag)

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor whose first dimension is [negative, positive]."""
        if self._num_passes == 1:
            return tensor
        assert tensor.shape[0] == 2, f"joined with guidance, but the batch is {tensor.shape[0]}"
        return tensor.chunk(2)[self._pass_index]

    def split(self, tensor: Tensor, sequence: str) -> Tensor:
        """This rank's piece of a sequence along dimension 1; its lengths are kept under the name `sequence`."""
        self._lengths[sequence] = lengths = split_evenly(tensor.shape[1], self._width)
        return tensor.split_with_sizes(lengths, dim=1)[self._index]

    def pick(self, tensor: Tensor, sequences: Sequence[str]) -> Tensor:
        """This rank's rows where sequences that were split before lie one behind another along dimension 0."""
        wholes = tensor.split_with_sizes([sum(self._lengths[sequence]) for sequence in sequences])
        return torch.cat(
            [
                whole.split_with_sizes(self._lengths[sequence])[self._index]
                for whole, sequence in zip(wholes, sequences, strict=True)
            ]
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sequences: Sequence[str]
    ) -> Tensor:
        """Attention over the joint `sequences` of which each rank has a piece; (batch, heads, tokens, width) each.

        Ranks trade tokens for heads, attend with a few heads each, and trade back. The pieces of the sequences may
        lie in any order, as long as it is that of query, key and value.
        """
        assert query.shape == key.shape == value.shape
        batch, num_heads, num_tokens, width = query.shape
        heads = split_evenly(num_heads, self._width)
        mine = heads[self._index]
        lengths = [sum(counts) for counts in zip(*(self._lengths[name] for name in sequences), strict=True)]
        assert lengths[self._index] == num_tokens, f"attention over {num_tokens} tokens, not {lengths[self._index]}"
        traded = self._exchange(
            torch.stack([query, key, value]).split_with_sizes(heads, dim=2),
            [(3, batch, mine, length, width) for length in lengths],
        )
        query, key, value = torch.cat(traded, dim=3)
        # A rank without heads calls no kernel.
        attended = scaled_dot_product_attention(query, key, value, scale=scale) if query.numel() else query
        returned = self._exchange(
            attended.split_with_sizes(lengths, dim=2), [(batch, count, num_tokens, width) for count in heads]
        )
        return torch.cat(returned, dim=1)

    def gather(self, output: Tensor, sequence: str | None) -> Tensor:
        """The whole output, all rows and all tokens, of which each rank has its rows and its piece of `sequence`.

        With `sequence` None the pieces are whole, and spare ranks have repeated the work of the first rank of their
        half.
        """
        lengths = [output.shape[1]] if sequence is None else self._lengths[sequence]
        pieces = self._gather_flat(output, max(lengths))
        batch, _, *rest = output.shape
        token = batch * math.prod(rest)
        passes = [
            [piece[: length * token].view(batch, length, *rest) for piece, length in zip(half, lengths, strict=False)]
            for half in pieces.chunk(self._num_passes)
        ]
        return torch.cat([torch.cat(half, dim=1) for half in passes])

    def _gather_flat(self, output: Tensor, longest: int) -> Tensor:
        """One row per rank: its output, padded to `longest` tokens, and whether it wants to stop."""
        assert self._comm is not None
        source = output.new_zeros(longest * output.shape[0] * math.prod(output.shape[2:]) + 1)
        source[: output.numel()] = output.reshape(-1)
        source[-1] = float(self.wants_stop)
        gathered = output.new_empty(self.degree * source.numel())
        self._comm.all_gather(gathered, source)
        rows = gathered.view(self.degree, -1)
        self._flag = rows[0, -1] != 0
        return rows

    def _exchange(self, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send the i-th piece to the i-th rank of this half; returns the pieces received, of these shapes."""
        assert self._comm is not None
        source = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [math.prod(shape) for shape in shapes]
        output = source.new_empty(sum(sizes))
        self._comm.all_to_all(
            output, source, self._in_group(sizes), self._in_group([piece.numel() for piece in pieces])
        )
        return [part.view(shape) for part, shape in zip(output.split_with_sizes(sizes), shapes, strict=True)]

    def _in_group(self, sizes: list[int]) -> list[int]:
        before = self._pass_index * self._width
        return [0] * before + sizes + [0] * (self.degree - before - self._width)


def split_evenly(total: int, num_parts: int) -> list[int]:
    """Parts that differ by one at most, the longer ones first; some are 0 if there are more parts than things."""
    quotient, remainder = divmod(total, num_parts)
    return [quotient + (index < remainder) for index in range(num_parts)]
