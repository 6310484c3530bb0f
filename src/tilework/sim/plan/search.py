"""The fewest devices that keep a share of the deadlines.

Theory of operation. More devices keep more deadlines on average, so the numbers that may be bought are bracketed, up or
down from the first guess in strides that grow, and then cut in three. Two numbers are tried at a time, with the same
requests (common random numbers), sample by sample. A number is decided as soon as the interval of its share excludes
the target: it *meets* it if the lower end is above, and *misses* it if the upper end is below. It is *unsure* if the
samples are used up before, or if all of them would not make it meet the target: not even if the rest had the share at
the upper end of the interval so far. The answer is the fewest that meet it; the fewest that reach it in the mean are
told beside it.

The first guess is the load and its square root: what is kept beyond the load, for requests that come together, grows
as their number varies. It never looks below the devices that the work of the requests on time needs at least, and does
not begin where too many requests are late even alone. What is tried, and so the answer, does not depend on the number
of processes.

Sources: square-root staffing is Halfin and Whitt, Heavy-traffic limits for queues with many exponential servers, 1981;
giving up what more samples would not change is stochastic curtailment (Lan, Simon and Halperin, 1982).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import sqrt

from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.plan.interval import Share, share_of
from tilework.sim.plan.traffic import AS_ASKED, Demand, Size, Traffic, WhatIf, demand_of
from tilework.sim.plan.trial import Trial, TrialOutcome, Try

SPARE = 1.0
"""Devices beyond the load in the first guess, as a multiple of the root of the load."""
_AT_ONCE = 2


class Verdict(StrEnum):
    """Judgement of a number of devices by simulation: its whole interval is above the target, or below; neither, and
    more samples would not put it above; or it is open, since another number has decided the search.
    """

    MEETS = "meets"
    MISSES = "misses"
    UNSURE = "unsure"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A number of devices that was tried. Where runs were ended early (not `is_whole`) the share is at most that."""

    num_devices: int
    share: Share
    verdict: Verdict
    is_whole: bool
    outcomes: Sequence[TrialOutcome] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One search: this part of the traffic on one hardware, which is sold in `numbers` of devices, ascending.

    It begins with the load and `spare` times its root.
    """

    hardware: str
    numbers: Sequence[int]
    num_samples: int
    spare: float = SPARE
    what_if: WhatIf = AS_ASKED
    sizes: Collection[Size] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Result of a search. `fewest` meets the target; None: none of the numbers does.

    `points` are all that were tried, ascending. Fewer than `demand.least` cannot meet it, whatever decides.
    """

    sizing: Sizing
    target: float
    demand: Demand
    fewest: int | None
    points: Sequence[Point]

    @property
    def in_the_mean(self) -> int | None:
        """The fewest of those tried that reach the target in the mean."""
        return min((one.num_devices for one in self.points if one.share.value >= self.target), default=None)

    @property
    def spare(self) -> float:
        """Surplus of the fewest over the load, as a multiple of its root: the first guess for traffic like this."""
        return SPARE if self.fewest is None else (self.fewest - self.demand.load) / sqrt(self.demand.load)

    @property
    def point(self) -> Point | None:
        """Point of the fewest."""
        return self.at(self.fewest)

    def at(self, num_devices: int | None) -> Point | None:
        return next((one for one in self.points if one.num_devices == num_devices), None)


def numbers_of(devices_per_node: int, step: int | None, most: int) -> tuple[int, ...]:
    """Return the numbers of devices to choose from: every `step`; without it single ones on a node, then nodes."""
    if step is not None:
        return tuple(range(step, most + 1, step))
    return (*range(1, min(devices_per_node, most + 1)), *range(devices_per_node, most + 1, devices_per_node))


def fewest_devices(sizing: Sizing, traffic: Traffic, table: CostTable, target: float, attempt: Try) -> Sized:
    """Search for the fewest. Raises UnknownCost, and what a policy or the simulation raises."""
    requests = traffic.requests(0, sizing.what_if, sizing.sizes)
    demand = demand_of(requests, TableCosts(table), target, has_batches=table.has_batches)
    search = _Search(sizing, target, demand, attempt)
    search.run()
    points = tuple(search.points[place] for place in sorted(search.points))
    fewest = search.met if search.met is None else sizing.numbers[search.met]
    return Sized(sizing=sizing, target=target, demand=demand, fewest=fewest, points=points)


def more_points(sized: Sized, factors: Sequence[float], attempt: Try) -> Sized:
    """Return the same with points of one sample at these multiples of the answer, for a curve."""
    if sized.fewest is None:
        return sized
    numbers = sized.sizing.numbers
    wanted = {numbers[min(bisect_left(numbers, factor * sized.fewest), len(numbers) - 1)] for factor in factors}
    wanted -= {one.num_devices for one in sized.points}
    trials = [_trial(sized.sizing, number, 0) for number in sorted(wanted)]
    found = [
        _point(trial.num_devices, [outcome], sized.target, sized.sizing.num_samples)
        for trial, outcome in zip(trials, attempt(trials), strict=True)
    ]
    points = tuple(sorted((*sized.points, *found), key=lambda one: one.num_devices))
    return Sized(sizing=sized.sizing, target=sized.target, demand=sized.demand, fewest=sized.fewest, points=points)


