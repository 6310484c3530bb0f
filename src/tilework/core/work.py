"""Works, the unit of scheduling: one or more jobs x one stage x a number of steps x a group of devices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

Group = tuple[int, ...]
"""Sorted ids of devices on one node; a member's rank is its index."""

ENCODE, DIFFUSE, DECODE = "encode", "diffuse", "decode"
STAGES = (ENCODE, DIFFUSE, DECODE)


@dataclass(frozen=True, slots=True, order=True)
class StageId:
    """A stage of a pipeline; `name` is one of STAGES."""

    pipeline: str
    name: str

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.name}"


@lru_cache(maxsize=1024)
def stages_of(pipeline: str) -> tuple[StageId, StageId, StageId]:
    """The encode, diffuse and decode stages. Cached, since every event needs them."""
    return StageId(pipeline, ENCODE), StageId(pipeline, DIFFUSE), StageId(pipeline, DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A work as a policy asks for it, without a number.

    `num_steps` is 1 for stages without steps. On a busy device it is queued after the device's works, so that the
    device does not idle between them. Encode and decode run on one device, for one job. Steps may have several jobs,
    the *members*, which share forward passes on one device; each does `num_steps` steps, from its own position. `why`
    is the reason in words, for the decision log and for the client of the job. It names no other job, which may be
    another tenant's.
    """

    stage: StageId
    job_ids: tuple[int, ...]
    devices: Group
    num_steps: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A Start that the controller has accepted.

    `attempts[i]` is the attempt of `job_ids[i]` that it belongs to, `first_steps[i]` the number of denoising steps
    that this job has done when the work begins. `after` names the works after which it is queued. A `sliced` decode
    takes less memory and more time.
    """

    work_id: int
    stage: StageId
    job_ids: tuple[int, ...]
    attempts: tuple[int, ...]
    first_steps: tuple[int, ...]
    devices: Group
    num_steps: int
    why: str
    after: tuple[int, ...] = ()
    sliced: bool = False

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """Each job with the number of steps done before the work."""
        return tuple(zip(self.job_ids, self.first_steps, strict=True))

    def without(self, left_out: Collection[int]) -> Work:
        """The work without these members."""
        if not left_out:
            return self
        kept = [index for index, job_id in enumerate(self.job_ids) if job_id not in left_out]
        return replace(
            self,
            job_ids=tuple(self.job_ids[index] for index in kept),
            attempts=tuple(self.attempts[index] for index in kept),
            first_steps=tuple(self.first_steps[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of a policy; an empty plan changes nothing.

    `stops` names jobs whose works end at their next step boundary, or are revoked if they have not begun. The jobs may
    be started again when these works have ended. Jobs that are not `JobView.may_stop` are ignored. Jobs that share
    works with a stopped job are stopped with it, since their later works would begin at other steps; if one of them
    must not stop, none stops.

    `dropped_to_best_effort` names jobs that cannot be on time any more, each with the reason in words. They are served
    after jobs that can, and never starve.
    """

    starts: tuple[Start, ...] = ()
    stops: tuple[int, ...] = ()
    dropped_to_best_effort: tuple[tuple[int, str], ...] = ()
    wake_ns: int | None = None
