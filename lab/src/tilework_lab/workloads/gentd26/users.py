"""Users and what they ask for: which user begins a session, and how each request follows from the one before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, TypeVar

from tilework_lab.workloads.gentd26.fit import CheckpointFit, Fit

Value = TypeVar("Value")


class Asked(NamedTuple):
    """What a request asks for. `size` is an index into the sizes of its checkpoint."""

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
        """The user of the next session."""
        fit, num_sessions = self._fit, len(self._sessions)
        is_new = self._rng.random() * (num_sessions + fit.theta) < fit.theta + fit.sigma * self._num_users
        user = User() if is_new or not self._sessions else self._former()
        self._num_users += not user.num_sessions
        user.num_sessions += 1
        self._sessions.append(user)
        return user

    def _former(self) -> User:
        """A user that has come before, with a probability in proportion to its sessions less `sigma`."""
        while True:
            user = self._rng.choice(self._sessions)
            if self._rng.random() >= self._fit.sigma / user.num_sessions:
                return user


class Choices:
    """What users ask for on one day, whose shares of fresh draws are drawn from a Dirichlet distribution."""

    def __init__(self, fit: Fit, rng: Random) -> None:
        self._fit = fit
        self._rng = rng
        self._fresh = [rng.gammavariate(fit.kappa * one.fresh, 1.0) for one in fit.checkpoints]

    def next(self, user: User, *, in_session: bool) -> Asked:
        """The next request of a user, in the session of the one before or in a new one."""
        fit, last = self._fit, user.last
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
        fit, rng, last = self._fit, self._rng, user.last
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
        """The value of the request before, or one drawn by these shares, so that both are equal in a share `same`."""
        by_chance = sum(share**2 for share in shares.values()) / sum(shares.values()) ** 2
        keeps = max(0.0, (same - by_chance) / (1 - by_chance)) if by_chance < 1 else 0.0
        if last is not None and self._rng.random() < keeps:
            return last
        return drawn(tuple(shares), shares.values(), self._rng)


def drawn(values: Sequence[Value], weights: Iterable[float], rng: Random) -> Value:
    """One of these values, with a probability in proportion to its weight."""
    return rng.choices(values, tuple(weights))[0]
