"""TridentServe's workloads: steady, dynamic and diurnal mixes on 128 devices, and its public traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilework.sim.workloads.family import parameter
from tilework.sim.workloads.mixes import TableMixes


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServe(TableMixes):
    """TridentServe §8.1 and D.1: half an hour at a fixed rate, deadlines 2.5 times the latency at the optimal degree.

    `light`, `medium` and `heavy` are steady. `dynamic` interleaves them in six blocks, with many small requests from
    minute 12 and many large ones from minute 20. `diurnal` is the medium mix while the rate goes through one day.

    Ours: all weights, which are missing in our text of the paper. The share of each degree is that of the paper's
    buckets (Table 6), spread evenly over the sizes of that optimal degree. Also ours: the blocks, after the prose of
    §8.3, and the day, a sine in place of a proprietary trace. Arrivals are evenly spaced, as in the published traces.
    """

    source: ClassVar[str] = "TridentServe §8.1, D.1"

    arrivals: str = parameter("constant", "Arrival process.", choices=("poisson", "constant", "bursts"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeSd3(TridentServe):
    """Stable Diffusion 3 Medium: 20 per second, 20 steps, five sizes from 128 to 1536 px."""

    name: ClassVar[str] = "tridentserve-sd3"
    about: ClassVar[str] = "images from 128 to 1536 px: steady, changing or over a day"
    table: ClassVar[str] = "sd3medium_l20"

    rate_per_s: float = parameter(20.0, "Requests per second on average.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeFlux(TridentServe):
    """FLUX.1: 1.5 per second, 4 steps, seven sizes from 128 to 4096 px."""

    name: ClassVar[str] = "tridentserve-flux"
    about: ClassVar[str] = "images from 128 to 4096 px: steady, changing or over a day"
    table: ClassVar[str] = "flux1_l20"

    rate_per_s: float = parameter(1.5, "Requests per second on average.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeCogVideoX(TridentServe):
    """CogVideoX1.5-5B: 1 per second, 6 steps, two sizes of 17 to 81 frames."""

    name: ClassVar[str] = "tridentserve-cogvideox"
    about: ClassVar[str] = "videos of 17 to 81 frames: steady, changing or over a day"
    table: ClassVar[str] = "cogvideox15_l20"

    rate_per_s: float = parameter(1.0, "Requests per second on average.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentServeHunyuanVideo(TridentServe):
    """HunyuanVideo: 0.5 per second, 6 steps, 540p and 720p of 17 to 129 frames."""

    name: ClassVar[str] = "tridentserve-hunyuanvideo"
    about: ClassVar[str] = "videos of 540p and 720p: steady, changing or over a day"
    table: ClassVar[str] = "hunyuanvideo_l20"

    rate_per_s: float = parameter(0.5, "Requests per second on average.", above=0)
