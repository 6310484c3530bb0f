"""The costs of requests on a node, computed once per class of requests whose steps cost the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel
from tilework.core.request import Request, StepClass, step_key
from tilework.core.work import DECODE, DIFFUSE, ENCODE, StageId
from tilework.policy.lookahead.batch import LEAST_SAVED
from tilework.policy.toolkit.degrees import best_doubling
from tilework.policy.toolkit.demand import Speed, step_speeds, worthwhile

_MOST_CLASSES = 10_000
_UNKNOWN = (0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs of requests of a class on a node with a given number of devices.

    `speeds` are the degrees that are faster than every narrower one; `usual` is the index of the degree up to which
    each doubling pays. `shares`: two such requests take less time in a batch, on one device, than one after the other.
    Where the time of one alone is a guess, `shares` is false until one has run alone. Requests with previews are an
    exception: their works measure nothing.
    """

    encode_ns: int
    speeds: tuple[Speed, ...]
    usual: int
    decode_ns: int
    shares: bool

    def alone_ns(self, num_steps: int) -> int:
        """The time of a request with this many steps at the fastest degree."""
        step_ns = self.speeds[-1].step_ns if self.speeds else 0
        return self.encode_ns + num_steps * step_ns + self.decode_ns


@dataclass(slots=True)
class RequestCosts:
    """The costs of each class of requests, computed again when the cost model has learned of such requests."""

    _known: dict[tuple[StepClass, int], tuple[int, StepCosts]] = field(default_factory=dict)

    def of(self, request: Request, num_devices: int, costs: CostModel) -> StepCosts:
        """The costs on a node of `num_devices`. Raises UnknownCost."""
        key, version = (step_key(request), num_devices), costs.version_of(request)
        known_version, known = self._known.get(key, _UNKNOWN)
        if known is not None and known_version == version:
            return known
        if len(self._known) >= _MOST_CLASSES:  # Clients choose the shapes.
            self._known.clear()
        known = _step_costs(request, num_devices, costs)
        self._known[key] = version, known
        return known


def _step_costs(request: Request, num_devices: int, costs: CostModel) -> StepCosts:
    encode_ns, decode_ns = (
        costs.work_ns(StageId(request.pipeline, stage), (request,), 1) for stage in (ENCODE, DECODE)
    )
    speeds = tuple(worthwhile(step_speeds(request, costs, num_devices)))
    degree = best_doubling(speeds) if speeds else 0
    return StepCosts(
        encode_ns=encode_ns,
        speeds=speeds,
        usual=max((rank for rank, speed in enumerate(speeds) if speed.degree <= degree), default=0),
        decode_ns=decode_ns,
        shares=bool(speeds) and speeds[0].degree == 1 and _shares(request, speeds[0].step_ns, costs),
    )


def _shares(request: Request, step_ns: int, costs: CostModel) -> bool:
    both, diffuse = (request, request), StageId(request.pipeline, DIFFUSE)
    if not costs.fits_together(diffuse, [one.shape for one in both]):
        return False
    if not (costs.knows(diffuse, request) or request.preview_every):
        return False
    return costs.work_ns(diffuse, both, 1) < (1 - LEAST_SAVED) * 2 * step_ns
