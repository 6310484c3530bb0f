"""Several cards of one host: what their groups exchange, and what it costs to change a request's devices or stop it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.chain import Chains, chains_over
from suite.gpu.exchanges import Exchanged, Plan, exchanged, rounds_of
from suite.gpu.models import TOY, folder_of, on_gpu
from suite.stats import bootstrap, exact, extremes, median
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.core.work import Group
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor

_MOST_CARDS = 8
_WARM_STEPS = 3  # The second call of a kind is recorded on CUDA.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """All cards of the host, up to eight; without any, processes that rehearse it by gloo.

    Exchanges: see `exchanges.Plan`. Changes: `works` chunks of one step at `side` px for each kind. Stops: `stops`
    requests of `steps` steps, each stopped after a few of them.
    """

    device: str
    dtype: str
    collectives: str
    num_cards: int
    model: str
    side: int
    megabytes: tuple[float, ...] = (1.0, 16.0, 64.0)
    repeats: int
    works: int
    stops: int
    steps: int = 20
    guidance_scale: float = 3.5
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Cards:
        if not on_gpu():
            return cls(
                device="cpu",
                dtype="float32",
                collectives="gloo",
                num_cards=4,
                model=TOY.model,
                side=TOY.side,
                megabytes=(0.1, 1.0),
                repeats=3 if quick else 10,
                works=6 if quick else 12,
                stops=3 if quick else 6,
            )
        import torch

        num_cards = min(_MOST_CARDS, torch.cuda.device_count())
        if num_cards < 2:
            raise CaseFailed("cards needs two CUDA devices or more; there is one")
        return cls(
            device="cuda",
            dtype="bfloat16",
            collectives="nccl",
            num_cards=num_cards,
            model="FLUX.1-dev",
            side=1024,
            repeats=5 if quick else 20,
            works=8 if quick else 24,
            stops=4 if quick else 12,
        )

    def measure(self, note: Note) -> Finding:
        rounds = rounds_of(self.num_cards)
        plan = Plan(
            num_devices=self.num_cards,
            collectives=self.collectives,
            rounds=rounds,
            megabytes=self.megabytes,
            repeats=self.repeats,
        )
        entered_s, found = exchanged(plan)
        note(f"{sum(map(len, rounds))} groups have exchanged")
        gaps, stops = asyncio.run(self._requests(note))
        step_ms = median(stops["a step"])
        waits = bootstrap(stops["from the stop to the end of the run"], self.seed)
        slower = [of_one.first_ms / of_one.again_ms for groups in found for of_one in groups.values()]
        return Finding(
            checks=(
                Check(what="from a stop to the end of the run / a step", measured=waits.scaled(1 / step_ms), high=2.2),
                Check(what="first exchange of a group / later ones", measured=extremes(slower), high=3.0),
                Check(what="the node entered again", measured=exact(entered_s[1]), high=2.0, unit="s"),
            ),
            method=self._method(),
            tables=(_exchange_table(found, self.megabytes), _gap_table(gaps), _gap_table(stops, "Stops, in ms")),
            facts={"the node entered for the first time": f"{entered_s[0]:.2f} s", "a step": f"{step_ms:.1f} ms"},
        )

    async def _requests(self, note: Note) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        source = ModelSource(path=folder_of(self.model, note), device=self.device, dtype=self.dtype)
        config = LocalConfig(num_workers=self.num_cards, sources=(source,), collectives=self.collectives)
        async with chains_over(LocalExecutor(config)) as driver:
            note(f"{self.num_cards} workers have {self.model}")
            gaps: dict[str, list[float]] = {}
            for name, route in self._routes().items():
                await driver.run(self._spec(_WARM_STEPS * len(route)), list(route) * _WARM_STEPS, 1)
                cycle = [route[index % len(route)] for index in range(self.works)]
                reports = await driver.run(self._spec(self.works), cycle, 1)
                gaps[name] = [(after.start_ns - before.end_ns) / 1e6 for before, after in pairwise(reports)]
                note(f"{name}: {median(gaps[name]):.2f} ms")
            stops: dict[str, list[float]] = {}
            for index in range(self.stops):
                for name, value in (await self._stop(driver, index)).items():
                    stops.setdefault(name, []).append(value)
        return gaps, stops

    def _routes(self) -> dict[str, Sequence[Group]]:
        """What changes between two chunks of a request, and the groups that take turns."""
        everyone = tuple(range(self.num_cards))
        half = everyone[: self.num_cards // 2]
        return {
            "stays on one": [(0,)],
            "stays on all": [everyone],
            "moves from one to another": [(0,), (1,)],
            f"degree {len(half)} to {len(everyone)} and back": [half, everyone],
            f"degree 1 to {len(everyone)} and back": [(0,), everyone],
        }

    async def _stop(self, driver: Chains, index: int) -> dict[str, float]:
        """Stop a request on half of the cards in a step, at one place or another; it goes on on the others."""
        everyone = tuple(range(self.num_cards))
        half = self.num_cards // 2
        told_ns, stopped, resumed = await driver.stop(
            self._spec(self.steps), everyone[:half], self.steps, 2 + index % 3, everyone[half:]
        )
        if stopped.steps_done == self.steps:
            raise CaseFailed("a request ended before it could be stopped; its steps are too short, or too few")
        return {
            "a step": (stopped.end_ns - stopped.start_ns) / 1e6 / stopped.steps_done,
            "from the stop to the end of the run": (stopped.end_ns - told_ns) / 1e6,
            "from there to the start of the next on other cards": (resumed.start_ns - stopped.end_ns) / 1e6,
        }

    def _spec(self, steps: int) -> Spec:
        return Spec(
            prompt="a red fox",
            height=self.side,
            width=self.side,
            steps=steps,
            guidance_scale=self.guidance_scale,
            seed=self.seed,
        )

    def _method(self) -> tuple[str, ...]:
        return (
            "Exchanges: an all-to-all among the members of a group, which is a part of the node's one communicator; "
            "by the first member's clock, until its device is done. Rates are what each member sends to the others.",
            "Changes: from the end of a chunk of one step at its first worker to the start of the next at its own, "
            "with all members there and the state moved; chunks are queued ahead, as by the engine.",
            "Stops: a run on half of the cards is told to stop. Its members agree on that in the next step, so it "
            "ends one to two steps later. Then it goes on on the others. The ratio is over a step of the same run.",
            "Random weights of real size (`tilework fake`). On CPUs it is a rehearsal by gloo: its times say nothing "
            "of GPUs.",
        )


def _exchange_table(found: Sequence[dict[Group, Exchanged]], megabytes: Sequence[float]) -> Table:
    rows = []
    for groups in found:
        for group, one in groups.items():
            rates = (f"{one.rates[size]:.2f}" for size in megabytes)
            beside = f"{group}, {len(groups)} at once"
            rows.append((beside, f"{one.first_ms:.3f}", f"{one.again_ms:.3f}", *rates))
    columns = ("group", "1 KB, first, ms", "again, ms", *(f"{size:g} MB, GB/s" for size in megabytes))
    return Table(title="All-to-all", columns=columns, rows=tuple(rows))


def _gap_table(gaps: dict[str, list[float]], title: str = "Between two chunks of a request, in ms") -> Table:
    rows = tuple((name, f"{median(values):.2f}", f"{max(values):.2f}") for name, values in gaps.items())
    return Table(title=title, columns=("", "median", "most"), rows=rows)
