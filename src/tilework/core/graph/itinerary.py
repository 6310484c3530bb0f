"""The way of a request through its pipeline's graph, as positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tilework.core.graph.progress import Cursor, Piece
from tilework.core.graph.stage import DeviceKind, Stage


class Itinerary:
    """The way of a request through its graph, as positions from 0 (nothing is done) to `length` (all is done).

    Each step is one position, and so is each stage that runs at once. Stages run one after another, in the order of the
    graph. A *leg* is the part of the way that a policy sees: it ends before the next stage that runs on a CPU slot.

    Attributes:
        stages: the stages in order; `ends` are the positions at which they are done.
        length: the last position.
        steps: the number of steps, of all stages with steps.
        num_stepped: the number of stages with steps; for a leg, those of the whole way.
        needs_slots: True if a stage runs on a CPU slot.
        at: the cursor of each position, 0 to `length`. Each is made once, when it is first asked for.
        needed_from: for each stage, the indices of the stages before it whose outputs it or a later one reads.
        following: for a leg, the rest of the way after its end; else empty.
        legs: by number of stages that are done, the leg on which the request then is.
    """

    __slots__ = (
        "at",
        "ends",
        "following",
        "legs",
        "length",
        "needed_from",
        "needs_slots",
        "num_stepped",
        "stages",
        "steps",
    )

    def __init__(self, parts: Iterable[Piece], following: tuple[Piece, ...] = ()) -> None:
        kept = tuple(parts)
        self.stages = tuple(stage for stage, _ in kept)
        self.ends = tuple(accumulate(num_steps for _, num_steps in kept))
        self.length = self.ends[-1] if kept else 0
        self.steps = sum(num_steps for stage, num_steps in kept if stage.has_steps)
        self.num_stepped = sum(stage.has_steps for stage, _ in (*kept, *following))
        self.needs_slots = any(stage.kind is DeviceKind.CPU for stage in self.stages)
        self.at = _Cursors(self, kept)
        self.needed_from = tuple(_needed(self.stages, index) for index in range(len(kept) + 1))
        self.following = following
        self.legs = self._legs(kept)

    def _legs(self, parts: Sequence[Piece]) -> tuple[Itinerary, ...]:
        on_slots = [index for index, stage in enumerate(self.stages) if stage.kind is DeviceKind.CPU]
        legs = []
        is_leg = bool(self.following)
        for index in range(len(parts) + 1):
            end = next((slot for slot in on_slots if slot >= index), None)
            if end is None or is_leg:
                legs.append(self)
            elif legs and len(legs[-1].stages) == end:
                legs.append(legs[-1])
            else:
                legs.append(Itinerary(parts[:end], tuple(parts[end:])))
        return tuple(legs)


class _Cursors(dict[int, Cursor]):
    """The cursors of an itinerary by position: a dict, since a known cursor is found without running Python code."""

    def __init__(self, itinerary: Itinerary, parts: tuple[Piece, ...]) -> None:
        super().__init__()
        self._itinerary = itinerary
        self._parts = parts

    def __missing__(self, position: int) -> Cursor:
        way = self._itinerary
        parts = self._parts
        if not 0 <= position <= way.length:
            raise IndexError(f"a way of {way.length} positions has no position {position}")
        index = bisect_right(way.ends, position)
        pieces = ((parts[index][0], way.ends[index] - position), *parts[index + 1 :]) if index < len(parts) else ()
        cursor = self[position] = Cursor(way, position, index, pieces)
        return cursor


def _needed(stages: Sequence[Stage], index: int) -> tuple[int, ...]:
    wanted = {name for stage in stages[index:] for name in stage.spec.inputs}
    return tuple(before for before in range(index) if not wanted.isdisjoint(stages[before].spec.outputs))
