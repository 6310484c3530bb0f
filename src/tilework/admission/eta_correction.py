"""How far off predicted finishes usually are, learned from requests that have finished."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tilework.core.request import Request, Shape

_MOST_KEYS = 4096
_REMEMBERED, _FEW = 15, 3


class _Key(NamedTuple):
    """What predictions are told apart by.

    This is coarser than `cost_key`: guidance and previews change the cost, which the prediction knows, but hardly how
    far off the prediction is; and a median needs several requests.
    """

    pipeline: str
    shape: Shape
    steps: int
    load: int
    asked: str


@dataclass(slots=True)
class EtaCorrection:
    """Medians of actual over predicted latency, by size, by number of jobs present, and by what was asked for.

    A prediction of admission lets each job take, in order, the devices that the policy asks for. Policies that widen
    groups, plan in rounds or let later requests pass do something else, by factors that hardly depend on anything else.
    The medians are of the latest few requests: a mean would follow the rare ones that many others have passed.
    """

    _seen: OrderedDict[_Key, deque[float]] = field(default_factory=OrderedDict)

    def ratio(self, request: Request, num_jobs: int) -> float:
        """The factor for the predicted latency of a request that arrives while so many jobs are present.

        What was asked for counts once a few such requests have been seen. Without any at this number of jobs, the next
        lower range of numbers is taken; 1 if there is none.
        """
        for load in range(_load(num_jobs), -1, -1):
            for key, num_needed in zip(_keys(request, load), (_FEW, 1), strict=True):
                ratios = self._seen.get(key, ())
                if len(ratios) >= num_needed:
                    return median(ratios)
        return 1.0

    def learn(self, request: Request, num_jobs: int, predicted_ns: int, actual_ns: int) -> None:
        """Take in a request that found so many jobs present and finished `actual_ns` after its arrival.

        Nothing is learned where the clock by which it arrived is ahead of ours.
        """
        if predicted_ns <= 0 or actual_ns <= 0:
            return
        for key in _keys(request, _load(num_jobs)):
            self._seen.setdefault(key, deque(maxlen=_REMEMBERED)).append(actual_ns / predicted_ns)
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)


def _keys(request: Request, load: int) -> Iterator[_Key]:
    """The key with what was asked for, and the one without."""
    asked = "promise" if request.is_promise else "none" if request.deadline_ns is None else "deadline"
    for what in (asked, "any"):
        yield _Key(request.pipeline, request.shape, request.steps, load, what)


def _load(num_jobs: int) -> int:
    """The range in which the number of jobs present falls: 0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
