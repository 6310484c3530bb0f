"""What it costs to change a request's degree between two steps, to move its state, and what a second worker gains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from suite.case import Check, Finding, Note, Table
from suite.chain import Chains, chains
from suite.stages import DIFFUSE
from suite.state_transfer import Load, StateTransfer, transferring
from suite.stats import bootstrap, extremes, median, percentile
from tilework.core.comm import Comm
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.wire.spec import Spec
from tilework.core.work import Group
from tilework.pipelines.parallel import Parallel

ALONE: Group = (0,)
OTHER: Group = (1,)
BOTH: Group = (0, 1)
GUIDANCE_SCALE = 4.0
CONDITIONING = "conditioning"
NUM_JOINS, NUM_WARMUPS = 10_000, 2
# States of the simulated workers are as large as FLUX's: 16 channels in half precision at an eighth of each side.
BYTES_PER_PIXEL, SIMULATED_STEP_S = 0.5, 0.01

Gaps = dict[str, list[float]]
"""Milliseconds between two works of a request, by what changes between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Two workers of one thread with the model `shapes`, and two processes that only move bytes.

    Degrees: `repeats` x five requests of `works` works of one step at `side` px. Moves: `moves` states of each of
    `megabytes`, and as many conditionings of `conditioning_mb` (in two tensors). Guidance: `halves` pairs of works of
    `halves_steps` steps at `halves_side` px.
    """

    side: int = 128
    works: int = 40
    repeats: int = 5
    megabytes: tuple[float, ...] = (0.1, 1.0, 4.0, 16.0)
    conditioning_mb: float = 4.2
    moves: int = 40
    halves_side: int = 192
    halves: int = 16
    halves_steps: int = 5
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Elastic:
        return cls(works=12, repeats=2, moves=10, halves=4, halves_steps=3) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with transferring() as transfer:
            loads = self._measure_moves(transfer, note)
            changes, state_blob_bytes, halves = asyncio.run(self._measure_workers(note))
            note("states between simulated workers")
            between = asyncio.run(self._measure_between())
            bare = [1e3 * transfer.seconds(Load(state_blob_bytes, 1, bare=True)) for _ in range(self.moves)]
        join_us = _join_us()
        checks = (*self._change_checks(changes), *self._move_checks(loads), self._halves_check(halves))
        return Finding(
            checks=checks,
            method=self._method(),
            tables=(_change_table(changes, bare), _move_table(loads, between)),
            facts={
                "join and leave of a group, without workers": f"{join_us:.2f} µs",
                f"state of {self.side} px": f"{state_blob_bytes / 1e3:.1f} kB",
                f"step of {self.halves_side} px, guided": f"{1e3 * median([one for one, _ in halves]):.1f} ms alone, "
                f"{1e3 * median([two for _, two in halves]):.1f} ms on two",
            },
        )

    # Real workers.

    async def _measure_workers(self, note: Note) -> tuple[list[Gaps], int, list[tuple[float, float]]]:
        async with chains(2, ModelSource(path="shapes")) as driver:
            note("two workers are up")
            await self._degree_gaps(driver, [ALONE, BOTH, OTHER])  # The first works of all kinds are slow.
            changes = []
            for index in range(self.repeats):
                note(f"changes of the degree, repeat {index + 1}")
                changes.append(await self._changes(driver))
            note("guidance halves")
            await driver.run(self._spec(self.halves_side, 4), [ALONE, BOTH], 2)
            reports = await driver.run(
                self._spec(self.halves_side, 2 * self.halves * self.halves_steps),
                [ALONE, BOTH] * self.halves,
                self.halves_steps,
            )
            step_s = [(report.end_ns - report.start_ns) / 1e9 / report.steps_done for report in reports]
            (encoded,) = await driver.run(self._spec(self.side, 2), [ALONE], 1)
        (blob,) = encoded.blobs.values()
        return changes, blob.num_bytes, list(zip(step_s[::2], step_s[1::2], strict=True))

    async def _changes(self, driver: Chains) -> Gaps:
        changing = await self._degree_gaps(driver, [ALONE, BOTH])
        moving = await self._degree_gaps(driver, [ALONE, OTHER])
        return {
            "1 to 2": changing[::2],
            "2 to 1": changing[1::2],
            "1 to 1, elsewhere": moving,
            "1 to 1, in place": await self._degree_gaps(driver, [ALONE]),
            "2 to 2, in place": await self._degree_gaps(driver, [BOTH]),
        }

    async def _degree_gaps(self, driver: Chains, cycle: Sequence[Group]) -> list[float]:
        return await self._gaps(driver, cycle, self.side, self.works)

    async def _gaps(self, driver: Chains, cycle: Sequence[Group], side: int, works: int) -> list[float]:
        """From the end of each work at its leader to the start of the next at its own, once all members are there.

        In milliseconds; each work is one step at `side` px.
        """
        route = [cycle[index % len(cycle)] for index in range(works)]
        reports = await driver.run(self._spec(side, works), route, 1)
        return [(after.start_ns - before.end_ns) / 1e6 for before, after in pairwise(reports)]

    def _spec(self, side: int, steps: int) -> Spec:
        return Spec(
            prompt="a small green cross on a white background",
            height=side,
            width=side,
            steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            seed=self.seed,
        )

    def _change_checks(self, repeats: list[Gaps]) -> list[Check]:
        def beyond(change: str, usual: str) -> list[float]:
            return [median(gaps[change]) - median(gaps[usual]) for gaps in repeats]

        return [
            _change_check("1 to 2, beyond moving the state", beyond("1 to 2", "1 to 1, elsewhere")),
            _change_check("2 to 1, beyond staying alone", beyond("2 to 1", "1 to 1, in place")),
        ]

    def _halves_check(self, halves: list[tuple[float, float]]) -> Check:
        speedups = bootstrap([one / two for one, two in halves], self.seed)
        what = f"guidance halves: one worker / two, {self.halves_side} px"
        return Check(what=what, measured=speedups, low=1.5)

    # Bytes.

    def _measure_moves(self, transfer: StateTransfer, note: Note) -> dict[str, list[tuple[float, float]]]:
        """Seconds (ours, bare) of each move, by what is moved."""
        kinds = {f"state of {size:g} MB": (size, 1) for size in self.megabytes}
        kinds[f"{CONDITIONING} of {self.conditioning_mb:g} MB"] = (self.conditioning_mb, 2)
        moves: dict[str, list[tuple[float, float]]] = {}
        for what, (size, num_tensors) in kinds.items():
            note(f"moving a {what}")
            ours, bare = (Load(round(size * 1e6), num_tensors, bare) for bare in (False, True))
            pairs = [(transfer.seconds(ours), transfer.seconds(bare)) for _ in range(NUM_WARMUPS + self.moves)]
            moves[what] = pairs[NUM_WARMUPS:]
        return moves

    async def _measure_between(self) -> dict[str, list[float]]:
        """Milliseconds of each move of a state from one simulated worker to another, in place of its next step."""
        sides = {
            f"state of {size:g} MB": round((size * 1e6 / BYTES_PER_PIXEL) ** 0.5 / 16) * 16 for size in self.megabytes
        }
        rows = tuple(
            CostRow(pipeline="states", stage=DIFFUSE, height=side, width=side, seconds=SIMULATED_STEP_S)
            for side in sides.values()
        )
        source = SimulatedSource(pipeline="states", hardware="simulated for bench", steps=self.moves + 1, rows=rows)
        moves: dict[str, list[float]] = {}
        async with chains(2, source) as driver:
            for what, side in sides.items():
                gaps = await self._gaps(driver, [ALONE, OTHER], side, NUM_WARMUPS + self.moves + 1)
                moves[what] = gaps[NUM_WARMUPS:]
        return moves

    def _move_checks(self, moves: dict[str, list[tuple[float, float]]]) -> list[Check]:
        return [
            Check(
                what=f"{what}: bytes per second / bare",
                measured=bootstrap([bare / ours for ours, bare in pairs], self.seed),
                low=0.5,
            )
            for what, pairs in moves.items()
        ]

    def _method(self) -> tuple[str, ...]:
        return (
            f"Degrees: works of one step of `shapes` at {self.side} px on two workers of one thread, all of a request "
            "queued at once as an engine would, on worker 0 alone and on both in turn. A gap lies between the end of a "
            "work and the start of the next, when the state has come and all members have met; serializing the state "
            "is in every gap.",
            "From 1 to 2 the state moves to worker 1. What that takes is the gap when a request goes from one worker "
            "to the other and stays alone, in the same run: the same state serialized, reported, requested and read "
            "by workers that have just run a step. The last row is less, as its processes do nothing but move bytes. "
            "Each value is a difference of medians; the interval are the repeats.",
            "Moves: from serializing the state, over the blob, the worker's report and the runtime's command, to the "
            "unpacked tensors in another process. Bare: a file of as many bytes written at once in the same directory "
            "and read at once, with the same messages, by the same processes, taking turns with ours. Between workers: "
            "the gap when a state goes from one simulated worker to another over the executor's event loop, all of "
            "which sleep until then.",
            "Halves: a guided request whose works run on worker 0 alone and on both in turn; the other worker is idle "
            "meanwhile. Seconds per step within the works; each ratio is of two neighbours.",
            "Intervals of ratios: 95% bootstrap of the median.",
        )


def _change_check(what: str, differences: list[float]) -> Check:
    return Check(what=f"degree {what}", measured=extremes(differences), high=1.0, unit="ms")


def _change_table(repeats: list[Gaps], bare: list[float]) -> Table:
    gathered: dict[str, list[float]] = {
        change: [gap for gaps in repeats for gap in gaps[change]] for change in repeats[0]
    }
    gathered["the state's bytes, bare"] = bare
    rows = tuple(
        (what, str(len(gaps)), *(f"{value:.3f}" for value in (median(gaps), percentile(gaps, 95), max(gaps))))
        for what, gaps in gathered.items()
    )
    return Table(title="Gaps, in ms", columns=("degree", "gaps", "median", "p95", "largest"), rows=rows)


def _move_table(moves: dict[str, list[tuple[float, float]]], between: dict[str, list[float]]) -> Table:
    rows = tuple(
        (
            what,
            *(f"{1e3 * median(side):.3f}" for side in zip(*pairs, strict=True)),
            f"{median(between[what]):.3f}" if what in between else "-",
        )
        for what, pairs in moves.items()
    )
    return Table(title="Moves, in ms (median)", columns=("what", "ours", "bare", "between workers"), rows=rows)


@dataclass(frozen=True, slots=True)
class _Two:
    """As much of a group as joining it looks at."""

    size: int = 2
    rank: int = 0


def _join_us() -> float:
    """Mean of many, since one is near the clock's resolution."""
    parallel, comm = Parallel(), cast(Comm, _Two())
    start_ns = time.perf_counter_ns()
    for _ in range(NUM_JOINS):
        parallel.join(comm, True)
        parallel.leave()
    return (time.perf_counter_ns() - start_ns) / 1e3 / NUM_JOINS
