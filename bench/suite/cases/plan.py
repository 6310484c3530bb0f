"""How many devices to buy: is the number that is named enough live, is one fewer not, and how long does a plan take?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.server import serving_simulated, tilework_json
from suite.simulated_devices import faster, with_files, write_table
from suite.stats import extremes
from tilework.client.drive import drive
from tilework.client.record import CallEnd
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.cost.degrees import least_device_ns
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.formats.workload import WorkloadRequest
from tilework.report.tables import summary
from tilework.sim.workloads.family import Item, request_of

_POLICY = "tilework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Pictures or clips of these sizes in turn, evenly spaced, due after `slo_factor` times their time alone.

    That is at the degree that takes least device time. They come at such a rate that it keeps `load` devices busy.
    Clips take `file_s` more on a CPU slot, for their files.
    """

    name: str
    table: str
    sizes: tuple[str, ...]
    load: float
    slo_factor: float
    time_scale: float
    file_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`requests` of each traffic are served live on `first` simulated devices; from that log the plan names a number.

    Then they are served on that many, and on one fewer. The question is timed with `question` devices at most.
    """

    traffics: tuple[Traffic, ...] = (
        Traffic(name="sd3", table="sd3_h100", sizes=("512x512",), load=2.9, slo_factor=1.6, time_scale=2.0),
        Traffic(
            name="flux",
            table="flux1dev_h100_eager",
            sizes=("256x256", "1024x1024"),
            load=2.6,
            slo_factor=1.6,
            time_scale=2.0,
        ),
        Traffic(
            name="clips",
            table="opensora_h800",
            sizes=("256x144x51",),
            load=1.7,
            slo_factor=2.0,
            time_scale=2.0,
            file_s=0.2,
        ),
    )
    target: float = 0.9
    requests: int = 80
    first: int = 6
    question: str = "tridentserve-flux,rate=2.5"
    question_target: float = 0.95

    @classmethod
    def make(cls, quick: bool) -> Plan:
        if not quick:
            return cls()
        whole = cls()
        return replace(whole, traffics=whole.traffics[:1], requests=40, question="tridentserve-flux,rate=2.5,minutes=2")

    def measure(self, note: Note) -> Finding:
        rows: list[tuple[str, ...]] = []
        checks: list[Check] = []
        for traffic in self.traffics:
            named = self._confirmed(traffic, note)
            rows.append(named.row)
            checks += named.checks(self.target)
        begin_s = time.monotonic()
        target = ["--target", str(self.question_target), "--processes", "2"]
        answer = tilework_json(["plan", "--workload", self.question, *target])
        wall_s = time.monotonic() - begin_s
        note(f"{self.question}: {answer['hardware'][0]['devices']} devices in {wall_s:.0f} s")
        checks.append(Check(what=f"{self.question}: the plan", measured=extremes([wall_s]), high=60, unit="s"))
        return Finding(checks=tuple(checks), method=self._method(), tables=(_table(rows), _question_table(answer)))

    def _confirmed(self, traffic: Traffic, note: Note) -> _Named:
        with TemporaryDirectory() as name:
            folder, table = Path(name), faster(read_table(traffic.table), traffic.time_scale)
            if traffic.file_s is not None:
                table = with_files(table, traffic.file_s)
            write_table(folder / "table.json", table)
            workload = _workload(traffic, table, self.requests)
            log = folder / "events.jsonl"
            _served(self.first, folder / "table.json", workload, log)
            plan = tilework_json(
                ["plan", "--workload", str(log), "--target", str(self.target), "--step", "1", "--processes", "2"]
            )
            number = plan["hardware"][0]["devices"]
            if not number or number < 2:
                raise CaseFailed(f"{traffic.name}: the plan names {number}; choose another load")
            note(f"{traffic.name}: {number} devices are named")
            again = folder / "again.jsonl"
            enough = _served(number, folder / "table.json", workload, again)
            fewer = _served(number - 1, folder / "table.json", workload, again)
            note(f"{traffic.name}: live {enough:.0%} on {number}, {fewer:.0%} on one fewer")
        return _Named(traffic.name, number, enough, fewer, plan)

    def _method(self) -> tuple[str, ...]:
        return (
            "`tilework serve --backend modelled`: HTTP, engine, controller and messages are real; a step sleeps for as "
            "long as the table says. All devices share the cores of this machine.",
            f"The plan is made from the event log of a run on {self.first} devices, by what it measured; then the "
            "same requests are served on the number that it names, and on one fewer. On time as the client saw it.",
            "The question is of half an hour on 128 devices (TridentServe's medium mix), with two processes.",
        )


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    number: int
    enough: float
    fewer: float
    plan: dict[str, Any]

    def checks(self, target: float) -> list[Check]:
        what = f"{self.name}: on time live"
        enough, fewer = (extremes([100 * share]) for share in (self.enough, self.fewer))
        return [
            Check(what=f"{what} on {self.number}", measured=enough, low=100 * target, unit="%"),
            Check(what=f"{what} on {self.number - 1}", measured=fewer, high=99.9 * target, unit="%"),
        ]

    @property
    def row(self) -> tuple[str, ...]:
        points = {one["devices"]: one["share"] for one in self.plan["hardware"][0]["points"]}
        simulated = (f"{points[n]:.1%}" if n in points else "-" for n in (self.number, self.number - 1))
        error = f"{self.plan['error']['points']:+.1f}"
        return (self.name, f"{self.number}", f"{self.enough:.1%}", f"{self.fewer:.1%}", *simulated, error)


def _workload(traffic: Traffic, table: CostTable, num: int) -> tuple[WorkloadRequest, ...]:
    pipeline, steps = table.rows[0].pipeline, table.steps
    assert steps is not None
    shapes = [Shape.parse(size) for size in traffic.sizes]
    costs = TableCosts(table)
    alone_s = {shape: s_from_ns(least_device_ns(costs, pipeline, shape, steps)) for shape in shapes}
    gap_s = sum(alone_s.values()) / len(shapes) / traffic.load
    return tuple(
        request_of(index * gap_s, Item(pipeline, shape, steps), traffic.slo_factor * alone_s[shape])
        for index in range(num)
        for shape in [shapes[index % len(shapes)]]
    )


def _served(devices: int, table: Path, workload: Sequence[WorkloadRequest], log: Path) -> float:
    """The share on time, as clients saw it. Raises CaseFailed."""
    log.unlink(missing_ok=True)
    with serving_simulated(devices, table, _POLICY, log) as server:
        records = asyncio.run(drive(server.url, workload, keep_files=False))
    if failed := [record for record in records if record.status is not CallEnd.DONE]:
        raise CaseFailed(f"{len(failed)} requests failed; the first: {failed[0].detail}")
    share: float = summary(records)["attainment"]
    return share


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(
        title="Named, and served live",
        columns=("traffic", "devices", "live", "one fewer, live", "simulated", "one fewer", "error, points"),
        rows=tuple(rows),
    )


def _question_table(answer: dict[str, Any]) -> Table:
    points = answer["hardware"][0]["points"]
    return Table(
        title=f"{answer['workload']}: {answer['simulations']} simulations in {answer['wall_s']:.1f} s",
        columns=("devices", "on time", "interval", "samples", "target"),
        rows=tuple(
            (
                f"{one['devices']}",
                f"{'' if one['is_whole'] else '≤ '}{one['share']:.1%}",
                f"{one['low']:.1%} to {one['high']:.1%}",
                f"{one['samples']}",
                one["verdict"],
            )
            for one in points
        ),
    )
