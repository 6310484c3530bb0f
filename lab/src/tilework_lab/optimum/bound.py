"""The most requests that could be on time for a scheduler that knows the future: a relaxation of scheduling.

Time is cut into intervals at arrivals and deadlines. For each request r there is a variable x[r], between 0 and 1: it
is on time; and for each of its pieces (encode, steps, decode), each degree k at which that may run and each interval i
the time y[r, k, i] >= 0 that it does so. Maximise the sum of x[r] such that

1. every piece is done:            sum over k, i of y[r, k, i] / (time of a unit at k)  >=  units * x[r]
2. one thing at a time:            sum over pieces, k of y[r, k, i]  <=  (part of i in the window of r) * x[r]
3. every piece in its window:      y[r, k, i]  <=  part of i in the window of the piece
4. no more devices than there are: sum over r, k of k * y[r, k, i]  <=  devices * length of i
5. all devices are all:            sum over k of y[r, k, i], but for k = devices, + w[i]  <=  length of i,
                                   where w[i] >= sum over all r' of y[r', devices, i]

Why it is a bound. Take any schedule, of any scheduler, in which some requests are on time. For those let x[r] = 1 and
let y[r, k, i] be the time in interval i in which r runs at degree k and the work is not lost; everything else is 0. A
degree that is no quicker than a narrower one counts as that one, for as much less time as that is quicker. (1) holds
because part of a unit's time does that part of the unit, however works are interrupted and change their degree. (2)
holds because the pieces of a request follow each other between its arrival and its deadline, (3) because those before
and after a piece take at least their time at the fastest degree, (4) because a work occupies its devices while it runs,
(5) because nothing else runs beside a group of all devices. So the schedule is a point of the program, whose value is
the number of requests on time, and the maximum is not less. What the program leaves out would only take more time:
switching, moving, loading, previews, memory, whole steps, and groups within nodes (but no group is wider than a node).

What it rests on: durations are those of the cost table (in a simulation: no jitter); a work is of one request (batches
that are cheaper than their members one by one could beat the bound); encode and decode run on one device.

What makes it tighter. Requests whose windows overlap, directly or through others, are a cluster; each cluster is
bounded alone. If all requests count the same, only a whole number of a cluster can be on time. And x may have to
be whole: a cluster of up to `max_whole` requests is searched with whole x, and what the search has not excluded when it
ends counts as possible.

What makes it quicker. A cut that is left out weakens 2 to 5, which then hold for a longer interval as a whole: it
remains a bound. If windows are cut into more than `max_cuts` intervals on average, every second, third... cut is
used. By default they are cut into 12 intervals, or 4 in a cluster of more than 400 requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np

from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.cost.demand import Speed, step_degrees, worthwhile
from tilework.cost.table_costs import TableCosts
from tilework_lab.optimum.solver import Builder, Floats, solve_relaxed, solve_whole

_WIDER_NS = 1.0  # Windows are wider by this than they are: rounding must not exclude what just fits.
_TOLERANCE = 1e-6  # The solver's.
_MAX_NODES = 2000  # Limit of the search for a cluster's whole numbers.
_LARGE = 400  # Requests of a cluster, above which its windows are cut less.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bound: no schedule has more than `value` requests on time, or requests of more weight.

    `shares` is the point of the relaxation that attains it, by uid: 1 for a request that is on time there, 0 for one
    that is not, between for part of one. Others may be as good. `unreachable` are the requests that cannot
    be on time even alone on all devices. Requests without a deadline are left out.
    """

    value: float
    shares: Mapping[str, float] = field(repr=False)
    unreachable: frozenset[str] = field(repr=False)


def on_time_bound(
    requests: Sequence[Request],
    costs: TableCosts,
    *,
    num_devices: int,
    devices_per_node: int,
    weights: Mapping[str, float] | None = None,
    max_cuts: float | None = None,
    max_whole: int = 40,
) -> Bound:
    """Return the most requests that can be on time, or the most weight of requests.

    Args:
        weights: what each request counts, by uid, none below 0; all count 1 without it.
        max_cuts, max_whole: see the head of this file; more is tighter and takes longer.

    Raises:
        UnknownCost: the costs say nothing of a pipeline, or of no degree that a node can run.
    """
    all_due = due_requests(requests, costs, min(num_devices, devices_per_node))
    shares = {due.request.uid: 0.0 for due in all_due}
    value = 0.0
    for cluster in _clusters([due for due in all_due if due.slack_ns >= 0]):
        gains = [1.0 if weights is None else weights[due.request.uid] for due in cluster]
        if len(cluster) == 1:
            part = gains[0]  # It fits alone.
            points = [1.0]
        else:
            part, points = _bound_cluster(_Relaxation(cluster, gains, num_devices, max_cuts), len(cluster) <= max_whole)
        value += part
        shares.update((due.request.uid, point) for due, point in zip(cluster, points, strict=True))
    unreachable = frozenset(due.request.uid for due in all_due if due.slack_ns < 0)
    return Bound(value=value, shares=shares, unreachable=unreachable)


