"""What works need beside the weights: what is dropped for it, what fits, what is refused; no device overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PIPELINE, only, request, shipped, table
from scripted import Script, start
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.admission.what_if import WhatIf
from tilework.control.components import Components
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import DropComponents, LoadComponents, Reject, RunWork
from tilework.core.component import Component, DropOrder, LoadSource, Memory
from tilework.core.events import DeviceJoined, Submitted, Woke
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.request import RefusalCode, Request, Shape
from tilework.core.time import ns_from_s
from tilework.core.work import Plan
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.sim.config import SimConfig
from tilework.sim.faults import Faults
from tilework.sim.invariants import Invariants
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace, Violation

TEXT, DENOISER, VAE = Component("text", 2), Component("denoiser", 5), Component("vae", 1)
ALL = ("text", "denoiser", "vae")


def activated(decode_bytes: int, memory_bytes: int | None = 10, *, sliceable: bool = False) -> CostTable:
    """A table whose decodes of 128 px need so much beside the weights."""
    specs = [replace(one, sliceable=sliceable and one.sliceable) for one in latent_diffusion(PIPELINE).specs]
    rows = [replace(row, activation_bytes=decode_bytes if row.stage == DECODE else 1) for row in table().rows]
    return replace(
        table(),
        rows=tuple(row for row in rows if row.height == 128),
        graphs={PIPELINE: Graph(PIPELINE, tuple(specs))},
        components={PIPELINE: {"text_encoder": TEXT, "denoiser": DENOISER, "vae": VAE}},
        memory_bytes=memory_bytes,
        load_bytes_per_s={LoadSource.DISK: 1.0},
    )


@pytest.mark.parametrize(
    ("decode_bytes", "dropped"), [(2, ()), (3, ("text",)), (4, ("text",)), (5, ("text", "denoiser"))]
)
def test_a_start_drops_what_its_activations_need(
    monkeypatch: pytest.MonkeyPatch, decode_bytes: int, dropped: tuple[str, ...]
) -> None:
    """Ten bytes, of which the weights take eight. What was used the longest ago goes first."""
    starts = (start(ENCODE, 0), start(DIFFUSE, 0, steps=10), start(DECODE, 0))
    monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan(), Plan(), Plan(starts=starts)]))
    control = Controller(ControllerConfig(policy="script"), activated(decode_bytes))
    control.handle(DeviceJoined(0, 0, components=ALL, memory_bytes=10), 0)
    control.handle(Submitted(request("a")), 0)
    actions = control.handle(Woke(), 0)
    assert [digest for one in only(DropComponents, actions) for digest in one.components] == list(dropped)
    assert not only(LoadComponents, actions)
    kinds = [type(one) for one in actions if isinstance(one, DropComponents | RunWork)]
    assert kinds == [RunWork, RunWork, *[DropComponents] * bool(dropped), RunWork], "not before it must be"
    if dropped:
        assert control.tracker.needs_loads, "other requests load it again"


def test_reservations_are_computed_on_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loads matter, the guard counts with the same drops as the controller does."""
    starts = (start(ENCODE, 0), start(DIFFUSE, 0, steps=10), start(DECODE, 0))
    monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan(), Plan(), Plan(starts=starts)]))
    control = Controller(ControllerConfig(policy="script"), activated(4))
    control.handle(DeviceJoined(0, 0, components=ALL[1:], memory_bytes=10), 0)
    control.handle(Submitted(request("a")), 0)
    after = WhatIf.now(control.tracker, control.costs, 0).plus(starts).memory(0)
    control.handle(Woke(), 0)
    assert after.components == control.tracker.devices[0].memory.components == (DENOISER, VAE)


def test_only_as_much_is_dropped_as_there_is() -> None:
    memory = Memory(10, (TEXT, DENOISER, VAE))
    assert memory.used([VAE], beside_bytes=2).drops == ()
    assert memory.used([VAE], (DENOISER,), beside_bytes=3).drops == (DENOISER,)
    assert memory.used([VAE], beside_bytes=99).drops == (TEXT, DENOISER)
    assert Memory(None, (TEXT,)).used([VAE], beside_bytes=99).drops == ()


def test_what_fits_counts_weights_and_activations() -> None:
    shape, tables = Shape(128, 128), [TableCosts(activated(size)) for size in (9, 10)]
    fits = [costs.fits(costs.graph(PIPELINE).stage(DECODE), shape, 1) for costs in tables]
    assert fits == [True, False], "the decoder weighs one"
    unlimited = TableCosts(activated(10, memory_bytes=None))
    assert unlimited.fits(unlimited.graph(PIPELINE).stage(DECODE), shape, 1)
    assert TableCosts(activated(9)).weights.most_bytes == 8 + 9


def test_what_can_run_in_slices_does_where_it_would_not_fit() -> None:
    stage, shape = stage_of(PIPELINE, DECODE), Shape(128, 128)
    for size, needs_slices in ((9, False), (10, True)):
        costs = TableCosts(activated(size, sliceable=True))
        assert costs.fits(stage, shape, 1)
        assert costs.needs_slices(costs.graph(PIPELINE).stage(DECODE), shape) is needs_slices


def test_a_request_whose_activations_never_fit_is_refused() -> None:
    control = Controller(ControllerConfig(policy="edf"), activated(10))
    control.handle(DeviceJoined(0, 0, components=ALL, memory_bytes=10), 0)
    (refusal,) = control.handle(Submitted(replace(request("a"), shape=Shape(128, 128))), 0)
    assert isinstance(refusal, Reject)
    assert refusal.code is RefusalCode.MEMORY


def flux(uid: str, side: int, at_s: float) -> Request:
    return Request(uid=uid, pipeline="flux.1", shape=Shape(side, side), steps=4, arrival_ns=ns_from_s(at_s))


def checked(policy: str) -> Trace:
    """Requests of FLUX on eight L20, whose decodes of 4096 px fit beside no denoiser, under all invariants."""
    costs, config = shipped("flux1_l20"), ControllerConfig(policy=policy)
    asked = [flux(f"{index}", (4096, 512, 3072)[index % 3], 3.0 * index) for index in range(18)]
    simulation = Simulation(config, costs, SimConfig(num_devices=8))
    invariants = Invariants(simulation, config, Faults({}), TableCosts(costs))
    trace = simulation.run(asked, observe=invariants.check)
    invariants.finish(trace)
    return trace


@pytest.mark.parametrize("policy", ["tilework", "srtf", "tridentserve"])
def test_no_device_exceeds_its_memory(policy: str) -> None:
    """Under `tridentserve`, these decodes run on devices of their own, and nothing has to be dropped."""
    trace = checked(policy)
    assert {str(ending.status) for ending in trace.endings} == {"done"}
    assert bool(trace.loads) == (policy != "tridentserve"), "what was dropped for a decode came back"


def test_a_work_that_exceeds_a_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Components.prepare
    monkeypatch.setattr(Components, "prepare", lambda self, start, work_id, beside_bytes: prepare(self, start, work_id))
    with pytest.raises(Violation, match="bytes beside"):
        checked("tilework")


def test_a_drop_order_counts_for_activations_too() -> None:
    order = DropOrder((DENOISER,))
    change = Memory(10, (TEXT, DENOISER, VAE)).used([VAE], order.device, beside_bytes=4)
    assert change.drops == (DENOISER,)
