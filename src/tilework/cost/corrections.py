"""Corrections of predicted times: the ratio of measured to predicted time, learned from works."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

_MAX_FACTOR = 4.0
_MOST = 4096  # Clients choose the shapes.
_REMEMBERED = 15
_FEW = 3
_FAR, _NEAR = 1.5, 1.25

CorrectionKey = tuple[str, str, int, int, int, int]
"""Key of a correction: pipeline, stage, degree, number of requests, their pixels, number of them that are guided.

A shape on its side has the same key. Guidance matters for steps only.
"""

StageKey = tuple[str, str, int]
"""Pipeline, stage and degree."""

Deviations = Mapping[tuple[str, str], float]
"""Measured over expected time by pipeline and stage, of the stages where it is off by more than half."""

_Key = TypeVar("_Key", bound=Hashable)
_Named = TypeVar("_Named", CorrectionKey, StageKey, tuple[str, str])
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Corrections:
    """Exponentially weighted means of measured over expected time; each measurement has the weight `weight`.

    A measurement counts as at most four times what was expected, so that one outlier does not make every later request
    look infeasible. There are many different batches, and each is rare: a batch that has not been measured is corrected
    like the recent batches of its stage. If the median of the latest single works of a stage is off by more than half,
    the times of its unmeasured shapes and degrees are corrected, too, until it is off by less than a quarter: such a
    table is of another machine, or was measured beside other work.

    Of each kind `_MOST` are kept; the least recently measured one is forgotten first.
    """

    weight: float
    _learned: OrderedDict[CorrectionKey, float] = field(default_factory=OrderedDict, init=False)
    _recent: OrderedDict[StageKey, float] = field(default_factory=OrderedDict, init=False)  # Batches.
    _prediction_error: OrderedDict[StageKey, float] = field(default_factory=OrderedDict, init=False)
    _ratios: OrderedDict[tuple[str, str], deque[float]] = field(default_factory=OrderedDict, init=False)  # Singles.
    _deviations: dict[tuple[str, str], float] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Return the number of entries of all kinds."""
        return len(self._learned) + len(self._recent) + len(self._prediction_error) + len(self._ratios)

    def __contains__(self, key: CorrectionKey) -> bool:
        """Return whether works of this key were measured."""
        return key in self._learned

    def single(self, key: CorrectionKey) -> float | None:
        """Return the correction of a work of one request; None until one has been measured."""
        return self._learned.get(key)

    def usual(self, pipeline: str, stage: str) -> float:
        """Return the correction of works of one request that have not been measured, from others of their stage.
        It is 1 unless the stage is among the deviations.
        """
        return min(_MAX_FACTOR, max(1 / _MAX_FACTOR, self._deviations.get((pipeline, stage), 1.0)))

    @property
    def deviations(self) -> Deviations:
        """Deviations by the latest works of one request."""
        return self._deviations

    def batch(self, key: CorrectionKey) -> float | None:
        """Return the correction of a batch; None until a batch of its stage has been measured."""
        return self._learned.get(key, self._recent.get(key[:3]))

    def prediction_error(self, stage: StageKey) -> float:
        """Return the recent mean of |measured / predicted - 1| of batches; 0 if none were measured."""
        return self._prediction_error.get(stage, 0.0)

    def forget(self, pipeline: str) -> None:
        """Drop all corrections of a pipeline."""
        _forget(self._learned, pipeline)
        _forget(self._recent, pipeline)
        _forget(self._prediction_error, pipeline)
        _forget(self._ratios, pipeline)
        _forget(self._deviations, pipeline)

    def observe_single(self, key: CorrectionKey, ratio: float, unknown: float = 1.0) -> bool:
        """Learn from a work of one request; returns whether its correction has changed.

        `unknown` is the factor by which such a work was corrected until one was measured.
        """
        before = self._learned.get(key)
        new = self._mean(before, ratio)
        _keep(self._learned, key, new)
        stage = key[:2]
        ratios = self._ratios.get(stage, deque(maxlen=_REMEMBERED))
        ratios.append(ratio / unknown)
        if (oldest := _keep(self._ratios, stage, ratios)) is not None:
            self._deviations.pop(oldest, None)
        if (middle := deviation(ratios, _NEAR if stage in self._deviations else _FAR)) is None:
            self._deviations.pop(stage, None)
        else:
            self._deviations[stage] = middle
        return new != before

    def observe_batch(self, key: CorrectionKey, ratio: float) -> bool:
        """Learn from a work of several requests; returns whether a correction has changed, or the prediction error."""
        stage = key[:3]
        before = self.batch(key)
        prediction_error = self.prediction_error(stage)
        new = self._mean(before, ratio)
        _keep(self._learned, key, new)
        _keep(self._recent, stage, self._mean(self._recent.get(stage), ratio))
        error = min(1.0, abs(ratio / (1.0 if before is None else before) - 1.0))
        _keep(self._prediction_error, stage, prediction_error + self.weight * (error - prediction_error))
        return new != before or error != prediction_error

    def _mean(self, old: float | None, ratio: float) -> float:
        """Return the mean with one more measurement. The first counts in full, within _MAX_FACTOR."""
        expected = 1.0 if old is None else old
        clipped = min(_MAX_FACTOR * expected, max(expected / _MAX_FACTOR, ratio))
        return clipped if old is None else old + self.weight * (clipped - old)


def deviation(ratios: Collection[float], far: float = _FAR) -> float | None:
    """Return the median of these ratios of measured to expected time if it is off by more than the factor `far`.
    None if it is not, or if there are too few ratios.
    """
    middle = median(ratios) if len(ratios) >= _FEW else 1.0
    return None if 1 / far <= middle <= far else middle


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> _Key | None:
    """Keep a value as the latest; returns the key of the one that is forgotten for it, if any."""
    kept[key] = value
    kept.move_to_end(key)
    return kept.popitem(last=False)[0] if len(kept) > _MOST else None


def _forget(kept: MutableMapping[_Named, _Value], pipeline: str) -> None:
    for key in [one for one in kept if one[0] == pipeline]:
        del kept[key]
