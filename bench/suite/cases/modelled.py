"""A whole server with eight simulated GPUs under mixed load: do policies rank as `simulate` says?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import Check, Finding, Note, Picture, Table
from suite.pictures import attainment_bars, timeline
from suite.simulated_devices import LiveRun, faster, run, uniform_workload, write_table
from suite.stats import Interval, extremes, fmean
from tilework.cost.table_file import read_table

_APART = 3

Runs = dict[str, list[LiveRun]]
"""By policy, one run per seed, in the order of the seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """`requests` at `rate_per_min`, Poisson, of all sizes of the table alike, due after their SLO x `slo_scale`.

    Table, arrivals and SLOs are `time_scale` times as fast, to save time; what Tilework itself takes is not, so it
    weighs that much more.
    """

    policies: tuple[str, ...] = (
        "fixed-sp2",
        "fixed-sp8",
        "ddit-drop",
        "tetriserve",
        "gf-dit-edf-best-fit-drop",
        "tilework",
    )
    table: str = "flux1dev_h100_eager"
    devices: int = 8
    requests: int = 60
    rate_per_min: float = 18.0
    slo_scale: float = 1.0
    time_scale: float = 3.0
    seeds: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def make(cls, quick: bool) -> Modelled:
        return cls(requests=20, time_scale=4.0, seeds=(1,)) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory() as folder:
            runs = self._runs(Path(folder), note)
        return Finding(
            checks=(*self._rank_checks(runs), *_simulation_checks(runs)),
            method=self._method(),
            tables=(_live_table(runs), _simulated_table(runs)),
            facts={f"{p}, all seeds: simulated - live": _together(runs[p]) for p in runs},
            pictures=(
                Picture(name="attainment", png=attainment_bars({policy: _attained(runs[policy]) for policy in runs})),
                *(Picture(name=policy, png=timeline(runs[policy][0], self.devices)) for policy in self.policies[-2:]),
            ),
        )

    def _runs(self, folder: Path, note: Note) -> Runs:
        table, path = faster(read_table(self.table), self.time_scale), folder / "table.json"
        write_table(path, table)
        runs: Runs = {policy: [] for policy in self.policies}
        for seed in self.seeds:
            rate_per_s = self.rate_per_min / 60 * self.time_scale
            workload = uniform_workload(table, self.requests, rate_per_s, self.slo_scale, seed)
            for policy, done in runs.items():
                done.append(run(policy, seed, self.devices, path, workload, folder))
                note(f"seed {seed}: {policy} attained {_attained(done)[-1]:.0%}")
        return runs

    def _rank_checks(self, runs: Runs) -> list[Check]:
        """Shares that differ by fewer requests than `_APART` are not to be told apart."""
        checks = []
        for index, seed in enumerate(self.seeds):
            live = {policy: done[index].seen["on_time"] for policy, done in runs.items()}
            predicted = {policy: done[index].predicted["on_time"] for policy, done in runs.items()}
            apart = [pair for pair in permutations(runs, 2) if predicted[pair[0]] - predicted[pair[1]] >= _APART]
            swapped = [pair for pair in apart if live[pair[0]] <= live[pair[1]]]
            what = f"seed {seed}: pairs that rank otherwise live than in simulation, of {len(apart)}"
            checks.append(Check(what=what, measured=extremes([len(swapped)]), high=0))
            *others, ours = live.values()
            what = f"seed {seed}: on time by {self.policies[-1]}, more than by the best other"
            checks.append(Check(what=what, measured=extremes([ours - max(others)]), low=0, unit=f"of {self.requests}"))
        return checks

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve --backend modelled --devices {self.devices}`: HTTP, engine, controller, messages, groups "
            "and state files are real; a step sleeps for as long as the table says. All of it, and the client, share "
            "the cores of this machine: waking eight processes takes milliseconds per run, which delays wide "
            "groups most. GPUs with a core each would not have this delay.",
            f"Times of the table, SLOs and gaps between arrivals are divided by {self.time_scale:g}; what Tilework "
            f"takes is not and so weighs {self.time_scale:g} times as much. Times below are as measured, not scaled "
            "back.",
            "All policies get the same requests at the same times, open loop, without warm-up. Attainment and latency "
            "are the client's, from the planned arrival to the end of the answer.",
            "Simulated: `simulate --log` on what the run itself measured, against the live run by its log, where a "
            "request ends with its last run. The deviation of a policy is the largest of its seeds. Predicted: "
            "`simulate` on the table alone, without anything measured.",
            f"Ranked are policies for which simulation predicts at least {_APART} requests more or fewer on time.",
        )


def _simulation_checks(runs: Runs) -> list[Check]:
    checks = []
    for policy, done in runs.items():
        points = [abs(one.attainment_points) for one in done]
        percent = [100 * abs(one.latency_ratio - 1) for one in done]
        checks += [
            Check(what=f"{policy}: |simulated - live| attainment", measured=_worst(points), high=3, unit="points"),
            Check(what=f"{policy}: |simulated / live - 1| mean latency", measured=_worst(percent), high=5, unit="%"),
        ]
    return checks


def _together(runs: Sequence[LiveRun]) -> str:
    """How far the simulations are off on average, with their signs."""
    points, ratio = fmean(run.attainment_points for run in runs), fmean(run.latency_ratio for run in runs)
    return f"{points:+.2f} points, mean latency {100 * (ratio - 1):+.2f}%"


def _attained(runs: Sequence[LiveRun]) -> list[float]:
    return [run.seen["attainment"] for run in runs]


def _percent(runs: Sequence[LiveRun]) -> Interval:
    return extremes([100 * share for share in _attained(runs)], fmean)


def _worst(values: Sequence[float]) -> Interval:
    return extremes(values, max)


def _live_table(runs: Runs) -> Table:
    columns = ("policy, seed", "attained", "mean", "p50", "p95", "p99", "devices per step")
    return Table(
        title="Live, as the client saw it; latency in s",
        columns=columns,
        rows=tuple(row for done in runs.values() for row in (*map(_live_row, done), _live_row_of_all(done))),
    )


def _live_row_of_all(runs: Sequence[LiveRun]) -> tuple[str, ...]:
    """Percentiles of several seeds are none of all."""
    latency_s = fmean(one.seen["latency_s"]["mean"] for one in runs)
    degree = fmean(one.mean_degree for one in runs)
    return f"{runs[0].policy}, all", f"{fmean(_attained(runs)):.1%}", f"{latency_s:.3f}", "", "", "", f"{degree:.2f}"


def _live_row(run: LiveRun) -> tuple[str, ...]:
    latency = (f"{run.seen['latency_s'][name]:.3f}" for name in ("mean", "p50", "p95", "p99"))
    return f"{run.policy}, {run.seed}", f"{run.seen['attainment']:.1%}", *latency, f"{run.mean_degree:.2f}"


def _simulated_table(runs: Runs) -> Table:
    columns = ("policy, seed", "live", "simulated", "predicted", "live mean", "simulated / live", "predicted / live")
    return Table(
        title="Attainment and mean latency in s: live by the log, simulated on what the run measured, predicted",
        columns=columns,
        rows=tuple(
            row
            for done in runs.values()
            for row in (*(_simulated_row([one], str(one.seed)) for one in done), _simulated_row(done, "all"))
        ),
    )


def _simulated_row(runs: Sequence[LiveRun], seeds: str) -> tuple[str, ...]:
    """Of one run, or of several: the mean of all."""
    answers = ([one.live, one.simulated, one.predicted] for one in runs)
    live, simulated, predicted = (list(each) for each in zip(*answers, strict=True))
    shares = (f"{fmean(one['attainment'] for one in each):.1%}" for each in (live, simulated, predicted))
    live_s, predicted_s = (fmean(one["latency_s"]["mean"] for one in each) for each in (live, predicted))
    ratios = (f"{ratio:.3f}" for ratio in (fmean(one.latency_ratio for one in runs), predicted_s / live_s))
    return f"{runs[0].policy}, {seeds}", *shares, f"{live_s:.3f}", *ratios
