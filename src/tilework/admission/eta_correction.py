"""Corrections of predicted finishes, and the spread of their errors, learned from requests that have finished."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import median

from tilework.admission.contract import EtaPrediction
from tilework.core.request import Request, Shape
from tilework.policy.toolkit.known_demands import ByClass

_MOST_SIZES = 1024
_MOST_SPREADS = 4096
_REMEMBERED, _FEW = 15, 3  # Of a size.
_REMEMBERED_TOLD = 50
_QUANTILE = 0.9
_UNDISTURBED, _OVERTAKEN = (1.0, 1.0, 1.0, 1.3, 1.3), (1.0, 1.0, 1.5, 2.0, 3.0, 3.0)
"""Ratios that count as seen from the start: of requests that are to be on time or find no others, and of all others."""

_Size = tuple[str, Shape, int, bool]
"""Pipeline, shape, steps, and whether the policy predicted the end: such requests share corrections.

It is coarser than `cost_key`: guidance and previews change the cost, which the prediction includes, but hardly the
error of the prediction; and a median needs several requests.
"""
_Ratios = dict[tuple[int, str], deque[float]]
"""Ratios by range of the number of jobs, and by type of deadline."""
_Spread = tuple[str, bool, str, int]
"""Pipeline, whether the policy predicted the end, type of deadline, range of the number of jobs."""


@dataclass(slots=True)
class EtaCorrection:
    """Corrections of predicted finishes, learned from actual ones.
    They are medians of actual over predicted latency, by size, number of jobs present and type of deadline; and the
    spread of actual over told latency, by number of jobs and type of deadline.

    Predictions leave out later requests. Those of a list schedule also leave out what policies do beyond it: they widen
    groups, plan in rounds, or let later requests overtake. The factors depend on little but the keys above. The medians
    are of the latest few requests: a mean would follow the rare requests that many others have overtaken.

    Lessons of an overload do not change what an idle server predicts: a request that found no others counts as one that
    found as many as came while it was there.
    """

    _seen: ByClass[_Size, _Ratios] = field(default_factory=partial(ByClass, _MOST_SIZES))
    _told: ByClass[_Spread, deque[float]] = field(default_factory=partial(ByClass, _MOST_SPREADS))

    def predict(
        self, request: Request, now_ns: int, end_ns: int, num_jobs: int, *, is_foreseen: bool = False
    ) -> EtaPrediction:
        """Return the prediction, made now, of a request that would end at `end_ns`, with `num_jobs` others present.

        A policy that foresees ends keeps deadlines. So its error moves an end towards the deadline, but not across it.
        """
        end_ns = max(now_ns, end_ns)
        due_ns = request.deadline_ns
        raw = EtaPrediction(now_ns, end_ns, end_ns, end_ns, num_jobs, is_foreseen)
        eta_ns = now_ns + int(self._ratio(request, raw) * (end_ns - now_ns))
        if is_foreseen and due_ns is not None:
            eta_ns = min(eta_ns, due_ns) if end_ns <= due_ns else max(eta_ns, end_ns)
        p90_ns = now_ns + int(self._spread(request, raw) * (eta_ns - now_ns))
        return EtaPrediction(now_ns, end_ns, eta_ns, p90_ns, num_jobs, is_foreseen)

    def _ratio(self, request: Request, raw: EtaPrediction) -> float:
        """Return the factor for the latency.

        The type of deadline counts once a few such requests have been seen. Without any request at this number of jobs,
        the next lower range of numbers is used; 1 if there is none.
        """
        seen = self._seen.get(_size(request, raw))
        if seen is None:
            return 1.0
        for load in range(_load(raw.num_jobs), -1, -1):
            for deadline, num_needed in zip((_deadline(request, raw), "any"), (_FEW, 1), strict=True):
                ratios = seen.get((load, deadline), ())
                if len(ratios) >= num_needed:
                    return median(ratios)
        return 1.0

    def _spread(self, request: Request, raw: EtaPrediction) -> float:
        """Return the factor that nine of ten do not exceed, at least 1."""
        is_undisturbed = not raw.num_jobs or _deadline(request, raw) in ("promise", "deadline")
        seen = _UNDISTURBED if is_undisturbed else _OVERTAKEN
        ratios: list[float] = sorted([*seen, *self._told.get(_spread(request, raw), ())])
        index: int = min(len(ratios), ceil(_QUANTILE * (len(ratios) + 1))) - 1
        return max(1.0, ratios[index])

    def forget(self, pipeline: str) -> None:
        """Drop all that was learned from requests for a pipeline."""
        self._seen.forget(pipeline)
        self._told.forget(pipeline)

    def learn(self, request: Request, prediction: EtaPrediction, now_ns: int, num_came: int) -> None:
        """Learn from a request that has just finished; `num_came` others have come since it did."""
        actual_ns, predicted_ns = now_ns - prediction.at_ns, prediction.end_ns - prediction.at_ns
        told_ns = prediction.eta_ns - prediction.at_ns
        if predicted_ns <= 0 or told_ns <= 0:
            return
        size = _size(request, prediction)
        load = _load(prediction.num_jobs or num_came)
        seen = self._seen.get(size, {})
        for deadline in (_deadline(request, prediction), "any"):
            seen.setdefault((load, deadline), deque(maxlen=_REMEMBERED)).append(actual_ns / predicted_ns)
        self._seen.renew(size, seen)
        spread = _spread(request, prediction)
        told = self._told.get(spread, deque(maxlen=_REMEMBERED_TOLD))
        told.append(actual_ns / told_ns)
        self._told.renew(spread, told)


def _size(request: Request, prediction: EtaPrediction) -> _Size:
    return request.pipeline, request.shape, request.steps, prediction.is_foreseen


def _spread(request: Request, prediction: EtaPrediction) -> _Spread:
    return request.pipeline, prediction.is_foreseen, _deadline(request, prediction), _load(prediction.num_jobs)


def _deadline(request: Request, prediction: EtaPrediction) -> str:
    """Return the type of its deadline: none, one before its predicted end (missed), a promise, or any other."""
    if request.deadline_ns is None:
        return "none"
    if prediction.end_ns > request.deadline_ns:
        return "missed"
    return "promise" if request.is_promise else "deadline"


def _load(num_jobs: int) -> int:
    """Return the range of the number of jobs present: 0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
