"""How much of a request is serialized, and the interface that keeps it beyond the life of the server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tilework.core.wire import StateBlob


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was put down last of a request: nothing, its conditioning, or also its state after `steps_done` steps."""

    conditioning: StateBlob | None = None
    state: StateBlob | None = None
    steps_done: int = 0

    @property
    def blobs(self) -> tuple[StateBlob, ...]:
        return tuple(blob for blob in (self.conditioning, self.state) if blob is not None)

    def among(self, there: Collection[StateBlob]) -> Checkpoint:
        """What one can still go on from if only these blobs are there."""
        if self.conditioning not in there:
            return Checkpoint()
        return self if self.state in there else Checkpoint(conditioning=self.conditioning)


class CheckpointKeeper(Protocol):
    """Is told of every blob that a request could go on from; must neither wait nor raise."""

    def keep_conditioning(self, uid: str, blob: StateBlob) -> None:
        """The request is encoded; a state that was kept of it before belongs to an earlier attempt."""

    def keep_state(self, uid: str, blob: StateBlob, steps_done: int) -> None: ...
