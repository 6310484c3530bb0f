"""Weights on devices: when they are loaded and dropped, from where, and how predictions and promises count it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from builders import PIPELINE, SERVICE_S, Idle, job, only, promise, promise_mix, request, table
from scripted import Script, run, start
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.admission.what_if import WhatIf
from tilework.control.cluster.tracker import Tracker
from tilework.control.components import Components
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, DropComponents, LoadComponents, Reject, RunWork, Stop
from tilework.core.block import Block
from tilework.core.component import Component, DropOrder, LoadSource, Memory
from tilework.core.events import (
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    DeviceLost,
    Stopped,
    Submitted,
    Woke,
    WorkFinished,
)
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import RefusalCode, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Plan, ReadAhead, Work
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

TEXT, DENOISER, VAE = Component("text", 2), Component("denoiser", 5), Component("vae", 1)
NAMED = {"text_encoder": TEXT, "denoiser": DENOISER, "vae": VAE}
OTHER = Component("other denoiser", 5)
SIZES = {one.digest: one.num_bytes for one in (*NAMED.values(), OTHER)}
ALL = ("text", "denoiser", "vae")
LOADS_S = 2 + 5 + 1  # Of all components, from disk.


def weights(memory_bytes: int | None = 6, degrees: tuple[int, ...] = (1, 2), **speeds: float) -> CostTable:
    """A table of a pipeline whose components are read at one byte per second."""
    return replace(
        table(degrees=degrees),
        components={PIPELINE: NAMED},
        memory_bytes=memory_bytes,
        load_bytes_per_s={LoadSource(source): speed for source, speed in ({"disk": 1.0} | speeds).items()},
    )


Scripted = Callable[..., Controller]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A controller whose policy returns these plans, after its devices have joined without components."""

    def build(*plans: Plan, costs: CostTable | None = None, nodes: tuple[int, ...] = (0, 0)) -> Controller:
        costs = costs or weights()
        monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan()] * len(nodes) + list(plans)))
        control = Controller(ControllerConfig(policy="script"), costs)
        for device_id, node in enumerate(nodes):
            control.handle(DeviceJoined(device_id, node, memory_bytes=costs.memory_bytes), 0)
        return control

    return build


def changes(actions: tuple[Action, ...]) -> list[Any]:
    """What is loaded, dropped and run, in order."""
    found: list[Any] = []
    for action in actions:
        match action:
            case LoadComponents(_, device_id, _, components, num_bytes, source):
                assert num_bytes == sum(SIZES[digest] for digest in components)
                found.append(("load", device_id, components, str(source)))
            case DropComponents(device_id, components):
                found.append(("drop", device_id, components))
            case RunWork(work):
                found.append((work.stage.name, *work.devices))
    return found


def test_a_stage_loads_what_it_needs_just_before_its_work(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0), start(DIFFUSE, 0, steps=10)), run(start(DECODE, 0)))
    begun = control.handle(Submitted(request("a")), 0)
    assert changes(begun) == [
        ("load", 0, ("text",), "disk"),
        (ENCODE, 0),
        ("drop", 0, ("text",)),
        ("load", 0, ("denoiser",), "disk"),
        (DIFFUSE, 0),
    ]
    device = control.tracker.device(0)
    assert device is not None
    assert device.free_ns == ns_from_s(2 + 0.01 + 5 + 1.0), "works wait for their loads"
    assert (device.memory.components, device.memory.free_bytes) == ((DENOISER,), 1)
    ended = control.handle(WorkFinished(1, NS_PER_S), 2 * NS_PER_S)
    assert changes(ended) == [("load", 0, ("vae",), "disk"), (DECODE, 0)], "there is room beside the denoiser"


