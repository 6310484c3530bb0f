"""A Stable Diffusion service with many checkpoints on few devices, fitted to the trace GenTD26, and its users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from random import Random
from typing import ClassVar, NamedTuple, TypeVar

from tilework.core.request import Shape
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import Item, WorkloadFamily, numbered, parameter, request_of, stream
from tilework_lab.workloads.gentd26.fit import CheckpointFit, Fit, read_fit

S_PER_HOUR = 3600
_EARLIER_DAYS = 3  # Before the day that counts, so that some of its users have come before.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenTD26(WorkloadFamily):
    """Hours of a working day of a service with 73 checkpoints, fitted to a production trace.

    Sessions begin at random at the rates of the day; their users, checkpoints, numbers of images and steps, lengths
    and gaps have the fitted distributions. A request for n images is one request whose shape has n frames: the cost
    table gives it the time of n images on one device. A deadline is `slo` times the inference alone, without loads.

    Ours: sizes, which the trace lacks; the inference time by images and pixels; deadlines; which of a user's earlier
    checkpoints a switch goes back to. Left out: LoRAs (4.5 s for a sixth of the requests), failures (1.3%), the day's
    own busyness, and the share of the session length that is the user's (2%).

    Source: GenTD26 (cluster-trace-v2026-GenAI of github.com/alibaba/clusterdata; Lin et al., SoCC 2025). The package
    has parameters fitted to it, and no row of it.
    """

    name: ClassVar[str] = "gentd26"
    source: ClassVar[str] = "GenTD26 (fitted)"
    about: ClassVar[str] = "many checkpoints on few devices"
    table: ClassVar[str] = "gentd26"
    num_devices: ClassVar[int] = 4

    load: float = parameter(0.5, "Inference work over capacity by the rates of the fit; a tenth less comes.", above=0)
    slo: float = parameter(3.5, "Deadline over the inference time.", above=0)
    from_hour: int = parameter(14, "Hour of the day when the workload begins.", least=0, most=23)
    to_hour: int = parameter(18, "Hour of the day when it ends.", least=1, most=24)
    devices: int = parameter(4, "Number of devices that `load` is for.", least=1)

    def __post_init__(self) -> None:
        WorkloadFamily.__post_init__(self)  # Dataclasses with slots know no super().
        if self.to_hour <= self.from_hour:
            raise self.refuse("to_hour", f"use an hour after {self.from_hour}, or an earlier from_hour")

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        """Return the requests of a day, after some others that make its users known; times count from `from_hour`."""
        fit = read_fit()
        users = Users(fit, stream(seed, "users"))
        begin_s, end_s = self.from_hour * S_PER_HOUR, self.to_hour * S_PER_HOUR
        day: list[tuple[float, Asked]] = []
        for number in range(_EARLIER_DAYS + 1):
            day = list(self._day(fit, users, seed, number))
        return numbered(self._request(at_s - begin_s, asked) for at_s, asked in day if begin_s <= at_s < end_s)

    def _day(self, fit: Fit, users: Users, seed: int, number: int) -> Iterator[tuple[float, Asked]]:
        """Yield the requests of one day and when they come, session by session."""
        arrivals, lengths = stream(seed, f"sessions of day {number}"), stream(seed, f"gaps of day {number}")
        choices = Choices(fit, stream(seed, f"choices of day {number}"))
        for begin_s in self._sessions_s(fit, arrivals):
            user = users.next()
            at_s = begin_s
            for index in range(_length(fit, lengths)):
                at_s += _gap_s(fit, lengths) if index else 0.0
                yield at_s, choices.next(user, in_session=index > 0)

    def _sessions_s(self, fit: Fit, rng: Random) -> Iterator[float]:
        """Draw the starts of sessions, ascending: a Poisson process with the rate of each hour, scaled to the load."""
        rates = fit.sessions_per_hour
        hours = rates[self.from_hour : self.to_hour]
        work_s = sum(hours) / len(hours) * fit.mean_length * fit.mean_infer_s
        scale = self.load * self.devices * S_PER_HOUR / work_s
        for hour, rate in enumerate(rates):
            at = rng.expovariate(rate * scale) if rate else 1.0
            while at < 1:
                yield (hour + at) * S_PER_HOUR
                at += rng.expovariate(rate * scale)

    def _request(self, at_s: float, asked: Asked) -> WorkloadRequest:
        size = tuple(asked.checkpoint.sizes)[asked.size]
        item = Item(asked.checkpoint.pipeline, Shape(size.height, size.width, asked.images), asked.steps)
        return request_of(at_s, item, self.slo * self.scale * self.optimal_s(item))


def _length(fit: Fit, rng: Random) -> int:
    """Return the number of requests of a session."""
    while True:
        length = round(rng.lognormvariate(fit.length_mu, fit.length_sigma))
        if length:
            return min(length, fit.longest)


def _gap_s(fit: Fit, rng: Random) -> float:
    """Return the time between two requests of a session."""
    if rng.random() < fit.together:
        return 1.0
    while True:
        _, median_s, sigma = rng.choices(fit.gaps, [weight for weight, _, _ in fit.gaps])[0]
        gap_s = exp(rng.normalvariate(log(median_s), sigma))
        if gap_s < fit.longest_gap_s:
            return gap_s


Value = TypeVar("Value")


class Asked(NamedTuple):
    """Contents of a request. `size` is an index into the sizes of its checkpoint."""

    checkpoint: CheckpointFit
    images: int
    steps: int
    size: int


@dataclass(slots=True, eq=False)
class User:
    """The number of sessions of a user, the latest request, and the checkpoints used so far, in order of first use."""

    num_sessions: int = 0
    last: Asked | None = None
    used: dict[int, CheckpointFit] = field(default_factory=dict)


class Users:
    """All users so far. The user of a session follows a Pitman-Yor process: most are new, a few come often."""

    def __init__(self, fit: Fit, rng: Random) -> None:
        self._fit = fit
        self._rng = rng
        self._sessions: list[User] = []
        self._num_users = 0

    def next(self) -> User:
        """Return the user of the next session."""
        fit = self._fit
        num_sessions = len(self._sessions)
        is_new = self._rng.random() * (num_sessions + fit.theta) < fit.theta + fit.sigma * self._num_users
        user = User() if is_new or not self._sessions else self._former()
        self._num_users += not user.num_sessions
        user.num_sessions += 1
        self._sessions.append(user)
        return user

    def _former(self) -> User:
        """Return a user that has come before, with a probability in proportion to its sessions less `sigma`."""
        while True:
            user = self._rng.choice(self._sessions)
            if self._rng.random() >= self._fit.sigma / user.num_sessions:
                return user


class Choices:
    """Requests of users on one day, whose shares of fresh draws are drawn from a Dirichlet distribution."""

    def __init__(self, fit: Fit, rng: Random) -> None:
        self._fit = fit
        self._rng = rng
        self._fresh = [rng.gammavariate(fit.kappa * one.fresh, 1.0) for one in fit.checkpoints]

    def next(self, user: User, *, in_session: bool) -> Asked:
        """Return the next request of a user, in the session of the one before or in a new one."""
        fit = self._fit
        last = user.last
        checkpoint = self._checkpoint(user, in_session=in_session)
        known = last if in_session else None
        shares = tuple(checkpoint.sizes.values())
        user.last = Asked(
            checkpoint,
            self._kept(known and known.images, checkpoint.images, fit.same_images),
            self._kept(known and known.steps, checkpoint.steps, fit.same_steps),
            self._kept(known and known.size, dict(enumerate(shares)), fit.same_size),
        )
        user.used.setdefault(checkpoint.rank, checkpoint)
        return user.last

    def _checkpoint(self, user: User, *, in_session: bool) -> CheckpointFit:
        fit = self._fit
        rng = self._rng
        last = user.last
        if last is None:
            return self._drawn()
        stays = last.checkpoint.stay if in_session else 1 - fit.switch_anew
        if rng.random() < stays:
            return last.checkpoint
        others = [one for one in user.used.values() if one is not last.checkpoint]
        if others and rng.random() < fit.returns:
            return rng.choice(others)
        while (other := self._drawn()) is last.checkpoint:
            pass
        return other

    def _drawn(self) -> CheckpointFit:
        return drawn(self._fit.checkpoints, self._fresh, self._rng)

    def _kept(self, last: int | None, shares: Mapping[int, float], same: float) -> int:
        """Return the value of the request before, or one drawn by these shares, so that both are equal in a share
        `same`.
        """
        by_chance = sum(share**2 for share in shares.values()) / sum(shares.values()) ** 2
        keeps = max(0.0, (same - by_chance) / (1 - by_chance)) if by_chance < 1 else 0.0
        if last is not None and self._rng.random() < keeps:
            return last
        return drawn(tuple(shares), shares.values(), self._rng)


def drawn(values: Sequence[Value], weights: Iterable[float], rng: Random) -> Value:
    """Draw one of these values, with a probability in proportion to its weight."""
    return rng.choices(values, tuple(weights))[0]
