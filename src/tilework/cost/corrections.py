"""Corrections of predicted times: the ratio of measured to predicted time, learned from works."""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_FACTOR = 4.0

CorrectionKey = tuple[str, str, int, int, int, int]
"""The key of a correction: pipeline, stage, degree, number of requests, their pixels, how many of them are guided.

A shape on its side has the same key. Guidance matters for steps only."""

StageKey = tuple[str, str, int]
"""Pipeline, stage and degree."""


@dataclass(slots=True)
class Corrections:
    """Exponentially weighted means of measured over expected time; each measurement has the weight `weight`.

    A measurement counts as at most four times what was expected, so that one outlier does not make every later request
    look infeasible. There are many different batches, and each is rare: one that has not been measured is corrected
    like the recent batches of its stage.
    """

    weight: float
    _learned: dict[CorrectionKey, float] = field(default_factory=dict, init=False)
    _recent: dict[StageKey, float] = field(default_factory=dict, init=False)  # Batches.
    _prediction_error: dict[StageKey, float] = field(default_factory=dict, init=False)

    def __contains__(self, key: CorrectionKey) -> bool:
        """Whether works of this key were measured."""
        return key in self._learned

    def single(self, key: CorrectionKey) -> float | None:
        """The correction of a work of one request; None until one has been measured."""
        return self._learned.get(key)

    def batch(self, key: CorrectionKey) -> float | None:
        """The correction of a batch; None until a batch of its stage has been measured."""
        return self._learned.get(key, self._recent.get(key[:3]))

    def prediction_error(self, stage: StageKey) -> float:
        """The recent mean of |measured / predicted - 1| of batches; 0 if none were measured."""
        return self._prediction_error.get(stage, 0.0)

    def forget(self, pipeline: str) -> None:
        """Drop what was learned of a pipeline."""
        self._learned = {key: factor for key, factor in self._learned.items() if key[0] != pipeline}
        self._recent = {key: factor for key, factor in self._recent.items() if key[0] != pipeline}
        self._prediction_error = {key: one for key, one in self._prediction_error.items() if key[0] != pipeline}

    def observe_single(self, key: CorrectionKey, ratio: float) -> bool:
        """Learn from a work of one request; returns whether the correction has changed."""
        before = self._learned.get(key)
        new = self._learned[key] = self._mean(before, ratio)
        return new != before

    def observe_batch(self, key: CorrectionKey, ratio: float) -> bool:
        """The same for a work of several requests."""
        stage = key[:3]
        before, prediction_error = self.batch(key), self.prediction_error(stage)
        new = self._learned[key] = self._mean(before, ratio)
        self._recent[stage] = self._mean(self._recent.get(stage), ratio)
        error = min(1.0, abs(ratio / (1.0 if before is None else before) - 1.0))
        self._prediction_error[stage] = prediction_error + self.weight * (error - prediction_error)
        return new != before or error != prediction_error

    def _mean(self, old: float | None, ratio: float) -> float:
        """The mean with one more measurement. The first counts in full, within _MAX_FACTOR."""
        expected = 1.0 if old is None else old
        clipped = min(_MAX_FACTOR * expected, max(expected / _MAX_FACTOR, ratio))
        return clipped if old is None else old + self.weight * (clipped - old)