def test_a_stage_that_waits_for_its_weights_is_revoked_by_a_stop(scripted: Scripted) -> None:
    """So nothing of it is done at the boundary, which is when the load has ended."""
    control = scripted(run(start(ENCODE, 0)), Plan(), Plan())
    control.handle(Submitted(request("a")), 0)
    jobs = [*control.tracker.jobs.values()]
    control.handle(Woke(), NS_PER_S)
    waiting = control.tracker.boundary(jobs)
    assert waiting is not None
    assert (waiting.positions, waiting.end_ns) == ({0: 0}, 2 * NS_PER_S)
    control.handle(ComponentsLoaded(1, 0, 2 * NS_PER_S, ()), 2 * NS_PER_S)
    running = control.tracker.boundary(jobs)
    assert running is not None
    assert running.positions == {0: 1}, "a stage without steps runs to its end"


def test_a_start_names_what_devices_drop_and_what_hosts_forget(scripted: Scripted) -> None:
    """The denoiser was used after the text encoder. The guard counts on the same memory."""
    order = DropOrder((DENOISER,), (DENOISER, TEXT))
    starts = start(ENCODE, 0), start(DIFFUSE, 0, steps=10), replace(start(DECODE, 0), drop_order=order)
    control = scripted(Plan(), run(*starts), costs=replace(weights(7), host_bytes=7))
    control.handle(Submitted(request("a")), 0)
    after = WhatIf.now(control.tracker, control.costs, 0).plus(starts).memory(0)
    actions = control.handle(Woke(), 0)
    assert ("drop", 0, ("denoiser",)) in changes(actions)
    assert after.components == control.tracker.devices[0].memory.components == (TEXT, VAE)
    loads = only(LoadComponents, actions)
    assert [one.forgets for one in loads] == [(), (), ("denoiser", "text")]
    for load in loads:
        control.handle(ComponentsLoaded(load.load_id, 0, 1), 0)
    assert control.tracker.sources.kept(0) == (TEXT, VAE)


def test_a_group_loads_on_each_device_that_lacks_something(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 1), start(DIFFUSE, 0, 1, steps=10)), costs=weights(8))
    begun = control.handle(Submitted(request("a")), 0)
    loads = [("load", device_id, ("denoiser",), "disk") for device_id in (0, 1)]
    assert changes(begun)[2:] == [*loads, (DIFFUSE, 0, 1)]
    wide_s = 2.01 + 5 + 10 * 0.1 / 1.6
    assert [device.free_ns for device in control.tracker.devices] == [ns_from_s(wide_s)] * 2


def test_devices_that_have_everything_load_nothing() -> None:
    control = Controller(ControllerConfig(policy="edf"), weights(None))
    control.handle(DeviceJoined(0, 0, components=ALL), 0)
    assert not control.tracker.needs_loads
    assert changes(control.handle(Submitted(request("a")), 0))[0] == (ENCODE, 0)
    control.handle(DeviceJoined(1, 0), 0)
    assert control.tracker.needs_loads
    control.handle(DeviceLost(1, "a test"), 0)
    assert not control.tracker.needs_loads


def test_the_quickest_source_that_has_them_is_used() -> None:
    """The disk; the host's memory, once the node has read it; another device of the node that has loaded it."""
    costs = TableCosts(weights(6, page_cache=2.0, peer=4.0))
    tracker = Tracker(Idle(), costs)
    components = Components(costs, tracker)

    def source(device_id: int, work_id: int) -> str:
        (load,) = components.prepare(start(ENCODE, device_id), work_id)
        assert isinstance(load, LoadComponents)
        return load.source.value

    for device_id, node in enumerate((0, 0, 0, 1)):
        components.join(DeviceJoined(device_id, node, memory_bytes=6))
    assert source(0, 1) == "disk"
    assert source(1, 2) == "disk", "the other device is still loading"
    components.on_report(ComponentsLoaded(1, 0, 2 * NS_PER_S))
    assert source(2, 3) == "peer"
    assert source(3, 4) == "disk", "it is on another node"
    components.on_report(ComponentsLoaded(4, 3, 2 * NS_PER_S))
    tracker.remove_device(3, set())
    components.join(DeviceJoined(3, 1, memory_bytes=6))
    assert source(3, 5) == "page_cache", "a worker that starts again has nothing, but its node has read it"


