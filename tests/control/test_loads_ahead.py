"""Loads ahead of need: when devices do them, and what works, other loads and promises make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from builders import PIPELINE, Idle, only, promise_mix, request, table
from scripted import Script, run, start
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.admission.reservation_guard import ReservationGuard
from tilework.admission.what_if import WhatIf
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, DropComponents, LoadComponents
from tilework.core.component import Component, DropOrder, LoadSource
from tilework.core.events import ComponentsLoaded, DeviceJoined, DeviceLost, Submitted, Woke, WorkFinished
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import LoadAhead, Plan
from tilework.cost.table import CostTable
from tilework.policy import registry
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

TEXT, DENOISER, VAE = Component("text", 2), Component("denoiser", 5), Component("vae", 1)
NAMED = {"text_encoder": TEXT, "denoiser": DENOISER, "vae": VAE}


def weights(**speeds: float) -> CostTable:
    """Components are read at one byte per second; devices have room for six."""
    speed = {LoadSource(source): speed for source, speed in ({"disk": 1.0} | speeds).items()}
    return replace(table(), components={PIPELINE: NAMED}, memory_bytes=6, load_bytes_per_s=speed)


def ahead(stage: str, device_id: int = 0, order: DropOrder | None = None) -> Plan:
    return Plan(
        loads=(LoadAhead(device_id=device_id, stage=stage_of(PIPELINE, stage), drop_order=order or DropOrder()),)
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Controller]:
    """A controller whose policy returns these plans, after its two devices have joined without components."""

    def build(*plans: Plan, costs: CostTable | None = None) -> Controller:
        costs = costs or weights()
        monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan()] * 2 + list(plans)))
        control = Controller(ControllerConfig(policy="script"), costs)
        for device_id in range(2):
            control.handle(DeviceJoined(device_id, 0, memory_bytes=costs.memory_bytes), 0)
        return control

    return build


def loads(actions: tuple[Action, ...]) -> list[tuple[tuple[str, ...], str, bool]]:
    return [(one.components, str(one.source), one.is_ahead) for one in only(LoadComponents, actions)]


def test_an_idle_device_loads_and_is_busy_until_it_has(scripted: Callable[..., Controller]) -> None:
    control = scripted(ahead(DIFFUSE), ahead(ENCODE), Plan())
    assert loads(control.handle(Woke(), 0)) == [(("denoiser",), "disk", True)]
    device = control.tracker.devices[0]
    assert (device.is_loading, device.free_ns, device.memory.components) == (True, 5 * NS_PER_S, (DENOISER,))
    assert not loads(control.handle(Woke(), NS_PER_S)), "one at a time"
    control.tracker.set_time(9 * NS_PER_S)
    assert device.free_ns == 9 * NS_PER_S, "it takes longer than predicted"
    num_changes = device.num_changes
    control.handle(ComponentsLoaded(1, 0, 9 * NS_PER_S), 9 * NS_PER_S)
    assert (device.is_loading, device.free_ns) == (False, 9 * NS_PER_S)
    assert device.num_changes > num_changes, "policies look at it again"


def test_what_it_drops_goes_by_the_order_of_the_plan(scripted: Callable[..., Controller]) -> None:
    """The denoiser and the VAE fill the device; the VAE was used last."""
    order = DropOrder((VAE, DENOISER))
    for plan, dropped in ((ahead(ENCODE), ("denoiser",)), (ahead(ENCODE, order=order), ("vae", "denoiser"))):
        control = scripted(ahead(DIFFUSE), ahead(DECODE), plan)
        control.handle(Woke(), 0)
        control.handle(ComponentsLoaded(1, 0, 1), 0)
        expected = WhatIf.now(control.tracker, control.costs, 0).plus_load(plan.loads[0])
        actions = control.handle(ComponentsLoaded(2, 0, 1), 0)
        assert [one.components for one in only(DropComponents, actions)] == [dropped]
        assert expected.memory(0) == control.tracker.devices[0].memory, "the guard counts on the same"


def test_a_device_with_works_loads_nothing_ahead(scripted: Callable[..., Controller]) -> None:
    begin = replace(ahead(DIFFUSE), starts=(start(ENCODE, 0),))
    actions = scripted(begin).handle(Submitted(request("a")), 0)
    assert loads(actions) == [(("text",), "disk", False)]


def test_a_work_that_is_started_meanwhile_waits_for_what_it_needs(scripted: Callable[..., Controller]) -> None:
    """The encoder runs for .01 s when the load has ended at 2 s; then the denoiser is loaded for 5 s."""
    control = scripted(ahead(ENCODE), run(start(ENCODE, 0)), run(start(DIFFUSE, 0, steps=10)))
    control.handle(Woke(), 0)
    device = control.tracker.devices[0]
    control.tracker.set_time(ns_from_s(0.5))
    assert control.tracker.sources.load_ns(0, stage_of(PIPELINE, ENCODE)) == ns_from_s(1.5), "policies are told"
    assert not loads(control.handle(Submitted(request("a")), ns_from_s(0.5)))
    assert (device.is_loading, device.free_ns) == (False, ns_from_s(2.01))
    assert device.load_ns(1) == ns_from_s(1.5), "it is the load of that work from now on"
    control.handle(ComponentsLoaded(1, 0, 2 * NS_PER_S), 2 * NS_PER_S)
    assert [device.load_ns(work_id) for work_id in (1, 2)] == [0, 5 * NS_PER_S], "that of the next work"


def test_a_work_that_needs_something_else_does_not_wait(scripted: Callable[..., Controller]) -> None:
    """Of the denoiser's 5 s 2 have passed when the encoder comes, which is loaded for 2 s and runs for .01 s."""
    roomy = replace(weights(), memory_bytes=8)
    control = scripted(ahead(DIFFUSE), run(start(ENCODE, 0)), Plan(), Plan(), costs=roomy)
    control.handle(Woke(), 0)
    device = control.tracker.devices[0]
    control.tracker.set_time(2 * NS_PER_S)
    assert control.tracker.sources.load_ns(0, stage_of(PIPELINE, ENCODE)) == 2 * NS_PER_S
    assert loads(control.handle(Submitted(request("a")), 2 * NS_PER_S)) == [(("text",), "disk", False)]
    assert (device.is_loading, device.idle_ns, device.free_ns) == (True, ns_from_s(4.01), ns_from_s(7.01))
    control.handle(ComponentsLoaded(2, 0, 2 * NS_PER_S), 4 * NS_PER_S)
    control.handle(WorkFinished(1, ns_from_s(0.01)), ns_from_s(4.01))
    assert (device.is_loading, device.free_ns) == (True, ns_from_s(7.01)), "three seconds are left, as before"


