"""How far off predictions of a finish usually are, learnt from requests that have finished."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from tilework.core.request import Request, Shape

_MOST_KINDS = 4096
_REMEMBERED, _FEW = 15, 3

Kind = tuple[str, Shape, int, int, str]


@dataclass(slots=True)
class EtaCorrection:
    """Medians of actual over predicted latency, by size, by how many are in the system, and by what was asked for.

    The prediction of admission lets everybody take what the policy asks for in order. Policies that widen groups, plan
    in rounds or let later arrivals pass do something else, by factors that hardly depend on anything else. The medians
    are of the latest few requests: a mean would follow the rare ones that were passed by many.
    """

    _seen: OrderedDict[Kind, deque[float]] = field(default_factory=OrderedDict)

    def ratio(self, request: Request, num_jobs: int) -> float:
        """By what to multiply the predicted latency of a request that finds so many others.

        What was asked for counts where a few such requests have been seen. Where nobody came to a crowd like this, the
        next smaller one is taken; 1 if there is none.
        """
        for crowd in range(_crowd(num_jobs), -1, -1):
            for kind, num_needed in zip(_kinds(request, crowd), (_FEW, 1), strict=True):
                ratios = self._seen.get(kind, ())
                if len(ratios) >= num_needed:
                    return median(ratios)
        return 1.0

    def learn(self, request: Request, num_jobs: int, predicted_ns: int, actual_ns: int) -> None:
        """A request that found so many others has finished, `actual_ns` after its arrival.

        Nothing is learnt where the clock by which it arrived is ahead of ours.
        """
        if predicted_ns <= 0 or actual_ns <= 0:
            return
        for kind in _kinds(request, _crowd(num_jobs)):
            self._seen.setdefault(kind, deque(maxlen=_REMEMBERED)).append(actual_ns / predicted_ns)
            self._seen.move_to_end(kind)
        while len(self._seen) > _MOST_KINDS:
            self._seen.popitem(last=False)


def _kinds(request: Request, crowd: int) -> Iterator[Kind]:
    """With what was asked for, and without."""
    asked = "promise" if request.is_promise else "none" if request.deadline_ns is None else "deadline"
    for what in (asked, "any"):
        yield request.pipeline, request.shape, request.steps, crowd, what


def _crowd(num_jobs: int) -> int:
    """0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
