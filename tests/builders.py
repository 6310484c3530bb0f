"""Short ways to say what a test is about: tables, requests, simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from math import exp, log2
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from quick import quick
from stages import DECODE, DIFFUSE, ENCODE, STAGES, at_start
from tilework.admission.contract import EtaPrediction
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.block import Demand
from tilework.core.cost_row import CostRow
from tilework.core.events import DeviceJoined
from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import OnMiss, Request, Shape, Status
from tilework.core.time import ns_from_s
from tilework.core.work import Group, Plan
from tilework.cost.demand import demand_at
from tilework.cost.profile import ProfileKey
from tilework.cost.shipped import shipped_path
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.policy.registry import make_policy, policy_names
from tilework.policy.traits import RefusesRequests
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

PIPELINE = "toy"
PROFILE_KEY = ProfileKey(
    hardware="a CPU",
    architecture="Toy@1",
    model="toy@1",
    dtype="float32",
    threads=1,
    workers=2,
    libraries="torch 2",
)
SIDES = (64, 128, 192)
SERVICE_S = 0.01 + 10 * 0.1 + 0.05  # Of a `request` by a `table`, on one device.

Kind = TypeVar("Kind")

# A policy of each kind: lanes, rounds, groups anew for each chunk, devices divided by size, groups that widen, batches,
# devices divided by stage, once and as requests change; ours.
# What takes long is tried with these, and with all others where slow tests run.
ONE_OF_EACH = (
    "edf",
    "tetriserve",
    "gf-dit-edf-best-fit-drop",
    "bucketed",
    "ddit",
    "patchedserve",
    "trident-b6",
    "tridentserve",
    "tilework",
)
# Of those that refuse requests for reasons of their own only the variant that does not: tests submit more than a rate.
ACCEPTING = [name for name in policy_names() if not isinstance(make_policy(name), RefusesRequests)]
POLICIES = quick(ONE_OF_EACH, ACCEPTING)
FEW_POLICIES = quick(("tilework", "edf", "tetriserve"), ACCEPTING)  # For tests of which each takes seconds.


def table(
    encode_s: float = 0.01,
    step_s: float = 0.1,
    decode_s: float = 0.05,
    degrees: tuple[int, ...] = (1,),
    pipeline: str = PIPELINE,
) -> CostTable:
    """Seconds at 128 px; other sizes in proportion to their pixels. Each doubling of the degree gains a factor 1.6."""
    rows = [
        CostRow(
            pipeline=pipeline,
            stage=stage,
            height=side,
            width=side,
            degree=degree,
            seconds=seconds * (side / 128) ** 2 / 1.6 ** log2(degree),
        )
        for side in SIDES
        for stage, seconds in zip(STAGES, (encode_s, step_s, decode_s), strict=True)
        for degree in (degrees if stage == DIFFUSE else (1,))
    ]
    return CostTable(hardware="toy", rows=tuple(rows))


def profile(steps_s: Mapping[int, Mapping[int, float]], decode_s: float = 0.0, encode_s: float = 0.0) -> CostTable:
    """Seconds of a step by side and degree."""
    steps = [(DIFFUSE, side, degree, s) for side, of_degree in steps_s.items() for degree, s in of_degree.items()]
    ends = [(stage, side, 1, s) for stage, s in ((ENCODE, encode_s), (DECODE, decode_s)) for side in steps_s]
    rows = [
        CostRow(pipeline=PIPELINE, stage=stage, height=side, width=side, degree=degree, seconds=seconds)
        for stage, side, degree, seconds in steps + ends
    ]
    return CostTable(hardware="toy", rows=tuple(rows))


def batched(fixed_s: float = 0.06, each_s: float = 0.04) -> CostTable:
    """Steps of up to eight requests of 128 or 64 px, of which the small ones take half."""
    alone = profile({64: {1: fixed_s + each_s / 2}, 128: {1: fixed_s + each_s, 4: (fixed_s + each_s) / 3}})
    first = alone.rows[0]
    together = [
        CostRow(
            pipeline=first.pipeline,
            stage=DIFFUSE,
            height=side,
            width=side,
            batch=number,
            seconds=fixed_s + each_s * number * share,
        )
        for side, share in ((64, 0.5), (128, 1.0))
        for number in range(2, 9)
    ]
    return replace(alone, rows=(*alone.rows, *together))


def shipped(name: str) -> CostTable:
    """A cost table that comes with the package."""
    path = shipped_path(name)
    assert path is not None
    return read_table(path)


def row(pixels: int, seconds: float, **fields: Any) -> CostRow:
    """A row of so many pixels, one pixel high."""
    return CostRow(**({"pipeline": PIPELINE, "stage": DIFFUSE, "height": 1, "width": pixels} | fields), seconds=seconds)


def sized(pixels: int, height: int = 1, **more: Any) -> Request:
    """A request of so many pixels."""
    return replace(request("a", **more), shape=Shape(height, pixels // height))


def costs(*rows: CostRow, **options: Any) -> TableCosts:
    return TableCosts(CostTable(hardware="toy", rows=rows), **options)


def request(
    uid: str,
    arrival_s: float = 0.0,
    *,
    side: int = 128,
    steps: int = 10,
    slo_s: float | None = None,
    on_miss: OnMiss = OnMiss.BEST_EFFORT,
    **more: Any,
) -> Request:
    """`more` are other fields of `Request`."""
    return Request(
        uid=uid,
        pipeline=PIPELINE,
        shape=Shape(side, side),
        steps=steps,
        arrival_ns=ns_from_s(arrival_s),
        deadline_ns=None if slo_s is None else ns_from_s(arrival_s + slo_s),
        on_miss=on_miss,
        **more,
    )


def promise(uid: str, arrival_s: float, slo_s: float, **more: Any) -> Request:
    """A request that comes in only if it will be on time."""
    return request(uid, arrival_s, slo_s=slo_s, on_miss=OnMiss.REJECT, **more)


def job(job_id: int, asked: Request, urgency_ns: int = 0, **more: Any) -> Job:
    """A job as admission makes it; `more` are other fields of `Job`."""
    fields: dict[str, Any] = {
        "eta_prediction": EtaPrediction(0, 0, 0, 0, 0),
        "demand": Demand(1, 0),
        "done": at_start(asked),
    } | more
    return Job(job_id=job_id, request=asked, urgency_ns=urgency_ns, **fields)


class Idle:
    """A policy of one device per request, in order of arrival, that plans nothing; for tests to derive others from."""

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (1,)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return demand_at(request, left, 1, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        return Plan()


def planned(
    policy: Any,
    requests: list[Request],
    num_devices: int = 1,
    costs: TableCosts | None = None,
    devices: tuple[int, ...] = (),
    last_devices: Mapping[int, Group] | None = None,
    aside: tuple[int, ...] = (),
) -> Plan:
    """What a policy plans when all these wait and all devices, of nodes of eight, are idle.

    Those that have `last_devices` are encoded, and have their states there; those `aside` are set aside.
    """
    costs = costs or TableCosts(table())
    tracker = Tracker(policy, costs)
    for device_id in devices or range(num_devices):
        tracker.add_device(device_id, device_id // 8)
    for job_id, asked in enumerate(requests):
        policy.demand(asked, at_start(asked), costs)  # As admission asks first.
        group, dropped_to_best_effort = (last_devices or {}).get(job_id, ()), job_id in aside
        done = at_start(asked).advanced(1 if group else 0)
        urgency_ns = policy.urgency_ns(asked, dropped_to_best_effort)
        state = {"dropped_to_best_effort": dropped_to_best_effort, "done": done, "last_devices": group}
        tracker.add_job(job(job_id, asked, urgency_ns, demand=policy.demand(asked, done, costs), **state))
    plan: Plan = policy.plan(tracker, costs, 0)
    return plan


def groups(trace: Trace, stage: str = DIFFUSE) -> dict[str, list[Group]]:
    """The groups on which each request ran a stage, in order; repeated ones once."""
    found: dict[str, list[Group]] = {}
    uids = {ending.job_id: ending.request.uid for ending in trace.endings}
    for run in sorted(trace.runs, key=lambda run: (run.start_ns, run.work.work_id)):
        for job_id in run.work.job_ids:
            visited = found.setdefault(uids[job_id], [])
            if run.work.stage.name == stage and visited[-1:] != [run.devices]:
                visited.append(run.devices)
    return found


def assert_legal(
    trace: Trace, num_devices: int, degrees: Sequence[int], devices_per_node: int, excused: Set[str]
) -> None:
    """Devices run one work at a time, groups together on one node; a request's works follow one another, and all end.

    Those that are `excused` need not be done. That nobody starves is part of it: a simulation ends only when nothing is
    left to happen, and looks for all endings.
    """
    for device_id in range(num_devices):
        runs = sorted((run.start_ns, run.end_ns) for run in trace.runs if device_id in run.work.devices)
        assert all(first[1] <= second[0] for first, second in pairwise(runs))
    for run in trace.runs:
        assert len({device_id // devices_per_node for device_id in run.work.devices}) == 1
        assert len(run.work.devices) in (degrees if run.work.stage.name == DIFFUSE else (1,))
    for ending in trace.endings:
        runs_of_job = sorted((r for r in trace.runs if ending.job_id in r.work.job_ids), key=lambda r: r.start_ns)
        assert all(run.start_ns >= ending.request.arrival_ns for run in runs_of_job)
        assert all(first.end_ns <= second.start_ns for first, second in pairwise(runs_of_job))
        steps = [run for run in runs_of_job if run.work.stage.name == DIFFUSE]
        done = [sum(run.steps for run in steps[:index]) for index in range(len(steps))]
        first = [run.work.member(ending.job_id).first_step for run in steps]
        assert first == done, "each step once, in order"
        if ending.status is Status.DONE:
            assert sum(run.steps for run in steps) == ending.request.steps
        assert ending.status is Status.DONE or ending.request.uid in excused


def finished(trace: Trace) -> list[str]:
    """Who is done, in order."""
    return [ending.request.uid for ending in sorted(trace.endings, key=lambda ending: ending.finish_ns)]


def on_time(trace: Trace) -> float:
    """The share of requests that were."""
    return fmean(ending.on_time for ending in trace.endings)


def controller(
    policy: str = "edf", num_devices: int = 1, degrees: tuple[int, ...] = (1,), **options: int
) -> Controller:
    """One that has devices of one node, all idle. `options` are of `ControllerConfig`."""
    built = Controller(ControllerConfig(policy=policy, **options), table(degrees=degrees))
    for device_id in range(num_devices):
        assert built.handle(DeviceJoined(device_id, 0), 0) == ()
    return built


def only(kind: type[Kind], actions: Sequence[Action]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


# DDiT gives no numbers; seconds of a step read from its Figure 5. B is 1, 2 and 4 for sides of 64, 128 and 192.
CLIP_STEPS_S = {
    64: {1: 0.05, 2: 0.051, 4: 0.053},
    128: {1: 0.138, 2: 0.07, 4: 0.063},
    192: {1: 0.389, 2: 0.212, 4: 0.11},
}


def clip(uid: str, arrival_s: float, best: int, steps: int = 30) -> Request:
    """A request that suits 1, 2 or 4 devices."""
    return request(uid, arrival_s, side=64 * best.bit_length(), steps=steps)


def poisson(count: int, rate_per_s: float, seed: int, slo_s: float = 3.0, best_effort: float = 0.2) -> list[Request]:
    """A mix of sizes with exponential gaps; a share is best effort."""
    rng, arrival_s, requests = Random(seed), 0.0, []
    for index in range(count):
        arrival_s += rng.expovariate(rate_per_s)
        slo = None if rng.random() < best_effort else slo_s
        requests.append(request(str(index), arrival_s, side=rng.choice(SIDES), slo_s=slo))
    return requests


def promise_mix(count: int, rate_per_s: float, seed: int, share: float) -> list[Request]:
    """A share asks for a promise, between 1.1 and 8 times what it takes on one device; the others are best effort."""
    rng, arrival_s, requests = Random(seed), 0.0, []
    for index in range(count):
        arrival_s += rng.expovariate(rate_per_s)
        side, steps = rng.choice(SIDES), rng.randint(2, 20)
        slo_s = (0.06 + 0.1 * steps) * (side / 128) ** 2 * rng.uniform(1.1, 8)
        on_miss = OnMiss.REJECT if rng.random() < share else OnMiss.BEST_EFFORT
        slo = None if on_miss is OnMiss.BEST_EFFORT and rng.random() < 0.5 else slo_s
        requests.append(request(str(index), arrival_s, side=side, steps=steps, slo_s=slo, on_miss=on_miss))
    return requests


FLUX_SLO_S = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}


def flux_requests(count: int, per_minute: float, scale: float, seed: int, alpha: float = 0.0) -> list[Request]:
    """The workload of TetriServe §6.1: 20 steps, deadlines by size times `scale`.

    A size is the more probable the larger it is, by a factor exp(alpha x tokens / most tokens); 0 is uniform.
    """
    rng, arrival_s, requests = Random(seed), 0.0, []
    weights = [exp(alpha * (side / 2048) ** 2) for side in FLUX_SLO_S]
    for index in range(count):
        arrival_s += rng.expovariate(per_minute / 60)
        (side,) = rng.choices(list(FLUX_SLO_S), weights)
        due_s = FLUX_SLO_S[side] * scale
        one = request(str(index), arrival_s, side=side, steps=20, slo_s=due_s)
        requests.append(replace(one, pipeline="flux.1-dev"))
    return requests


def simulate(
    requests: list[Request],
    policy: str = "edf",
    *,
    num_devices: int = 2,
    jitter: float = 0.0,
    seed: int = 0,
    cancels: tuple[tuple[int, str], ...] = (),
    costs: CostTable | None = None,
    max_jobs: int = 25_000,
) -> Trace:
    config = SimConfig(num_devices=num_devices, seed=seed, jitter=jitter)
    controller = ControllerConfig(policy=policy, max_jobs=max_jobs)
    return Simulation(controller, costs or table(), config).run(requests, cancels)
