"""Corrections of predicted finishes, learned from requests that have finished."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from tilework.core.request import Request, Shape
from tilework.policy.toolkit.known_demands import ByClass

_MOST_SIZES = 1024
_REMEMBERED, _FEW = 15, 3

_Size = tuple[str, Shape, int]
"""Pipeline, shape and steps: such requests share corrections.

It is coarser than `cost_key`: guidance and previews change the cost, which the prediction knows, but hardly the error
of the prediction; and a median needs several requests.
"""
_Ratios = dict[tuple[int, str], deque[float]]
"""By range of the number of jobs, and by type of deadline."""


@dataclass(slots=True)
class EtaCorrection:
    """Medians of actual over predicted latency, by size, by number of jobs present, and by type of deadline.

    Admission predicts that each job takes, in order, the devices that the policy asks for. Policies that widen groups,
    plan in rounds or let later requests overtake do something else, by factors that depend on little but this. The
    medians are of the latest few requests: a mean would follow the rare requests that many others have overtaken.
    """

    _seen: ByClass[_Size, _Ratios] = field(default_factory=partial(ByClass, _MOST_SIZES))

    def ratio(self, request: Request, num_jobs: int) -> float:
        """The factor for the predicted latency of a request that arrives while `num_jobs` jobs are present.

        The type of deadline counts once a few such requests have been seen. Without any request at this number of jobs,
        the next lower range of numbers is used; 1 if there is none.
        """
        seen = self._seen.get((request.pipeline, request.shape, request.steps))
        if seen is None:
            return 1.0
        for load in range(_load(num_jobs), -1, -1):
            for deadline, num_needed in zip(_deadlines(request), (_FEW, 1), strict=True):
                ratios = seen.get((load, deadline), ())
                if len(ratios) >= num_needed:
                    return median(ratios)
        return 1.0

    def forget(self, pipeline: str) -> None:
        """Drop what was learned from requests for a pipeline."""
        self._seen.forget(pipeline)

    def learn(self, request: Request, num_jobs: int, predicted_ns: int, actual_ns: int) -> None:
        """Learn from a request that found `num_jobs` jobs present and finished `actual_ns` after its arrival.

        Nothing is learned if its arrival, by the client's clock, is later than its end.
        """
        if predicted_ns <= 0 or actual_ns <= 0:
            return
        size, load = (request.pipeline, request.shape, request.steps), _load(num_jobs)
        seen = self._seen.get(size, {})
        for deadline in _deadlines(request):
            seen.setdefault((load, deadline), deque(maxlen=_REMEMBERED)).append(actual_ns / predicted_ns)
        self._seen.renew(size, seen)


def _deadlines(request: Request) -> tuple[str, str]:
    """The type of its deadline, and what stands for any type."""
    return "promise" if request.is_promise else "none" if request.deadline_ns is None else "deadline", "any"


def _load(num_jobs: int) -> int:
    """The range in which the number of jobs present falls: 0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
