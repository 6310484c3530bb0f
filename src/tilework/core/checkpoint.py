"""How far a request has come as far as it is put down, and whoever keeps that beyond the life of the server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tilework.core.wire import Parcel


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was put down last of a request: nothing, its conditioning, or also its state after `steps_done` steps."""

    conditioning: Parcel | None = None
    state: Parcel | None = None
    steps_done: int = 0

    @property
    def parcels(self) -> tuple[Parcel, ...]:
        return tuple(parcel for parcel in (self.conditioning, self.state) if parcel is not None)

    def among(self, there: Collection[Parcel]) -> Checkpoint:
        """What one can still go on from if only these parcels are there."""
        if self.conditioning not in there:
            return Checkpoint()
        return self if self.state in there else Checkpoint(conditioning=self.conditioning)


class CheckpointKeeper(Protocol):
    """Is told of every parcel that a request could go on from; must neither wait nor raise."""

    def keep_conditioning(self, uid: str, parcel: Parcel) -> None:
        """The request is encoded; a state that was kept of it before belongs to an earlier attempt."""

    def keep_state(self, uid: str, parcel: Parcel, steps_done: int) -> None: ...
