"""The grids: cells to compare policies on, and the policies to compare. lab/docs/compare.md has the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from tilework.sim.workloads.cells import BadCell, Cell
from tilework.sim.workloads.family import WorkloadFamily, costs_of
from tilework.sim.workloads.requests import device_seconds
from tilework.sim.workloads.synthetic import CoServing, HeavyTail
from tilework_lab.workloads.ddit import DDiT
from tilework_lab.workloads.patchedserve import SIDES, PatchedServe, PatchedServeSd3, PatchedServeSdxl
from tilework_lab.workloads.promises import Promises
from tilework_lab.workloads.tetriserve import TetriServe
from tilework_lab.workloads.tridentserve import TridentServeFlux, TridentServeHunyuanVideo

POLICIES = (
    "tilework",
    "gf-dit-edf-best-fit-drop",
    "tetriserve-early",
    "tetriserve",
    "ddit-drop",
    "fixed-sp8",
)
"""The policies that are compared by default: ours, and the best of each group of published policies and of habits.

Without `edf`: on one device each, half of the requests of most cells can never be on time, whatever the load.
"""

BATCHING = ("tilework", "patchedserve", "mixed-cache", "nirvana", "distrifusion", "edf")
"""The policies on PatchedServe's grid: ours, its policy and its baselines, and `edf`, which has no batches."""

FEW_SEEDS, FULL_SEEDS = 3, 10

_MIXES = ("uniform", "skewed")
_SCALES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
_RATES = (6, 9, 15, 18)  # And 12, which the scales have.
_OVERLOADS = (24, 30)
_FEWER = 200  # Requests where the queue grows, or there are many devices: what takes longest to simulate.
_VIDEOS = 150

# Requests per second and device: what eight of them have in the paper's workflow study, less and more.
_PATCHED: dict[type[PatchedServe], tuple[float, ...]] = {
    PatchedServeSdxl: (0.7, 0.9, 1.1, 1.3),
    PatchedServeSd3: (0.25, 0.325, 0.4, 0.475),
}
_STUDIED = 2  # The place of that among them.
_PATCHED_SCALES = (0.6, 0.8, 1.2, 1.4)  # Deadlines of 3 to 7 times the latency alone; and 1, which the rates have.
_PATCHED_S = 120  # Length of a workload.
_FEWEST = 200  # Requests of a workload, at least.


@dataclass(frozen=True, slots=True)
class Grid:
    """Grid of `cells` in the order of their sections, with unique names; `policies` are compared by default."""

    cells: Callable[[], tuple[Cell, ...]]
    policies: tuple[str, ...]


def grid() -> tuple[Cell, ...]:
    """Return 56 cells, from loads that every policy can serve to loads that none can."""
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
            yield _flux("four nodes", mix, 1.0, rpm, num_devices=32, num_requests=_FEWER)


def _videos() -> Iterator[Cell]:
    for rate in (0.25, 0.5, 0.75, 1.0):
        yield _cell("videos", f"ddit8-r{rate:g}", DDiT(rate_per_s=rate, num_requests=_VIDEOS), 8)
    yield _cell("videos", "ddit8-at-once", DDiT(arrivals="at_once", num_requests=_VIDEOS), 8)
    yield _cell("videos", "ddit8-deadlines-r0.75", DDiT(rate_per_s=0.75, deadlines=True, num_requests=_VIDEOS), 8)


def _stages() -> Iterator[Cell]:
    """Return TridentServe's cells, on a quarter of its 128 devices, at rates that fill our approximation of them.

    For images these are a quarter of what the table suggests: there the best static baseline keeps 90%.
    """
    for load, rate_per_s in (("heavy", 0.4), ("dynamic", 0.6)):
        workload = TridentServeFlux(rate_per_s=rate_per_s, num_requests=300, load=load)
        yield _cell("stages", f"trident-flux32-{load}", workload, 32)
    for load in ("medium", "dynamic"):
        video = TridentServeHunyuanVideo(rate_per_s=0.16, num_requests=_VIDEOS, load=load)
        yield _cell("stages", f"trident-video32-{load}", video, 32)