def test_the_time_of_a_load_follows_what_its_node_has_and_how_long_loads_take() -> None:
    """Two devices of a node and one of another; `times` asks for all of them each time, so that all are known."""
    costs = TableCosts(weights(6, page_cache=2.0, peer=4.0))
    tracker = Tracker(Idle(), costs)
    components = Components(costs, tracker)
    for device_id, node in enumerate((0, 0, 1)):
        components.join(DeviceJoined(device_id, node, memory_bytes=6))
    for index in range(2):
        tracker.add_job(job(index, request(str(index))))

    def begin(device_id: int, job_id: int) -> Work:
        one = start(ENCODE, device_id, job=job_id)
        components.prepare(one, tracker.next_work_id)
        return tracker.commit(one)

    def times() -> list[float]:
        return [tracker.sources.load_ns(device_id, stage_of(PIPELINE, ENCODE)) / NS_PER_S for device_id in range(3)]

    assert times() == [2, 2, 2]
    work = begin(0, 0)
    assert times() == [0, 2, 2], "a device that loads gives nothing to others"
    tracker.end_work(work, 1)
    assert times() == [0, 0.5, 2], "it needs to load no more"
    components.on_report(ComponentsLoaded(1, 0, 4 * NS_PER_S))
    assert times() == [0, 0.5, 4], "the disk is slower than was known"
    begin(2, 1)
    components.on_report(ComponentsLoaded(2, 2, 4 * NS_PER_S))
    tracker.remove_device(2, set())
    components.join(DeviceJoined(2, 1, memory_bytes=6))
    assert times() == [0, 0.5, 1], "its host has read it"


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_needed_while_a_device_lacks_something_or_has_not_the_memory(seed: int) -> None:
    rng, costs = Random(seed), TableCosts(weights(None))
    tracker, seen = Tracker(Idle(), costs), set[bool]()
    for _ in range(200):
        device_id, held = rng.randrange(3), (DENOISER, TEXT, VAE)[: rng.choice((0, 2, 3, 3, 3, 3))]
        device = tracker.device(device_id)
        if device is None:
            tracker.add_device(device_id, 0, memory=Memory(rng.choice((None, 8, 7)), held))
        elif rng.random() < 0.2:
            tracker.remove_device(device_id, set())
        else:
            tracker.set_memory(device_id, Memory(device.memory.total_bytes, held))
        memories = [one.memory for one in tracker.devices]
        needed = any(one.total_bytes == 7 or len(one.components) < 3 for one in memories)
        assert tracker.needs_loads == needed, f"seed {seed}"
        seen.add(needed)
    assert seen == {False, True}


def host_of(host_bytes: int | None, device_bytes: int = 5) -> tuple[Tracker, Callable[[str], str]]:
    """A tracker with one device, and a function that begins a stage there; it returns the source of its load."""
    costs = TableCosts(replace(weights(device_bytes, host=4.0), host_bytes=host_bytes))
    tracker = Tracker(Idle(), costs)
    components = Components(costs, tracker)
    components.join(DeviceJoined(0, 0, memory_bytes=device_bytes))

    def begin(stage: str) -> str:
        predicted_ns = tracker.sources.load_ns(0, stage_of(PIPELINE, stage))
        actions = components.prepare(start(stage, 0), 1)
        assert tracker.devices[0].load_ns(1) == predicted_ns, "policies are told the time of the source that is used"
        for load in only(LoadComponents, tuple(actions)):
            components.on_report(ComponentsLoaded(load.load_id, 0, predicted_ns))
            return load.source.value
        return "none"

    return tracker, begin


def test_a_host_forgets_what_was_used_least_recently() -> None:
    _, begin = host_of(7)
    assert [begin(stage) for stage in (ENCODE, DIFFUSE)] == ["disk", "disk"], "2 + 5 bytes fit"
    assert [begin(stage) for stage in (ENCODE, DIFFUSE)] == ["host", "host"]
    assert begin(ENCODE) == "host", "a load from the host is a use"
    assert begin(DECODE) == "disk", "another byte, so the denoiser is forgotten"
    assert begin(ENCODE) == "none", "it is on the device, which is no use of the host"
    assert [begin(stage) for stage in (DIFFUSE, DECODE, ENCODE)] == ["disk", "host", "disk"]


