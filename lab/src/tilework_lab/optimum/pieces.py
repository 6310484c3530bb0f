"""A request as the bound sees it: the pieces of work that it needs one after another, and the time that it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilework.core.request import Request
from tilework.cost.demand import Speed, step_degrees
from tilework.cost.table_costs import TableCosts


@dataclass(frozen=True, slots=True)
class Piece:
    """Units of work of one stage: its steps, or all of it. `speeds` say how long a unit takes, by degree."""

    stage: str
    units: int
    speeds: tuple[Speed, ...]

    @property
    def shortest_ns(self) -> int:
        return self.units * min(speed.step_ns for speed in self.speeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request with a deadline, as its pieces."""

    request: Request
    deadline_ns: int
    pieces: tuple[Piece, ...]

    @property
    def arrival_ns(self) -> int:
        return self.request.arrival_ns

    @property
    def slack_ns(self) -> int:
        """The time that is left if it has all devices to itself; below 0 if it cannot be on time."""
        return self.deadline_ns - self.arrival_ns - sum(piece.shortest_ns for piece in self.pieces)

    def windows(self) -> Iterable[tuple[Piece, int, int]]:
        """Each piece with the earliest time it can begin and the latest it may end if the request is on time."""
        start_ns, slack_ns = self.arrival_ns, self.slack_ns
        for piece in self.pieces:
            end_ns = start_ns + piece.shortest_ns
            yield piece, start_ns, end_ns + slack_ns
            start_ns = end_ns


def due_requests(requests: Sequence[Request], costs: TableCosts, max_degree: int) -> list[Due]:
    """The requests that have a deadline, in the order given, as their pieces.

    Steps run at every degree up to `max_degree` that the request may have, other stages on one device. Pieces that
    cost nothing are left out, and so are previews, which only add to the time of a request. Raises UnknownCost.
    """
    known: dict[object, tuple[Piece, ...]] = {}
    found = []
    for one in requests:
        if one.deadline_ns is None:
            continue
        key = one.pipeline, one.shape, one.steps, one.guided, one.exact, one.loras
        if key not in known:
            known[key] = tuple(_pieces(one, costs, max_degree))
        found.append(Due(request=one, deadline_ns=one.deadline_ns, pieces=known[key]))
    return found


def _pieces(request: Request, costs: TableCosts, max_degree: int) -> Iterable[Piece]:
    for stage, units in costs.start(request).pieces:
        known = step_degrees(request, costs) if stage.has_steps else (1,)
        degrees = [degree for degree in known if degree <= max_degree] or [max_degree]  # Raises UnknownCost below.
        units_ns = [costs.run_ns(stage, (request.shape,), degree, 1, request.guided) for degree in degrees]
        if all(units_ns):
            yield Piece(stage.name, units, tuple(map(Speed, degrees, units_ns)))
