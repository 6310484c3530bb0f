"""Workers that are killed under load: nothing may be lost, and no request may wait long."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.killed_workers import Kill, KillingDriver, killing_driver
from suite.stages import STAGES
from suite.stats import bootstrap, exact, percentile
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.runtime.ticket import Outcome

PROMPTS = ("a large red circle on a blue background", "a small green cross on a white background")
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """`kills` of `workers` under `concurrency` requests in a closed loop; all with the model `shapes`.

    When all workers are up again, the next kill comes after an exponential time of mean `gap_s`, of a random worker; in
    a share `double` of the cases all are killed at once.
    """

    kills: int = 300
    workers: int = 2
    concurrency: int = 6
    gap_s: float = 0.6
    double: float = 0.05
    sides: tuple[int, ...] = (96, 128, 192)
    steps: tuple[int, ...] = (8, 20)
    seeds: tuple[int, ...] = (1, 2)
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Chaos:
        return cls(kills=10, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        return asyncio.run(self._measure(note))

    async def _measure(self, note: Note) -> Finding:
        specs = self._specs()
        async with killing_driver(self.workers) as driver:
            expected = {spec: _digest(await driver.draw(spec)) for spec in specs}
            note(f"{len(specs)} references drawn, undisturbed")
            undisturbed = driver.num_submitted
            load = _Load(driver, expected, Random(self.seed))
            clients = [asyncio.create_task(load.run()) for _ in range(self.concurrency)]
            await self._kill(driver, Random(self.seed + 1), note)
            load.is_over = True
            await asyncio.gather(*clients)
            await _until_up(driver)
        return self._finding(driver, load, driver.num_submitted - undisturbed)

    def _specs(self) -> list[Spec]:
        return [
            Spec(prompt=prompt, height=side, width=side, steps=steps, guidance_scale=4.0, seed=seed)
            for prompt, side, steps, seed in product(PROMPTS, self.sides, self.steps, self.seeds)
        ]

    async def _kill(self, driver: KillingDriver, rng: Random, note: Note) -> None:
        while len(driver.kills) < self.kills:
            await _until_up(driver)
            await asyncio.sleep(rng.expovariate(1 / self.gap_s))
            if not driver.all_up:
                continue
            killed_ids = range(self.workers) if rng.random() < self.double else (rng.randrange(self.workers),)
            for device_id in killed_ids:
                driver.kill(device_id)
            if len(driver.kills) % 25 == 0:
                note(f"{len(driver.kills)} workers killed, {sum(driver.ends.values())} requests ended")
        await _until_up(driver)

    def _finding(self, driver: KillingDriver, load: _Load, num_submitted: int) -> Finding:
        hits = [kill for kill in driver.kills if kill.victim is not None]
        ended = [kill for kill in hits if kill.resumed_s is not None]
        if not ended:
            raise CaseFailed("no kill has hit a running work")
        resumed = [kill.resumed_s - kill.at_s for kill in ended if kill.resumed_s is not None]
        hit_percent = exact(100 * len(hits) / len(driver.kills))
        return Finding(
            checks=(
                Check(what="kills that hit a running work", measured=hit_percent, low=80, unit="%"),
                Check(what="requests that did not end once, done", measured=exact(load.num_lost), high=0),
                Check(what="pictures other than the undisturbed", measured=exact(load.num_different), high=0),
                Check(what="steps, encodes, decodes missing or doubled", measured=exact(load.num_doubled), high=0),
                Check(
                    what="kill to the victim's next step, median",
                    measured=bootstrap(resumed, self.seed),
                    high=1,
                    unit="s",
                ),
            ),
            method=_method(self),
            tables=(_times(ended),),
            facts={
                "workers killed": len(driver.kills),
                "of these, running a work": len(hits),
                "workers started again": driver.num_restarts,
                "requests": num_submitted,
                "steps done again": sum(kill.redone for kill in hits),
                "steps done": load.num_steps,
                "victims that ended before another step was reported": len(hits) - len(ended),
            },
        )


class _Load:
    """Clients, one request after another, and what they got."""

    def __init__(self, driver: KillingDriver, expected: Mapping[Spec, str], rng: Random) -> None:
        self._trouble, self._expected, self._rng = driver, expected, rng
        self.is_over = False
        self.num_lost = self.num_different = self.num_doubled = self.num_steps = 0

    async def run(self) -> None:
        while not self.is_over:
            spec = self._rng.choice(list(self._expected))
            outcome = await asyncio.wait_for(self._trouble.draw(spec), _PATIENCE_S)
            self.num_lost += outcome.status is not Status.DONE or self._trouble.ends[outcome.uid] != 1
            self.num_different += _digest(outcome) != self._expected[spec]
            self.num_doubled += _stages(outcome) != {"encode": 1, "diffuse": spec.steps, "decode": 1}
            self.num_steps += spec.steps


def _digest(outcome: Outcome) -> str:
    return "" if outcome.image is None else hashlib.sha256(outcome.image.pixels).hexdigest()


def _stages(outcome: Outcome) -> dict[str, int]:
    """How many steps of each stage the picture is made of."""
    return {stage: sum(segment.num_steps for segment in outcome.segments if segment.stage == stage) for stage in STAGES}


async def _until_up(driver: KillingDriver) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not driver.all_up:
            await asyncio.sleep(0.005)


def _times(kills: list[Kill]) -> Table:
    parts: dict[str, Callable[[Any], float]] = {
        "kill to the victim's next step, or work": lambda kill: kill.resumed_s - kill.at_s,
        "  kill to the engine's knowledge": lambda kill: kill.known_s - kill.at_s,
        "  until a worker is given a work of it": lambda kill: kill.given_s - kill.known_s,
        "  until the end of a step of that is reported": lambda kill: kill.resumed_s - kill.given_s,
    }
    rows = []
    for name, part in parts.items():
        times_ms = [1e3 * part(kill) for kill in kills]
        rows.append(
            (name, *(f"{percentile(times_ms, percent):.1f}" for percent in (50, 90, 99)), f"{max(times_ms):.1f}")
        )
    return Table(title="After a kill, in ms", columns=("part", "p50", "p90", "p99", "largest"), rows=tuple(rows))


def _method(case: Chaos) -> tuple[str, ...]:
    return (
        f"The engine with {case.workers} real workers (`shapes`, one thread each) in one process with its clients, no "
        f"HTTP; policy edf, {case.concurrency} requests at a time, each followed by the next.",
        "Each kill is a SIGKILL at a random time, when all workers are up: a killed worker comes back after half "
        "a second and the loading of the model. It ran a work if the engine counted one as lost.",
        "Every picture is compared with the same request's before the first kill. A request must end exactly once, and "
        "its picture be made of one encode, each of its steps and one decode.",
        "A victim has resumed when the engine hears of the end of a step: with what it waits for on the surviving "
        "worker (two chunks of 200 ms at most), the reading of its state and the step itself. To where it was it comes "
        "when the lost chunk has been done again.",
    )