def test_a_host_keeps_what_is_to_be_loaded_from_it() -> None:
    """The text encoder was read before the denoiser, but a load of it is under way when the decoder is read."""
    costs = TableCosts(replace(weights(5, host=4.0), host_bytes=7))
    tracker = Tracker(Idle(), costs)
    components = Components(costs, tracker)
    for device_id in range(3):
        components.join(DeviceJoined(device_id, 0, memory_bytes=5))
    for load_id, (device_id, stage) in enumerate(((0, ENCODE), (1, DIFFUSE)), 1):
        components.prepare(start(stage, device_id), load_id)
        components.on_report(ComponentsLoaded(load_id, device_id, NS_PER_S))
    components.prepare(start(ENCODE, 2), 3)
    components.prepare(start(DECODE, 0), 4)
    components.on_report(ComponentsLoaded(4, 0, NS_PER_S))
    device = tracker.device(1)
    assert device is not None
    assert [tracker.sources.of(one, device) for one in (TEXT, DENOISER)] == [LoadSource.HOST, LoadSource.DISK]


def host_with_all_but_the_decoder() -> tuple[Tracker, Components]:
    """Three devices of a node whose host, of 7 bytes, has read the text encoder and the denoiser."""
    costs = TableCosts(replace(weights(5, host=4.0), host_bytes=7))
    tracker = Tracker(Idle(), costs)
    components = Components(costs, tracker)
    for device_id in range(3):
        components.join(DeviceJoined(device_id, 0, memory_bytes=5, read=("text", "denoiser")))
    return tracker, components


def test_a_load_does_not_count_on_what_its_host_will_forget_for_a_read_that_has_begun() -> None:
    for is_ahead in (True, False):
        tracker, components = host_with_all_but_the_decoder()
        order = DropOrder(host=(TEXT,))
        if is_ahead:
            components.read_ahead(ReadAhead(node=0, stage=stage_of(PIPELINE, DECODE), forgets=order.host), 0)
        else:
            components.prepare(replace(start(DECODE, 1), drop_order=order), 1)
        device = tracker.device(0)
        assert device is not None
        assert TEXT in tracker.sources.kept(0), "it has not read yet"
        assert [tracker.sources.of(one, device) for one in (TEXT, DENOISER)] == [LoadSource.DISK, LoadSource.HOST]
        assert tracker.sources.load_ns(0, stage_of(PIPELINE, ENCODE)) == 2 * NS_PER_S, "as from the disk"


def test_no_read_makes_a_host_forget_what_is_to_be_loaded_from_it() -> None:
    """The decoder's read names the text encoder, which a device is about to load from there."""
    for is_ahead in (True, False):
        tracker, components = host_with_all_but_the_decoder()
        order = DropOrder(host=(TEXT, DENOISER))
        (load,) = only(LoadComponents, tuple(components.prepare(start(ENCODE, 0), 1)))
        assert load.source is LoadSource.HOST
        if is_ahead:
            components.read_ahead(ReadAhead(node=0, stage=stage_of(PIPELINE, DECODE), forgets=order.host), 0)
            components.on_report(ComponentsRead(load.load_id + 1, True))
        else:
            components.prepare(replace(start(DECODE, 1), drop_order=order), 2)
            components.on_report(ComponentsLoaded(load.load_id + 1, 1, NS_PER_S))
        assert set(tracker.sources.kept(0)) == {TEXT, VAE}


def test_a_host_without_a_limit_forgets_nothing_and_a_small_one_keeps_what_fits() -> None:
    _, begin = host_of(None)
    stages = (ENCODE, DIFFUSE, DECODE, ENCODE, DIFFUSE, DECODE)
    assert [begin(stage) for stage in stages] == [*["disk"] * 3, *["host"] * 3]
    _, begin = host_of(4)
    assert [begin(stage) for stage in stages] == [*["disk"] * 3, "host", "disk", "host"], "5 bytes never fit into 4"


