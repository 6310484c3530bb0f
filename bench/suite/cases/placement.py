"""How long a decision takes where stages have weights that do not all fit, on up to 4096 devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from suite.case import Check, Finding, Note, Table
from suite.decision_times import FullSimulation, Thought, TimedController, shown
from suite.stats import extremes, median, over_repeats, p99
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request
from tilework.cost.table_file import read_table
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.registry import make_policy
from tilework.server.garbage import rare_collections
from tilework.sim.config import SimConfig
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A workload by name with its parameters, and its cost table."""

    workload: str
    table: str
    parameters: Mapping[str, str] = field(default_factory=dict)


PIPELINES = {
    pipeline: Asked(workload=f"tridentserve-{pipeline}", table=table, parameters={"load": "medium"})
    for pipeline, table in (
        ("sd3", "sd3medium_l20"),
        ("flux", "flux1_l20"),
        ("cogvideox", "cogvideox15_l20"),
        ("hunyuanvideo", "hunyuanvideo_l20"),
    )
} | {"flux + hunyuanvideo": Asked(workload="coserving", table="flux1_l20+hunyuanvideo_l20")}
"""Those of TridentServe, and two side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`goal_ms`: the median of a decision; `published_ms`: what TridentServe states for its solver (Table 4)."""

    devices: int
    goal_ms: float
    published_ms: float
    seeds: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Each of `pipelines` under each policy on each number of devices.

    For each device `waiting` requests wait at all times: as one begins, the next arrives. After `warm_up` requests have
    ended, so many `decisions` that begin a request are measured. Those of `policies` have goals; `others` have none,
    and are measured with the first pipeline.
    """

    pipelines: tuple[str, ...] = ("hunyuanvideo", "flux", "flux + hunyuanvideo")
    policies: tuple[str, ...] = ("tilework", "tridentserve")
    others: tuple[str, ...] = ("tridentserve-ilp",)
    sizes: tuple[Size, ...] = (
        Size(devices=128, goal_ms=2.0, published_ms=25.0, seeds=(1, 2, 3)),
        Size(devices=1024, goal_ms=6.0, published_ms=45.0),
        Size(devices=4096, goal_ms=20.0, published_ms=98.0),
    )
    waiting: float = 0.125
    warm_up: int = 100
    decisions: int = 100
    jitter: float = 0.05

    @classmethod
    def make(cls, quick: bool) -> Placement:
        whole = cls()
        if not quick:
            return whole
        small = replace(whole.sizes[0], seeds=(1,))
        return replace(whole, sizes=(small,), pipelines=("flux",), warm_up=20, decisions=30)

    def measure(self, note: Note) -> Finding:
        checks, decisions, bursts = [], [], []
        for what, size, policy, pipeline in self._cells():
            runs = []
            for seed in size.seeds:
                note(f"{what}, seed {seed}")
                with rare_collections():
                    runs.append(self._run(policy, pipeline, size.devices, seed))
            if policy in self.policies:
                times = [[one.handle_ms for one in run.decisions if one.num_begun] for run in runs]
                measured = over_repeats(times, median)
                checks.append(Check(what=f"{what}: median", measured=measured, high=size.goal_ms, unit="ms"))
            decisions.append(_row(what, [[one for one in run.decisions if one.num_begun] for run in runs]))
            decisions.append(_row(f"{what}, all", [run.decisions for run in runs]))
            bursts.append(_burst(what, runs))
        return Finding(
            checks=tuple(checks),
            method=self._method(),
            tables=(
                Table(title="Decisions while requests wait all the time", columns=_COLUMNS, rows=tuple(decisions)),
                Table(title="The first requests, all at once", columns=_BURST_COLUMNS, rows=tuple(bursts)),
            ),
        )

    def _cells(self) -> Iterator[tuple[str, Size, str, str]]:
        for pipeline in self.pipelines:
            for policy in (*self.policies, *(self.others if pipeline == self.pipelines[0] else ())):
                for size in self.sizes:
                    yield f"{pipeline}, {policy}, {size.devices} devices", size, policy, pipeline

    def _run(self, policy: str, pipeline: str, num_devices: int, seed: int) -> _Run:
        asked, made, num_waiting = PIPELINES[pipeline], make_policy(policy), int(num_devices * self.waiting)
        table = read_table(asked.table)
        timed = TimedController(ControllerConfig(policy=policy), table, made)
        if isinstance(made, TridentServe):
            made.solver = timed.solving.around(made.solver)
        run = _Run()

        def is_over() -> bool:
            run.note(timed.thoughts[-1], num_waiting, self.warm_up)
            return run.num_begun >= self.decisions

        FullSimulation(
            timed,
            table,
            SimConfig(num_devices=num_devices, seed=seed, jitter=self.jitter),
            _requests(asked, seed),
            num_missing=lambda: num_waiting - timed.num_waiting,
            is_over=is_over,
        ).run_until_over()
        return run

    def _method(self) -> tuple[str, ...]:
        shown = " / ".join(f"{size.published_ms:g}" for size in self.sizes)
        return (
            "Measured around `Controller.handle` in simulations by the shipped L20 tables, mix medium; `coserving` for "
            "two pipelines side by side. An event is a run that has ended, a component that is loaded, or requests "
            "that arrive. Its time is all from the event to the actions: which requests run where and at which degree, "
            "what devices load and drop, placements, and the controller's own record. `plan` is the policy alone. CPU "
            "time of the thread, with garbage collection as in the server.",
            f"{self.waiting:g} requests wait for each device: as one begins, the next arrives. Measured is from when "
            f"{self.warm_up} requests have ended. Judged are events upon which a waiting request begins; `all` are "
            "those upon which any work was started. `weights` counts loads and drops of components in them, and "
            "`placed` new placements.",
            "All weights of `flux` and of `hunyuanvideo` fit on a device, but not beside the activations of the "
            "largest requests; those of both together do not fit. Devices begin with all weights if they fit, else "
            "with none.",
            "Every request is accepted without a predicted finish, since admission is not part of the decision.",
            f"TridentServe's Table 4 states {shown} ms for its solver, on another machine.",
            "`program` is what `tridentserve` spends in its dispatch program: the greedy method, or HiGHS in "
            "`tridentserve-ilp`.",
            "Intervals: extremes over the seeds.",
        )


def _requests(asked: Asked, seed: int) -> Iterator[Request]:
    """Without end, in the proportions of the workload."""
    index = count()
    for part in count():
        made = make_workload(asked.workload, {**asked.parameters, "num_requests": _DEALT})
        for request in to_requests(made.requests(seed + _SEEDS * part)):
            yield replace(request, uid=str(next(index)))


_DEALT, _SEEDS = 1000, 1_000_000
_COLUMNS = ("pipeline, policy, devices", "count", "event", "p99", "largest", "plan", "program", "weights", "placed")
_BURST_COLUMNS = ("pipeline, policy, devices", "requests", "started", "event", "plan", "program")


@dataclass(slots=True)
class _Run:
    """The thought upon the first requests, and the decisions with a full line."""

    burst: Thought | None = None
    decisions: list[Thought] = field(default_factory=list)
    num_begun: int = 0
    _was_full: bool = False

    def note(self, thought: Thought, num_waiting: int, warm_up: int) -> None:
        if self.burst is None and thought.num_jobs:
            self.burst = thought
        self._was_full = self._was_full or thought.num_waiting >= num_waiting
        if self._was_full and thought.num_ended >= warm_up and thought.num_starts:
            self.decisions.append(thought)
            self.num_begun += thought.num_begun > 0


def _row(what: str, repeats: Sequence[Sequence[Thought]]) -> tuple[str, ...]:
    decisions = [one for some in repeats for one in some]
    handles = [[one.handle_ms for one in some] for some in repeats]
    return (
        what,
        str(len(decisions)),
        shown(over_repeats(handles, median)),
        shown(over_repeats(handles, p99)),
        f"{max(one.handle_ms for one in decisions):.1f}",
        *(f"{median([read(one) for one in decisions]):.3f}" for read in _PARTS),
        str(sum(one.num_changes for one in decisions)),
        str(sum(one.placed for one in decisions)),
    )


def _plan_ms(thought: Thought) -> float:
    return thought.plan_ms


def _solve_ms(thought: Thought) -> float:
    return thought.solve_ms


_PARTS = (_plan_ms, _solve_ms)


def _burst(what: str, runs: Sequence[_Run]) -> tuple[str, ...]:
    bursts = [run.burst for run in runs if run.burst is not None]
    times = [extremes([one.handle_ms for one in bursts]), *(extremes([read(one) for one in bursts]) for read in _PARTS)]
    return what, str(bursts[0].num_jobs), str(bursts[0].num_starts), *map(shown, times)