def _clusters(all_due: Sequence[Due]) -> Iterator[list[Due]]:
    """Yield the clusters: requests whose windows overlap, directly or through others, in order of arrival."""
    cluster: list[Due] = []
    end_ns = 0
    for due in sorted(all_due, key=lambda due: due.arrival_ns):
        if cluster and due.arrival_ns >= end_ns:
            yield cluster
            cluster = []
        cluster.append(due)
        end_ns = max(end_ns, due.deadline_ns)
    if cluster:
        yield cluster


class _Relaxation:
    """The program of one cluster. `gains` are what its requests count; time is in seconds from its first arrival on."""

    def __init__(
        self, cluster: Sequence[Due], gains: Sequence[float], num_devices: int, max_cuts: float | None
    ) -> None:
        self.gains = np.array(gains)
        self._num_devices = num_devices
        self._origin_ns = cluster[0].arrival_ns
        self._edges = self._cut(cluster, max_cuts or (12.0 if len(cluster) <= _LARGE else 4.0))
        self._builder = Builder()
        lengths = np.diff(self._edges)
        self._capacity = self._builder.add_rows(num_devices * lengths)
        self._can_take_all = any(
            num_devices == s.degree for due in cluster for piece in due.pieces for s in piece.speeds
        )
        if self._can_take_all:
            self._all = self._builder.add_columns(lengths)
            self._all_rows = self._builder.add_rows(np.zeros(len(lengths)))
            self._builder.put(self._all_rows, self._all, -1.0)
        self.chosen = self._builder.add_columns(np.ones(len(cluster)), self.gains)
        for due, column in zip(cluster, self.chosen, strict=True):
            self._add(due, column)
        self.program = self._builder.program()

    def _cut(self, cluster: Sequence[Due], max_cuts: float) -> Floats:
        """Return the edges of the intervals, from the first arrival to the last deadline."""
        windows = [(self._s(due.arrival_ns), self._s(due.deadline_ns + _WIDER_NS)) for due in cluster]
        edges = np.unique(windows)
        spans = np.diff(np.searchsorted(edges, windows))
        stride = max(1, ceil(spans.mean() / max_cuts))
        return np.append(edges[:-1:stride], edges[-1])

    def _s(self, at_ns: float) -> float:
        return (at_ns - self._origin_ns) / NS_PER_S

    def _add(self, due: Due, chosen: int) -> None:
        builder = self._builder
        first, lengths = self._parts(due.arrival_ns, due.deadline_ns)
        alone = builder.add_rows(np.zeros(len(lengths)))
        builder.put(alone, chosen, -lengths)
        if self._can_take_all:
            there = slice(first, first + len(lengths))
            beside = builder.add_rows(np.diff(self._edges)[there])
            builder.put(beside, self._all[there], 1.0)
        for piece, start_ns, end_ns in due.windows():
            begin, limits = self._parts(start_ns, end_ns)
            here, there = slice(begin - first, begin - first + len(limits)), slice(begin, begin + len(limits))
            done = builder.add_row()
            builder.put(done, chosen, float(piece.units))
            for speed in worthwhile(piece.speeds):
                times = builder.add_columns(limits)
                builder.put(done, times, -NS_PER_S / speed.step_ns)
                builder.put(alone[here], times, 1.0)
                builder.put(self._capacity[there], times, float(speed.degree))
                if self._can_take_all:
                    is_all = speed.degree == self._num_devices
                    builder.put(self._all_rows[there] if is_all else beside[here], times, 1.0)

    def _parts(self, start_ns: int, end_ns: int) -> tuple[int, Floats]:
        """Return the first interval that a window has a part of, and the lengths of these parts."""
        start_s, end_s = self._s(start_ns), self._s(end_ns + _WIDER_NS)
        first = int(np.searchsorted(self._edges, start_s, side="right")) - 1
        last = int(np.searchsorted(self._edges, end_s, side="left"))
        return first, np.diff(np.clip(self._edges[first : last + 1], start_s, end_s))


def _bound_cluster(relaxation: _Relaxation, is_searched: bool) -> tuple[float, list[float]]:
    """Return the bound, and x of each request."""
    counts_requests = bool(np.all(relaxation.gains == 1.0))
    solution = solve_relaxed(relaxation.program)
    bound = _rounded(solution.bound) if counts_requests else solution.bound
    if is_searched and bound < relaxation.gains.sum() - _TOLERANCE:
        solution = solve_whole(relaxation.program, relaxation.chosen, max_nodes=_MAX_NODES)
        bound = min(bound, _rounded(solution.bound) if counts_requests else solution.bound + _TOLERANCE)
    shares: list[float] = np.clip(solution.point[relaxation.chosen], 0.0, 1.0).tolist()
    return bound, shares


def _rounded(bound: float) -> float:
    return float(floor(bound + _TOLERANCE))


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
        """Yield each piece with the earliest time it can begin and the latest it may end if the request is on time."""
        start_ns = self.arrival_ns
        slack_ns = self.slack_ns
        for piece in self.pieces:
            end_ns = start_ns + piece.shortest_ns
            yield piece, start_ns, end_ns + slack_ns
            start_ns = end_ns


def due_requests(requests: Sequence[Request], costs: TableCosts, max_degree: int) -> list[Due]:
    """Return the requests that have a deadline, in the order given, as their pieces.

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
