"""The progress of a request: its position on the way through its pipeline's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilework.core.graph.stage import Stage

if TYPE_CHECKING:
    from tilework.core.graph.itinerary import Itinerary

Piece = tuple[Stage, int]
"""A stage with its number of steps; 1 for a stage that runs at once."""


class Cursor:
    """A position of a request, and so its remaining work. Read-only; `Itinerary.at` has the one of each position.

    Every event asks for the remaining work of its jobs, so all of it is computed once.

    Attributes:
        itinerary: the way that it is on.
        position: the number of steps and of stages without steps that are done.
        num_done: the number of stages that are done, which is the index of the stage here.
        pieces: each remaining stage with its remaining steps, in order.
        stage: the stage that is next; None if nothing is left.
        num_left_here: the number of positions that the stage here still has.
        num_steps_left: the remaining steps of all stages with steps; `num_steps_done` is the number of the others.
        stepped: the stage here if it has steps, else the next one that has; None if no steps are left.
        num_steps: the remaining steps of `stepped`.
    """

    __slots__ = (
        "itinerary",
        "num_done",
        "num_left_here",
        "num_steps",
        "num_steps_done",
        "num_steps_left",
        "pieces",
        "position",
        "stage",
        "stepped",
    )

    def __init__(self, itinerary: Itinerary, position: int, num_done: int, pieces: tuple[Piece, ...]) -> None:
        self.itinerary = itinerary
        self.position = position
        self.num_done = num_done
        self.pieces = pieces
        self.stage: Stage | None
        self.stepped: Stage | None
        self.stage, self.num_left_here = pieces[0] if pieces else (None, 0)
        stepped = [piece for piece in pieces if piece[0].has_steps]
        self.stepped, self.num_steps = stepped[0] if stepped else (None, 0)
        self.num_steps_left = sum(num_steps for _, num_steps in stepped)
        self.num_steps_done = itinerary.steps - self.num_steps_left

    def __repr__(self) -> str:
        return f"Cursor({self.position} of {self.itinerary.length}, at {self.stage})"

    @property
    def last_stepped(self) -> Stage | None:
        """`stepped`; if no steps are left, the last stage that has some."""
        return self.stepped or next((stage for stage in reversed(self.itinerary.stages) if stage.has_steps), None)

    @property
    def leg(self) -> Cursor:
        """Same position on the part of the way that a policy sees, which ends before the next stage on a CPU slot."""
        return self.itinerary.legs[self.num_done].at[self.position]

    def at_once(self) -> Iterator[tuple[Stage, Cursor]]:
        """Yield the stages without steps that come next, up to one with steps, each with the cursor after it."""
        cursor = self
        while (stage := cursor.stage) is not None and not stage.has_steps:
            cursor = cursor.advanced(1)
            yield stage, cursor

    def advanced(self, num_steps: int) -> Cursor:
        """Return the cursor after `num_steps` of the stage here; a stage that runs at once is one step."""
        assert num_steps <= self.num_left_here, "a work has more steps than its job"
        return self.itinerary.at[self.position + num_steps]
