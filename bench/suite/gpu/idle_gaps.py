"""The gaps in what a device did, and what the host did in them, from a recording of `recorder/sitecustomize.py`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_NEAR_NS = 5_000_000
"""A sampled function counts for what is no further from it. Samples come every 2 ms if Python lets them."""


@dataclass(frozen=True, slots=True)
class Span:
    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class _Busy:
    """Events that overlap or follow each other at once; `first` begins it, and `last` ends it."""

    start_ns: int
    end_ns: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two events of a device; `did` is what the host did in its middle."""

    start_ns: int
    end_ns: int
    before: str
    after: str
    did: str

    @property
    def num_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a device did for `num_ns`, from its first event to the end of its last."""

    num_ns: int
    num_events: int
    gaps: tuple[Gap, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Recorded:
        """Without events of a device, the outermost operators of the host are taken for them."""
        host = sorted((Span(*one) for one in values["host"]), key=lambda one: (one.start_ns, -one.end_ns))
        device = sorted((Span(*one) for one in values["device"]), key=lambda one: one.start_ns)
        busy = list(_busy(device or host))
        pairs = list(pairwise(busy))
        middles = [(before.end_ns + after.start_ns) // 2 for before, after in pairs]
        samples = [
            (at_ns, f"{inner} < {own}" if own not in ("", inner) else inner) for at_ns, inner, own in values["samples"]
        ]
        gaps = tuple(
            Gap(before.end_ns, after.start_ns, before.last, after.first, operator or _sampled(samples, middle_ns))
            for (before, after), middle_ns, operator in zip(pairs, middles, _innermost(host, middles), strict=True)
        )
        return cls(busy[-1].end_ns - busy[0].start_ns if busy else 0, len(device or busy), gaps)

    @property
    def idle_ns(self) -> int:
        return sum(gap.num_ns for gap in self.gaps)

    def causes(self) -> list[tuple[str, int, int]]:
        """What the host did in gaps: how many they are, and how long in nanoseconds; the longest together first."""
        counts, lengths = Counter[str](), Counter[str]()
        for gap in self.gaps:
            counts[gap.did] += 1
            lengths[gap.did] += gap.num_ns
        return [(did, counts[did], num_ns) for did, num_ns in lengths.most_common()]


def _busy(events: Sequence[Span]) -> Iterator[_Busy]:
    """`events` are in the order of their starts."""
    current: _Busy | None = None
    for one in events:
        if current is None or one.start_ns > current.end_ns:
            if current is not None:
                yield current
            current = _Busy(one.start_ns, one.end_ns, one.name, one.name)
        elif one.end_ns > current.end_ns:
            current = _Busy(current.start_ns, one.end_ns, current.first, one.name)
    if current is not None:
        yield current


def _innermost(host: Sequence[Span], times_ns: Sequence[int]) -> Iterator[str]:
    """The shortest operator at each of these times, which ascend; an empty text where there is none."""
    around, coming = list[Span](), 0
    for at_ns in times_ns:
        while coming < len(host) and host[coming].start_ns <= at_ns:
            around.append(host[coming])
            coming += 1
        around = [one for one in around if one.end_ns > at_ns]
        yield min(around, key=lambda one: one.end_ns - one.start_ns).name if around else ""


def _sampled(samples: Sequence[tuple[int, str]], at_ns: int) -> str:
    place = bisect_left(samples, (at_ns, ""))
    near = [one for one in samples[max(0, place - 1) : place + 1] if abs(one[0] - at_ns) <= _NEAR_NS]
    return f"Python: {min(near, key=lambda one: abs(one[0] - at_ns))[1]}" if near else "Python"
