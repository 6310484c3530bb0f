"""The guard: all promises are kept under any policy, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from builders import FEW_POLICIES, POLICIES, Idle, only, promise, promise_mix, request, simulate, table
from quick import quick
from stages import DIFFUSE
from tilework.admission import feasibility
from tilework.admission.reservation_guard import ReservationGuard, Review
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, WakeAt
from tilework.core.block import Block
from tilework.core.events import Event, Submitted, Woke
from tilework.core.policy import ClusterView, CostModel, JobView
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NEVER_NS, NS_PER_MS, NS_PER_S, START_MARGINS, Margin, Margins
from tilework.core.work import Plan, Start
from tilework.cost.demand import usable_degree
from tilework.policy import registry
from tilework.policy.toolkit.open_devices import WORKS_PER_DEVICE
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace


class Greedy(Idle):
    """Fills every device with jobs in some order, each with all its remaining steps: others wait long."""

    def order(self, jobs: Iterable[JobView]) -> list[JobView]:
        return list(jobs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        jobs = iter(self.order(job for job in view.waiting() if job.left.stage is not None))
        rooms = [device for device in view.devices for _ in range(WORKS_PER_DEVICE - len(device.works))]
        return Plan(starts=tuple(start(job, (device.device_id,), 99) for device, job in zip(rooms, jobs, strict=False)))


class LeastUrgentFirst(Greedy):
    """Serves the job that is due last."""

    def order(self, jobs: Iterable[JobView]) -> list[JobView]:
        return list(jobs)[::-1]


class Faithless(Greedy):
    """Never serves a promised job."""

    def order(self, jobs: Iterable[JobView]) -> list[JobView]:
        return [job for job in jobs if job.promised is None]


class Sleeper(Idle):
    """Serves no job at all, and asks for no wake-up."""


@dataclass
class Reckless(Idle):
    """Picks jobs, groups and numbers of steps at random."""

    random: Random

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        jobs, starts = [job for job in view.waiting() if job.left.stage is not None], list[Start]()
        idle = [device.device_id for device in view.devices if len(device.works) < WORKS_PER_DEVICE]
        self.random.shuffle(jobs)
        for job in jobs:
            self.random.shuffle(idle)
            assert job.left.stage is not None
            width = usable_degree(job.request, self.random.randint(0, len(idle)), costs)
            if not idle or self.random.random() < 0.3:
                break
            starts.append(start(job, tuple(idle[:width]), self.random.randint(1, 8)))
            del idle[:width]
        return Plan(starts=tuple(starts), wake_ns=now_ns + 50 * NS_PER_MS if jobs else None)


def start(job: JobView, devices: tuple[int, ...], num_steps: int) -> Start:
    assert job.left.stage is not None
    is_diffuse = job.left.stage.name == DIFFUSE
    return Start(
        stage=job.left.stage,
        job_ids=(job.job_id,),
        devices=tuple(sorted(devices)) if is_diffuse else devices[:1],
        num_steps=min(num_steps, job.left.num_steps_left) if is_diffuse else 1,
        why="on a whim",
    )


HOSTILE = ("least-urgent", "faithless", "sleeper", "reckless")


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that ignore promises."""
    monkeypatch.setitem(registry._GIVEN, "least-urgent", LeastUrgentFirst)
    monkeypatch.setitem(registry._GIVEN, "faithless", Faithless)
    monkeypatch.setitem(registry._GIVEN, "sleeper", Sleeper)
    monkeypatch.setitem(registry._GIVEN, "reckless", lambda: Reckless(Random(1)))


def kept_and_refused(trace: Trace) -> tuple[int, int]:
    """The number of kept promises and of refused ones; no promise may be broken."""
    promised = [ending for ending in trace.endings if ending.request.is_promise]
    given = [ending for ending in promised if ending.status not in (Status.REJECTED, Status.CANCELLED)]
    late = {ending.request.uid: ending.finish_ns - (ending.request.deadline_ns or 0) for ending in given}
    assert all(ending.on_time for ending in given), {uid: late_ns for uid, late_ns in late.items() if late_ns > 0}
    return len(given), sum(ending.status is Status.REJECTED for ending in promised)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("policy", HOSTILE)
