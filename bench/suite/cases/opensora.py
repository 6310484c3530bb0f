"""DDiT's setting behind a live server with eight simulated H800s: videos of three sizes, no deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Table
from suite.simulated_devices import LiveRun, faster, run, with_files, write_table
from suite.stats import extremes, fmean, percentile
from tilework.cost.table_file import read_table
from tilework.formats.workload import WorkloadRequest
from tilework_lab.workloads.ddit import DDiT

BASELINES = ("fixed-sp1", "fixed-sp2", "fixed-sp4", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSora:
    """`requests` of DDiT's workload at `rate_per_s`, `mix` of 144p to 240p to 360p.

    Table and arrivals are `time_scale` times as fast, to save time; what Tilework itself takes is not. `file_s` is the
    time of writing a video file on the CPU slot, before that.
    """

    policies: tuple[str, ...] = ("ddit", *BASELINES, "tilework")
    devices: int = 8
    requests: int = 80
    rate_per_s: float = 0.5
    mix: str = "1:1:1"
    time_scale: float = 1.0
    file_s: float = 0.3
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> OpenSora:
        return cls(requests=16, time_scale=4.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        runs: dict[str, LiveRun] = {}
        with TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            write_table(path, faster(with_files(read_table(DDiT.table), self.file_s), self.time_scale))
            for policy in self.policies:
                runs[policy] = run(policy, self.seed, self.devices, path, self._workload(), Path(folder))
                note(f"{policy}: mean {_mean_s(runs[policy]):.2f} s, p99 {_p99_s(runs[policy]):.2f} s")
        return Finding(
            checks=tuple(self._checks(runs)),
            method=(
                f"`tilework serve --backend modelled --devices {self.devices}`: HTTP, engine, controller, messages, "
                "groups and state files are real; a step sleeps for as long as the table says. Requests go to "
                "`/v1/videos/sync`; files of a few pixels are written on the CPU slot. All of it, and the client, "
                "share the cores of this machine.",
                f"Times of the table and gaps between arrivals are divided by {self.time_scale:g}; what Tilework takes "
                f"is not and so weighs {self.time_scale:g} times as much. Times below are as measured.",
                "All policies get the same requests at the same times, open loop. Latency is the client's, from the "
                "planned arrival until it has the file and its timeline.",
                "Simulated: `simulate --log` on what the run itself measured, against the live run by its log.",
            ),
            tables=(_table(runs),),
        )

    def _workload(self) -> tuple[WorkloadRequest, ...]:
        """The requests of `tilework compare --workload ddit,...`, sooner."""
        family = DDiT(rate_per_s=self.rate_per_s, num_requests=self.requests, mix=self.mix)
        return tuple(replace(one, arrival_s=one.arrival_s / self.time_scale) for one in family.requests(self.seed))

    def _checks(self, runs: dict[str, LiveRun]) -> list[Check]:
        ddit, ours = runs["ddit"], runs["tilework"]
        checks = [
            Check(
                what=f"p99 of ddit over {name}",
                measured=extremes([_p99_s(ddit) / _p99_s(runs[name])]),
                high=1.0,
            )
            for name in BASELINES
        ]
        checks += [
            Check(what="mean of tilework over ddit", measured=extremes([_mean_s(ours) / _mean_s(ddit)]), high=1.0),
            Check(what="p99 of tilework over ddit", measured=extremes([_p99_s(ours) / _p99_s(ddit)]), high=1.0),
        ]
        for name, one in runs.items():
            percent = 100 * abs(one.latency_ratio - 1)
            what = f"{name}: |simulated / live - 1| mean latency"
            checks.append(Check(what=what, measured=extremes([percent]), high=5, unit="%"))
        return checks


def _latencies_s(one: LiveRun) -> list[float]:
    return [record.latency_s for record in one.records]


def _mean_s(one: LiveRun) -> float:
    return fmean(_latencies_s(one))


def _p99_s(one: LiveRun) -> float:
    return percentile(_latencies_s(one), 99)


def _table(runs: dict[str, LiveRun]) -> Table:
    rows = tuple(
        (
            name,
            f"{_mean_s(one):.2f}",
            f"{percentile(_latencies_s(one), 50):.2f}",
            f"{_p99_s(one):.2f}",
            f"{one.mean_degree:.2f}",
            f"{one.latency_ratio:.3f}",
        )
        for name, one in runs.items()
    )
    columns = ("policy", "mean s", "p50 s", "p99 s", "devices per step", "simulated / live, mean")
    return Table(title="Live", columns=columns, rows=rows)
