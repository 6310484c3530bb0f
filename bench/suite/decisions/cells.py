"""What is recorded: cells of the built-in grids, cut short, and the policies. All by the names of the old code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POLICIES = (
    "bucketed",
    "ddit",
    "ddit-aside",
    "distrifusion",
    "dp",
    "dpci",
    "edf",
    "edf-narrowest",
    "fixed-sp1",
    "fixed-sp2",
    "fixed-sp4",
    "fixed-sp8",
    "gf-dit-edf-best-fit",
    "gf-dit-edf-best-fit-aside",
    "gf-dit-srtf",
    "mixed-cache",
    "nirvana",
    "patchedserve",
    "rssp",
    "spci",
    "srtf",
    "tetriserve",
    "tetriserve-early",
    "tilework",
    "tridentserve",
    "tridentserve-ilp",
)
"""All that the registry has; named here, so that a new one, or another order of names, changes nothing."""

_EVERY_POLICY = 2000  # Seeds that go round all policies; those after them go to the most intricate ones.
_INTRICATE = ("tilework", "tilework", "tetriserve")


def policy_of(seed: int) -> str:
    """The policy of each scenario; the seed's own choice would change with the names of policies."""
    turns = POLICIES if seed < _EVERY_POLICY else _INTRICATE
    return turns[seed % len(turns)]


_FLUX, _OPENSORA = "flux1dev_h100_eager", "opensora_h800"
_SMALL_L20 = "flux1_l20"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A workload on so many devices; `parameters` are those of `workload make --set`, `options` those of `simulate`.

    With `promises` requests get tenants and classes, and every second deadline is promised, which the built-in grids do
    not have.
    """

    name: str
    workload: str
    parameters: Mapping[str, Any]
    table: str
    devices: int
    options: tuple[str, ...] = ()
    promises: bool = False
    seed: int = 0

    @property
    def settings(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.parameters.items()]

    @property
    def arguments(self) -> list[str]:
        return ["--gpus", str(self.devices), *self.options]


def _flux(name: str, rpm: float, num: int, devices: int = 8, **more: Any) -> Cell:
    options, promises = more.pop("options", ()), more.pop("promises", False)
    parameters = {"rate_per_s": rpm / 60, "num_requests": num, **more}
    return Cell(
        name=name,
        workload="tetriserve",
        parameters=parameters,
        table=_FLUX,
        devices=devices,
        options=options,
        promises=promises,
    )


def _videos(name: str, num: int, **more: Any) -> Cell:
    parameters = {"num_requests": num, **more}
    return Cell(name=name, workload="ddit", parameters=parameters, table=_OPENSORA, devices=8)


def _patched(name: str, kind: str, devices: int, rate_per_s: float, num: int, **more: Any) -> Cell:
    options, promises = more.pop("options", ()), more.pop("promises", False)
    return Cell(
        name=name,
        workload=f"patchedserve-{kind}",
        parameters={"rate_per_s": rate_per_s, "num_requests": num, **more},
        table=f"{kind}_h100",
        devices=devices,
        options=options,
        promises=promises,
    )


_NOISE = ("--jitter", "0.1", "--switch-ms", "20", "--seed", "3")

CELLS = (
    _flux("flux8-uniform-s1.0-r12", 12, 60, mix="uniform"),
    _flux("flux8-skewed-s1.5-r18", 18, 50, mix="skewed", scale=1.5),
    _flux("flux8-skewed-s1.0-r30", 30, 50, mix="skewed"),
    _flux("flux8-uniform-bursts-s1.0-r12", 12, 60, mix="uniform", arrivals="bursts"),
    _flux("flux32-skewed-s1.0-r120", 120, 60, devices=32, mix="skewed"),
    _flux("flux16-nodes-of-4-noise-r40", 40, 50, devices=16, mix="uniform", options=("--gpus-per-node", "4", *_NOISE)),
    _flux("flux8-promises-noise-r18", 18, 60, mix="uniform", scale=1.5, promises=True, options=_NOISE),
    _videos("ddit8-r0.75", 40, rate_per_s=0.75),
    _videos("ddit8-at-once", 30, arrivals="at_once"),
    _videos("ddit8-deadlines-r0.75", 40, rate_per_s=0.75, deadlines="true"),
    Cell(
        name="trident-flux32-dynamic",
        workload="tridentserve-flux",
        parameters={"rate_per_s": 0.75, "num_requests": 60, "load": "dynamic"},
        table=_SMALL_L20,
        devices=32,
    ),
    Cell(
        name="trident-video32-medium",
        workload="tridentserve-hunyuanvideo",
        parameters={"rate_per_s": 0.16, "num_requests": 25, "load": "medium"},
        table="hunyuanvideo_l20",
        devices=32,
    ),
    Cell(
        name="coserving16-r0.5",
        workload="coserving",
        parameters={"rate_per_s": 0.5, "num_requests": 40},
        table="flux1_l20+hunyuanvideo_l20",
        devices=16,
    ),
    Cell(
        name="heavy-tail16-r1.5",
        workload="heavy-tail",
        parameters={"rate_per_s": 1.5, "num_requests": 60},
        table=_SMALL_L20,
        devices=16,
    ),
    _patched("sdxlx1-equal-s1.0-r1.1", "sdxl", 1, 1.1, 60, mix="equal"),
    _patched("sd3x8-high-s1.0-r3.2", "sd3", 8, 3.2, 60, mix="high"),
    _patched("sdxlx2-promises-noise-r2.6", "sdxl", 2, 2.6, 60, promises=True, options=("--max-batch", "4", *_NOISE)),
)
