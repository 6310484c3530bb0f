"""The grid: 56 cells, from loads that everybody can serve to loads that nobody can. docs/compare.md says why these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilework.sim.compare.cells import Cell
from tilework.sim.workloads.coserving import CoServing
from tilework.sim.workloads.ddit import DDiT
from tilework.sim.workloads.family import Family
from tilework.sim.workloads.heavy_tail import HeavyTail
from tilework.sim.workloads.tetriserve import TetriServe
from tilework.sim.workloads.tridentserve import TridentServeFlux, TridentServeHunyuanVideo

POLICIES = (
    "tilework",
    "gf-dit-edf-best-fit-aside",
    "tetriserve-early",
    "tetriserve",
    "ddit-aside",
    "fixed-sp8",
)
"""Who is compared if nobody says otherwise: ours, and the best of each kind of published policy and of habit.

Without `edf`: on one device each, half of the requests of most cells can never be on time, whatever the load.
"""

FEW_SEEDS, FULL_SEEDS = 3, 10

_MIXES = ("uniform", "skewed")
_SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
_RATES = (6, 9, 15, 18)  # And 12, which the scales have.
_OVERLOADS = (24, 30)
_FEWER = 200  # Requests where the queue grows, or there are many devices: what takes longest to simulate.
_VIDEOS = 150


def grid() -> tuple[Cell, ...]:
    """In the order of their sections; names are unique."""
    return (*_tight(), *_rates(), *_overload(), *_bursts(), *_nodes(), *_videos(), *_stages(), *_mixed())


def _tight() -> Iterator[Cell]:
    for mix in _MIXES:
        for scale in _SCALES:
            yield _flux("deadlines", mix, scale, 12)


def _rates() -> Iterator[Cell]:
    for mix in _MIXES:
        for scale in (1.0, 1.5):
            for rpm in _RATES:
                yield _flux("rates", mix, scale, rpm)


def _overload() -> Iterator[Cell]:
    for mix in _MIXES:
        for scale in (1.0, 1.5):
            for rpm in _OVERLOADS:
                yield _flux("overload", mix, scale, rpm, num_requests=_FEWER)


def _bursts() -> Iterator[Cell]:
    for mix in _MIXES:
        for scale in (1.0, 1.5):
            yield _flux("bursts", mix, scale, 12, "-bursts", arrivals="bursts", num_requests=_FEWER)


def _nodes() -> Iterator[Cell]:
    for mix in _MIXES:
        for rpm in (72, 120):
            yield _flux("four nodes", mix, 1.0, rpm, num_gpus=32, num_requests=_FEWER)


def _videos() -> Iterator[Cell]:
    for rate in (0.25, 0.5, 0.75, 1.0):
        yield _cell("videos", f"ddit8-r{rate:g}", DDiT(rate_per_s=rate, num_requests=_VIDEOS), 8)
    yield _cell("videos", "ddit8-at-once", DDiT(arrivals="at_once", num_requests=_VIDEOS), 8)
    yield _cell("videos", "ddit8-deadlines-r0.75", DDiT(rate_per_s=0.75, deadlines=True, num_requests=_VIDEOS), 8)


def _stages() -> Iterator[Cell]:
    """TridentServe's, on a quarter of its 128 devices, at rates that fill our approximation of them."""
    for load in ("heavy", "dynamic"):
        workload = TridentServeFlux(rate_per_s=0.75, num_requests=300, load=load)
        yield _cell("stages", f"trident-flux32-{load}", workload, 32)
    for load in ("medium", "dynamic"):
        video = TridentServeHunyuanVideo(rate_per_s=0.16, num_requests=_VIDEOS, load=load)
        yield _cell("stages", f"trident-video32-{load}", video, 32)


def _mixed() -> Iterator[Cell]:
    yield _cell("mixed", "coserving16-r0.5", CoServing(rate_per_s=0.5, num_requests=300), 16)
    yield _cell("mixed", "heavy-tail16-r1.5", HeavyTail(rate_per_s=1.5, num_requests=300), 16)


def _flux(section: str, mix: str, scale: float, rpm: float, suffix: str = "", num_gpus: int = 8, **more: Any) -> Cell:
    workload = TetriServe(mix=mix, scale=scale, rate_per_s=rpm / 60, **more)
    return _cell(section, f"flux{num_gpus}-{mix}{suffix}-s{scale}-r{rpm}", workload, num_gpus)


def _cell(section: str, name: str, workload: Family, num_gpus: int) -> Cell:
    return Cell(name=name, workload=workload, table=workload.table, num_gpus=num_gpus, section=section)
