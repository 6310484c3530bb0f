"""The places for nodes, and the session that has each place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

Session = TypeVar("Session")


class NodePlaces(Generic[Session]):
    """The `num` places for nodes. A node has one for a session, from its greeting until it counts as lost.

    A message of a session without a place must change nothing: its node may go on for a while after it was given up,
    and the next node may have its place.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._there: dict[int, Session] = {}

    @property
    def there(self) -> Mapping[int, Session]:
        """Current sessions by their place."""
        return self._there

    @property
    def free(self) -> int | None:
        """First free place; None if all are taken."""
        return next((place for place in range(self._num) if place not in self._there), None)

    def take(self, place: int, session: Session) -> None:
        """Begin a session at a free place."""
        assert place not in self._there, f"place {place} is taken"
        self._there[place] = session

    def is_current(self, place: int, session: Session) -> bool:
        """Return whether a session has its place, so that its messages count."""
        return self._there.get(place) is session

    def lose(self, place: int, session: Session) -> bool:
        """Record that the node of a session is lost; returns False if it was lost before."""
        if not self.is_current(place, session):
            return False
        del self._there[place]
        return True
