"""TridentServe over placement types: where stages run, when devices change their types, and its ablations.

On nodes of four simulated L20, with the published tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from builders import job, shipped
from policy.published.tridentserve_runs import ED, FLUX, C, Seen, ask, by_declared, named, serve
from quick import quick
from tilework.control.cluster.tracker import Tracker
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action
from tilework.core.component import Memory
from tilework.core.events import Event
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Plan, Start
from tilework.cost.table import CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.policy.placement.roles import PlacementType, Role, role_of
from tilework.policy.placement.switching import WindowStats
from tilework.policy.published.tridentserve.devices import DeviceAllocator
from tilework.policy.published.tridentserve.dispatch import Dispatch
from tilework.policy.published.tridentserve.layout import SHARED, Pool, PoolLayout
from tilework.policy.published.tridentserve.monitor import Monitor, PoolRun
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.published.tridentserve.program import shortest_first, solve_quickly
from tilework.policy.published.tridentserve.ways import Profiles
from tilework.policy.toolkit.open_devices import OpenDevices
from tilework.policy.toolkit.order import DeadlineOrder
from tilework.policy.toolkit.tasks import TaskReader
from tilework.policy.traits import PlacementStatus
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework_lab.policies.variants import DOWNTIME_S

VIDEO = replace(shipped("hunyuanvideo_l20"), devices_per_node=4)
NAMES = [name for name in registry.policy_names() if name.startswith("tridentserve")]
SMALL = ("128x128", "512x512", "1024x1024", "2048x2048")
SHAPES = {"flux.1": (*SMALL, "3072x3072", "4096x4096"), "hunyuanvideo": ("960x544x17", "1280x720x17", "1280x720x129")}


def mixed(seed: int, num: int, rate_per_s: float, table: CostTable = FLUX) -> list[Request]:
    rng, arrival_s, found = Random(seed), 0.0, []
    for index in range(num):
        arrival_s += rng.expovariate(rate_per_s)
        size = rng.choice(SHAPES[table.rows[0].pipeline])
        found.append(ask(str(index), arrival_s, size, table, rng.choice((1.0, 1.0, 0.5, None))))
    return found


# Where stages run.


def assert_resident(seen: Seen, requests: Sequence[Request], table: CostTable) -> None:
    """A stage runs on devices of one type that is for it, and fits there beside all weights of that type.

    Steps of a request that has begun go on where it began, whatever its devices are for since then.
    """
    costs, by_job = TableCosts(table), {one.job_id: one.request for one in seen.done.endings}
    groups: dict[int, tuple[int, ...]] = {}
    for _, work, kinds in seen.starts:
        graph, asked = costs.graph(work.stage.pipeline), by_job[work.job_ids[0]]
        role = role_of(graph, work.stage)
        if role is Role.D and groups.get(work.job_ids[0]) == work.devices:
            continue
        if role is Role.D:
            assert work.job_ids[0] not in groups, "the group was kept"
            groups[work.job_ids[0]] = work.devices
        (kind,) = kinds
        roles = PlacementType(kind).roles
        assert role in roles
        held = {
            one for stage in graph.stages if role_of(graph, stage) in roles for one in costs.weights.components(stage)
        }
        num_bytes = sum(one.num_bytes for one in held)
        num_bytes += costs.weights.activation_bytes(work.stage, (asked,), len(work.devices))
        assert num_bytes <= (table.memory_bytes or 0), f"{work.stage} of {asked.shape} on {kind}"
    assert len(requests) == len(by_job)


def assert_in_order(trace: Trace) -> None:
    """Devices run one work at a time, groups are on one node, and stages of a request follow each other."""
    for device_id in range(8):
        runs = sorted((run.start_ns, run.end_ns) for run in trace.runs if device_id in run.work.devices)
        assert all(first[1] <= second[0] for first, second in pairwise(runs))
    positions: dict[int, int] = {}
    for run in sorted(trace.runs, key=lambda run: run.start_ns):
        assert len({device_id // 4 for device_id in run.work.devices}) == 1
        for job_id, _, position, _ in run.work.members:
            assert position == positions.get(job_id, 0)
            positions[job_id] = position + run.work.num_steps


@pytest.mark.parametrize("table", [pytest.param(FLUX, marks=pytest.mark.exhaustive), VIDEO], ids=["flux", "video"])
@pytest.mark.parametrize("policy", quick(("tridentserve",), NAMES))
def test_stages_run_where_they_are_resident_and_fit(policy: str, table: CostTable) -> None:
    for seed, rate in ((1, 0.05), (2, 0.4)):
        requests = mixed(seed, 40, rate / (1 if table is FLUX else 4), table)
        seen = serve(requests, policy, table)
        assert_resident(seen, requests, table)
        assert_in_order(seen.done)
        assert serve(requests, policy, table).done == seen.done, "it is deterministic"


def test_the_largest_flux_never_decodes_on_a_device_with_all_stages() -> None:
    """Its steps run on ED, its decode on two C auxiliaries of a node."""
    seen = serve([ask(str(n), 8.0 * n, "4096x4096" if n % 3 == 0 else "1024x1024") for n in range(24)])
    large = {one.job_id for one in seen.done.endings if one.request.shape.height == 4096}
    decodes = [(len(work.devices), kinds) for work, kinds in seen.of("decode") if work.job_ids[0] in large]
    assert len(decodes) == 8
    assert all(found == (2, {"C"}) for found in decodes)
    assert all(kinds == {"ED"} for work, kinds in seen.of("diffuse") if work.job_ids[0] in large)
    assert {"EDC"} in [kinds for _, kinds in seen.of("decode")], "small ones run where all stages are"


def test_the_largest_video_is_encoded_beside_its_steps_and_decoded_on_a_part_of_their_devices() -> None:
    seen = serve([ask(str(n), 60.0 * n, "1280x720x129", VIDEO) for n in range(3)], table=VIDEO)
    assert [kinds for _, kinds in seen.of("encode")] == [{"E"}] * 3
    steps = {work.job_ids[0]: work.devices for work, kinds in seen.of("diffuse") if kinds == {"DC"}}
    assert len(steps) == 3
    for work, _ in seen.of("decode"):
        assert work.devices == steps[work.job_ids[0]][:2]


def test_where_no_placement_has_room_stages_take_turns_on_a_device() -> None:
    """One device decodes 4096 px when nothing else is on it, and loads what it dropped for the next request."""
    requests = [ask(str(n), 100.0 * n, "4096x4096") for n in range(2)]
    seen = serve(requests, num_devices=1)
    loaded = [str(one.load.stage) for one in sorted(seen.done.loads, key=lambda one: one.start_ns)]
    assert loaded == ["flux.1/encode", "flux.1/diffuse"], "the first request finds all weights on the device"


def test_what_fits_on_no_device_even_by_itself_is_tried_as_if_there_were_no_limit() -> None:
    """Admission refuses it; if that is learned later, attempts are counted by the controller."""
    costs = TableCosts(FLUX)
    assert waiting(TridentServe(), costs, [ask("a", 0.0, "4096x4096")], 20).starts


def waiting(policy: TridentServe, costs: TableCosts, requests: Iterable[Request], gb: float, now_s: float = 0) -> Plan:
    """The plan for requests that wait while all of eight devices with `gb` of memory are idle."""
    tracker = Tracker(policy, costs)
    tracker.set_time(ns_from_s(now_s))
    for device_id in range(8):
        tracker.add_device(device_id, device_id // 4, memory=Memory(round(gb * 1e9)))
    for number, asked in enumerate(requests):
        urgency_ns = policy.urgency_ns(asked, False)
        tracker.add_job(job(number, asked, urgency_ns, done=costs.start(asked)))
    return policy.plan(tracker, costs, ns_from_s(now_s))


def test_without_limits_there_is_no_placement_and_no_tick() -> None:
    plan = waiting(TridentServe(), TableCosts(FLUX), [ask("a", 0.0, "1024x1024")], 1000)
    assert plan.placement is None
    assert plan.wake_ns is None or plan.wake_ns >= 15 * NS_PER_S
    assert {start.devices for start in plan.starts} == {(0,)}
    assert all(not start.drop_order.device for start in plan.starts)


def test_devices_drop_first_what_they_are_not_for() -> None:
    policy = by_declared([(ask("x", 0.0, "4096x4096"), 1.0)])
    plan = waiting(policy, TableCosts(FLUX), [ask("a", 0.0, "4096x4096")], 46.3)
    dropped = {start.stage.name: [one.digest for one in start.drop_order.device] for start in plan.starts}
    assert dropped == {"encode": ["flux.1/decode"], "diffuse": ["flux.1/decode"]}


# When devices change their types.


def shift(at_s: float = 150.0, until_s: float = 330.0) -> list[Request]:
    """Small ones with a large one every 75 s; later a large one every 15 s, too."""
    small = [ask(f"s{n}", 3.0 * n, "1024x1024") for n in range(int(until_s / 3))]
    few = [ask(f"f{n}", 1 + 75.0 * n, "4096x4096", slo=3.0) for n in range(int(at_s / 75))]
    many = [ask(f"m{n}", at_s + 15.0 * n, "4096x4096", slo=3.0) for n in range(int((until_s - at_s) / 15))]
    return sorted([*small, *few, *many], key=lambda one: one.arrival_ns)


def test_a_new_mix_brings_a_new_placement_and_says_why() -> None:
    seen = serve(shift(), num_devices=16)
    whys = [place.why for _, place in seen.places]
    assert whys[0].startswith("a request of 4096x4096 can run nowhere; V0 gets ")
    switches = [(at_s, why) for (at_s, _), why in zip(seen.places, whys, strict=True) if "went from" in why]
    assert any(at_s > 150 and why.startswith("the share of V") for at_s, why in switches)
    times = [at_s for at_s, _ in switches]
    assert all(later - earlier >= 60 for earlier, later in pairwise(times)), "one per window"


def test_without_switches_the_first_placement_stays() -> None:
    seen = serve(shift(), "tridentserve-wo-switch", num_devices=16)
    assert not [place.why for _, place in seen.places if "went from" in place.why or "was asked" in place.why]
    assert seen.places[-1][1].why.startswith(("the first placement, for ", "a request of "))


def test_a_declared_mix_is_placed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [(ask("x", 0.0, "4096x4096"), 0.2), (ask("y", 0.0, "1024x1024"), 0.8)]
    policy = named(monkeypatch, lambda: by_declared(declared))
    seen = serve([ask("a", 5.0, "1024x1024"), ask("b", 9.0, "4096x4096")], policy)
    ((at_s, place),) = seen.places
    assert at_s == 5.0
    assert place.why.startswith("the first placement, for the declared mix; ")


def test_a_decode_whose_devices_have_changed_finds_others() -> None:
    """The only large request is in its steps when the window has forgotten it; its class is not forgotten."""
    slow = replace(ask("slow", 0.0, "4096x4096", slo=None), steps=60)
    seen = serve([slow, *(ask(str(n), 2.0 * n, "512x512") for n in range(200))], num_devices=8)
    assert [kinds for work, kinds in seen.of("decode") if len(work.devices) == 2] == [{"C"}]


def test_downtime_leaves_changed_devices_idle() -> None:
    seen = serve(shift(), "tridentserve-downtime", num_devices=16)
    kinds = [{one: name for group, name in place.groups for one in group} for _, place in seen.places]
    found = 0
    for at in (at for at, (at_s, _) in enumerate(seen.places) if at and at_s > 30):
        from_ns = ns_from_s(seen.places[at][0])
        changed = {one for one, name in kinds[at].items() if kinds[at - 1].get(one) != name}
        inside = [work for at_ns, work, _ in seen.starts if from_ns <= at_ns < from_ns + ns_from_s(DOWNTIME_S)]
        assert not [work for work in inside if changed & set(work.devices)]
        found += len(changed)
    assert found, "some devices have changed"


def test_the_monitor_sees_what_waits_for_an_auxiliary() -> None:
    """Two decodes of 8 s are done and one waits; the other pool has served as many, and keeps up."""
    pools = {0: Pool("flux.1", ED), 1: Pool("flux.1", ED), 2: Pool("flux.1", C)}
    layout, monitor = PoolLayout({0: range(3)}, pools), Monitor()
    second = NS_PER_S
    for begin in (0, 8, 16):
        monitor.note(PoolRun(pools[2], begin * second, (begin + 8) * second, 8 * second))
        monitor.note(PoolRun(pools[0], begin // 2 * second, (begin // 2 + 1) * second, 2 * second))
    stats = monitor.stats("flux.1", layout, {ED: 0}, 10 * second)
    assert stats[C] == WindowStats(completions=1, busy_ns=8 * second, replicas=1, backlog=1)
    assert stats[ED] == WindowStats(completions=3, busy_ns=6 * second, replicas=2, backlog=0)
    monitor.note(PoolRun(pools[0], 4 * second, 6 * second, 4 * second, num_requests=4))
    monitor.note(PoolRun(pools[2], 24 * second, 25 * second, second, num_requests=2))
    batched = monitor.stats("flux.1", layout, {ED: 0}, 10 * second)
    assert (batched[ED].completions, batched[C].backlog) == (3 + 4, 1 + 2)


def test_what_the_monitor_counts_can_be_asked_at_any_time_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = list[TridentServe]()

    def make() -> TridentServe:
        policies.append(TridentServe())
        return policies[-1]

    monkeypatch.setitem(registry._GIVEN, "variant", make)
    quiet, seen = serve(shift(), "variant", num_devices=16), list[PlacementStatus]()
    config = SimConfig(num_devices=16, hosts_have_read=True)

    def ask_policy(_event: Event, _actions: tuple[Action, ...], now_ns: int) -> None:
        for at_ns in (now_ns, now_ns + 7 * NS_PER_S):
            seen.extend(policies[-1].placement_status(at_ns))

    asked = Simulation(ControllerConfig(policy="variant"), FLUX, config).run(shift(), observe=ask_policy)
    assert asked == quiet.done
    assert {"EDC", "ED", "C"} <= {one.name for one in seen}
    assert max(one.completions for one in seen if one.name == "C") > 0
    assert any(one.backlog for one in seen)
    assert (
        sum(one.num_devices for one in policies[-1].placement_status(max(one.finish_ns for one in asked.endings))) == 16
    )


def test_runs_that_no_window_has_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all stages fit on each device, and so no switch is ever looked for."""
    policy = TridentServe()
    monkeypatch.setitem(registry._GIVEN, "variant", lambda: policy)
    serve([ask(str(n), 4.0 * n, "512x512") for n in range(400)], "variant", replace(FLUX, memory_bytes=10**12))
    assert 100 < len(policy.orchestration.monitor._runs) < 300


