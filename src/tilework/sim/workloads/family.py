"""The base of all workloads: parameters, independent random streams, and arrivals at a rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
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


class BadParameter(ValueError):
    """A parameter of a workload is unknown or has a wrong value; names workload, parameter, value and remedy."""

    def __init__(self, workload: str, name: str, what: str) -> None:
        super().__init__(f"{workload}: {name} {what}")
        self.workload = workload
        self.name = name


def parameter(
    default: Any,
    about: str,
    *,
    type_: type | None = None,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    choices: Iterable[str] = (),
) -> Any:
    """Return a field of a workload. `type_` is that of the default unless the default is None."""
    rules = {"above": above, "least": least, "most": most, "choices": tuple(choices)}
    return field(default=default, metadata={"about": about, "type": type_ or type(default), **rules})


def check(workload: str, one: Field[Any], value: Any) -> None:
    """Raise BadParameter if the value is not allowed; None is allowed where it is the default."""
    if value is None and one.default is None:
        return
    type_ = one.metadata["type"]
    rules = one.metadata
    if not _is_a(value, type_):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")
    if rules["choices"] and value not in rules["choices"]:
        near = get_close_matches(value, rules["choices"], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadParameter(workload, one.name, f"is {value!r}; {hint}use {_wanted(one)}")
    if type_ in (int, float) and not (rules["least"] <= value <= rules["most"] and value > rules["above"]):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")


def parsed(workload: str, one: Field[Any], text: str) -> Any:
    """Return the value that a text means; `check` decides whether it is allowed. Raises BadParameter."""
    type_ = one.metadata["type"]
    if type_ is bool:
        if text in ("true", "false"):
            return text == "true"
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}")
    try:
        return type_(text)
    except ValueError:
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}") from None


def unknown(workload: str, name: str, known: Iterable[str]) -> BadParameter:
    """Return the error for an unknown parameter; names the known one that is nearest in spelling."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return BadParameter(workload, name, f"is not a parameter of this workload; {remedy}")


def _is_a(value: Any, type_: type) -> bool:
    if type_ is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Path) if type_ is Path else type(value) is type_


def _wanted(one: Field[Any]) -> str:
    """Say what is allowed, such as "a whole number of at least 1 and at most 8"."""
    rules = one.metadata
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    nouns = {int: "a whole number", float: "a number", bool: "true or false", Path: "the path of a file"}
    noun = nouns.get(rules["type"], "text")
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", rules["above"]), ("of at least", rules["least"]), ("at most", rules["most"]))
        if math.isfinite(bound)
    ]
    return " ".join([noun, " and ".join(bounds)]).strip()


ARRIVALS = ("poisson", "constant", "bursts", "diurnal", "at_once")
DIURNAL_PARTS = 96
BURST_SHARE = 0.2
MICROSECOND_DIGITS = 6


class Item(NamedTuple):
    """Pipeline, shape and steps of a request, without its arrival."""

    pipeline: str
    shape: Shape
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFamily(ABC):
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
        """Return the requests in order of arrival, known by their places.

        The same parameters and seed give the same ones.

        Raises:
            BadParameter, BadLine, OSError: a file that a parameter names cannot be used.
        """

    @property
    def cost_table(self) -> str:
        """Cost table of the workload: `table`, unless a parameter names another."""
        return self.table

    def parameters(self) -> dict[str, Any]:
        return asdict(self)

    def refuse(self, name: str, remedy: str) -> BadParameter:
        return BadParameter(self.name, name, f"is {getattr(self, name)!r}; {remedy}")

    def optimal_s(self, item: Item) -> float:
        """Return the latency of an item alone, each stage at its optimal degree."""
        return s_from_ns(optimal_latency_ns(costs_of(self.cost_table), *item))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedFamily(WorkloadFamily):
    """A workload whose requests come at a rate, and differ only in what `items` and `slo_s` say."""

    rate_per_s: float = parameter(1.0, "Requests per second on average.", above=0)
    num_requests: int | None = parameter(300, "Number of requests.", least=1)
    arrivals: str = parameter("poisson", "Arrival process.", choices=ARRIVALS)
    period_s: float = parameter(120.0, "Period of bursts and diurnal arrivals, in seconds.", above=0)
    peak: float = parameter(4.0, "Highest rate over lowest, with bursts and diurnal arrivals.", least=1)
    trace: Path | None = parameter(  # noqa: RUF009 - a field, whose default is None
        None, "File whose arrivals are taken instead, at rate_per_s.", type_=Path
    )
    cache: str = parameter(OFF, "Cache of all requests.", choices=BLOCK_CACHES)
    cache_threshold: float = parameter(
        DEFAULT_THRESHOLD, "Change up to which parts are not computed.", least=0, most=MAX_THRESHOLD
    )

    @property
    def count(self) -> int:
        """Number of requests."""
        assert self.num_requests is not None
        return self.num_requests

    @abstractmethod
    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        """Return one item per arrival."""

    @abstractmethod
    def slo_s(self, item: Item) -> float | None:
        """Return the deadline of an item before `scale`, in seconds from its arrival; None is best effort."""

    def slos_s(self, items: Sequence[Item], seed: int) -> Iterable[float | None]:
        """Return one deadline per item, before `scale`; for workloads whose deadlines do not depend on items alone."""
        return map(self.slo_s, items)

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        arrivals_s = self.arrivals_s(seed)
        items = list(self.items(arrivals_s, seed))
        slos_s = self.slos_s(items, seed)
        return numbered(
            self.asked(at_s, item, slo_s) for at_s, item, slo_s in zip(arrivals_s, items, slos_s, strict=True)
        )

    def asked(self, arrival_s: float, item: Item, slo_s: float | None) -> WorkloadRequest:
        """Make a request with the cache of all; `slo_s` is before `scale`."""
        request = request_of(arrival_s, item, scaled(slo_s, self.scale))
        return (
            request if self.cache == OFF else replace(request, cache=self.cache, cache_threshold=self.cache_threshold)
        )

    def arrivals_s(self, seed: int) -> list[float]:
        if self.trace is not None:
            return [request.arrival_s for request in self.traced("")]
        return list(islice(self._process_s(stream(seed, "arrivals")), self.count))

    def traced(self, pipeline: str) -> tuple[WorkloadRequest, ...]:
        """Return the first `count` requests of the trace, at `rate_per_s`."""
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
    """Return relative rates over a day that begins in its trough: a sine, at most `peak` times its least."""
    swing = (peak - 1) / (peak + 1)
    return [1 - swing * sin(pi / 2 + 2 * pi * (part + 0.5) / DIURNAL_PARTS) for part in range(DIURNAL_PARTS)]


def stream(seed: int, purpose: str) -> Random:
    """Return the random generator of one purpose; other purposes draw from their own."""
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
    """Sort requests by arrival and number them by their places; requests that arrive together keep their order."""
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
    """Return the costs of a table. They are never corrected by observations, and thus shared."""
    return TableCosts(table_of(place))
