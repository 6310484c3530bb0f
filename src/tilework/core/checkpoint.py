"""How much of a request is serialized, and the interface that keeps it beyond the life of the server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tilework.core.wire import StateBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The latest blobs of a request: none, its conditioning, or also its state after `steps_done` steps."""

    conditioning: StateBlob | None = None
    state: StateBlob | None = None
    steps_done: int = 0

    @property
    def blobs(self) -> tuple[StateBlob, ...]:
        return tuple(blob for blob in (self.conditioning, self.state) if blob is not None)

    def among(self, there: Collection[StateBlob]) -> Checkpoint:
        """The part of this checkpoint that is still usable if only these blobs exist."""
        if self.conditioning not in there:
            return Checkpoint()
        return self if self.state in there else Checkpoint(conditioning=self.conditioning)


class CheckpointKeeper(Protocol):
    """Records every blob from which a request could be resumed. Its methods must neither wait nor raise."""

    def keep_conditioning(self, uid: str, blob: StateBlob) -> None:
        """Record that the request is encoded; a state recorded before belongs to an earlier attempt."""

    def keep_state(self, uid: str, blob: StateBlob, steps_done: int) -> None: ...
