"""The serialized states of a request, and the interface that keeps them beyond the life of the server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tilework.core.wire.blobs import SavedState, StateBlob


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The latest state of each stage that a request has begun, in the order of the stages; empty if nothing is kept."""

    states: tuple[SavedState, ...] = ()

    @property
    def position(self) -> int:
        """Position at which the request can be resumed."""
        return self.states[-1].position if self.states else 0

    @property
    def blobs(self) -> tuple[StateBlob, ...]:
        return tuple(state.blob for state in self.states)

    def among(self, there: Collection[StateBlob]) -> Checkpoint:
        """Return the part of this checkpoint that is still usable if only these blobs exist."""
        for count, state in enumerate(self.states):
            if state.blob not in there:
                return Checkpoint(self.states[:count])
        return self


class CheckpointKeeper(Protocol):
    """Records every blob from which a request could be resumed. Its methods must neither wait nor raise."""

    def keep(self, uid: str, state: SavedState) -> None:
        """Record what a stage has written; it supersedes what the same stage or a later one wrote before."""