# Several pipelines.


def test_each_pipeline_has_devices_of_its_own() -> None:
    """Two nodes, two pipelines: each has one, since their weights do not fit on a device together."""
    both = merged([FLUX, VIDEO])
    flux = [ask(f"f{n}", 6.0 * n, "4096x4096" if n % 4 == 0 else "512x512") for n in range(20)]
    video = [ask(f"v{n}", 1 + 30.0 * n, "1280x720x129", VIDEO, slo=3.0) for n in range(4)]
    seen = serve(sorted([*flux, *video], key=lambda one: one.arrival_ns), table=both)
    parts = {
        name.split()[0]: {
            one // 4 for group, other in place.groups if other.startswith(name.split()[0]) for one in group
        }
        for _, place in seen.places
        for _, name in place.groups
        if " " in name
    }
    assert {frozenset(nodes) for nodes in parts.values()} == {frozenset({0}), frozenset({1})}


def test_pipelines_that_fit_share_all_devices() -> None:
    layout = PoolLayout.colocated({0: range(4)})
    assert layout.is_colocated
    assert layout.part_of("anything") == SHARED
    assert layout.groups() == (((0, 1, 2, 3), "EDC"),)


# Ablations.


def test_without_awareness_of_stages_a_decode_holds_as_many_devices_as_the_steps() -> None:
    for policy, width in (("tridentserve", 1), ("tridentserve-wo-stageaware", 2)):
        seen = serve([ask("a", 0.0, "2048x2048")], policy)
        assert [len(work.devices) for work, _ in seen.of("decode")] == [width]
        assert {len(work.devices) for work, _ in seen.of("diffuse")} == {2}