def test_what_is_dropped_before_it_is_there_teaches_nothing(scripted: Callable[..., Controller]) -> None:
    """The encoder needs the room of the denoiser, which is loaded for 1 s of 5."""
    control = scripted(ahead(DIFFUSE), run(start(ENCODE, 0)), Plan())
    control.handle(Woke(), 0)
    actions = control.handle(Submitted(request("a")), NS_PER_S)
    assert [one.components for one in only(DropComponents, actions)] == [("denoiser",)]
    device = control.tracker.devices[0]
    assert device.free_ns == ns_from_s(3.01), "it waits for its own load alone"
    control.handle(ComponentsLoaded(1, 0, NS_PER_S, ("denoiser",)), NS_PER_S)
    assert (device.is_loading, control.costs.weights.load_ns(5)) == (False, 5 * NS_PER_S)
    assert not control.tracker.sources.kept(0), "the host has not read it"


def test_no_other_device_loads_from_one_that_has_not_loaded_yet(scripted: Callable[..., Controller]) -> None:
    control = scripted(ahead(ENCODE), ahead(ENCODE, 1), costs=weights(peer=100.0))
    control.handle(Woke(), 0)
    assert loads(control.handle(Woke(), 0)) == [(("text",), "disk", True)]
    control = scripted(ahead(ENCODE), Plan(), ahead(ENCODE, 1), costs=weights(peer=100.0))
    control.handle(Woke(), 0)
    control.handle(ComponentsLoaded(1, 0, 1), 0)
    assert loads(control.handle(Woke(), 0)) == [(("text",), "peer", True)]


def test_a_device_that_is_lost_loads_no_more(scripted: Callable[..., Controller]) -> None:
    control = scripted(ahead(ENCODE))
    control.handle(Woke(), 0)
    control.handle(DeviceLost(0, "gone"), 0)
    control.handle(DeviceJoined(0, 0, memory_bytes=6), 0)
    control.handle(ComponentsLoaded(1, 0, 1), 0)
    assert not control.tracker.devices[0].is_loading


class Eager(Idle):
    """Starts nothing, so that the guard must, and lets idle devices load whatever they lack."""

    def __init__(self) -> None:
        self.num_left = 300

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        stages = [stage_of("other", DIFFUSE), stage_of(PIPELINE, DIFFUSE)]
        loads = [
            LoadAhead(device_id=device.device_id, stage=stage)
            for device in view.devices
            if not device.works and not device.is_loading and self.num_left > 0
            for stage in stages
            if not device.memory.has(costs.weights.components(stage))
        ]
        self.num_left -= len(loads)
        return Plan(loads=tuple(loads))


def broken_promises(seeds: range) -> tuple[int, int]:
    """How many promises are kept, and how many broken, with two pipelines of which each needs all of a device."""
    costs, other = replace(weights(), memory_bytes=8), table(pipeline="other")
    costs = replace(
        costs,
        rows=costs.rows + other.rows,
        components={PIPELINE: NAMED, "other": {"denoiser": Component("another", 7)}},
        load_bytes_per_s={LoadSource.DISK: 6.0},
    )
    promises: list[bool] = []
    for seed in seeds:
        mix = promise_mix(60, 1.0, seed, 1.0)
        asked = [replace(one, pipeline=("other", PIPELINE)[index % 2]) for index, one in enumerate(mix)]
        trace = Simulation(ControllerConfig(policy="eager"), costs, SimConfig(num_devices=2)).run(asked)
        assert any(load.load.is_ahead for load in trace.loads)
        promises += [one.on_time for one in trace.endings if one.request.is_promise and one.status is Status.DONE]
    return promises.count(True), promises.count(False)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_loads_ahead_of_need_break_no_promise(*, is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._GIVEN, "eager", Eager)
    if not is_guarded:
        monkeypatch.setattr(ReservationGuard, "review_load", lambda *_: {})
    kept, broken = broken_promises(range(3))
    assert kept > 20 or not is_guarded
    assert bool(broken) is not is_guarded