def test_far_reservations_are_kept_too(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first two or three are far here, since thousands of promises would take long."""
    monkeypatch.setattr(feasibility, "_NUM_NEAR", 2)
    share, num_kept = 1.0 if policy == "sleeper" else 0.7, 0
    for seed in range(4):
        costs = replace(table(degrees=(1, 2)), devices_per_node=2 if policy != "reckless" else 4)
        requests = promise_mix(40, 4.0, seed, share)
        cancels = tuple((one.arrival_ns + NS_PER_S, one.uid) for one in requests[::7])
        num_kept += kept_and_refused(simulate(requests, policy, num_devices=4, costs=costs, cancels=cancels))[0]
    assert num_kept > 20


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("policy", HOSTILE)
@pytest.mark.parametrize("num_devices", quick((3,), (1, 3)))
def test_promises_are_kept_under_policies_that_ignore_them(policy: str, num_devices: int) -> None:
    share, num_kept = 1.0 if policy == "sleeper" else 0.5, 0
    for seed in range(4):
        for rate in (0.8, 4.0):
            requests = promise_mix(30, rate * num_devices, seed, share)
            trace = simulate(requests, policy, num_devices=num_devices, costs=table(degrees=(1, 2)))
            num_kept += kept_and_refused(trace)[0]
    assert num_kept > 20, "some promises are given; otherwise none could be broken"


@pytest.mark.parametrize("policy", FEW_POLICIES)
@pytest.mark.parametrize("devices_per_node", quick((2,), (1, 2)))
def test_promises_are_kept_on_several_nodes_though_works_take_a_little_longer(
    policy: str, devices_per_node: int
) -> None:
    costs = replace(table(degrees=(1, 2)), devices_per_node=devices_per_node)
    num_kept = 0
    for seed in range(3):
        requests = promise_mix(60, 4.0, seed, 0.5)
        num_kept += kept_and_refused(simulate(requests, policy, num_devices=4, jitter=0.005, seed=seed, costs=costs))[0]
    assert num_kept > 20


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_promises(policy: str) -> None:
    costs = replace(table(degrees=(1, 2)), devices_per_node=2)
    assert kept_and_refused(simulate(promise_mix(25, 4.0, 1, 0.5), policy, num_devices=4, costs=costs))[0] > 5


@pytest.mark.usefixtures("hostile")
def test_a_promise_waits_as_long_as_it_can_and_no_longer() -> None:
    """Only the guard starts it; the only event meanwhile is the wake-up that the guard asked for."""
    (ending,) = simulate([promise("a", 0, slo_s=5.0)], "sleeper", num_devices=1).endings
    assert 0 <= 5.0 - ending.finish_ns / NS_PER_S < 0.3


@pytest.mark.usefixtures("hostile")
def test_a_margin_that_has_grown_holds_for_promises_that_were_given_before() -> None:
    """The guard begins as much earlier what may not wait any longer."""
    asked = [promise("a", 0.0, slo_s=4.0), request("b", 0.5)]
    larger = Margins(Margin(fixed_ns=NS_PER_S, permille=60), Margin(fixed_ns=NS_PER_S // 2, permille=30))
    begins_ns: list[int] = []
    for margins in (START_MARGINS, larger):
        simulation = Simulation(ControllerConfig(policy="sleeper"), table(), SimConfig(num_devices=1))

        def grow(
            event: Event,
            actions: tuple[Action, ...],
            now_ns: int,
            grown: Margins = margins,
            of: Simulation = simulation,
        ) -> None:
            if isinstance(event, Submitted):
                of.controller.tracker.margins = grown

        runs = simulation.run(asked, ((5 * NS_PER_S, "b"),), grow).runs
        begins_ns.append(min(run.start_ns for run in runs))
    grown_ns = larger.guard.fixed_ns - START_MARGINS.guard.fixed_ns
    assert begins_ns[0] - begins_ns[1] == pytest.approx(grown_ns, abs=2 * NS_PER_MS)


@pytest.mark.usefixtures("hostile")
def test_stages_that_cost_nothing_are_started_in_time() -> None:
    requests = [promise(str(index), index, slo_s=5.0) for index in range(3)]
    free = table(encode_s=0.0, decode_s=0.0)
    assert kept_and_refused(simulate(requests, "sleeper", num_devices=2, costs=free)) == (3, 0)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("policy", [*POLICIES, "least-urgent", "reckless"])
def test_wake_ups_do_not_multiply(policy: str) -> None:
    """Each wake-up occurs once; a new one is asked for only if it is earlier than all open ones."""
    outstanding: list[int] = []
    most = 0

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        nonlocal most
        if isinstance(event, Woke):
            outstanding.remove(now_ns)  # ValueError: this wake-up was not asked for.
        for wake in only(WakeAt, actions):
            assert now_ns < wake.at_ns < min(outstanding, default=NEVER_NS)
            outstanding.append(wake.at_ns)
        most = max(most, len(outstanding))

    simulation = Simulation(ControllerConfig(policy=policy), table(degrees=(1, 2)), SimConfig(num_devices=3))
    simulation.run(promise_mix(60, 4.0, 5, 0.7), observe=observe)
    assert most < 10
    assert most or policy in ("edf", "deadline-lru", "deadline-belady"), "which start in time what is promised"
    assert not outstanding


@dataclass
class Scripted(Idle):
    """Serves only requests that name a device; requests of 160 steps run on two devices, all others on one."""

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return (2,) if request.steps == 160 else (1,)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        named = [job for job in view.waiting() if job.request.uid.startswith("on ")]
        return Plan(starts=tuple(start(job, (int(job.request.uid[3:]),), 999) for job in named))


@pytest.mark.parametrize("devices_per_node", [3, 2])
def test_a_device_that_is_free_early_makes_no_promise_late(
    devices_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide job is reserved on the two devices that are free last, the other, due a little later, on the first.

    Then a work on that node is cancelled. Placed anew, the wide job would begin at once, and the other when the last
    device is free, which is too late.
    """
    monkeypatch.setitem(registry._GIVEN, "scripted", Scripted)
    busy = {3: {"on 1": 100, "on 2": 100}, 2: {"on 1": 100, "on 2": 50, "on 3": 50}}[devices_per_node]
    requests = [
        *(request(uid, steps=steps) for uid, steps in busy.items()),
        promise("narrow", 0.1, slo_s=21.5, steps=180),
        promise("wide", 0.1, slo_s=21.4, steps=160),
    ]
    costs = replace(table(degrees=(1, 2)), devices_per_node=devices_per_node)
    cancels = ((NS_PER_S, "on 1"),)
    trace = simulate(requests, "scripted", num_devices=len(busy) + 1, costs=costs, cancels=cancels)
    assert kept_and_refused(trace) == (2, 0)


class NoGuard(ReservationGuard):
    """Accepts every start, and forces none."""

    def update(self, *what_if: Any) -> dict[int, Block]:
        return {}

    def review(self, starts: tuple[Start, ...], *what_if: Any) -> Review:
        return Review(starts)

    def forced(self, *what_if: Any) -> tuple[Start, ...]:
        return ()

    def wake_ns(self, *what_if: Any) -> None:
        return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", FEW_POLICIES)
def test_without_promises_the_guard_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*requests: Request) -> Trace:
        return simulate(list(requests), policy, num_devices=3, costs=table(degrees=(1, 2)))

    mixes = [promise_mix(60, 6.0, seed, 0.3) for seed in (1, 4)]  # Each policy alone would be late in one of them.
    patient = [replace(one, on_miss=OnMiss.BEST_EFFORT) for one in mixes[0]]
    guarded = traced(*patient), [traced(*asked) for asked in mixes]
    monkeypatch.setattr("tilework.control.controller.ReservationGuard", NoGuard)
    assert traced(*patient) == guarded[0]
    # In order of arrival or deadline, on one device each: only jobs that were present at the promise can delay it.
    unguarded = [traced(*asked) for asked in mixes]
    in_order = ("fixed-sp1", "fifo-load", "lru", "deadline-lru", "deadline-belady", "trident-b1")
    assert (unguarded == guarded[1]) == (policy in in_order), "with promises it does"
