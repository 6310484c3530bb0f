"""What can go wrong in a simulation: named faults, each with a probability and a size, drawn from a seed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random


class BadFault(ValueError):
    """A fault that does not exist, or a number that cannot be used; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """`per` says what `probability` is of, `size` what the second number is; both are what a fuzzer starts from."""

    text: str
    per: str
    size: str
    probability: float
    usual_size: float


KINDS: Mapping[str, FaultKind] = {
    "crash": FaultKind(
        text="a worker dies in a work, at any step",
        per="work and device",
        size="seconds until it is started again",
        probability=0.03,
        usual_size=2.0,
    ),
    "hang": FaultKind(
        text="a worker stops doing anything, until it is killed for it",
        per="work and device",
        size="seconds until it is started again",
        probability=0.01,
        usual_size=2.0,
    ),
    "slow": FaultKind(
        text="a work takes many times as long", per="work", size="how many times", probability=0.05, usual_size=6.0
    ),
    "error": FaultKind(
        text="a work raises an error", per="work", size="of no meaning", probability=0.03, usual_size=1.0
    ),
    "oom": FaultKind(
        text="a work runs out of memory once, since something else takes it",
        per="work",
        size="of no meaning",
        probability=0.03,
        usual_size=1.0,
    ),
    "memory": FaultKind(
        text="devices are too small for the largest works",
        per="run",
        size="memory of a device, as a share of what the largest work needs alone",
        probability=0.5,
        usual_size=0.6,
    ),
    "node": FaultKind(
        text="all workers of a node are lost, and come back",
        per="work",
        size="seconds until they are started again",
        probability=0.004,
        usual_size=10.0,
    ),
    "load": FaultKind(
        text="a worker that is started cannot load its model",
        per="start of a worker",
        size="seconds until the next attempt",
        probability=0.3,
        usual_size=1.0,
    ),
    "lost": FaultKind(
        text="a message never arrives", per="message", size="of no meaning", probability=0.004, usual_size=1.0
    ),
    "delayed": FaultKind(
        text="a message is late, and those behind it", per="message", size="seconds", probability=0.05, usual_size=0.5
    ),
    "doubled": FaultKind(
        text="a message comes twice", per="message", size="seconds between", probability=0.03, usual_size=0.2
    ),
    "reordered": FaultKind(
        text="a message is overtaken by others", per="message", size="seconds", probability=0.02, usual_size=0.3
    ),
    "checkpoint": FaultKind(
        text="a state that was put down is lost", per="state", size="of no meaning", probability=0.03, usual_size=1.0
    ),
    "skew": FaultKind(
        text="the clock by which requests are dated is off",
        per="request",
        size="seconds",
        probability=0.5,
        usual_size=3.0,
    ),
    "replay": FaultKind(
        text="the controller is lost and built again from its log",
        per="event",
        size="seconds without it",
        probability=0.003,
        usual_size=1.0,
    ),
    "restart": FaultKind(
        text="the server and all its workers are lost; what it had accepted is taken up by the next one",
        per="event",
        size="seconds without it",
        probability=0.002,
        usual_size=3.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is a name of `KINDS`."""

    kind: str
    probability: float
    size: float

    def __str__(self) -> str:
        return f"{self.kind}={self.probability:g}:{self.size:g}"


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that are on, by kind."""

    by_kind: Mapping[str, Fault] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_kind)

    def __contains__(self, kind: str) -> bool:
        return kind in self.by_kind

    def size(self, kind: str) -> float:
        return self.by_kind[kind].size

    def without(self, kind: str) -> Faults:
        return Faults({name: fault for name, fault in self.by_kind.items() if name != kind})


def parse_faults(texts: Iterable[str]) -> Faults:
    """Read `kind`, `kind=probability` or `kind=probability:size`. Raises BadFault."""
    faults = [_parse(text) for text in texts]
    return Faults({fault.kind: fault for fault in faults})


def _parse(text: str) -> Fault:
    name, _, numbers = text.partition("=")
    if name not in KINDS:
        nearest = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.0)[0]
        raise BadFault(f"{name!r} is not a fault; did you mean {nearest!r}? There are {', '.join(KINDS)}")
    kind, (probability, _, size) = KINDS[name], numbers.partition(":")
    return Fault(
        name,
        _number(text, probability, kind.probability, f"a probability per {kind.per}", 1.0),
        _number(text, size, kind.usual_size, kind.size, 1e6),
    )


def _number(text: str, given: str, default: float, meaning: str, most: float) -> float:
    if not given:
        return default
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise BadFault(f"{text!r}: {given!r} is not {meaning}; give a number from 0 to {most:g}")
    return number


class Dice:
    """Draws for each kind of fault from a generator of its own, so that one more or less changes no other's draws."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.strikes_by_kind = dict.fromkeys(faults.by_kind, 0)
        self._randoms = {kind: Random(f"{seed}/{kind}") for kind in faults.by_kind}

    def strikes(self, kind: str) -> bool:
        """Whether the fault happens this time; never if it is off."""
        fault = self.faults.by_kind.get(kind)
        if fault is None or self._randoms[kind].random() >= fault.probability:
            return False
        self.strikes_by_kind[kind] += 1
        return True

    def share(self, kind: str) -> float:
        """A number in [0, 1), for where or how much."""
        return self._randoms[kind].random()

    def extent(self, kind: str) -> float:
        """How large it is this time: half of its size to one and a half."""
        return self.faults.size(kind) * (0.5 + self.share(kind))
