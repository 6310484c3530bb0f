"""The way of a request through its pipeline's graph, as positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tilework.core.graph.stage import DeviceKind, Stage

Piece = tuple[Stage, int]
"""A stage with its number of steps; 1 for a stage that runs at once."""


class Itinerary:
    """The way of a request through its graph, as positions from 0 (nothing is done) to `length` (all is done).

    Each step is one position, and so is each stage that runs at once. Stages run one after another, in the order of the
    graph. A *leg* is what a policy sees of the way: it ends before the next stage that runs on a CPU slot.

    Attributes:
        stages: the stages in order; `ends` are the positions at which they are done.
        length: the last position.
        steps: the number of steps, of all stages with steps.
        num_stepped: how many stages have steps; of a leg, those of the whole way.
        at: what is to be done at each position.
        needed_from: for each stage, the indices of those before it whose outputs it or a later one reads.
        following: what comes after the end; empty but for a leg.
        legs: for each number of stages that are done, the leg on which the request is then.
    """

    __slots__ = ("at", "ends", "following", "legs", "length", "needed_from", "num_stepped", "stages", "steps")

    def __init__(self, parts: Iterable[Piece], following: tuple[Piece, ...] = ()) -> None:
        kept = list(parts)
        self.stages = tuple(stage for stage, _ in kept)
        self.ends = tuple(accumulate(num_steps for _, num_steps in kept))
        self.length = self.ends[-1] if kept else 0
        self.steps = sum(num_steps for stage, num_steps in kept if stage.has_steps)
        self.num_stepped = sum(stage.has_steps for stage, _ in (*kept, *following))
        self.at = tuple(_places(kept))
        self.needed_from = tuple(_needed(self.stages, index) for index in range(len(kept) + 1))
        self.following = following
        self.legs = self._legs(kept)

    def _legs(self, parts: Sequence[Piece]) -> tuple[Itinerary, ...]:
        on_slots = [index for index, stage in enumerate(self.stages) if stage.kind is DeviceKind.CPU]
        legs, is_leg = [], bool(self.following)
        for index in range(len(parts) + 1):
            end = next((slot for slot in on_slots if slot >= index), None)
            if end is None or is_leg:
                legs.append(self)
            elif legs and len(legs[-1].stages) == end:
                legs.append(legs[-1])
            else:
                legs.append(Itinerary(parts[:end], tuple(parts[end:])))
        return tuple(legs)


def _places(parts: Sequence[Piece]) -> Iterator[Place]:
    for index, (stage, num_steps) in enumerate(parts):
        later = [one for one in parts[index:] if one[0].has_steps]
        after = sum(num for _, num in later) - (num_steps if stage.has_steps else 0)
        for left in range(num_steps, 0, -1):
            steps_left = after + (left if stage.has_steps else 0)
            stepped, num_next = (stage, left) if stage.has_steps else later[0] if later else (None, 0)
            yield Place(stage, index, left, steps_left, stepped, num_next)
    yield Place(None, len(parts), 0, 0, None, 0)


def _needed(stages: Sequence[Stage], index: int) -> tuple[int, ...]:
    wanted = {name for stage in stages[index:] for name in stage.spec.inputs}
    return tuple(before for before in range(index) if not wanted.isdisjoint(stages[before].spec.outputs))


class Place(NamedTuple):
    """What is to be done at a position.

    Attributes:
        stage: the stage here; None at the end.
        num_done: how many stages are done, so the index of the stage here.
        num_left_here: how many positions the stage here still has.
        num_steps_left: the remaining steps of all stages with steps.
        stepped: the stage here if it has steps, else the next one that has; None if no steps are left.
        num_steps: the remaining steps of `stepped`.
    """

    stage: Stage | None
    num_done: int
    num_left_here: int
    num_steps_left: int
    stepped: Stage | None
    num_steps: int
