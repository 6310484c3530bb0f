"""The interface of collectives, by which the members of a group exchange tensors while they run a work together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

SOCKETS = "sockets"
COLLECTIVES = {SOCKETS: "cpu", "gloo": "cpu", "nccl": "cuda"}
"""Transports by which the members of a group exchange tensors, each with the type of device whose tensors it takes.
SOCKETS connects each pair of members; the others are one communicator per node.
"""
LINK_TIMEOUT_S = 40.0
"""Longest time that the workers of a node may take to connect, and to exchange their first messages.

They all begin at once, whatever they run, and with eight cards NCCL looks at the host's links for seconds. A lost
member ends the wait sooner.
"""
USUAL_COLLECTIVES = {"cpu": SOCKETS, "cuda": "nccl"}
"""Usual transport by type of device (`core.model.DEVICES`)."""


class GroupBroken(RuntimeError):
    """A collective failed: a member is gone, or the group was aborted. The tensors are undefined."""


class Comm(Protocol):
    """Collectives of one group; every member calls the same ones in the same order. Tensors are contiguous.

    Each method returns when its tensors may be used again on the device's current stream. All methods raise
    GroupBroken. Tensors are torch's, typed `Any` because this package does not import torch.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def has_aborted_calls(self) -> bool:
        """True if calls that have returned may have been aborted, so that what they were to receive may be wrong.

        On a GPU calls return before their messages arrive. Aborted calls then leave their tensors undefined. So results
        count only if this is false after the device was synchronized.
        """

    def all_to_all(self, output: Any, source: Any, output_splits: list[int], source_splits: list[int]) -> None:
        """Send the i-th piece of the flat `source` to rank i; `output` receives the pieces of all ranks in order.

        Pieces may have any length, also 0; `output_splits[i]` is the length of the piece from rank i.
        """

    def all_gather(self, output: Any, source: Any) -> None:
        """Fill the flat `output` with the flat `source` of every rank in order; all have the same length."""

    def broadcast(self, tensor: Any, root: int) -> None: ...
    def send(self, tensor: Any, target: int) -> None: ...
    def recv(self, tensor: Any, source: int) -> None: ...
    def among(self, ranks: Sequence[int]) -> Comm:
        """Return the collectives of these ranks alone, which include this one; a rank's index here is its rank there.

        Aborting one of the two aborts the other.
        """

    def abort(self) -> None:
        """Make the calls of every member fail with GroupBroken, also running ones. May be called from any thread."""

    def close(self) -> None: ...
