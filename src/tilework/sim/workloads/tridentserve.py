"""TridentServe's workloads: steady, dynamic and diurnal mixes on 128 devices, and its public traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilework.core.shares import dealt
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import (
    Item,
    RatedFamily,
    diurnal,
    numbered,
    request_of,
    scaled,
    steps_of,
    stream,
    table_of,
)
from tilework.sim.workloads.parameters import parameter

# How many times as frequent a size is as the next larger one.
LEAN = {"light": 1.5, "medium": 1.2, "heavy": 1.0}
STEADY = tuple(LEAN)
LOADS = (*STEADY, "dynamic", "diurnal", "trace")
BLOCKS_PER_MIX = 3
DOMINANT = 0.8
SLO_FACTOR = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServe(RatedFamily):
    """TridentServe §8.1 and D.1: half an hour at a fixed rate, deadlines 2.5 times the latency at the optimal degree.

    `light`, `medium` and `heavy` are steady. `dynamic` interleaves them at random: nine equal blocks, in each of which
    one mix makes up four fifths of the requests. `diurnal` is the medium mix while the rate goes through one day; the
    lowest rate comes first. `trace` takes sizes and steps, too, from the file.

    Ours: all weights, which are missing in our text of the paper (see LEAN; heavy has equally many of each size, as
    have the traces that were published with its code); the blocks; the day, a sine in place of a proprietary trace.
    Arrivals are evenly spaced, as in the published traces.
    """

    table: ClassVar[str]
    pipeline: ClassVar[str]
    source: ClassVar[str] = "TridentServe §8.1, D.1"
    num_devices: ClassVar[int] = 128

    arrivals: str = parameter("constant", "How they come.", choices=("poisson", "constant", "bursts"))
    load: str = parameter("medium", "Which sizes, and how they change.", choices=LOADS)

    def __post_init__(self) -> None:
        RatedFamily.__post_init__(self)
        if self.load == "trace" and self.trace is None:
            raise self.refuse("load", "name the file as trace, too")

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        if self.load != "trace":
            return RatedFamily.requests(self, seed)
        return numbered(
            request_of(one.arrival_s, item, scaled(self.slo_s(item), self.scale))
            for one in self.traced(self.pipeline)
            for item in [Item(self.pipeline, one.shape, one.steps)]
        )

    def arrivals_s(self, seed: int) -> list[float]:
        arrivals_s = RatedFamily.arrivals_s(self, seed)
        if self.load != "diurnal" or self.trace is not None:
            return arrivals_s
        return _bent(arrivals_s, self.num_requests / self.rate_per_s, diurnal(self.peak))

    def items(self, arrivals_s: Sequence[float], seed: int) -> Iterable[Item]:
        rng = stream(seed, "items")
        if self.load != "dynamic":
            return dealt(self._shares("medium" if self.load == "diurnal" else self.load), len(arrivals_s), rng)
        mixes = list(STEADY) * BLOCKS_PER_MIX
        stream(seed, "blocks").shuffle(mixes)
        bounds = [len(arrivals_s) * i // len(mixes) for i in range(len(mixes) + 1)]
        return [
            item
            for index, mix in enumerate(mixes)
            for item in dealt(self._blend(mix), bounds[index + 1] - bounds[index], rng)
        ]

    def slo_s(self, item: Item) -> float:
        return SLO_FACTOR * self.optimal_s(item)

    def _shares(self, mix: str) -> dict[Item, float]:
        table = table_of(self.table)
        shapes = {row.shape for row in table.rows}
        ordered = sorted(shapes, key=lambda shape: (shape.pixels, shape))
        weights = [LEAN[mix] ** -place for place in range(len(ordered))]
        return {
            Item(self.pipeline, shape, steps_of(self.table)): weight / sum(weights)
            for shape, weight in zip(ordered, weights, strict=True)
        }

    def _blend(self, dominant: str) -> Mapping[Item, float]:
        others = [mix for mix in STEADY if mix != dominant]
        shares = {item: DOMINANT * share for item, share in self._shares(dominant).items()}
        for mix in others:
            for item, share in self._shares(mix).items():
                shares[item] += (1 - DOMINANT) / len(others) * share
        return shares


def _bent(arrivals_s: Sequence[float], span_s: float, profile: Sequence[float]) -> list[float]:
    """The same arrivals, moved so that their rate goes through `profile` once over `span_s`; later ones stay."""
    part_s, total = span_s / len(profile), sum(profile)
    moved, begun, part = [], 0.0, 0
    for at_s in arrivals_s:
        while part < len(profile) and at_s >= begun + span_s * profile[part] / total:
            begun += span_s * profile[part] / total
            part += 1
        share = 0.0 if part == len(profile) else (at_s - begun) / (span_s * profile[part] / total)
        moved.append((part + share) * part_s if part < len(profile) else at_s)
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeFlux(TridentServe):
    """FLUX.1: 1.5 per second, 4 steps, eight sizes from 128 to 4096 px."""

    name: ClassVar[str] = "tridentserve-flux"
    about: ClassVar[str] = "pictures from 128 to 4096 px: steady, changing or over a day"
    table: ClassVar[str] = "flux1_l20"
    pipeline: ClassVar[str] = "flux.1"

    rate_per_s: float = parameter(1.5, "Requests per second on average.", above=0)
    num_requests: int = parameter(2700, "How many requests; the default is half an hour.", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeHunyuanVideo(TridentServe):
    """HunyuanVideo: 0.5 per second, 6 steps, 540p and 720p of 17 to 129 frames."""

    name: ClassVar[str] = "tridentserve-hunyuanvideo"
    about: ClassVar[str] = "videos of 540p and 720p: steady, changing or over a day"
    table: ClassVar[str] = "hunyuanvideo_l20"
    pipeline: ClassVar[str] = "hunyuanvideo"

    rate_per_s: float = parameter(0.5, "Requests per second on average.", above=0)
    num_requests: int = parameter(900, "How many requests; the default is half an hour.", least=1)
