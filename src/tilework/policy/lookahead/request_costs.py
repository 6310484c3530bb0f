"""What requests of a kind take on a node, worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.core.work import DECODE, DIFFUSE, ENCODE, StageId
from tilework.policy.lookahead.batch import WORTH
from tilework.policy.toolkit.degrees import best_doubling
from tilework.policy.toolkit.demand import Speed, step_speeds, worthwhile

_Key = tuple[str, int, int, int, bool, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`speeds` are the degrees that are quicker than every narrower one; `usual` is the index of the degree up to which
    each doubling pays. `shares` tells that two of the kind take less time together, on one device, than one by one.
    Where the time of one alone is a guess, one must have run alone before; works with previews tell no times, and need
    not be known.
    """

    encode_ns: int
    speeds: tuple[Speed, ...]
    usual: int
    decode_ns: int
    shares: bool


@dataclass(slots=True)
class Kinds:
    """The kinds of a version of the costs."""

    _version: int = -1
    _kinds: dict[_Key, Kind] = field(default_factory=dict)

    def of(self, request: Request, num_devices: int, costs: CostModel) -> Kind:
        """On a node of so many devices. Raises UnknownCost."""
        if costs.version != self._version:
            self._kinds, self._version = {}, costs.version
        shape = request.shape  # Its hash takes longer than the rest.
        key = (
            request.pipeline,
            shape.height,
            shape.width,
            shape.frames,
            request.guided,
            request.preview_every,
            num_devices,
        )
        kind = self._kinds.get(key)
        if kind is None:
            encode_ns, decode_ns = (
                costs.work_ns(StageId(request.pipeline, stage), (request,), 1) for stage in (ENCODE, DECODE)
            )
            speeds = tuple(worthwhile(step_speeds(request, costs, num_devices)))
            degree = best_doubling(speeds) if speeds else 0
            usual = max((rank for rank, speed in enumerate(speeds) if speed.degree <= degree), default=0)
            shares = bool(speeds) and speeds[0].degree == 1 and _shares(request, speeds[0].step_ns, costs)
            kind = self._kinds[key] = Kind(
                encode_ns=encode_ns, speeds=speeds, usual=usual, decode_ns=decode_ns, shares=shares
            )
        return kind


def _shares(request: Request, step_ns: int, costs: CostModel) -> bool:
    both, diffuse = (request, request), StageId(request.pipeline, DIFFUSE)
    if not costs.fits_together(diffuse, [one.shape for one in both]):
        return False
    if not (costs.knows(diffuse, request) or request.preview_every):
        return False
    return costs.work_ns(diffuse, both, 1) < (1 - WORTH) * 2 * step_ns
