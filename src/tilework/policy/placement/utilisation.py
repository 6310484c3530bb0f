"""The number of instances of each service, and the rule by which one goes to another: by how busy services are.

Theory of operation. A *service* is what has devices of its own: a stage, or several, of one pipeline or of several that
share its weights. An *instance* is a group of devices of one node that is for one service. The first division follows
what requests take (`proportional`); after that, `UtilisationRule` looks at what each service did in a window, and gives
the busiest one more instances: idle ones first, then those of the least used.

Source: OnePiece §5 (Theorem 1) and §8.2, whose examples are a window of 5 minutes and a threshold of 85%. It does not
say how many instances move, nor when one of the least used may go. Ours: as many as bring the busiest down to the
threshold; none that would leave its service less than `margin` below the threshold, so that no instance goes back and
forth; one change in a window, so that each is measured before the next.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

from tilework.core.time import NS_PER_S, s_from_ns

Key = TypeVar("Key", bound=Hashable)
"""A service."""


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a service in a window.

    `share` is the time that its devices were busy, over all their time; more than 1 where requests were refused that
    would have taken more. It keeps `least` instances.
    """

    num_instances: int
    share: float
    least: int = 0

    def share_with(self, num_more: int) -> float:
        """Return the share with this many more instances, or fewer; infinite without any, unless it had no work."""
        if not self.share:
            return 0.0
        num = self.num_instances + num_more
        return self.share * self.num_instances / num if num > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Reassignment(Generic[Key]):
    """The service that gets instances, the services that give one each (None: an idle one), and why."""

    to: Key
    givers: Sequence[Key | None]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationRule:
    """The rule by which a service gets more instances, and from which.

    Attributes:
        window_ns: what use is measured over, and the least time between two changes.
        threshold: the share from which on a service is too busy.
        margin: how far below the threshold a service must be after it has given an instance.
    """

    window_ns: int = 300 * NS_PER_S
    threshold: float = 0.85
    margin: float = 0.1

    def reassignment(self, uses: Mapping[Key, Use], num_idle: int) -> Reassignment[Key] | None:
        """Return the change after a window; None if no service is too busy, or no other can give an instance.

        Of services that are equally busy or equally idle, the first.
        """
        busiest = max(uses, key=lambda key: uses[key].share, default=None)
        if busiest is None or uses[busiest].share <= self.threshold:
            return None
        use = uses[busiest]
        num_wanted = max(1, ceil(use.num_instances * use.share / self.threshold) - use.num_instances)
        givers: list[Key | None] = [None] * min(num_idle, num_wanted)
        while len(givers) < num_wanted and (giver := self._giver(uses, busiest, givers)) is not None:
            givers.append(giver)
        return Reassignment(busiest, givers, self._why(uses, busiest, givers)) if givers else None

    def _giver(self, uses: Mapping[Key, Use], busiest: Key, givers: Sequence[Key | None]) -> Key | None:
        """Return the service that is the least used after it has given one more; None if none may."""
        after = {key: use.share_with(-1 - givers.count(key)) for key, use in uses.items()}
        left = {key: use.num_instances - givers.count(key) for key, use in uses.items()}
        spare = [key for key, use in uses.items() if key != busiest and left[key] > use.least]
        may = [key for key in spare if after[key] <= self.threshold - self.margin]
        return min(may, key=after.__getitem__, default=None)

    def _why(self, uses: Mapping[Key, Use], busiest: Key, givers: Sequence[Key | None]) -> str:
        """Return the change in words, with what each service did."""
        of = [
            f"{givers.count(key)} of {key} ({uses[key].share:.0%})" if key is not None else f"{givers.count(key)} idle"
            for key in dict.fromkeys(givers)
        ]
        over = f"over {s_from_ns(self.window_ns):g} s"
        return f"{over}, {busiest} was asked for {uses[busiest].share:.0%} of its time; it gets {', '.join(of)}"


def proportional(loads: Mapping[Key, float], num_instances: int) -> dict[Key, int]:
    """Give one instance to each service, and each further one to that with most load per instance, the first of equals.

    So the rate that all services can take is as high as it can be.

    Two stages that take `T_X` and `T_Y` get at least K and ceil(K T_Y / T_X) of as many instances (Theorem 1: M for K),
    or others with which the slower of the two is no slower.
    """
    assert num_instances >= len(loads), f"{num_instances} instances are too few for {len(loads)} services"
    counts = dict.fromkeys(loads, 1)
    for _ in range(num_instances - len(counts)) if loads else ():
        counts[max(counts, key=lambda key: loads[key] / counts[key])] += 1
    return counts
