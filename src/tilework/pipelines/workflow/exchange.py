"""Exchange of the values that the members of a group have made of a stage: all members get all values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilework.core.comm import Comm
from tilework.pipelines.serialization import SerializedState, deserialize, room, serialize


def from_all(comm: Comm, values: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the values of all ranks, in their order, bit for bit; tensors of an accelerator are on the `device`.

    Every rank calls it at the same time.

    Raises:
        NotSerializable: there is something among the values that cannot be sent.
        GroupBroken: a member of the group is lost.
    """
    state = serialize(values)
    pieces = [memoryview(bytearray(state.head)), *state.buffers]
    (counts,) = _gathered(comm, torch.tensor([[len(pieces)]]), device).T.tolist()
    lengths = torch.zeros(max(counts), dtype=torch.int64)
    lengths[: len(pieces)] = torch.tensor([piece.nbytes for piece in pieces])
    all_lengths = _gathered(comm, lengths[None], device).tolist()
    content = torch.zeros(max(map(sum, all_lengths)), dtype=torch.uint8)
    content[: sum(piece.nbytes for piece in pieces)] = torch.cat(
        [torch.frombuffer(one, dtype=torch.uint8) for one in pieces]
    )
    rows = _gathered(comm, content[None], device)
    return [
        deserialize(_state(row, lengths[:count]), device)
        for row, lengths, count in zip(rows, all_lengths, counts, strict=True)
    ]


def _gathered(comm: Comm, own: Tensor, device: torch.device) -> Tensor:
    """Return the rows (1, n) of all ranks, (size, n), on the CPU; n is the same on all."""
    gathered = torch.empty(comm.size * own.numel(), dtype=own.dtype, device=device)
    comm.all_gather(gathered, own.flatten().to(device))
    return gathered.cpu().view(comm.size, -1)


def _state(content: Tensor, lengths: list[int]) -> SerializedState:
    """Return the pieces of these lengths, one after another, as a state. Each has its own aligned memory."""
    pieces = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        pieces.append(room(length))
        pieces[-1][:] = content[start : start + length].numpy().data
    head, *buffers = pieces
    return SerializedState(bytes(head), buffers)
