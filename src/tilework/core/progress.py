"""The progress of a request through its stages and steps."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.request import Request
from tilework.core.work import DIFFUSE, ENCODE, StageId, stages_of


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next stage of a request (None: nothing is left) and its remaining denoising steps."""

    stage: StageId | None
    num_steps_left: int

    @staticmethod
    def start(request: Request) -> Cursor:
        return Cursor(stages_of(request.pipeline)[0], request.steps)

    def advanced(self, num_steps: int) -> Cursor:
        """The cursor after a work of `num_steps` at this stage; 0 steps of any stage change nothing."""
        assert self.stage is not None, "nothing is left to advance"
        if num_steps == 0:
            return self
        name = self.stage.name
        _, diffuse, decode = stages_of(self.stage.pipeline)
        if name == ENCODE:
            return Cursor(diffuse, self.num_steps_left)
        if name == DIFFUSE and num_steps < self.num_steps_left:
            return Cursor(self.stage, self.num_steps_left - num_steps)
        if name == DIFFUSE:
            assert num_steps == self.num_steps_left, "a work has more steps than its job"
            return Cursor(decode, 0)
        return Cursor(None, 0)

    def pieces(self) -> tuple[tuple[StageId, int], ...]:
        """Each remaining stage with its number of steps, in order."""
        if self.stage is None:
            return ()
        name = self.stage.name
        encode, diffuse, decode = stages_of(self.stage.pipeline)
        if name == ENCODE:
            return (encode, 1), (diffuse, self.num_steps_left), (decode, 1)
        if name == DIFFUSE:
            return (diffuse, self.num_steps_left), (decode, 1)
        return ((decode, 1),)
