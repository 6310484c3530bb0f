"""Corrections of predicted finishes, learned from requests that have finished."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from tilework.core.request import Request, Shape

_MOST_KEYS = 4096
_REMEMBERED, _FEW = 15, 3


_Key = tuple[str, Shape, int, int, str]
"""Pipeline, shape, steps, range of the number of jobs, and type of deadline: such requests share a correction.

It is coarser than `cost_key`: guidance and previews change the cost, which the prediction knows, but hardly the error
of the prediction; and a median needs several requests.
"""


@dataclass(slots=True)
class EtaCorrection:
    """Medians of actual over predicted latency, by size, by number of jobs present, and by type of deadline.

    Admission predicts that each job takes, in order, the devices that the policy asks for. Policies that widen groups,
    plan in rounds or let later requests overtake do something else, by factors that depend on little but this key. The
    medians are of the latest few requests: a mean would follow the rare requests that many others have overtaken.
    """

    _seen: OrderedDict[_Key, deque[float]] = field(default_factory=OrderedDict)

    def ratio(self, request: Request, num_jobs: int) -> float:
        """The factor for the predicted latency of a request that arrives while `num_jobs` jobs are present.

        The type of deadline counts once a few such requests have been seen. Without any request at this number of jobs,
        the next lower range of numbers is used; 1 if there is none.
        """
        for load in range(_load(num_jobs), -1, -1):
            for key, num_needed in zip(_keys(request, load), (_FEW, 1), strict=True):
                ratios = self._seen.get(key, ())
                if len(ratios) >= num_needed:
                    return median(ratios)
        return 1.0

    def learn(self, request: Request, num_jobs: int, predicted_ns: int, actual_ns: int) -> None:
        """Learn from a request that found `num_jobs` jobs present and finished `actual_ns` after its arrival.

        Nothing is learned if its arrival, by the client's clock, is later than its end.
        """
        if predicted_ns <= 0 or actual_ns <= 0:
            return
        for key in _keys(request, _load(num_jobs)):
            self._seen.setdefault(key, deque(maxlen=_REMEMBERED)).append(actual_ns / predicted_ns)
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)


def _keys(request: Request, load: int) -> Iterator[_Key]:
    """The key with the type of deadline, and the key for any type."""
    own = "promise" if request.is_promise else "none" if request.deadline_ns is None else "deadline"
    for deadline in (own, "any"):
        yield request.pipeline, request.shape, request.steps, load, deadline


def _load(num_jobs: int) -> int:
    """The range in which the number of jobs present falls: 0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
