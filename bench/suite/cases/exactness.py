"""How far pictures are from the stock pipeline's: families, samplers, types, guidance, shared passes and groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Picture, Table
from suite.exactness import middle, models
from suite.exactness.histogram import histograms
from suite.exactness.middle import Trial
from suite.exactness.sweep import (
    ALONE,
    EQUAL,
    GUIDANCE,
    MIXED,
    MOVED,
    PLAIN,
    SHARED,
    STOCK_BATCH,
    THREE_DEVICES,
    TWO_DEVICES,
    TWO_THREADS,
    WIDE,
    Model,
    Outcome,
    sweep,
)
from suite.exactness.team import Team
from suite.stats import exact, percentile
from tilework.pipelines.loading import quiet
from tilework.pipelines.model_index import SHIPPED
from tilework.report.palette import HUES

WAYS = (ALONE, MOVED, PLAIN, TWO_THREADS, STOCK_BATCH, EQUAL, MIXED, TWO_DEVICES, THREE_DEVICES)
LAW = 1e-5
"""The bound on a prediction in float32 with guidance up to 7.5; it grows with the guidance beyond."""
GRADED = (STOCK_BATCH, *SHARED, *WIDE)
"""Ways whose errors grow with the guidance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Models of all families, for each of `model_seeds` and each sampler, in all `dtypes`; and the shipped one.

    Other seeds are other models: other numbers of heads, channels and layers, other weights.
    """

    model_seeds: tuple[int, ...] = (0, 1)
    samplers: int = 4
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    steps: int = 6

    @classmethod
    def make(cls, quick: bool) -> Exactness:
        return cls(model_seeds=(0,), samplers=1, dtypes=("float32", "bfloat16"), steps=3) if quick else cls()

    def measure(self, note: Note) -> Finding:
        quiet()
        outcomes: list[Outcome] = []
        trials: dict[str, list[Trial]] = {}
        chosen = self._models()
        with Team(3) as team, TemporaryDirectory() as folder:
            for index, model in enumerate(chosen):
                note(f"{index + 1} of {len(chosen)}: {model}")
                swept = sweep(model, Path(folder) / str(index), self.dtypes, self.steps, team)
                outcomes += swept.outcomes
                for dtype, tried in swept.trials.items():
                    trials.setdefault(dtype, []).extend(tried)
        halves = self.dtypes[1:]
        return Finding(
            checks=_checks(outcomes, halves),
            method=self._method(len(chosen)),
            tables=(
                _latents(outcomes, self.dtypes),
                _predictions(outcomes, self.dtypes[:1]),
                _distances(outcomes, halves),
                _middle(trials),
            ),
            pictures=(Picture(name="histogram", png=self._histogram(outcomes)),),
        )

    def _models(self) -> list[Model]:
        drawn = [
            Model(family=family, seed=seed, sampler=sampler)
            for family in models.FAMILIES
            for seed in self.model_seeds
            for sampler in list(models.samplers(family))[: self.samplers]
        ]
        return [*drawn, Model(family=SHIPPED)]

    def _histogram(self, outcomes: Sequence[Outcome]) -> bytes:
        errors = {
            way: {dtype: [o.error for o in outcomes if (o.way, o.dtype) == (way, dtype)] for dtype in self.dtypes}
            for way in WAYS
        }
        return histograms(errors, dict(zip(self.dtypes, (HUES[6], HUES[3], HUES[1]), strict=False)))

    def _method(self, num_models: int) -> tuple[str, ...]:
        return (
            f"{num_models} models of 0.1 to 1 million weights, saved and loaded from disk by both sides; "
            f"{self.steps} steps on one thread of a CPU; two sizes of 64 to 128 px; guidance 1, 7.5 and 30 where it "
            "takes a second pass.",
            "Stock: the pipeline of `tilework.reference`, called with the prompt and a generator of the seed.",
            "Error: the largest difference of latents, or of one prediction, over the largest value. A prediction is "
            "compared with what the same model predicts alone for the same state.",
            "Shared passes are of three requests at once, with different guidance; devices are processes with real "
            "groups.",
            "Ways between: the others are of other sizes, but of the same size with fixed rows (four in each pass). "
            "Time by turns, median of three; over that of the request alone as served.",
            "Distance: the error of the final latents against the stock pipeline in float32.",
        )


def _checks(outcomes: Sequence[Outcome], halves: Sequence[str]) -> tuple[Check, ...]:
    def predictions(shipped: bool, scales: Iterable[float]) -> float:
        return max(
            error
            for outcome in outcomes
            if outcome.dtype == "float32"
            and outcome.way in (*SHARED, *WIDE)
            and outcome.model.is_shipped == shipped
            and outcome.guidance in scales
            for error in outcome.predictions
        )

    usual, high = GUIDANCE[:2], GUIDANCE[2:]
    shares = [
        Check(
            what=f"{way}, all types: latents and pixels equal to stock",
            measured=exact(100 * fmean(o.is_equal for o in outcomes if o.way == way)),
            low=100,
            unit="%",
        )
        for way in (ALONE, MOVED)
    ]
    law = [
        Check(what=f"float32, shared or wide: {what}, worst", measured=exact(predictions(shipped, scales)), high=bound)
        for what, shipped, scales, bound in (
            ("a prediction, guidance up to 7.5", False, usual, LAW),
            ("the same, guidance 30", False, high, LAW * high[0] / usual[-1]),
            ("of shapes, guidance up to 7.5", True, usual, LAW),
            ("of shapes, guidance 30", True, high, LAW * high[0] / usual[-1]),
        )
    ]
    farther = [
        Check(
            what=f"{dtype}: distance from float32, shared or wide over alone, median",
            measured=exact(_farther([o for o in outcomes if o.dtype == dtype and o.way in (*SHARED, *WIDE)])),
            high=1.1,
        )
        for dtype in halves
    ]
    return (*shares, *law, *farther)


def _farther(outcomes: Sequence[Outcome]) -> float:
    return median(outcome.distance / outcome.stock_distance for outcome in outcomes if outcome.stock_distance)


def _latents(outcomes: Sequence[Outcome], dtypes: Sequence[str]) -> Table:
    rows = []
    for way, dtype, scale, cases in _grouped(outcomes, dtypes):
        worst = max(cases, key=lambda outcome: outcome.error)
        errors = [outcome.error for outcome in cases]
        rows.append(
            (
                f"{way}; {dtype}{scale}",
                str(len(cases)),
                f"{fmean(outcome.is_equal for outcome in cases):.0%}",
                *(f"{value:.1e}" for value in (median(errors), percentile(errors, 99), max(errors))),
                str(max(outcome.levels for outcome in cases)),
                f"{fmean(outcome.changed for outcome in cases):.1%}",
                str(worst) if worst.error else "",
            )
        )
    return Table(
        title="Final latents and pixels against stock",
        columns=(
            "way; type; guidance",
            "cases",
            "equal",
            "median error",
            "p99",
            "worst",
            "levels of 255",
            "pixels that differ",
            "the worst case",
        ),
        rows=tuple(rows),
    )


def _predictions(outcomes: Sequence[Outcome], dtypes: Sequence[str]) -> Table:
    rows = []
    for way, dtype, scale, cases in _grouped(outcomes, dtypes):
        for name, members in _by_origin(cases):
            errors = [error for outcome in members for error in outcome.predictions]
            if errors:
                above = fmean(error > LAW for error in errors)
                numbers = (f"{value:.1e}" for value in (median(errors), percentile(errors, 99), max(errors)))
                rows.append((f"{way}; {dtype}{scale}; {name}", str(len(errors)), *numbers, f"{above:.0%}"))
    return Table(
        title="Single predictions against those of the same model alone",
        columns=("way; type; guidance; weights", "predictions", "median error", "p99", "worst", "above 1e-5"),
        rows=tuple(rows),
    )


def _by_origin(cases: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    shipped = [outcome for outcome in cases if outcome.model.is_shipped]
    return [("random", [outcome for outcome in cases if outcome not in shipped]), (SHIPPED, shipped)]


def _distances(outcomes: Sequence[Outcome], halves: Sequence[str]) -> Table:
    rows = []
    for way, dtype, scale, cases in _grouped(outcomes, halves):
        if way in (ALONE, *GRADED):
            distances = [outcome.distance for outcome in cases]
            numbers = (f"{value:.1e}" for value in (median(distances), max(distances)))
            rows.append((f"{way}; {dtype}{scale}", str(len(cases)), *numbers, f"{_farther(cases):.2f}"))
    return Table(
        title="Half precision: distance from float32",
        columns=("way; type; guidance", "cases", "median", "worst", "over stock's own, median"),
        rows=tuple(rows),
    )


def _middle(trials: dict[str, list[Trial]]) -> Table:
    rows = []
    for dtype, tried in trials.items():
        for way in ("as served", middle.FLOAT32_AROUND, middle.FIXED_ROWS):
            members = [trial for trial in tried if trial.way == way]
            apart = [trial.apart for trial in members]
            rows.append(
                (
                    f"{way}; {dtype}",
                    str(len(members)),
                    f"{fmean(levels == 0 for levels in apart):.0%}",
                    f"{median(apart):g}",
                    str(max(apart)),
                    f"{median(trial.distances[0] for trial in members):.1e}",
                    f"{median(trial.distances[1] for trial in members):.1e}",
                    f"{median(trial.cost for trial in members):.2f}",
                )
            )
    return Table(
        title="Ways between: a request alone, and beside three others",
        columns=(
            "way; type",
            "requests",
            "same picture",
            "levels of 255 apart, median",
            "worst",
            "distance from float32, alone",
            "beside others",
            "time alone, over as served",
        ),
        rows=tuple(rows),
    )


def _grouped(outcomes: Sequence[Outcome], dtypes: Sequence[str]) -> Iterable[tuple[str, str, str, list[Outcome]]]:
    """By way, type and, where it matters, guidance."""

    def key(outcome: Outcome) -> tuple[int, int, float]:
        scale = outcome.guidance if outcome.way in GRADED else 0.0
        return WAYS.index(outcome.way), dtypes.index(outcome.dtype), scale

    members = sorted((outcome for outcome in outcomes if outcome.dtype in dtypes), key=key)
    for (way, dtype, scale), cases in groupby(members, key):
        yield WAYS[way], dtypes[dtype], f"; {scale:g}" if scale else "", list(cases)
