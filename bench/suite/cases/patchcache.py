"""What the bookkeeping of the patch cache costs when nothing is reused, and what is gained when something is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from suite import denoisers
from suite.case import Check, Finding, Note, Table
from suite.stats import bootstrap, median
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.model import ModelSource
from tilework.core.packing import Reuse, Size
from tilework.core.wire.spec import Spec
from tilework.patches.cache import PatchCache
from tilework.patches.layout import PatchLayout, pack
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.loading import load, quiet
from tilework.pipelines.staged import StagedPipeline

ALWAYS = 1.0  # A threshold that lets all be reused that has not changed.
GUIDANCE = 4.0
_PER_SIDE = 4  # Patches, as at a model's default size.


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchCaching:
    """One request of `shapes` with `shapes_side` and one of an SDXL with 0.5M random weights with `sdxl_side` pixels.

    Both are guided, on one thread, in float32. Passes over the same latents, in which a share of the patches of each
    block is skipped: one of `shares`, in `rounds`.
    """

    shapes_side: int = 256
    sdxl_side: int = 512
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    rounds: int = 30
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> PatchCaching:
        return cls(rounds=4) if quick else cls()

    def measure(self, note: Note) -> Finding:
        torch.set_num_threads(1)
        quiet()
        shapes = load(ModelSource(path="shapes"))
        assert isinstance(shapes, StagedPipeline)
        checks, rows = list[Check](), list[tuple[str, ...]]()
        for family, side in ((shapes, self.shapes_side), (denoisers.build("sdxl"), self.sdxl_side)):
            note(f"{family.info.name} at {side} px")
            found, row = self._family(family, side)
            checks += found
            rows.append(row)
        shares = [f"{share:.0%} skipped" for share in self.shares]
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(
                    title="In ms (median)",
                    columns=("request", "stock", "packed", "nothing skipped", *shares),
                    rows=tuple(rows),
                ),
            ),
        )

    def _family(self, family: StagedPipeline, side: int) -> tuple[list[Check], tuple[str, ...]]:
        plain = _state(family, side, None)
        cut = _state(family, side, CacheChoice(CacheKind.PATCH, 0.0))
        assert isinstance(cut.reuse, Reuse)
        cap, nothing = max(cut.reuse.patch), PatchCache(1 << 32)
        blocks = _BlockTimes(nothing)
        ways: dict[str, Callable[[], object]] = {
            "stock": lambda: family.predict([plain]),
            "packed": lambda: family._predict_packed([plain], _whole_pack(cap)),
            "nothing": lambda: family.predict([cut], blocks),
        }
        for share in self.shares:
            state, cache = _state(family, side, CacheChoice(CacheKind.PATCH, ALWAYS), share), PatchCache(1 << 32)
            ways[str(share)] = lambda state=state, cache=cache: family.predict([state], cache)  # type: ignore[misc]
        with torch.no_grad():
            rounds = [[_seconds(way) for way in ways.values()] for _ in range(2 + self.rounds)][2:]
        times = dict(zip(ways, zip(*rounds, strict=True), strict=True))
        within = blocks.seconds[-self.rounds :]
        name = f"{family.info.name} at {side} px"
        overheads = [100 * (own / other - 1) for own, other in zip(times["nothing"], times["packed"], strict=True)]
        check = Check(
            what=f"{name}: bookkeeping when nothing is reused, of a step",
            measured=bootstrap(overheads, self.seed),
            high=5,
            unit="%",
        )
        gains = [
            Check(
                what=f"{name}: time saved / patches skipped, at {share:.0%}",
                measured=bootstrap(
                    [(1 - own / other) / share for own, other in zip(times[str(share)], times["nothing"], strict=True)],
                    self.seed,
                ),
                low=0.8,
            )
            for share in self.shares
        ]
        gains += [
            Check(
                what=f"{name}: time saved / time of the blocks' patches skipped, at {share:.0%}",
                measured=bootstrap(
                    [
                        (other - own) / (share * of_blocks)
                        for own, other, of_blocks in zip(times[str(share)], times["nothing"], within, strict=True)
                    ],
                    self.seed,
                ),
                low=0.8,
            )
            for share in self.shares
        ]
        return [check, *gains], (name, *(f"{1e3 * median(list(values)):.1f}" for values in times.values()))

    def _method(self) -> tuple[str, ...]:
        return (
            "Stock: the forward pass as without packing. Packed: the same picture cut into the patches that the cache "
            "takes, without a cache. Nothing skipped: with the cache and threshold zero, so that inputs are compared, "
            "and everything is kept and computed.",
            "Skipped: in each block another choice of this share of the patches, which are spread evenly. Texts go "
            "through all blocks in any case. Time saved is against nothing skipped. Only blocks can be skipped: their "
            "time is that within them, texts included, when nothing is skipped.",
            "The ways take turns (A B A B ...), after two rounds that do not count; ratios are of one round. Interval: "
            "95% bootstrap of the median.",
        )


class _BlockTimes:
    """A `core.packing.Pack` that adds up, for each pass, how long its blocks took, in seconds."""

    def __init__(self, pack: PatchCache) -> None:
        self._pack = pack
        self.seconds: list[float] = []

    def __call__(
        self, sizes: tuple[Size, ...], multiple: int, device: torch.device, reuses: tuple[Reuse, ...] = ()
    ) -> PatchLayout:
        layout = self._pack(sizes, multiple, device, reuses)
        run_block = layout.run_block
        self.seconds.append(0.0)

        def timed(*block: Any) -> list[Tensor]:
            start_s = time.perf_counter()
            outputs = run_block(*block)
            self.seconds[-1] += time.perf_counter() - start_s
            return outputs

        layout.run_block = timed  # type: ignore[method-assign, assignment]
        return layout


class _Skip:
    """In place of a predictor: skips a share of the patches of each block."""

    def __init__(self, share: float) -> None:
        self._share, self._generator = share, torch.Generator().manual_seed(0)

    def __call__(self, index: int, change: Tensor) -> Tensor:
        order = torch.randperm(len(change), generator=self._generator)
        return torch.where(order < round(self._share * len(change)), 0.0, 2 * ALWAYS)


def _state(family: StagedPipeline, side: int, cache: CacheChoice | None, share: float = 0.0) -> LatentState:
    spec = Spec(
        prompt="a red circle on a blue background",
        height=side,
        width=side,
        steps=20,
        guidance_scale=GUIDANCE,
        seed=1,
    )
    state = begin_steps(family, replace(spec, cache=cache))
    assert isinstance(state, LatentState)
    if isinstance(state.reuse, Reuse):
        rows, columns = family._size(state)
        patch = rows // _PER_SIDE, columns // _PER_SIDE
        state.reuse = replace(state.reuse, patch=patch, predict=_Skip(share))
    return state


def _whole_pack(cap: int) -> Callable[..., PatchLayout]:
    def packed(sizes: tuple[Size, ...], multiple: int, device: torch.device, reuses: object = ()) -> PatchLayout:
        return pack(sizes, multiple, device, cap=cap)

    return packed


def _seconds(way: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    way()
    return time.perf_counter() - start_s
