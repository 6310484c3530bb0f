"""What all workloads share: parameters, independent random streams, and arrivals at a rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import islice, repeat
from math import pi, sin
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from tilework.core.arrivals import constant_s, poisson_s, varying_s
from tilework.core.cache import BLOCK_CACHES, DEFAULT_THRESHOLD, MAX_THRESHOLD, OFF
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.cost.degrees import optimal_latency_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.formats.trace import paced, read_trace
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.parameters import BadParameter, check, parameter

ARRIVALS = ("poisson", "constant", "bursts", "diurnal", "at_once")
DIURNAL_PARTS = 96
BURST_SHARE = 0.2
MICROSECOND_DIGITS = 6


class Item(NamedTuple):
    """What is asked for, apart from when."""

    pipeline: str
    shape: Shape
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ABC):
    """A workload: parameters with defaults, and the requests that they and a seed decide.

    `table` is the cost table that it is meant for (a place for `read_table`; `cost_table` is that of these parameters),
    `num_devices` the devices of the
    published evaluation, or those that we chose for it. What is drawn for one purpose (arrivals, sizes, deadlines) does
    not change with a parameter of another: each purpose has its own stream.

    Raises:
        BadParameter: a value is not what its parameter may be.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    about: ClassVar[str]
    table: ClassVar[str]
    num_devices: ClassVar[int]

    scale: float = parameter(1.0, "Multiplies all deadlines.", above=0)

    def __post_init__(self) -> None:
        for one in fields(self):
            check(self.name, one, getattr(self, one.name))

    @abstractmethod
    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        """In order of arrival, known by their places. The same parameters and seed give the same requests.

        Raises:
            BadParameter, BadLine, OSError: a file that a parameter names cannot be used.
        """

    @property
    def cost_table(self) -> str:
        """Its cost table: `table`, unless a parameter names another."""
        return self.table

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def refuse(self, name: str, remedy: str) -> BadParameter:
        return BadParameter(self.name, name, f"is {getattr(self, name)!r}; {remedy}")

    def optimal_s(self, item: Item) -> float:
        """Latency alone, each stage at its optimal degree."""
        return s_from_ns(optimal_latency_ns(costs_of(self.cost_table), *item))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedFamily(Family):
    """A workload whose requests come at a rate, and differ only in what `items` and `slo_s` say."""

    rate_per_s: float = parameter(1.0, "Requests per second on average.", above=0)
    num_requests: int | None = parameter(300, "How many requests.", least=1)
    arrivals: str = parameter("poisson", "How they come.", choices=ARRIVALS)
    period_s: float = parameter(120.0, "Of bursts and diurnal arrivals.", above=0)
    peak: float = parameter(4.0, "Of bursts and diurnal arrivals: highest rate over lowest.", least=1)
    trace: Path | None = parameter(  # noqa: RUF009 - a field, whose default is None
        None, "A file whose arrivals are taken instead, at rate_per_s.", type_=Path
    )
    cache: str = parameter(OFF, "The cache of all requests.", choices=BLOCK_CACHES)
    cache_threshold: float = parameter(
        DEFAULT_THRESHOLD, "By how much parts may change and not be computed.", least=0, most=MAX_THRESHOLD
    )

    @property
    def count(self) -> int:
        """How many requests it has."""
        assert self.num_requests is not None
        return self.num_requests

    @abstractmethod
    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        """One per arrival."""

    @abstractmethod
    def slo_s(self, item: Item) -> float | None:
        """Before `scale`; None is best effort."""

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        """One per item, before `scale`; for those whose deadline is not decided by what is asked for."""
        return map(self.slo_s, items)

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        arrivals_s = self.arrivals_s(seed)
        items = list(self.items(arrivals_s, seed))
        slos_s = self.slos_s(items, seed)
        return numbered(
            self.asked(at_s, item, slo_s) for at_s, item, slo_s in zip(arrivals_s, items, slos_s, strict=True)
        )

    def asked(self, arrival_s: float, item: Item, slo_s: float | None) -> WorkloadRequest:
        """A request with the cache of all; `slo_s` is before `scale`."""
        request = request_of(arrival_s, item, scaled(slo_s, self.scale))
        return (
            request if self.cache == OFF else replace(request, cache=self.cache, cache_threshold=self.cache_threshold)
        )

    def arrivals_s(self, seed: int) -> list[float]:
        if self.trace is not None:
            return [request.arrival_s for request in self.traced("")]
        return list(islice(self._process_s(stream(seed, "arrivals")), self.count))

    def traced(self, pipeline: str) -> tuple[WorkloadRequest, ...]:
        """The first `count` requests of the trace, at `rate_per_s`."""
        assert self.trace is not None
        requests = read_trace(self.trace, pipeline)[: self.count]
        if len(requests) < self.count:
            remedy = f"it has {len(requests)} requests; set num_requests to that, or name a longer file"
            raise self.refuse("trace", remedy)
        try:
            return paced(requests, self.rate_per_s)
        except ValueError as error:
            raise self.refuse("trace", f"{error}; name another file") from error

    def _process_s(self, rng: Random) -> Iterator[float]:
        match self.arrivals:
            case "poisson":
                return poisson_s(self.rate_per_s, rng)
            case "constant":
                return constant_s(self.rate_per_s)
            case "at_once":
                return repeat(0.0)
            case "bursts":
                parts = round(1 / BURST_SHARE)
                return varying_s(self.rate_per_s, [1.0] * (parts - 1) + [self.peak], self.period_s, rng)
            case _:
                return varying_s(self.rate_per_s, diurnal(self.peak), self.period_s, rng)


def diurnal(peak: float) -> list[float]:
    """Relative rates over a day that begins in its trough: a sine whose highest value is `peak` times its lowest."""
    swing = (peak - 1) / (peak + 1)
    return [1 - swing * sin(pi / 2 + 2 * pi * (part + 0.5) / DIURNAL_PARTS) for part in range(DIURNAL_PARTS)]


def stream(seed: int, purpose: str) -> Random:
    """The random generator of one purpose; other purposes draw from their own."""
    return Random(f"{purpose} {seed}")


def request_of(arrival_s: float, item: Item, slo_s: float | None) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_s=round(arrival_s, MICROSECOND_DIGITS),
        pipeline=item.pipeline,
        height=item.shape.height,
        width=item.shape.width,
        frames=item.shape.frames,
        steps=item.steps,
        slo_s=None if slo_s is None else round(slo_s, MICROSECOND_DIGITS),
    )


def numbered(requests: Iterable[WorkloadRequest]) -> tuple[WorkloadRequest, ...]:
    """In order of arrival, with their places as ids; requests that arrive together keep their order."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return tuple(replace(request, id=index) for index, request in enumerate(ordered))


def scaled(slo_s: float | None, scale: float) -> float | None:
    return None if slo_s is None else slo_s * scale


@cache
def table_of(place: str) -> CostTable:
    return read_table(place)


def steps_of(place: str) -> int:
    steps = table_of(place).steps
    assert steps is not None, f"{place} was made for an evaluation, and says its steps"
    return steps


@cache
def costs_of(place: str) -> TableCosts:
    """Never corrected by observations, and thus shared."""
    return TableCosts(table_of(place))
