"""Exchange of the parts of a decode among the ranks of a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilework.core.comm import Comm

_MOST_DIMS = 7


class DecodeGroup:
    """The ranks that share a decode on a `device`; without a `comm` there is one, and nothing is sent.

    All ranks call the same methods in the same order. All methods raise GroupBroken.
    """

    def __init__(self, comm: Comm | None, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)

    def of(self, root: int, tensor: Tensor | None) -> Tensor:
        """Return the tensor of rank `root`, whose shape the others do not know; they get it on the `device`."""
        if self._comm is None:
            assert tensor is not None
            return tensor
        head = torch.zeros(_MOST_DIMS + 2, dtype=torch.int64)
        if self.rank == root:
            assert tensor is not None
            assert tensor.ndim <= _MOST_DIMS
            head[:2] = torch.tensor([tensor.ndim, _TYPES.index(tensor.dtype)])
            head[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
        head = head.to(self._device)
        self._comm.broadcast(head, root)
        num_dims, dtype, *sizes = head.tolist()
        sent = torch.empty(sizes[:num_dims], dtype=_TYPES[dtype], device=self._device)
        if self.rank == root and tensor is not None:
            sent.copy_(tensor)
        self._comm.broadcast(sent, root)
        return sent if self.rank != root or tensor is None else tensor

    def joined(self, tensor: Tensor, lengths: list[int], dim: int) -> Tensor:
        """Join pieces of all ranks along `dim`; rank i has `lengths[i]`. The result is where `tensor` is."""
        if self._comm is None:
            return tensor
        moved = tensor.movedim(dim, 0)
        assert len(moved) == lengths[self.rank]
        each = math.prod(moved.shape[1:])
        source = torch.zeros(max(lengths) * each, dtype=tensor.dtype, device=self._device)
        source[: moved.numel()] = moved.reshape(-1)
        gathered = torch.empty(self.size * source.numel(), dtype=tensor.dtype, device=self._device)
        self._comm.all_gather(gathered, source)
        pieces = [
            piece[: length * each].view(length, *moved.shape[1:])
            for piece, length in zip(torch.split(gathered, source.numel()), lengths, strict=True)
        ]
        return torch.cat(pieces).movedim(0, dim).contiguous().to(tensor.device)

    def stacked(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, which have one shape, along a new first dimension."""
        return self.joined(tensor.unsqueeze(0), [1] * self.size, 0)

    def traded(self, to_above: Tensor, to_below: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the `to_below` of the previous rank and the `to_above` of the next one.

        None where there is no such rank. All these tensors have one shape.
        """
        assert self._comm is not None
        above, below = self.rank > 0, self.rank + 1 < self.size
        count = to_above.numel()
        splits = [0] * self.size
        if above:
            splits[self.rank - 1] = count
        if below:
            splits[self.rank + 1] = count
        source = torch.cat([*([to_above.reshape(-1)] * above), *([to_below.reshape(-1)] * below)])
        output = torch.empty_like(source)
        self._comm.all_to_all(output, source, splits, splits)
        pieces = [piece.view(to_above.shape) for piece in torch.split(output, count)]
        return pieces[0] if above else None, pieces[-1] if below else None


_TYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)