def _trial(sizing: Sizing, num_devices: int, sample: int) -> Trial:
    return Trial(
        hardware=sizing.hardware, num_devices=num_devices, sample=sample, what_if=sizing.what_if, sizes=sizing.sizes
    )


def _point(num_devices: int, outcomes: Sequence[TrialOutcome], target: float, num_samples: int) -> Point:
    share = share_of([block for outcome in outcomes for block in outcome.blocks])
    may_meet = len(outcomes) < num_samples and share.low_at_most(num_samples / len(outcomes)) >= target
    verdict = Verdict.OPEN if may_meet else Verdict.UNSURE
    if share.low >= target or share.high < target:
        verdict = Verdict.MEETS if share.low >= target else Verdict.MISSES
    is_whole = all(outcome.is_whole for outcome in outcomes)
    return Point(num_devices=num_devices, share=share, verdict=verdict, is_whole=is_whole, outcomes=tuple(outcomes))


@dataclass(slots=True)
class _Search:
    """State of a search over places in `sizing.numbers`. `below` is the largest known not to meet the target, or -1."""

    sizing: Sizing
    target: float
    demand: Demand
    attempt: Try
    points: dict[int, Point] = field(default_factory=dict)
    below: int = field(init=False)
    guess: int = field(init=False)
    met: int | None = None

    def __post_init__(self) -> None:
        load = self.demand.load
        numbers = self.sizing.numbers
        self.below = bisect_left(numbers, self.demand.least) - 1
        self.guess = max(self.below + 1, bisect_left(numbers, load + self.sizing.spare * sqrt(load)))

    def run(self) -> None:
        if self.demand.reachable < self.target:
            return
        places = self._places(self.guess - 1, self.guess)
        while places:
            self._try_all(places)
            self._bracket()
            places = self._next()

    def _places(self, *places: int) -> list[int]:
        """Return the open ones of these places, and the nearest open one for those that are beyond."""
        top = len(self.sizing.numbers) - 1 if self.met is None else self.met - 1
        return sorted({min(max(place, self.below + 1), top) for place in places} - self.points.keys())

    def _next(self) -> list[int]:
        """Return the places to try next; none if the answer is known."""
        if self.met is None:
            stride = max(1, self.below - self.guess + 1)
            return self._places(self.below + stride, self.below + 2 * stride) if self._is_open() else []
        gap = self.met - self.below
        if gap == 1:
            return []
        if self.below not in self.points:  # Far fewer are slow to simulate: queues grow long.
            stride = self.guess - self.met
            return self._places(self.met - 1) if stride < 2 else self._places(self.met - stride, self.met - 2 * stride)
        return self._places(self.below + max(1, gap // 3), self.below + max(1, 2 * gap // 3))

    def _is_open(self) -> bool:
        return self.below < len(self.sizing.numbers) - 1

    def _bracket(self) -> None:
        """Find the fewest that meet the target, and of those below them the most that do not."""
        misses = [place for place, one in self.points.items() if one.verdict is Verdict.MISSES]
        above = max(misses, default=-1)
        met = [place for place, one in self.points.items() if one.verdict is Verdict.MEETS and place > above]
        self.met = min(met, default=None)
        known = [place for place in self.points if self.met is None or place < self.met]
        self.below = max([self.below, *known])

    def _try_all(self, places: Sequence[int]) -> None:
        """Try these places sample by sample, until each is decided, or one is that decides the others, too."""
        outcomes: dict[int, list[TrialOutcome]] = {place: [] for place in places}
        while open_ := self._undecided(outcomes):
            trials = list(self._trials(open_, outcomes))
            found = self.attempt([_trial(self.sizing, self.sizing.numbers[place], sample) for place, sample in trials])
            for (place, _), outcome in zip(trials, found, strict=True):
                outcomes[place].append(outcome)
            for place in open_:
                self.points[place] = _point(
                    self.sizing.numbers[place], outcomes[place], self.target, self.sizing.num_samples
                )

    def _undecided(self, outcomes: dict[int, list[TrialOutcome]]) -> list[int]:
        def is_open(place: int) -> bool:
            return place not in self.points or self.points[place].verdict is Verdict.OPEN

        places = [place for place in outcomes if is_open(place)]
        verdicts = {place: self.points[place].verdict for place in outcomes if place in self.points}
        met = [place for place, verdict in verdicts.items() if verdict is Verdict.MEETS]
        not_met = [place for place, verdict in verdicts.items() if verdict in (Verdict.MISSES, Verdict.UNSURE)]
        low, high = max(not_met, default=-1), min(met, default=len(self.sizing.numbers))
        return [place for place in places if low < place < high]

    def _trials(self, places: Sequence[int], outcomes: dict[int, list[TrialOutcome]]) -> Iterator[tuple[int, int]]:
        """Yield the next sample of each place; of a single one the next two."""
        for place in places:
            done = len(outcomes[place])
            ahead = 1 if len(places) >= _AT_ONCE else _AT_ONCE
            for sample in range(done, min(self.sizing.num_samples, done + ahead)):
                yield place, sample
