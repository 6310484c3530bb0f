"""Faults of a simulation: each has a name, a probability and a size, and is drawn from a seed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random


class BadFault(ValueError):
    """Raised for an unknown fault or an unusable number; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultType:
    """A kind of fault. `per` says what the probability refers to, `size` what the second number means.

    `probability` and `usual_size` are the fuzzer's defaults.
    """

    text: str
    per: str
    size: str
    probability: float
    usual_size: float


FAULTS: Mapping[str, FaultType] = {
    "crash": FaultType(
        text="a worker dies in a work, at any step",
        per="work and device",
        size="seconds until it is started again",
        probability=0.03,
        usual_size=2.0,
    ),
    "hang": FaultType(
        text="a worker hangs, until it is killed as stuck",
        per="work and device",
        size="seconds until it is started again",
        probability=0.01,
        usual_size=2.0,
    ),
    "slow": FaultType(
        text="a work takes many times as long", per="work", size="how many times", probability=0.05, usual_size=6.0
    ),
    "error": FaultType(text="a work raises an error", per="work", size="not used", probability=0.03, usual_size=1.0),
    "oom": FaultType(
        text="a work runs out of memory once, because another process takes it",
        per="work",
        size="not used",
        probability=0.03,
        usual_size=1.0,
    ),
    "memory": FaultType(
        text="devices are too small for the largest works",
        per="run",
        size="memory of a device, as a share of what the largest work needs alone",
        probability=0.5,
        usual_size=0.6,
    ),
    "node": FaultType(
        text="a node is lost with all its workers and the states that only it has, and comes back",
        per="work",
        size="seconds until they are started again",
        probability=0.004,
        usual_size=10.0,
    ),
    "partition": FaultType(
        text="a node is cut off from the server, and goes on meanwhile; after 10 s it is given up",
        per="work, with several nodes",
        size="seconds",
        probability=0.01,
        usual_size=8.0,
    ),
    "fetch": FaultType(
        text="a node gets states from another one late, and after 10 s not at all",
        per="fetch",
        size="seconds",
        probability=0.3,
        usual_size=6.0,
    ),
    "clock": FaultType(
        text="the clock of a node is off, and messages by which it is compared take up to 5 ms each way",
        per="session of a node",
        size="seconds",
        probability=0.5,
        usual_size=100.0,
    ),
    "frontend": FaultType(
        text="a front end dies, and with it the clients that wait there",
        per="request",
        size="seconds after it has taken the request",
        probability=0.1,
        usual_size=2.0,
    ),
    "leave": FaultType(
        text="a node leaves: it hands over the states that only it has when its works have ended, and comes back",
        per="work",
        size="seconds until its workers are started again",
        probability=0.01,
        usual_size=5.0,
    ),
    "links": FaultType(
        text="after a loss the other accelerators of the node have to be connected anew, and form no groups until then",
        per="loss of a device",
        size="seconds",
        probability=0.5,
        usual_size=2.0,
    ),
    "late": FaultType(
        text="a node, but the first, comes later than the server, without what it had kept for it",
        per="node and start of the server",
        size="seconds",
        probability=0.3,
        usual_size=10.0,
    ),
    "load": FaultType(
        text="a worker that is started cannot load its model",
        per="start of a worker",
        size="seconds until the next attempt",
        probability=0.3,
        usual_size=1.0,
    ),
    "read": FaultType(
        text="a host cannot read components ahead of need, so devices do it when they need them",
        per="read",
        size="not used",
        probability=0.1,
        usual_size=1.0,
    ),
    "lost": FaultType(
        text="a message never arrives", per="message", size="not used", probability=0.004, usual_size=1.0
    ),
    "delayed": FaultType(
        text="a message and those behind it are late", per="message", size="seconds", probability=0.05, usual_size=0.5
    ),
    "doubled": FaultType(
        text="a message comes twice", per="message", size="seconds between", probability=0.03, usual_size=0.2
    ),
    "reordered": FaultType(
        text="a message is overtaken by others", per="message", size="seconds", probability=0.02, usual_size=0.3
    ),
    "checkpoint": FaultType(
        text="a serialized state is lost", per="state", size="not used", probability=0.03, usual_size=1.0
    ),
    "skew": FaultType(
        text="the clock that dates requests is off",
        per="request",
        size="seconds",
        probability=0.5,
        usual_size=3.0,
    ),
    "replay": FaultType(
        text="the controller is lost and built again from its log",
        per="event",
        size="seconds without it",
        probability=0.003,
        usual_size=1.0,
    ),
    "restart": FaultType(
        text="the server is lost, and workers forget all; the next one takes up what was accepted, and states of nodes",
        per="event",
        size="seconds without it",
        probability=0.002,
        usual_size=3.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is on. `name` is one of `FAULTS`."""

    name: str
    probability: float
    size: float

    def __str__(self) -> str:
        return f"{self.name}={self.probability:g}:{self.size:g}"


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that are on, by name."""

    by_name: Mapping[str, Fault] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def size(self, name: str) -> float:
        return self.by_name[name].size

    def without(self, name: str) -> Faults:
        return Faults({other: fault for other, fault in self.by_name.items() if other != name})


def parse_faults(texts: Iterable[str]) -> Faults:
    """Read `name`, `name=probability` or `name=probability:size`. Raises BadFault."""
    faults = [_parse(text) for text in texts]
    return Faults({fault.name: fault for fault in faults})


def _parse(text: str) -> Fault:
    name, _, numbers = text.partition("=")
    if name not in FAULTS:
        nearest = difflib.get_close_matches(name, FAULTS, n=1, cutoff=0.0)[0]
        raise BadFault(f"{name!r} is not a fault; did you mean {nearest!r}? There are {', '.join(FAULTS)}")
    usual = FAULTS[name]
    (probability, _, size) = numbers.partition(":")
    return Fault(
        name,
        _number(text, probability, usual.probability, f"a probability per {usual.per}", 1.0),
        _number(text, size, usual.usual_size, usual.size, 1e6),
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


class FaultInjector:
    """Decides when faults happen, and counts them.

    Each fault has a random generator of its own, so that turning one on does not change the draws of another.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.counts = dict.fromkeys(faults.by_name, 0)
        self._randoms = {name: Random(f"{seed}/{name}") for name in faults.by_name}

    def injects(self, name: str) -> bool:
        """Draw whether the fault happens now; never if it is off."""
        fault = self.faults.by_name.get(name)
        if fault is None or self._randoms[name].random() >= fault.probability:
            return False
        self.counts[name] += 1
        return True

    def fraction(self, name: str) -> float:
        """Return a random number in [0, 1): for example where in a work the fault happens."""
        return self._randoms[name].random()

    def magnitude(self, name: str) -> float:
        """Return a random size of the fault: half to one and a half times its configured size."""
        return self.faults.size(name) * (0.5 + self.fraction(name))
