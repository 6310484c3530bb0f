"""Finds the answer to a question: the searches in their order, with progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from tilework.cli.plan.asked import Asked
from tilework.sim.plan.error import PlanError, error_of_run, shipped_error
from tilework.sim.plan.mix import Purchase, cheapest
from tilework.sim.plan.search import SPARE, Sized, Sizing, fewest_devices, more_points
from tilework.sim.plan.stages import NoStages, StagePlan, stage_plan
from tilework.sim.plan.traffic import AS_ASKED, Size, WhatIf
from tilework.sim.plan.trial import Question, Trial, TrialOutcome, Try, trials_of

WHAT_IFS = (
    WhatIf(slo=0.8),
    WhatIf(slo=1.25),
    WhatIf(rate=0.5),
    WhatIf(rate=1.5),
    WhatIf(rate=2.0),
    WhatIf(heaviest=0.5),
    WhatIf(heaviest=2.0),
)
CURVE = (0.5, 0.75, 1.25)
"""Further points of a curve beside the numbers that were tried, as multiples of the answer."""

OnStep = Callable[[str, int], None]
"""Told what is simulated, and how many simulations are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a question. `alone` has the search of each hardware; `choice` is the one to buy (None: none is enough).

    `what_ifs` are searches for the hardware that is chosen, or the first. `stages` divide its devices; `no_stages` says
    why they do not although that was asked.
    """

    asked: Asked
    alone: Sequence[Sized]
    choice: Purchase | Sized | None
    what_ifs: Sequence[Sized]
    stages: StagePlan | None
    no_stages: str
    error: PlanError
    num_trials: int
    wall_s: float
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Parts of the question beside the number of devices."""

    num_samples: int
    has_what_ifs: bool
    has_stages: bool
    has_curve: bool
    num_processes: int


def answered(asked: Asked, extent: Extent, on_step: OnStep) -> Answer:
    """Search. Raises UnknownCost, and what a policy or the simulation raises."""
    begin_s = monotonic()
    question = asked.question
    num_trials = 0

    def done(trial: Trial, outcome: TrialOutcome) -> None:
        nonlocal num_trials
        num_trials += 1
        on_step(f"{trial.num_devices} x {trial.hardware}, {trial.what_if}, sample {trial.sample + 1}", num_trials)

    with trials_of(question, extent.num_processes, done) as attempt:
        searches = _Searches(asked, extent.num_samples, attempt)
        alone = [searches.sized(name) for name in asked.serving]
        choice = _choice(asked, alone, searches)
        if extent.has_curve:
            alone = [more_points(one, CURVE, attempt) for one in alone]
        own = _own(alone, choice)
        asked_too = WHAT_IFS if extent.has_what_ifs else ()
        what_ifs = [searches.sized(own.sizing.hardware, what_if, like=own) for what_if in asked_too if own is not None]
    stages = None
    no_stages = ""
    if extent.has_stages:
        stages, no_stages = _stages(question, own, lambda what: on_step(what, num_trials))
    return Answer(
        asked=asked,
        alone=alone,
        choice=choice,
        what_ifs=what_ifs,
        stages=stages,
        no_stages=no_stages,
        error=_error(asked),
        num_trials=num_trials,
        wall_s=monotonic() - begin_s,
        num_processes=extent.num_processes,
    )


@dataclass(frozen=True, slots=True)
class _Searches:
    asked: Asked
    num_samples: int
    attempt: Try

    def sized(
        self,
        hardware: str,
        what_if: WhatIf = AS_ASKED,
        sizes: frozenset[Size] | None = None,
        like: Sized | None = None,
    ) -> Sized:
        """Search; it begins where another one on this hardware, `like`, has ended."""
        question = self.asked.question
        numbers = self.asked.numbers[hardware]
        sizing = Sizing(
            hardware=hardware,
            numbers=numbers,
            num_samples=self.num_samples,
            spare=SPARE if like is None else like.spare,
            what_if=what_if,
            sizes=sizes,
        )
        return fewest_devices(sizing, question.traffic, question.tables[hardware], question.target, self.attempt)


def _choice(asked: Asked, alone: Sequence[Sized], searches: _Searches) -> Purchase | Sized | None:
    """Return the cheapest; without prices the hardware that needs the fewest devices; the first of equals."""
    if asked.prices:
        return cheapest(
            asked.requests,
            asked.question.tables,
            asked.prices,
            alone,
            lambda hardware, sizes: searches.sized(hardware, sizes=sizes),
        )
    enough = [one for one in alone if one.fewest is not None]
    return min(enough, key=lambda one: one.fewest or 0, default=None)


def _own(alone: Sequence[Sized], choice: Purchase | Sized | None) -> Sized | None:
    """Return the search of the one hardware that is chosen, or of the first that serves all if two are, or none is
    enough.
    """
    parts = choice.parts if isinstance(choice, Purchase) else () if choice is None else (choice,)
    chosen = parts[0].sizing.hardware if len(parts) == 1 else None
    return next((one for one in alone if one.sizing.hardware == chosen), next(iter(alone), None))


def _stages(question: Question, own: Sized | None, on_step: Callable[[str], None]) -> tuple[StagePlan | None, str]:
    """Return the division of the devices that were found, or why there is none."""
    if own is None or own.fewest is None:
        return None, "no number of devices is enough; there is nothing to divide"
    hardware = own.sizing.hardware
    fewest = own.fewest
    try:
        plan = stage_plan(question, hardware, fewest, lambda one: on_step(f"stages {one.counts or 'undivided'}"))
    except NoStages as error:
        return None, str(error)
    return plan, ""


def _error(asked: Asked) -> PlanError:
    if asked.past is None:
        return shipped_error()
    (hardware,) = asked.serving[:1]
    return error_of_run(asked.question, hardware, asked.requests, asked.past)
