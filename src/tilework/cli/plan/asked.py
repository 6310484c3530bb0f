"""The question of `tilework plan`, from its options. Raises UserError for each option that cannot be used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilework.cli.console import UserError, user_errors
from tilework.cli.logs import is_log, load_history
from tilework.control.controller import ControllerConfig
from tilework.control.history import History
from tilework.control.measured import dispatch_ns, profiled_table
from tilework.core.request import Request
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_file import read_table
from tilework.formats.json_lines import BadLine
from tilework.policy.registry import DEFAULT_POLICY, UnknownPolicy, check_live
from tilework.sim.config import SimConfig
from tilework.sim.plan.error import ComparedWith, PastRun
from tilework.sim.plan.interval import num_to_show
from tilework.sim.plan.mix import unknown_pipelines
from tilework.sim.plan.search import numbers_of
from tilework.sim.plan.traffic import DrawnTraffic, Resampled, Traffic
from tilework.sim.plan.trial import Question
from tilework.sim.workloads.cells import BadCell, Cell, CellDevices, cell_of
from tilework.sim.workloads.family import BadParameter
from tilework.sim.workloads.registry import UnknownWorkload
from tilework.sim.workloads.requests import BadRequests, check_requests, to_requests

LOWEST_TARGET, HIGHEST_TARGET = 0.01, 0.999
MEASURED = "measured"
"""The name of the hardware of a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options as they were given, but for what only decides how the answer is shown."""

    workload: str | None
    target: float
    hardware: Sequence[str]
    prices: Sequence[str]
    policy: str | None
    sim: SimConfig
    devices_per_node: int | None
    step: int | None
    most: int
    sample: int
    num_samples: int
    served: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question, with the numbers of devices of each hardware that may be bought, and prices in US dollars per hour.

    `serving` are the hardware that knows all pipelines. `requests` are those of seed 0.
    """

    name: str
    question: Question
    requests: Sequence[Request]
    numbers: Mapping[str, Sequence[int]]
    prices: Mapping[str, float]
    serving: Sequence[str]
    past: PastRun | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Requests, costs and devices that a workload brings by itself."""

    traffic: Traffic
    tables: Mapping[str, CostTable]
    controller: ControllerConfig
    sim: SimConfig
    past: PastRun | None = None


def asked(wanted: Wanted, quiet: bool) -> Asked:
    """Return the question that the options ask. Raises UserError."""
    _check(wanted)
    assert wanted.workload is not None
    with user_errors(*(BadLine, BadRequests, BadCell, BadParameter, UnknownWorkload, UnknownPolicy, OSError)):
        path = Path(wanted.workload)
        is_of_log = path.exists() and is_log(path)
        source = _of_log(path, wanted, quiet) if is_of_log else _of_workload(wanted)
        check_live(source.controller.policy)
    requests = source.traffic.requests(0)
    if all(one.deadline_ns is None for one in requests):
        raise UserError(f"--workload {wanted.workload}: no request has a deadline; give them slo_s (docs/formats.md)")
    _check_number(requests, wanted)
    tables = {name: _sized(table, wanted.devices_per_node) for name, table in source.tables.items()}
    prices = _prices(wanted.prices, tuple(tables))
    serving = tuple(name for name, table in tables.items() if not unknown_pipelines(requests, table))
    if not serving and len(prices) < len(tables):
        name, table = next(iter(tables.items()))
        lacks = ", ".join(unknown_pipelines(requests, table))
        raise UserError(
            f"--hardware {name} has no costs of {lacks}, which the workload asks for; give a table that does"
        )
    return Asked(
        name=wanted.workload,
        question=Question(
            traffic=source.traffic,
            tables=tables,
            target=wanted.target,
            controller=source.controller,
            sim=source.sim,
            sample=wanted.sample,
        ),
        requests=requests,
        numbers={name: numbers_of(one.devices_per_node, wanted.step, wanted.most) for name, one in tables.items()},
        prices=prices,
        serving=serving,
        past=source.past,
    )


def _check(wanted: Wanted) -> None:
    """Check what can be wrong whatever the files say. Raises UserError."""
    if wanted.workload is None:
        raise UserError("give --workload: a name of `tilework workload list`, a file of requests, or an event log")
    if not LOWEST_TARGET <= wanted.target <= HIGHEST_TARGET:
        raise UserError(
            f"--target is {wanted.target:g}; give a share of the deadlines from {LOWEST_TARGET} to {HIGHEST_TARGET}, "
            "such as 0.95"
        )
    if wanted.step is not None and wanted.step > wanted.most:
        raise UserError(f"--step {wanted.step} is more than --most {wanted.most}; give less, or more with --most")
    if twice := [name for name, times in Counter(wanted.hardware).items() if times > 1]:
        raise UserError(f"--hardware {twice[0]} is given twice; leave one out")
    path = Path(wanted.workload)
    if path.suffix == ".jsonl" and not path.exists():
        raise UserError(f"--workload {path}: there is no such file; give a file of requests, an event log, or a name")


def _check_number(requests: Sequence[Request], wanted: Wanted) -> None:
    """Raise UserError if a number of devices could not meet the target even with all deadlines kept."""
    num_due = sum(one.deadline_ns is not None for one in requests)
    needed = num_to_show(wanted.target)
    if num_due * wanted.num_samples < needed:
        raise UserError(
            f"--workload {wanted.workload}: {num_due} requests with a deadline are too few to show {wanted.target:.1%} "
            f"even if all are on time; give {math.ceil(needed / wanted.num_samples)} or more, or a lower target"
        )


def _table(name: str) -> CostTable:
    """Raises UserError."""
    try:
        return read_table(name)
    except BadCostTable as error:
        raise UserError(f"--hardware {error}") from error


def _of_workload(wanted: Wanted) -> _Source:
    assert wanted.workload is not None
    is_file = wanted.workload.endswith(".jsonl") or Path(wanted.workload).is_file()
    if is_file and not wanted.hardware:
        raise UserError(
            f"--workload {wanted.workload}: a file of requests does not say what they cost; give --hardware"
        )
    cell = cell_of(wanted.workload, CellDevices(table=next(iter(wanted.hardware), None), num_devices=1))
    tables = {name: _table(name) for name in wanted.hardware or (cell.table,)}
    workload = cell.workload
    return _Source(
        traffic=Traffic(draw=_as_they_came(cell, tables) if isinstance(workload, Path) else DrawnTraffic(workload)),
        tables=tables,
        controller=ControllerConfig(policy=wanted.policy or DEFAULT_POLICY),
        sim=wanted.sim,
        past=_served(wanted.served, cell),
    )


def _as_they_came(cell: Cell, tables: Mapping[str, CostTable]) -> Resampled:
    lines = cell.requests(0)
    if len(tables) == 1:
        for name, table in tables.items():
            check_requests(lines, table, source=cell.source, costs=name)
    return Resampled(tuple(to_requests(lines)))


def _of_log(path: Path, wanted: Wanted, quiet: bool) -> _Source:
    if wanted.served is not None:
        raise UserError("--served is for a file of requests; an event log says by itself how they were served")
    history = load_history(path, quiet)
    requests = tuple(one.request for one in history.requests if one.status is not None)
    if not requests:
        raise UserError(f"{path} holds no finished request; serve something first")
    logged = history.header.config
    return _Source(
        traffic=Traffic(draw=Resampled(requests)),
        tables={name: _table(name) for name in wanted.hardware} or {MEASURED: profiled_table(history)},
        controller=ControllerConfig(policy=wanted.policy or logged.policy, max_batch=logged.max_batch),
        sim=replace(wanted.sim, dispatch_ns=dispatch_ns(history), hosts_have_read=True),
        past=None if wanted.hardware else _past(history, path),
    )


def _past(history: History, path: Path) -> PastRun:
    num_met = sum(one.on_time is True for one in history.requests)
    return PastRun(
        num_devices=max(1, history.num_devices),
        num_met=num_met,
        source=str(path),
        served_by=ComparedWith.SIMULATION if history.header.is_simulated else ComparedWith.SERVER,
    )


def _served(text: str | None, cell: Cell) -> PastRun | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts) or int(parts[0]) < 1:
        raise UserError(f"--served is {text!r}; give the devices and the requests on time, such as 8,412")
    if cell.is_drawn:
        raise UserError(f"--served is for a file of requests, and {cell.name} is a workload; leave it out")
    return PastRun(num_devices=int(parts[0]), num_met=int(parts[1]), source=cell.source)


def _sized(table: CostTable, devices_per_node: int | None) -> CostTable:
    """Return the table for any number of devices: each serves all pipelines."""
    return replace(table, devices={}, devices_per_node=devices_per_node or table.devices_per_node)


def _prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in texts:
        name, _, usd = text.rpartition("=")
        if name not in names:
            raise UserError(
                f"--price {text}: {name or usd!r} is not one of the hardware ({', '.join(names)}); name one"
            )
        if name in prices:
            raise UserError(f"--price {text}: {name} has a price already; leave one out")
        prices[name] = _usd(text, usd)
    if prices and (lacking := [name for name in names if name not in prices]):
        raise UserError(f"--price of {', '.join(lacking)} is missing; give one for each hardware, or none")
    return prices


def _usd(text: str, usd: str) -> float:
    try:
        value = float(usd)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--price {text}: {usd!r} is not a price; give US dollars per hour above 0, such as 2.49")
    return value
