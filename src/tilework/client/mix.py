"""Sizes, shares, deadlines and default prompts: the options `--sizes`, `--mix` and `--slo` as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from tilework.core.request import OnMiss, Shape
from tilework.core.shares import dealt
from tilework.formats.workload import WorkloadRequest

SIZES_EXAMPLE = "256,512x768:2,832x480x81"
SLO_EXAMPLE = "256=1.5,512=2, 3 for all sizes, auto, or auto:2.5"
AUTO_FACTOR = 2.5  # AlpaServe's rule, which TridentServe (section 8) adopts.

Shares = Mapping[Shape, float]


def parse_size(text: str) -> Shape:
    """Parse WIDTHxHEIGHT, WIDTHxHEIGHTxFRAMES, or SIDE for a square. Raises ValueError that names the text."""
    size = text.strip()
    try:
        return Shape.parse(size if "x" in size else f"{size}x{size}")
    except ValueError:
        remedy = "use WIDTHxHEIGHT, such as 1024x768, or one number for a square; 832x480x81 is a clip of 81 frames"
        raise ValueError(f"size is {text!r}; {remedy}") from None


def parse_sizes(text: str) -> dict[Shape, float]:
    """Parse sizes with the weight of each, such as "256,512x768:2,832x480x81"; a weight left out is 1.

    Raises:
        ValueError: an entry is no size or has no weight above 0, or a size comes twice.
    """
    shares: dict[Shape, float] = {}
    for entry in text.split(","):
        size, _, weight = entry.partition(":")
        shape = parse_size(size)
        if shape in shares:
            raise ValueError(f"sizes has {size.strip()!r} twice; name each size once, as in {SIZES_EXAMPLE}")
        shares[shape] = _positive(f"the weight in sizes entry {entry.strip()!r}", weight or "1")
    return shares


def mixed_workload(
    arrivals_s: Sequence[float],
    shares: Shares,
    *,
    pipeline: str,
    steps: int,
    prompts: Sequence[str],
    seed: int,
) -> tuple[WorkloadRequest, ...]:
    """Make one request per arrival, without deadlines; the same arguments give the same workload."""
    rng = Random(f"mix {seed}")
    return tuple(
        WorkloadRequest(
            id=index,
            arrival_s=arrival_s,
            pipeline=pipeline,
            height=shape.height,
            width=shape.width,
            frames=shape.frames,
            steps=steps,
            seed=rng.randrange(2**31),
            prompt=rng.choice(prompts),
        )
        for index, (arrival_s, shape) in enumerate(zip(arrivals_s, dealt(shares, len(arrivals_s), rng), strict=True))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRule:
    """The deadline of a size: by name, else `others_s`; or `factor` times its latency on the idle server."""

    by_shape: Mapping[Shape, float] = field(default_factory=dict)
    others_s: float | None = None
    factor: float | None = None

    def slo_s(self, shape: Shape, unloaded_s: Mapping[Shape, float]) -> float:
        """Return the deadline of a size, in seconds. Raises ValueError if the rule has none."""
        if self.factor is not None:
            return self.factor * unloaded_s[shape]
        named_s = self.by_shape.get(shape, self.others_s)
        if named_s is None:
            raise ValueError(f"slo says nothing of size {shape}; add {shape}=SECONDS, or a number for all other sizes")
        return named_s


def parse_slo(text: str) -> SloRule:
    """Parse "256=1.5,512x768=2", with a bare number for all other sizes, or "auto", or "auto:FACTOR".

    Raises:
        ValueError: an entry is none of these, or its seconds are not above 0.
    """
    rule, _, factor = text.strip().partition(":")
    if rule == "auto":
        return SloRule(factor=_positive(f"the factor in slo {text!r}", factor or str(AUTO_FACTOR)))
    by_shape: dict[Shape, float] = {}
    others_s = None
    for entry in text.split(","):
        size, equals, seconds = entry.rpartition("=")
        value_s = _positive(f"slo has {entry.strip()!r}, whose time", seconds, f"write slo as in {SLO_EXAMPLE}")
        if equals:
            by_shape[parse_size(size)] = value_s
        else:
            others_s = value_s
    return SloRule(by_shape=by_shape, others_s=others_s)


def with_slo(
    workload: Sequence[WorkloadRequest],
    rule: SloRule | None,
    *,
    unloaded_s: Mapping[Shape, float],
    scale: float,
    on_miss: OnMiss | None,
) -> tuple[WorkloadRequest, ...]:
    """Return the requests with the rule's deadlines, times `scale`. A rule of None keeps their own, times `scale`.

    Raises:
        ValueError: the rule has no deadline for a size that occurs.
    """

    def adapted(request: WorkloadRequest) -> WorkloadRequest:
        slo_s = request.slo_s if rule is None else rule.slo_s(request.shape, unloaded_s)
        slo_s = None if slo_s is None else slo_s * scale
        return replace(request, slo_s=slo_s, on_miss=on_miss or request.on_miss)

    return tuple(adapted(request) for request in workload)


def _positive(what: str, text: str, remedy: str = "use a number above 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{what} is {text.strip()!r}; {remedy}")
    return value


PROMPTS = (
    "a red circle on a blue background",
    "a lighthouse at dusk",
    "a bowl of ramen, studio light",
    "portrait of an old sailor, oil on canvas",
    "a fox asleep in fresh snow, shallow depth of field",
    "an empty railway station at night, long exposure, wet pavement reflecting green signal lights",
    "isometric cutaway of a submarine, technical illustration with thin ink lines and flat colours",
    "a street market in the rain seen from above, dozens of umbrellas in every colour",
    "macro photograph of a dragonfly's wing, every vein visible, morning light from behind",
    "a quiet library in an abandoned greenhouse, ivy over the shelves, dust in slanted sunbeams, wide angle",
    "watercolour of a mountain village with smoke from the chimneys",
    "a robot repairing a bicycle in a cluttered workshop",
)


def read_prompts(path: Path | str) -> tuple[str, ...]:
    """Return the lines of a text file that are not blank.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise ValueError(f"prompts is {str(path)!r}, which holds no text; write one prompt per line")
    return prompts
