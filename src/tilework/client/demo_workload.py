"""The workload of the demo: images of many sizes and clips.

The images keep two small workers busy, with nearly all deadlines within reach; the clips take the time that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tilework.core.request import Shape
from tilework.formats.workload import WorkloadRequest

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
DIRECTIONS = ("left", "right", "up", "down")
# (height, width): number in a deck; the sizes that the shipped model is trained at.
SIDES = {
    (64, 64): 4,
    (96, 96): 3,
    (64, 128): 2,
    (128, 64): 2,
    (96, 128): 2,
    (128, 96): 2,
    (128, 128): 3,
    (160, 160): 2,
    (128, 192): 1,
    (192, 128): 1,
    (192, 192): 2,
}
SLACKS = (2.0, 3.0, 4.0)
BEST_EFFORT_EVERY = 8
ServiceTime = Callable[[Shape], float]
Prompt = Callable[[Random], str]


def linear_service(base_s: float, s_per_pixel: float) -> ServiceTime:
    """Return the seconds that one device takes for one image, all its steps: a fixed part and a part per pixel."""
    return lambda shape: base_s + s_per_pixel * shape.pixels


def demo_prompt(rng: Random) -> str:
    """Make a prompt such as "a large red circle on a blue background"; the two colours differ."""
    colour, background = rng.sample(COLOURS, 2)
    size = rng.choice(SIZES)
    shape = rng.choice(SHAPES)
    return f"a {size} {colour} {shape} on {_with_article(background)} background"


def short_prompt(rng: Random) -> str:
    """Make a prompt such as "red circle", for a workflow that makes it longer."""
    return f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}"


def demo_workload(
    seed: int,
    service_s: ServiceTime,
    *,
    pipeline: str = "shapes",
    prompt: Prompt = demo_prompt,
    steps: int = 20,
    num_requests: int = 24,
    num_devices: int = 2,
    load: float = 0.8,
    floor_s: float = 0.1,
) -> tuple[WorkloadRequest, ...]:
    """Make requests of all sizes, in order of arrival; the same arguments give the same workload.

    Arrivals are random, spread over the time in which the offered work is `load` of what `num_devices` can do, by
    `service_s`; so the length of the workload follows the machine. Every deadline is `floor_s` (the overhead of any
    request) plus one of SLACKS times the request's own service time; each BEST_EFFORT_EVERY-th request has none.

    Raises:
        ValueError: `num_requests`, `num_devices` or `load` is not above 0.
    """
    for name, value in (("num_requests", num_requests), ("num_devices", num_devices), ("load", load)):
        if value <= 0:
            raise ValueError(f"{name} is {value}; use a number above 0")
    rng = Random(seed)
    shapes = _shapes(num_requests, rng)
    times_s = [service_s(shape) for shape in shapes]
    arrivals_s = _arrivals(num_requests, sum(times_s) / (num_devices * load), rng)
    return tuple(
        WorkloadRequest(
            id=index,
            arrival_s=arrivals_s[index],
            pipeline=pipeline,
            height=shape.height,
            width=shape.width,
            steps=steps,
            slo_s=_slo_s(index, times_s[index], floor_s, rng),
            seed=rng.randrange(2**31),
            prompt=prompt(rng),
        )
        for index, shape in enumerate(shapes)
    )


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _shapes(count: int, rng: Random) -> Sequence[Shape]:
    """Return shuffled sizes, in the proportions of SIDES as nearly as `count` allows."""
    deck = [Shape(height, width) for (height, width), share in SIDES.items() for _ in range(share)]
    decks = [rng.sample(deck, len(deck)) for _ in range(-(-count // len(deck)))]
    return [shape for cards in decks for shape in cards][:count]


def _arrivals(count: int, span_s: float, rng: Random) -> Sequence[float]:
    """Return Poisson arrivals, scaled so that the first comes at 0 and the mean gap is `span_s / count`."""
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    scale_s = span_s / sum(gaps)
    return [round(sum(gaps[:index]) * scale_s, 4) for index in range(count)]


def _slo_s(index: int, time_s: float, floor_s: float, rng: Random) -> float | None:
    slack = rng.choice(SLACKS)
    return None if index % BEST_EFFORT_EVERY == BEST_EFFORT_EVERY - 1 else round(floor_s + slack * time_s, 4)


def demo_clips(seed: int, *, side: int = 64, frames: int = 17, steps: int = 16) -> tuple[WorkloadRequest, ...]:
    """Make one clip for each direction, without a deadline, asked for at the start."""
    rng = Random(f"clips {seed}")
    colours = rng.sample(COLOURS[:6], len(DIRECTIONS))
    shapes = rng.sample((*SHAPES[:3], rng.choice(SHAPES[:3])), len(DIRECTIONS))
    backgrounds = ("black", "white")
    return tuple(
        WorkloadRequest(
            arrival_s=0.0,
            pipeline="shapes-motion",
            height=side,
            width=side,
            frames=frames,
            steps=steps,
            seed=rng.randrange(2**31),
            prompt=f"{_with_article(colour)} {shape} moves {direction} on a {rng.choice(backgrounds)} background",
        )
        for colour, shape, direction in zip(colours, shapes, DIRECTIONS, strict=True)
    )