def test_loads_correct_their_prediction(scripted: Scripted) -> None:
    control = scripted(run(start(ENCODE, 0)), Plan(), run(start(ENCODE, 1, job=1)))
    (load,) = only(LoadComponents, control.handle(Submitted(request("a")), 0))
    control.handle(ComponentsLoaded(load.load_id, 1, 9 * NS_PER_S), 4 * NS_PER_S)
    assert control.costs.weights.load_ns(2) == 2 * NS_PER_S, "it is not of this device"
    (load,) = only(LoadComponents, control.handle(Submitted(request("b")), 4 * NS_PER_S))
    control.handle(ComponentsLoaded(load.load_id, 1, 4 * NS_PER_S), 8 * NS_PER_S)
    assert control.costs.weights.load_ns(2) == 4 * NS_PER_S


def test_the_load_of_a_work_that_is_revoked_goes_on_for_no_work(scripted: Scripted) -> None:
    """The denoiser takes 5 s. At 4.01 s, after two of them, the steps that waited for it are revoked."""
    control = scripted(run(start(ENCODE, 0)), Plan(), run(start(DIFFUSE, 0, steps=10)), Plan(stops=(0,)))
    control.handle(Submitted(request("a")), 0)
    control.handle(ComponentsLoaded(1, 0, 2 * NS_PER_S), 2 * NS_PER_S)
    steps = control.handle(WorkFinished(1, ns_from_s(0.01)), ns_from_s(2.01))
    assert [change[0] for change in changes(steps)] == ["drop", "load", DIFFUSE]
    assert only(Stop, control.handle(Woke(), ns_from_s(4.01)))
    device = control.tracker.devices[0]
    assert device.free_ns == ns_from_s(7.01), "the load goes on, the steps are revoked"
    control.handle(Stopped(2, 0), ns_from_s(4.01))
    assert (device.is_loading, device.idle_ns, device.free_ns) == (True, ns_from_s(4.01), ns_from_s(7.01))
    control.handle(ComponentsLoaded(2, 0, 5 * NS_PER_S), 7 * NS_PER_S)
    assert (device.is_loading, device.free_ns) == (False, 7 * NS_PER_S)
    assert DENOISER in device.memory.components


def test_what_never_fits_is_refused() -> None:
    control = Controller(ControllerConfig(policy="edf"), weights(4))
    control.handle(DeviceJoined(0, 0, memory_bytes=4), 0)
    (refusal,) = control.handle(Submitted(request("a")), 0)
    assert isinstance(refusal, Reject)
    assert refusal.code is RefusalCode.WEIGHTS
    assert refusal.reason == f"the weights of {PIPELINE}/{DIFFUSE} take 5 bytes, and a device has 4 bytes for them"


@pytest.mark.parametrize(
    ("memory_bytes", "loras", "code"),
    [(5, ("ink",), None), (5, ("ink", "wash"), RefusalCode.LORAS), (3, ("ink",), RefusalCode.WEIGHTS)],
)
def test_a_refusal_says_whether_the_model_fits_without_loras(
    memory_bytes: int, loras: tuple[str, ...], code: RefusalCode | None
) -> None:
    known = {name: Lora(changes=frozenset({"denoiser"}), component=Component(name, 1)) for name in ("ink", "wash")}
    costs = replace(weights(5), components={PIPELINE: {"denoiser": Component("denoiser", 4)}}, loras={PIPELINE: known})
    control = Controller(ControllerConfig(policy="edf"), costs)
    control.handle(DeviceJoined(0, 0, memory_bytes=memory_bytes), 0)
    answer, *_ = control.handle(Submitted(request("a", loras=tuple(UsedLora(one, 1.0) for one in loras))), 0)
    assert (answer.code if isinstance(answer, Reject) else None) == code
    if code is RefusalCode.LORAS:
        with_loras = f"{PIPELINE}/{DIFFUSE}[ink=1.0,wash=1.0]"
        assert answer.reason == f"the weights of {with_loras} take 6 bytes, and a device has 5 bytes for them"


