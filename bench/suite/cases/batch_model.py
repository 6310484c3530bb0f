"""How well the time of a batch is predicted, on simulated tables and on models on this CPU, and how long that takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from suite import denoisers
from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.stages import DIFFUSE
from suite.stats import extremes, fmean, median, over_repeats, p99
from tilework.core.cost_row import Batch, CostRow
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.learning import can_learn, learn
from tilework.cost.rows import batch_key
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load, quiet
from tilework.runtime.models.costs import random_batches
from tilework.worker.calibrate import calibrate

PIPELINE = "batches"
STEP = latent_diffusion(PIPELINE).stage(DIFFUSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchModelCase:
    """`combinations` of 2 to 12 requests of three sizes; a step of each is timed `runs` times, after three to warm up.

    Simulated tables, one for each of `seeds`, have errors of `noise` (standard deviation). Their forward pass takes
    `fixed_ms`, and more by megapixels, by squares of these (attention), and by edges of patches in a mix. `repeated`
    batches are measured twice. So many `questions` are asked, once for each seed.
    """

    combinations: int = 200
    runs: int = 3
    single_runs: int = 20
    sides: tuple[tuple[str, tuple[int, ...]], ...] = (("sdxl", (64, 128, 192)), ("shapes", (64, 96, 128)))
    repeated: int = 20
    noise: float = 0.02
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    simulated_sides: tuple[int, ...] = (512, 768, 1024)
    fixed_ms: float = 12.0
    pixels_ms: float = 30.0
    attention_ms: float = 6.0
    edges_ms: float = 1.5
    questions: int = 1000

    @classmethod
    def make(cls, quick: bool) -> BatchModelCase:
        return cls(combinations=110, runs=1, sides=(("sdxl", (64, 96, 128)),), repeated=5) if quick else cls()

    def measure(self, note: Note) -> Finding:
        if not can_learn():
            raise CaseFailed("scikit-learn is not installed; run: pip install 'tilework[learn]'")
        note("simulated tables")
        simulated = [self._simulated(seed) for seed in self.seeds]
        learned = [_learned(rows) for rows in simulated]
        check = Check(
            what=f"simulated, with {100 * self.noise:g}% noise: mean error for batches that were held out",
            measured=extremes([100 * one.error for one in learned], fmean),
            high=3.7,
            unit="%",
        )
        first = ("simulated", *_told(simulated[0], learned[0]), f"{100 * self.noise:g}% by design")
        rows = (first, *(self._measured(name, sides, note) for name, sides in self.sides))
        columns = (
            "model",
            "one by one / together",
            "error, learned",
            "error, from a start's batches",
            "measured again",
        )
        return Finding(
            checks=(check, *self._times(simulated[0], learned[0])),
            method=self._method(),
            tables=(Table(title="Mean errors of predictions", columns=columns, rows=rows),),
        )

    def _simulated(self, seed: int) -> list[CostRow]:
        rng, shapes = Random(seed), _squares(self.simulated_sides)
        batches = [*((shape,) for shape in shapes), *_start(shapes), *random_batches(shapes, self.combinations, seed)]
        seconds = [1e-3 * self._simulated_ms(batch) * rng.gauss(1, self.noise) for batch in batches]
        rows = zip(batches, seconds, strict=True)
        return [CostRow.of(batch, pipeline=PIPELINE, stage=DIFFUSE, seconds=taken) for batch, taken in rows]

    def _simulated_ms(self, batch: Batch) -> float:
        megapixels = [shape.pixels / 2**20 for shape in batch]
        patch = math.gcd(*(shape.height for shape in batch)) / 2**10
        edges = sum(megapixels) / patch if len(set(batch)) > 1 else 0.0
        squares = sum(each**2 for each in megapixels)
        return self.fixed_ms + self.pixels_ms * sum(megapixels) + self.attention_ms * squares + self.edges_ms * edges

    def _measured(self, name: str, sides: Sequence[int], note: Note) -> tuple[str, ...]:
        torch.set_num_threads(1)
        quiet()
        family, shapes = _family(name), _squares(sides)
        note(f"{name}: single requests")
        rows = [*calibrate(family, [(shape,) for shape in shapes], num_runs=self.single_runs)]
        batches = [*_start(shapes), *random_batches(shapes, self.combinations)]
        for number, batch in enumerate(batches):
            if number % 20 == 0:
                note(f"{name}: batch {number + 1} of {len(batches)}")
            rows += calibrate(family, [batch], num_runs=self.runs)
        steps = [replace(row, pipeline=PIPELINE) for row in rows if row.stage == DIFFUSE]
        taken = {row.shapes: row.seconds for row in steps}
        again = calibrate(family, batches[-self.repeated :], num_runs=self.runs)
        noise = fmean([abs(row.seconds / taken[row.shapes] - 1) for row in again])
        sizes = ", ".join(map(str, sides))
        return (f"{name}, {sizes} px", *_told(steps, _learned(steps)), f"{noise:.1%}")

    def _times(self, rows: Sequence[CostRow], batch_model: BatchLatencyModel) -> list[Check]:
        """Of predictions; and of prices of twelve that differ in members or order, of which none is at hand."""
        rng, shapes = Random(1), _squares(self.simulated_sides)
        singles = tuple(row for row in rows if row.batch == 1)
        costs = TableCosts(CostTable(hardware="", rows=singles, batch_models={PIPELINE: batch_model}))
        members = [batch_key(row.shapes) for row in rows if row.batch != 1]
        twelves = iter(dict.fromkeys(tuple(rng.choices(shapes, k=12)) for _ in range(10 * self.questions)))
        predicted_us, priced_us = [], []
        for _ in self.seeds:
            asked = rng.choices(members, k=self.questions)
            predicted_us.append([_us(lambda: batch_model.ratio(batch)) for batch in asked])  # noqa: B023
            new = [next(twelves) for _ in range(self.questions)]
            priced_us.append([_us(lambda: costs.run_ns(STEP, batch, 1)) for batch in new])  # noqa: B023
        return [
            Check(what="a prediction: median", measured=over_repeats(predicted_us, median), high=200, unit="µs"),
            Check(what="a prediction: p99", measured=over_repeats(predicted_us, p99), high=200, unit="µs"),
            Check(what="a price of twelve: median", measured=over_repeats(priced_us, median), high=50, unit="µs"),
        ]

    def _method(self) -> tuple[str, ...]:
        return (
            "Error: the mean of |predicted / measured - 1|. Learned: over the fifth of the batches that nothing was "
            "fitted to; the batch_model has learned from the others, of which none is dropped as an outlier.",
            "From a start's batches: what a table makes of single requests and the four batches that a server's start "
            "measures, over all other batches.",
            "Simulated: a fixed time per forward pass, times by pixels, by their squares and by edges of patches, with "
            "noise. The row is of the first seed, the check is the mean over the seeds, with their extremes.",
            "sdxl: a U-Net of half a million random weights; shapes: the shipped model. Timed as by tilework profile "
            "--mixed (worker.calibrate): guided steps, the median of the runs, but in this process, on one thread.",
            "Measured again: how far the last batches are from what they took before, in the mean; what else the "
            "machine does is part of it, and nothing can predict better.",
            "One by one / together: median over all batches. A price is what a policy asks of a table, with the "
            "batch_model and without any row of a batch.",
        )


def _family(name: str) -> Family:
    """The shipped model, or a denoiser of random weights and texts."""
    return load(ModelSource(path=name)) if name == "shapes" else denoisers.build(name)


def _squares(sides: Sequence[int]) -> tuple[Shape, ...]:
    return tuple(Shape(side, side) for side in sides)


def _start(shapes: tuple[Shape, ...]) -> list[Batch]:
    """What a server's start measures, see `runtime.costs.calibration_batches`."""
    small, middle, large = shapes
    return [(small,) * 2, (small,) * 4, (small, middle), (small, small, small, middle, middle, large)]


def _learned(rows: Sequence[CostRow]) -> BatchLatencyModel:
    batch_model = learn(rows, STEP)
    if batch_model is None:
        raise CaseFailed("there are too few mixed batches to learn from")
    return batch_model


def _told(rows: Sequence[CostRow], batch_model: BatchLatencyModel) -> tuple[str, str, str]:
    """The gain of batches; the errors of the batch_model and of a table with a start's batches only."""
    shapes = tuple(sorted(row.shape for row in rows if row.batch == 1))
    few = [row for row in rows if row.batch == 1 or row.shapes in _start(shapes)]
    others = [row for row in rows if row not in few]
    costs = TableCosts(CostTable(hardware="", rows=tuple(few)))
    alone = {shape: costs.run_ns(STEP, (shape,), 1) / NS_PER_S for shape in shapes}
    gains = [sum(alone[shape] for shape in row.shapes) / row.seconds for row in others]
    errors = [abs(costs.run_ns(STEP, row.shapes, 1) / NS_PER_S / row.seconds - 1) for row in others]
    return f"{median(gains):.2f}", f"{batch_model.error:.1%}", f"{fmean(errors):.1%}"


def _us(work: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e3