def test_without_awareness_of_stages_an_auxiliary_decode_is_wide_too() -> None:
    """On 64 devices there are four C on one node; with it, two of them are enough."""
    for policy, width in (("tridentserve", 2), ("tridentserve-wo-stageaware", 4)):
        seen = serve([ask(str(n), 60.0 * n, "4096x4096") for n in range(3)], policy, num_devices=64)
        assert [len(work.devices) for work, kinds in seen.of("decode") if kinds == {"C"}] == [width] * 3


def test_without_the_scheduler_the_shortest_goes_first() -> None:
    """Four that can be on time are worth more than eight that have no deadline, and take longer."""
    urgent = [ask(f"u{n}", 0.0, "2048x2048") for n in range(4)]
    short = [ask(f"s{n}", 0.0, "1024x1024", slo=None) for n in range(8)]
    for solver, begun in ((solve_quickly, {0, 1, 2, 3, 4, 5, 6, 7}), (shortest_first, {4, 5, 6, 7, 8, 9, 10, 11})):
        plan = waiting(TridentServe(solver=solver), TableCosts(FLUX), [*urgent, *short], 46.3)
        assert {start.job_ids[0] for start in plan.starts} == begun


# No request starves.


@pytest.mark.parametrize(
    "policy", ["tridentserve", pytest.param("tridentserve-wo-scheduler", marks=pytest.mark.exhaustive)]
)
def test_a_large_late_request_gets_its_turn(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests that can be on time keep all devices busy; the large one is late from the beginning."""
    made, order = registry.make_policy(policy), DeadlineOrder(late_patience_ns=40 * NS_PER_S)
    assert isinstance(made, TridentServe)
    monkeypatch.setitem(registry._GIVEN, "impatient", lambda: replace(made, order=order))
    small = [ask(str(n), 0.4 * n, "1024x1024", slo=20.0) for n in range(400)]
    seen = serve([*small[:20], ask("large", 8.0, "4096x4096", slo=0.1), *small[20:]], "impatient")
    (ending,) = [one for one in seen.done.endings if one.request.uid == "large"]
    begin_ns = min(at_ns for at_ns, work, _ in seen.starts if work.job_ids == (ending.job_id,))
    assert max(one.finish_ns for one in seen.done.endings) > 200 * NS_PER_S, "or the small ones were no burden"
    assert 40 * NS_PER_S < begin_ns - ending.request.arrival_ns < 60 * NS_PER_S


def test_stages_are_queued_on_the_devices_that_are_free_first_and_are_not_kept() -> None:
    tracker = Tracker(TridentServe(), TableCosts(FLUX))
    for device_id in range(8):
        tracker.add_device(device_id, device_id // 4)
    pool = Pool("flux.1", C)
    layout = PoolLayout({0: range(4), 1: range(4, 8)}, dict.fromkeys((2, 3, 4, 5), pool))
    up = OpenDevices()
    up.update(tracker.devices, 0)
    devices, none = DeviceAllocator(up, layout), lambda _: False
    devices.queue((2,), 0, 10)
    assert devices.earliest(pool, 1, none) == (3,)
    assert devices.earliest(pool, 2, none) == (4, 5)
    devices.keep((3, 4))
    assert devices.earliest(pool, 1, none) == (5,)
    assert devices.earliest(pool, 1, lambda device: device.device_id == 5) == (2,)
    assert devices.earliest(pool, 2, none) is None
    assert devices.queue((2,), 5, 10) == 20
    assert DeviceAllocator(up, layout, closed={2, 3}).earliest(pool, 2, none) == (4, 5)


def test_a_device_that_a_running_request_keeps_gets_no_stage_of_another() -> None:
    """Device 0 is free before device 1, but will make further steps; device 1 only ends a decode."""
    costs, layout = TableCosts(FLUX), PoolLayout({0: range(2)}, dict.fromkeys(range(2), Pool("flux.1", C)))
    tracker, now_ns = Tracker(TridentServe(), costs), 0
    small, large = ask("a", 0.0, "128x128"), ask("b", 0.0, "2048x2048")
    at_decode = costs.start(large).itinerary.at[5]
    for device_id in range(2):
        tracker.add_device(device_id, 0)
    for index, (asked, cursor) in enumerate(((small, costs.start(small)), (large, at_decode), (large, at_decode))):
        tracker.add_job(job(index, replace(asked, uid=str(index)), done=cursor))
    for job_id, device_id in ((0, 0), (0, 0), (1, 1)):
        stage = tracker.jobs[job_id].left.stage
        assert stage is not None
        tracker.commit(Start(stage=stage, job_ids=(job_id,), devices=(device_id,), num_steps=1, why="a test"))
    up, profiles = OpenDevices(), Profiles()
    up.update(tracker.devices, now_ns)
    profiles.set_devices(FLUX.memory_bytes, (2,))
    assert tracker.devices[0].free_ns < tracker.devices[1].free_ns
    reader = TaskReader(up.by_id, costs, 2, now_ns)
    task = reader.read(tracker.jobs[2])
    assert task is not None
    dispatch = Dispatch(tracker, costs, now_ns, DeviceAllocator(up, layout), reader, profiles, 1, True, True)
    assert not dispatch.after([task])
    assert [start.devices for start in dispatch.starts] == [(1,)]


def test_the_monitor_sees_a_request_that_runs_again_after_its_window() -> None:
    costs, tracker = TableCosts(FLUX), Tracker(TridentServe(), TableCosts(FLUX))
    tracker.add_device(0, 0)
    for index, asked in enumerate((ask("a", 0.0, "128x128"), ask("b", 0.0, "512x512"))):
        tracker.add_job(job(index, asked, done=costs.start(asked)))
    reader, monitor = TaskReader({}, costs, 1, 0), Monitor(window_ns=10)
    tasks = [task for one in tracker.waiting() if (task := reader.read(one)) is not None]
    monitor.see(tracker, tasks, 0)
    stage = tracker.jobs[0].left.stage
    assert stage is not None
    tracker.commit(Start(stage=stage, job_ids=(0,), devices=(0,), num_steps=1, why="a test"))
    assert [one.job_id for one in monitor.running(tracker)] == [0]
    monitor.see(tracker, [], 9)
    assert (monitor.num_seen, monitor.num_classes_seen) == (2, 2)
    monitor.see(tracker, [], 10)
    assert (monitor.num_seen, monitor.num_classes_seen) == (3, 3), "it runs, and the other is not given"
    assert [count for _, count in monitor.classes().values()] == [1]
    tracker.remove_job(tracker.jobs[0])
    monitor.see(tracker, [], 20)
    assert not monitor.classes()


def test_a_change_of_what_pipelines_take_waits_for_the_end_of_the_window() -> None:
    """From FLUX alone to mostly video, on eight nodes: each tick would give another node to the video."""
    both = merged([FLUX, VIDEO])
    flux = [ask(f"f{n}", 6.0 * n, "4096x4096" if n % 2 == 0 else "512x512", slo=5.0) for n in range(30)]
    video = [ask(f"v{n}", 60 + 6.0 * n, "1280x720x129", VIDEO, slo=5.0) for n in range(15)]
    seen = serve(sorted([*flux, *video], key=lambda one: one.arrival_ns), table=both, num_devices=32)
    switches = [at_s for at_s, place in seen.places if "the share of " in place.why]
    assert switches
    assert all(later - earlier >= 60 for earlier, later in pairwise(switches))
