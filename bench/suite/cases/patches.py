"""What it gains to draw requests of several sizes in one forward pass, and what cutting them into patches costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from suite import denoisers
from suite.batch_choice import BatchChooser
from suite.case import Check, Finding, Note, Picture, Table
from suite.layouts import layout_png
from suite.stats import bootstrap, extremes, median, percentile
from tilework.core.packing import Size
from tilework.core.request import Shape
from tilework.patches.layout import PatchLayout, pack
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.loading import quiet
from tilework.pipelines.staged import StagedPipeline

GUIDED, UNGUIDED = 5.0, 1.0
DRAWN: tuple[Size, ...] = ((4, 4), (2, 2), (2, 3), (3, 2))
MIX: tuple[Size, ...] = ((128, 128),) * 8 + ((256, 256),) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Denoisers of half a million random weights on one thread, float32.

    `repeats` pairs of eight requests of 128 px and two of 256 px; `mixes` random ones per family, of `mix_pairs` pairs
    each, with sides of `sides`; `share_repeats` steps at each of `share_sides`; U-Nets of `widths` times the channels.
    Which requests a policy would batch follows from costs that were measured before, with `combinations` others of
    these sides, each in `cost_passes` passes; the chosen run in `chosen_pairs`.
    """

    repeats: int = 30
    mixes: int = 50
    mix_pairs: int = 3
    chosen_pairs: int = 11
    combinations: int = 40
    cost_passes: int = 3
    sides: tuple[int, ...] = (64, 128, 192, 256)
    share_sides: tuple[int, ...] = (512, 768, 1024)
    share_repeats: int = 5
    widths: tuple[int, ...] = (1, 2, 4)
    width_repeats: int = 5
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Patches:
        if not quick:
            return cls()
        return cls(
            repeats=5,
            mixes=4,
            mix_pairs=1,
            chosen_pairs=5,
            combinations=4,
            cost_passes=1,
            share_repeats=2,
            width_repeats=1,
        )

    def measure(self, note: Note) -> Finding:
        torch.set_num_threads(1)
        quiet()
        note("eight requests of 128 px and two of 256 px")
        family = denoisers.build("sdxl")
        gains = _gains(family, self._states(family, MIX), self.repeats)
        check = Check(
            what="8 of 128 px and 2 of 256 px, sdxl, guided: one by one / together",
            measured=bootstrap(gains, self.seed),
            low=1.8,
        )
        shares, share_table = self._shares(family, note)
        widths = self._widths(note)
        mixes = {name: self._mixes(name, note) for name in denoisers.FAMILIES}
        chosen = [one for name, drawn in mixes.items() for one in _checks(name, drawn)]
        return Finding(
            checks=(check, *shares, *chosen),
            method=self._method(),
            tables=(widths, share_table, *(_table(name, drawn) for name, drawn in mixes.items())),
            pictures=(Picture(name="batch", png=layout_png(DRAWN, 128, shown=21)),),
        )

    def _states(self, family: StagedPipeline, sizes: Sequence[Size], rng: Random | None = None) -> list[LatentState]:
        """Requests of these sizes in pixels, guided, or half of them if there is an `rng`."""
        return [
            denoisers.begin(family, *size, rng.choice((GUIDED, UNGUIDED)) if rng else GUIDED, seed)
            for seed, size in enumerate(sizes)
        ]

    def _widths(self, note: Note) -> Table:
        rows = []
        for width in self.widths:
            note(f"U-Net of {width} times the channels")
            family = denoisers.build("sdxl", width)
            gain = median(_gains(family, self._states(family, MIX), self.width_repeats))
            rows.append((f"{width} x", f"{family.info.parameters / 1e6:.1f}M", f"{gain:.2f}"))
        return Table(
            title="The same, by width of the U-Net: the more a call computes, the less there is to gain",
            columns=("channels", "weights", "one by one / together"),
            rows=tuple(rows),
        )

    def _shares(self, family: StagedPipeline, note: Note) -> tuple[list[Check], Table]:
        """Of a step of two requests, of which one has half the width of the other."""
        checks, rows = [], []
        for side in self.share_sides:
            note(f"splitting at {side} px")
            states = self._states(family, [(side, side), (side, side // 2)])
            latents = [state.latents[0] for state in states for _ in range(2)]
            layout = pack(tuple((*picture.shape[1:],) for picture in latents), 4, family.device)
            cut_s = [_seconds(lambda: _cut(layout, latents)) for _ in range(1 + 10 * self.share_repeats)][1:]  # noqa: B023
            step_s = [_seconds(lambda: family.predict(states, pack)) for _ in range(1 + self.share_repeats)][1:]  # noqa: B023
            share = 100 * median(cut_s) / median(step_s)
            least, most = 100 * min(cut_s) / max(step_s), 100 * max(cut_s) / min(step_s)
            checks.append(
                Check(
                    what=f"split and assemble, of a step at {side} px",
                    measured=extremes([least, share, most]),
                    high=3,
                    unit="%",
                )
            )
            rows.append((f"{side} px", f"{1e3 * median(cut_s):.3f}", f"{1e3 * median(step_s):.1f}"))
        return checks, Table(title="In ms (median)", columns=("side", "split and assemble", "step"), rows=tuple(rows))

    def _mixes(self, name: str, note: Note) -> list[_Mix]:
        family, rng = denoisers.build(name), Random(self.seed)
        shapes = [Shape(height, width) for height in self.sides for width in self.sides]
        chooser = BatchChooser.measured(family, shapes, self.combinations, self.cost_passes, note)
        mixes = []
        for index in range(self.mixes):
            if index % 10 == 0:
                note(f"{name}, mix {index + 1} of {self.mixes}")
            sizes = [(rng.choice(self.sides), rng.choice(self.sides)) for _ in range(rng.randint(2, 8))]
            states = self._states(family, sizes, rng)
            chosen = chooser.chosen(states)
            mixes.append(
                _Mix(
                    sizes=sizes,
                    gain=median(_gains(family, states, self.mix_pairs)),
                    difference=_difference(family, states),
                    num_chosen=len(chosen),
                    chosen_gain=median(_gains(family, chosen, self.chosen_pairs)) if chosen else None,
                )
            )
        return mixes

    def _method(self) -> tuple[str, ...]:
        return (
            "One by one: a forward pass for each request (for both halves of its guidance at once), as without "
            "packing. Together: one for all, from latents to guided predictions, with splitting and assembling.",
            "The two sides take turns, A B A B, after one of each; each ratio is of two neighbours. Layouts are made "
            "before: a mix keeps its layout from step to step.",
            "Random mixes: 2 to 8 requests, sides drawn from the given ones, half of the requests guided; the median "
            "ratio. The difference is relative to the largest value of the prediction.",
            "Chosen: the first, and each further one that saves 10% of a step, as a policy decides; by costs that were "
            "measured before: each size alone, two and four of it, and other random mixes, as by tilework profile "
            "--mixed, but in this process and in several passes, of which the median counts; and each size alone "
            "without guidance. Their ratio is the median of pairs of their own.",
            "Shares: medians of two loops. Weights are random, so time is all that is measured.",
            "Interval of the first check: 95% bootstrap of the median. Of shares: the least over the most, and the "
            "other way round. Of the chosen: all of them.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """Requests of these sizes, of which a policy would let `num_chosen` share; a gain is None if none do."""

    sizes: list[Size]
    gain: float
    difference: float
    num_chosen: int
    chosen_gain: float | None

    @property
    def row(self) -> tuple[str, ...]:
        listed = ", ".join(f"{height}x{width}" for height, width in sorted(self.sizes))
        chosen = ("", "")
        if self.chosen_gain is not None:
            chosen = f"{self.num_chosen} of {len(self.sizes)}", f"{self.chosen_gain:.2f}"
        return listed, f"{self.gain:.2f}", f"{self.difference:.1e}", *chosen


def _checks(name: str, mixes: Sequence[_Mix]) -> list[Check]:
    """None where no request was chosen."""
    gains = [mix.chosen_gain for mix in mixes if mix.chosen_gain is not None]
    if not gains:
        return []
    what = f"chosen from random mixes, {name}: least one by one / together ({median(gains):.2f} in the median)"
    return [Check(what=what, measured=extremes(gains, min), low=0.98)]


def _table(name: str, mixes: Sequence[_Mix]) -> Table:
    gains = [mix.gain for mix in mixes]
    num_slower, num_chosen = sum(gain < 1 for gain in gains), sum(mix.chosen_gain is not None for mix in mixes)
    return Table(
        title=f"Random mixes, {name}: one by one / together is {median(gains):.2f} in the median, "
        f"{percentile(gains, 10):.2f} to {percentile(gains, 90):.2f} in 80%; "
        f"slower together {num_slower} of {len(mixes)}; chosen from {num_chosen}",
        columns=("mix", "one by one / together", "largest difference", "chosen", "one by one / together, chosen"),
        rows=tuple(mix.row for mix in sorted(mixes, key=lambda mix: mix.gain)),
    )


def _gains(family: StagedPipeline, states: Sequence[LatentState], pairs: int) -> list[float]:
    def one_by_one() -> list[torch.Tensor]:
        return [family.predict([state])[0] for state in states]

    def together() -> list[torch.Tensor]:
        return family.predict(states, pack)

    _seconds(one_by_one)
    _seconds(together)
    return [_seconds(one_by_one) / _seconds(together) for _ in range(pairs)]


def _difference(family: StagedPipeline, states: Sequence[LatentState]) -> float:
    together = family.predict(states, pack)
    return max(
        float((result - alone).abs().max() / alone.abs().max())
        for state, result in zip(states, together, strict=True)
        for alone in family.predict([state])
    )


def _cut(layout: PatchLayout, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return layout.assemble(layout.split(pictures))


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