def test_the_predicted_finish_counts_loads() -> None:
    control = Controller(ControllerConfig(policy="edf"), weights())
    control.handle(DeviceJoined(0, 0, memory_bytes=6), 0)
    accept, *_ = control.handle(Submitted(request("a")), 0)
    assert isinstance(accept, Accept)
    assert accept.eta_ns == ns_from_s(LOADS_S + SERVICE_S)


def test_a_promise_counts_the_loads_of_all_stages() -> None:
    """What a device has when the request comes may be gone when its turn comes."""
    for slo_s, is_accepted in ((LOADS_S + SERVICE_S, False), (LOADS_S + 1.2 * SERVICE_S + 1, True)):
        control = Controller(ControllerConfig(policy="edf"), weights())
        control.handle(DeviceJoined(0, 0, components=("text",), memory_bytes=6), 0)
        answer, *_ = control.handle(Submitted(promise("a", 0, slo_s)), 0)
        assert isinstance(answer, Accept) == is_accepted
        if isinstance(answer, Reject):
            assert answer.earliest_ns is not None
            assert answer.earliest_ns > ns_from_s(LOADS_S + SERVICE_S)


def broken_promises(policy: str, seeds: range) -> tuple[int, int]:
    """How many promises are kept and how many broken, with two pipelines of which each needs all of a device."""
    costs, other = weights(8, degrees=(1,)), table(pipeline="other")
    costs = replace(
        costs,
        rows=costs.rows + other.rows,
        components={PIPELINE: NAMED, "other": {"denoiser": Component("another", 7)}},
        load_bytes_per_s={LoadSource.DISK: 12.0},
    )
    promises: list[bool] = []
    for seed in seeds:
        mix = promise_mix(60, 1.6, seed, 0.5)
        asked = [replace(one, pipeline=("other", PIPELINE)[index % 2]) for index, one in enumerate(mix)]
        trace = Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_devices=2)).run(asked)
        assert {ending.status for ending in trace.endings} <= {Status.DONE, Status.REJECTED}
        promises += [one.on_time for one in trace.endings if one.request.is_promise and one.status is Status.DONE]
    return promises.count(True), promises.count(False)


@pytest.mark.parametrize("policy", ["edf", "tetriserve", "tilework", "fixed-sp1"])
def test_promises_are_kept_while_requests_of_two_pipelines_push_out_each_others_weights(policy: str) -> None:
    kept, broken = broken_promises(policy, range(4))
    assert kept > 40
    assert not broken


def without_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loads", "promise_query"):
        monkeypatch.setattr(f"tilework.admission.{module}.load_bound_ns", lambda stage, weights: 0)


def whatever_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation counts on the weights that its device has now, even after another reservation there."""
    monkeypatch.setattr(Block, "if_unloaded", property(lambda block: block))


def whatever_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that drops weights changes no reservation that counts on them."""
    monkeypatch.setattr(WhatIf, "_lose_components", lambda self, devices, moved: None)


@pytest.mark.parametrize(
    ("breakage", "policy", "seeds"),
    [
        (without_loads, "edf", range(8)),
        (whatever_runs_before, "fixed-sp1", range(16, 20)),
        (whatever_is_started, "edf", range(8)),
    ],
)
def test_each_rule_about_loads_is_needed(
    breakage: Callable[[pytest.MonkeyPatch], None], policy: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    _, broken = broken_promises(policy, seeds)
    assert broken


def test_pipelines_share_equal_components() -> None:
    same = {"text_encoder": TEXT, "denoiser": OTHER, "vae": VAE}
    costs = weights(13)
    shared = replace(costs, rows=costs.rows + table(pipeline="other").rows, components={PIPELINE: NAMED, "other": same})
    control = Controller(ControllerConfig(policy="fixed-sp1"), shared)
    control.handle(DeviceJoined(0, 0, components=("text", "vae"), memory_bytes=13), 0)
    begun = control.handle(Submitted(replace(request("a"), pipeline="other")), 0)
    assert [change[2] for change in changes(begun) if change[0] == "load"] == [("other denoiser",)]
    assert stage_of("other", ENCODE) in [action.work.stage for action in only(RunWork, begun)]