def _mixed() -> Iterator[Cell]:
    yield _cell("mixed", "coserving16-r0.5", CoServing(rate_per_s=0.5, num_requests=300), 16)
    yield _cell("mixed", "heavy-tail16-r1.5", HeavyTail(rate_per_s=1.5, num_requests=300), 16)


def _flux(
    section: str, mix: str, scale: float, rpm: float, suffix: str = "", num_devices: int = 8, **more: Any
) -> Cell:
    workload = TetriServe(mix=mix, scale=scale, rate_per_s=rpm / 60, **more)
    return _cell(section, f"flux{num_devices}-{mix}{suffix}-s{scale}-r{rpm}", workload, num_devices)


def _cell(section: str, name: str, workload: WorkloadFamily, num_devices: int) -> Cell:
    return Cell(name=name, workload=workload, table=workload.cost_table, num_devices=num_devices, section=section)


def patchedserve_grid() -> tuple[Cell, ...]:
    """PatchedServe §8.1 and §8.2: rates on 1 to 8 devices, deadlines, and one size that prevails."""
    return (*_patched_rates(), *_patched_scales(), *_patched_mixes())


def _patched_rates() -> Iterator[Cell]:
    for workload, rates in _PATCHED.items():
        for num_devices in (1, 2, 4, 8):
            for rate in rates:
                yield _patched_cell("rates", workload, rate, num_devices)


def _patched_scales() -> Iterator[Cell]:
    for workload, rates in _PATCHED.items():
        for scale in _PATCHED_SCALES:
            yield _patched_cell("deadlines", workload, rates[_STUDIED], scale=scale)


def _patched_mixes() -> Iterator[Cell]:
    for workload, rates in _PATCHED.items():
        for mix in SIDES:
            yield _patched_cell("mixes", workload, rates[_STUDIED], mix=mix)


def _patched_cell(
    section: str,
    workload_type: type[PatchedServe],
    rate_per_s: float,
    num_devices: int = 8,
    mix: str = "equal",
    scale: float = 1.0,
) -> Cell:
    """Return a cell; `rate_per_s` is that of each device."""
    total = round(rate_per_s * num_devices, 6)
    workload = workload_type(
        rate_per_s=total, num_requests=max(_FEWEST, round(total * _PATCHED_S)), mix=mix, scale=scale
    )
    name = f"{workload_type.pipeline}x{num_devices}-{mix}-s{scale}-r{total:g}"
    return _cell(section, name, workload, num_devices)


def promises_grid() -> tuple[Cell, ...]:
    """Return 8 cells: many steps and few with a decode, two mixes, and two loads of the cheapest degree."""
    return tuple(
        _promises_cell(name, steps, last, mix, load)
        for name, steps, last in (("steps28", 28, 0.0), ("steps4", 4, 2.0))
        for mix in _MIXES
        for load in (0.7, 1.0)
    )


def _promises_cell(kind: str, steps: int, last: float, mix: str, load: float) -> Cell:
    workload = Promises(steps=steps, last=last, mix=mix)
    each_s = fmean(device_seconds(workload.requests(0), costs_of(workload.cost_table)))
    rated = replace(workload, rate_per_s=round(load * Promises.num_devices / each_s, 4))
    return _cell(kind, f"{kind}-{mix}-l{load}", rated, Promises.num_devices)


GRIDS = {
    "grid": Grid(grid, POLICIES),
    "patchedserve-grid": Grid(patchedserve_grid, BATCHING),
    "promises-grid": Grid(promises_grid, POLICIES),
}
"""Grids by the names that `tilework compare --workload` knows."""


def chosen(cells: Sequence[Cell], pattern: str) -> tuple[Cell, ...]:
    """Return the cells whose names match a pattern as in a shell. Raises BadCell if none does."""
    found = tuple(cell for cell in cells if fnmatchcase(cell.name, pattern))
    if not found:
        raise BadCell(f"no cell of the grid is called {pattern!r}; it has {', '.join(cell.name for cell in cells)}")
    return found
