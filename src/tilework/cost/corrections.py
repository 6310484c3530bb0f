"""What measurements teach of works: how much longer, or less long, they take than expected."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.core.work import StageId

_FARTHEST = 4.0

Place = tuple[StageId, int, int, int, int]
"""What has a correction of its own: stage, degree, number of members, their pixels, how many of them are guided. Turned
on its side, a shape has the same. Guidance concerns steps only."""


@dataclass(slots=True)
class Corrections:
    """Exponentially weighted means of measured over expected time, each measurement weighing `weight`.

    None counts as more than four times what was expected, so that one outlier cannot close the door. There are many
    batches, and each is rare: one that has not been measured is corrected like the batches of its stage lately.
    """

    weight: float
    _learnt: dict[Place, float] = field(default_factory=dict, init=False)
    _lately: dict[tuple[StageId, int], float] = field(default_factory=dict, init=False)  # Of batches, by their degree.
    _prediction_error: dict[tuple[StageId, int], float] = field(default_factory=dict, init=False)  # The same.

    def __contains__(self, place: Place) -> bool:
        """Whether it was measured itself."""
        return place in self._learnt

    def single(self, place: Place) -> float | None:
        """None as long as nothing has been measured."""
        return self._learnt.get(place)

    def batch(self, place: Place) -> float | None:
        """None as long as no batch of its stage has been measured."""
        stage, degree, *_ = place
        return self._learnt.get(place, self._lately.get((stage, degree)))

    def prediction_error(self, stage: StageId, degree: int) -> float:
        """How far the times of batches were from what was expected lately, over these; 0 if there were none."""
        return self._prediction_error.get((stage, degree), 0.0)

    def observe_single(self, place: Place, ratio: float) -> bool:
        """Learn from one work; returns whether that is news."""
        before = self._learnt.get(place)
        new = self._learnt[place] = self._mean(before, ratio)
        return new != before

    def observe_batch(self, place: Place, ratio: float) -> bool:
        """The same of a work of several members."""
        stage, degree, *_ = place
        before, prediction_error = self.batch(place), self.prediction_error(stage, degree)
        new = self._learnt[place] = self._mean(before, ratio)
        self._lately[stage, degree] = self._mean(self._lately.get((stage, degree)), ratio)
        error = min(1.0, abs(ratio / (1.0 if before is None else before) - 1.0))
        self._prediction_error[stage, degree] = prediction_error + self.weight * (error - prediction_error)
        return new != before or error != prediction_error

    def _mean(self, old: float | None, ratio: float) -> float:
        """With one measurement more. The first counts in full, within _FARTHEST."""
        expected = 1.0 if old is None else old
        near = min(_FARTHEST * expected, max(expected / _FARTHEST, ratio))
        return near if old is None else old + self.weight * (near - old)
