"""How far off predictions of a finish usually are, learnt from requests that have finished."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilework.core.request import Request, Shape

_LEAST, _MOST = 0.25, 4.0
_MOST_KINDS = 4096
_MANY = 3

Kind = tuple[str, Shape, int, int, str]


@dataclass(slots=True)
class _Mean:
    """An exponentially weighted mean of ratios."""

    ratio: float
    num_seen: int = 1

    def add(self, ratio: float, weight: float) -> None:
        self.ratio += max(weight, 1 / (self.num_seen + 1)) * (ratio - self.ratio)
        self.num_seen += 1


@dataclass(slots=True)
class Experience:
    """Means of actual over predicted latency, by size, by how many are in the system, and by what was asked for.

    The prediction of admission lets everybody take what the policy asks for in order. Policies that widen groups, plan
    in rounds or let later arrivals pass do something else, by factors that hardly depend on anything else. `weight` is
    that of one observation among many.
    """

    weight: float = 0.2
    _means: OrderedDict[Kind, _Mean] = field(default_factory=OrderedDict)

    def ratio(self, request: Request, num_jobs: int) -> float:
        """By what to multiply the predicted latency of a request that finds so many others.

        What was asked for counts where a few such requests have been seen. Where nobody came to a crowd like this, the
        next smaller one is taken; 1 if there is none.
        """
        for crowd in range(_crowd(num_jobs), -1, -1):
            for kind, num_needed in zip(_kinds(request, crowd), (_MANY, 1), strict=True):
                mean = self._means.get(kind)
                if mean is not None and mean.num_seen >= num_needed:
                    return mean.ratio
        return 1.0

    def learn(self, request: Request, num_jobs: int, predicted_ns: int, actual_ns: int) -> None:
        """A request that found so many others has finished, `actual_ns` after its arrival."""
        if predicted_ns <= 0:
            return
        ratio = min(_MOST, max(_LEAST, actual_ns / predicted_ns))
        for kind in _kinds(request, _crowd(num_jobs)):
            if kind in self._means:
                self._means[kind].add(ratio, self.weight)
                self._means.move_to_end(kind)
            else:
                self._means[kind] = _Mean(ratio)
        while len(self._means) > _MOST_KINDS:
            self._means.popitem(last=False)


def _kinds(request: Request, crowd: int) -> Iterator[Kind]:
    """With what was asked for, and without."""
    asked = "promise" if request.is_promise else "none" if request.deadline_ns is None else "deadline"
    for what in (asked, "any"):
        yield request.pipeline, request.shape, request.steps, crowd, what


def _crowd(num_jobs: int) -> int:
    """0, 1, 2-3, 4-7 and so on."""
    return num_jobs.bit_length()
