"""The progress of a request: its position on the way through its pipeline's graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilework.core.graph.itinerary import Itinerary, Place
from tilework.core.graph.stage import Stage


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position of a request, and so its remaining work."""

    itinerary: Itinerary
    position: int

    @property
    def here(self) -> Place:
        """What is to be done next."""
        return self.itinerary.at[self.position]

    @property
    def stage(self) -> Stage | None:
        """The stage that is next; None if nothing is left."""
        return self.itinerary.at[self.position].stage

    @property
    def num_steps_left(self) -> int:
        """The remaining steps of all stages with steps."""
        return self.itinerary.at[self.position].num_steps_left

    @property
    def num_steps_done(self) -> int:
        """The steps that are done, of all stages with steps."""
        return self.itinerary.steps - self.itinerary.at[self.position].num_steps_left

    @property
    def stepped(self) -> Stage | None:
        """The stage here if it has steps, else the next one that has; None if no steps are left."""
        return self.itinerary.at[self.position].stepped

    @property
    def last_stepped(self) -> Stage | None:
        """`stepped`; if no steps are left, the last stage that has some."""
        return self.stepped or next((stage for stage in reversed(self.itinerary.stages) if stage.has_steps), None)

    @property
    def leg(self) -> Cursor:
        """The same position on the way as a policy sees it, which ends before the next stage on a CPU slot."""
        itinerary = self.itinerary.legs[self.here.num_done]
        return self if itinerary is self.itinerary else Cursor(itinerary, self.position)

    def at_once(self) -> Iterator[tuple[Stage, Cursor]]:
        """The stages without steps that come next, up to one with steps, each with the cursor after it."""
        cursor = self
        while (stage := cursor.stage) is not None and not stage.has_steps:
            cursor = cursor.advanced(1)
            yield stage, cursor

    def advanced(self, num_steps: int) -> Cursor:
        """The cursor after `num_steps` of the stage here; a stage that runs at once is one step."""
        assert num_steps <= self.here.num_left_here, "a work has more steps than its job"
        return Cursor(self.itinerary, self.position + num_steps) if num_steps else self

    def pieces(self) -> tuple[tuple[Stage, int], ...]:
        """Each remaining stage with its remaining steps (1 for a stage that runs at once), in order."""
        index, begin = self.here.num_done, self.position
        found: list[tuple[Stage, int]] = []
        for stage, end in zip(self.itinerary.stages[index:], self.itinerary.ends[index:], strict=True):
            found.append((stage, end - begin))
            begin = end
        return tuple(found)
