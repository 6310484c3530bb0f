"""The mixes of a cost table: steady, in blocks, over a day, or with the sizes of a trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import ClassVar

from tilework.core.request import Shape
from tilework.core.shares import dealt
from tilework.cost.mixes import Mix, Mixes
from tilework.cost.table import BadCostTable, CostTable
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import (
    DIURNAL_PARTS,
    BadParameter,
    Item,
    RatedFamily,
    diurnal,
    numbered,
    parameter,
    stream,
    table_of,
)

BY_BLOCKS = "dynamic"
OVER_A_DAY = "diurnal"
OF_A_TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMixes(RatedFamily):
    """Requests as a cost table describes its evaluation: `mixes`, `dynamic` and `diurnal`, `steps` and `slo_s`.

    `load` names one of the mixes, whose sizes come in its proportions, in random order. `dynamic` goes through the
    table's blocks: each has its part of the requests by length and `rate_factor`, in the proportions of its mixes.
    `diurnal` is the table's mix of a day that begins at its lowest rate. Blocks and day are stretched to the length of
    the workload. `trace` takes sizes and steps, too, from the file.

    Deadlines are the table's. One for other steps, or for a size without an SLO, is as much longer than that of the
    nearest size as the request takes longer, each stage at its optimal degree. Ours: how blocks are stretched.
    """

    name: ClassVar[str] = "mixes"
    source: ClassVar[str] = "a cost table"
    about: ClassVar[str] = "the mixes of a cost table: steady, changing or over a day"
    table: ClassVar[str] = "flux1_l20"
    num_devices: ClassVar[int] = 128

    num_requests: int | None = parameter(
        None, "How many requests; by default as many as come in `minutes`.", type_=int, least=1
    )
    minutes: float = parameter(30.0, "Length in minutes, unless num_requests is given.", above=0)
    arrivals: str = parameter("poisson", "Arrival process.", choices=("poisson", "constant", "bursts"))
    peak: float = parameter(4.0, "Highest rate over lowest, with bursts.", least=1)
    cost: str | None = parameter(
        None, "The cost table: a name of `cost list`, or a file; by default the workload's own.", type_=str
    )
    load: str = parameter("medium", "A mix of the table, or dynamic, diurnal or trace: which sizes, and when.")

    def __post_init__(self) -> None:
        RatedFamily.__post_init__(self)  # Dataclasses with slots know no super().
        try:
            table = table_of(self.cost_table)
        except BadCostTable as error:
            raise BadParameter(self.name, "cost", f"is {self.cost_table!r}; {error}") from error
        if table.steps is None:
            raise self._lacks("has no steps; add how many a request has")
        if len({row.pipeline for row in table.rows}) > 1:
            raise self._lacks("has several pipelines; name a table of one")
        self._check_load(table.mixes)

    def _check_load(self, mixes: Mixes) -> None:
        if self.load == OF_A_TRACE:
            if self.trace is None:
                raise self.refuse("load", "name the file as trace, too")
            return
        if not mixes.by_name:
            raise self._lacks("has no mixes; add them (docs/formats.md)")
        known = [*mixes.by_name, *[BY_BLOCKS] * bool(mixes.dynamic), *[OVER_A_DAY] * (mixes.diurnal is not None)]
        if self.load not in known:
            raise self.refuse("load", f"{self.cost_table} has {', '.join(known)}; use one of these, or {OF_A_TRACE}")

    def _lacks(self, what: str) -> BadParameter:
        return BadParameter(self.name, "cost", f"is {self.cost_table!r}, which {what}")

    @property
    def cost_table(self) -> str:
        return self.table if self.cost is None else self.cost

    @property
    def count(self) -> int:
        return self.num_requests or max(1, round(self.rate_per_s * 60 * self.minutes))

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        if self.load != OF_A_TRACE:
            return RatedFamily.requests(self, seed)
        pipeline = _pipeline(table_of(self.cost_table))
        return numbered(
            self.asked(one.arrival_s, item, self.slo_s(item))
            for one in self.traced(pipeline)
            for item in [Item(pipeline, one.shape, one.steps)]
        )

    def arrivals_s(self, seed: int) -> list[float]:
        arrivals_s = RatedFamily.arrivals_s(self, seed)
        if self.load not in (BY_BLOCKS, OVER_A_DAY) or self.trace is not None:
            return arrivals_s
        return _bent(arrivals_s, self._rates())

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        rng = stream(seed, "items")
        mixes = self._mixes()
        if self.load != BY_BLOCKS:
            day = mixes.diurnal
            mix = day.mix if self.load == OVER_A_DAY and day is not None else self.load
            return dealt(self._shares({mix: 1.0}), len(arrivals_s), rng)
        ends_s = list(accumulate(seconds for seconds, _ in self._rates()))[:-1]
        places = [0, *(bisect_left(arrivals_s, end_s) for end_s in ends_s), len(arrivals_s)]
        return [
            item
            for block, (begin, end) in zip(mixes.dynamic, pairwise(places), strict=True)
            for item in dealt(self._shares(block.weights), end - begin, rng)
        ]

    def slo_s(self, item: Item) -> float | None:
        table = table_of(self.cost_table)
        slos_s = _slos_s(self.cost_table)
        if not slos_s:
            return None
        near = min(slos_s, key=lambda one: (one != item.shape, abs(one.pixels - item.shape.pixels), one))
        usual = Item(item.pipeline, near, _steps(table))
        return slos_s[near] if usual == item else slos_s[near] * self.optimal_s(item) / self.optimal_s(usual)

    def _mixes(self) -> Mixes:
        return table_of(self.cost_table).mixes

    def _rates(self) -> list[tuple[float, float]]:
        """Return the parts of a changing load: how many seconds each is long, and its rate relative to the others."""
        mixes = self._mixes()
        span_s = self.count / self.rate_per_s
        if self.load == BY_BLOCKS:
            unit_s = span_s / mixes.dynamic[-1].to_min
            return [((one.to_min - one.from_min) * unit_s, one.rate_factor) for one in mixes.dynamic]
        assert mixes.diurnal is not None
        return [(span_s / DIURNAL_PARTS, rate) for rate in diurnal(mixes.diurnal.peak)]

    def _shares(self, weights: Mapping[str, float]) -> dict[Item, float]:
        """Return the shares of what is asked for, by weights of mixes."""
        table = table_of(self.cost_table)
        shares = dict[Item, float]()
        for name, weight in weights.items():
            mix: Mix = table.mixes.by_name[name]
            total = sum(mix.values())
            for shape, share in mix.items():
                item = Item(_pipeline(table), shape, _steps(table))
                shares[item] = shares.get(item, 0.0) + weight * share / total
        return shares


def _pipeline(table: CostTable) -> str:
    return table.rows[0].pipeline


def _steps(table: CostTable) -> int:
    assert table.steps is not None
    return table.steps


@cache
def _slos_s(place: str) -> dict[Shape, float]:
    return {Shape.parse(size): slo_s for size, slo_s in table_of(place).slo_s.items()}


def _bent(arrivals_s: Sequence[float], rates: Sequence[tuple[float, float]]) -> list[float]:
    """Return the same arrivals, moved so that their rate goes through `rates` (seconds, relative rate); later ones
    stay.
    """
    span_s, total = sum(seconds for seconds, _ in rates), sum(seconds * rate for seconds, rate in rates)
    moved: list[float] = []
    part = 0
    from_s = 0.0  # Begin of the part.
    begun_s = 0.0  # Begin of the part at a constant rate.
    for at_s in arrivals_s:
        while part < len(rates) and at_s >= begun_s + span_s * rates[part][0] * rates[part][1] / total:
            begun_s += span_s * rates[part][0] * rates[part][1] / total
            from_s += rates[part][0]
            part += 1
        is_later = part == len(rates)
        moved.append(at_s if is_later else from_s + (at_s - begun_s) * total / span_s / rates[part][1])
    return moved
