"""What is known by a model's name is forgotten with the model, by every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from builders import ONE_OF_EACH, SIDES, request, table
from policy.played import Devices, num_objects, traces
from quick import quick, quick_rows
from stages import DECODE, DIFFUSE, ENCODE
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.events import Submitted
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.policy.registry import make_policy, policy_names
from tilework.policy.traits import NeedsFuture

STAYS, GONE = "stays", "comes-and-goes"
SPEEDS = dict.fromkeys(LoadSource, 1000000000.0)
ONLINE = [name for name in policy_names() if not isinstance(make_policy(name), NeedsFuture)]
BY_COUNT = {"tetriserve-early"}  # It searches the length of its rounds again after so many events of any kind.
MANY = quick(ONE_OF_EACH, ONLINE)

INK = Lora(changes=frozenset({"denoiser"}), slowdown=1.1)

OTHER_STAGES = Graph(
    GONE,
    (
        StageSpec(name="read", outputs=("words",), components=("reader",)),
        StageSpec(name="draft", inputs=("words",), outputs=("a",), steps=StepShare(last=0.8), degrees=None),
        StageSpec(name="enlarge", inputs=("a",), outputs=("b",), components=("painter",)),
        StageSpec(name="paint", inputs=("b",), outputs=("c",), steps=StepShare(first=0.8), degrees=None),
        StageSpec(name="show", inputs=("c",), outputs=("picture",)),
    ),
)
ONE_STAGE_MORE = Graph(
    GONE,
    (
        *latent_diffusion(GONE).specs[:2],
        replace(latent_diffusion(GONE).specs[2], name="enlarge", outputs=("large",), sliceable=False),
        replace(latent_diffusion(GONE).specs[2], inputs=("large",)),
    ),
)


def first(pipeline: str) -> CostTable:
    """A latent diffusion pipeline with weights and a LoRA."""
    names = {component for spec in latent_diffusion(pipeline).specs for component in spec.components}
    return replace(
        table(degrees=(1, 2, 4), pipeline=pipeline),
        components={pipeline: {name: Component(f"{name} of {pipeline}", 1000) for name in sorted(names)}},
        loras={
            pipeline: {
                "ink": Lora(
                    changes=frozenset({"denoiser"}), component=Component(f"ink of {pipeline}", 10), slowdown=1.1
                )
            }
        },
        load_bytes_per_s=SPEEDS,
    )


def again(graph: Graph) -> CostTable:
    """Another pipeline of that name, which is four times as fast."""
    rows = [
        CostRow(
            pipeline=GONE,
            stage=spec.name,
            height=side,
            width=side,
            degree=degree,
            seconds=(0.025 if spec.steps else 0.01) * (side / 128) ** 2 / degree**0.7,
        )
        for spec in graph.specs
        for side in SIDES
        for degree in ((1, 2, 4) if spec.steps else (1,))
    ]
    names = sorted({name for spec in graph.specs for name in spec.components})
    components = {name: Component(f"new {name} of {GONE}", 500) for name in names}
    return CostTable(
        hardware="toy",
        rows=tuple(rows),
        graphs={GONE: graph},
        components={GONE: components},
        load_bytes_per_s=SPEEDS,
    )


def mix(pipeline: str, begin_s: float, num: int, seed: int = 0, loras: tuple[UsedLora, ...] = ()) -> list[Request]:
    """Requests of all kinds, in bursts: some share forward passes, some have deadlines, some are promised."""
    random, made = Random(f"{pipeline} {seed}"), list[Request]()
    for index in range(num):
        arrival_s = begin_s + 12 * (index // 4)
        slo_s, on_miss = random.choice([(None, OnMiss.BEST_EFFORT), (9.0, OnMiss.BEST_EFFORT), (9.0, OnMiss.REJECT)])
        one = request(
            f"r{begin_s:g}.{seed}.{index}",
            arrival_s,
            side=random.choice(SIDES),
            steps=random.choice((4, 10)),
            slo_s=slo_s,
            on_miss=on_miss,
            exact=random.random() < 0.2,
            loras=loras if random.random() < 0.3 else (),
            preview_every=random.choice((0, 0, 0, 2)),
        )
        made.append(replace(one, pipeline=pipeline))
    return made


def slower(part: CostTable, factor: float) -> CostTable:
    return replace(part, rows=tuple(replace(row, seconds=row.seconds * factor) for row in part.rows))


def begun(policy: str, *, has_limit: bool = False) -> Devices:
    """Four devices with one model."""
    control = Controller(ControllerConfig(policy=policy), first(STAYS))
    devices = Devices(control, 4)
    devices.join(memory_bytes=5000 if has_limit else None)
    devices.serve(first(STAYS))
    return devices


def use_and_remove(devices: Devices, *, begin_s: float = 0.0) -> None:
    """Serve a model, three times as slow as its table says, draw with it, and remove it."""
    requests = mix(GONE, begin_s, 40, loras=(UsedLora("ink", 0.5),))
    devices.too_large = {one.uid for one in requests[::7]}
    devices.serve(first(GONE), slower(first(GONE), 3.0))
    devices.play(requests, {one.uid: one.arrival_ns + ns_from_s(0.5) for one in requests[::9]})
    devices.remove(GONE)


def assert_ended(devices: Devices, requests: Sequence[Request]) -> None:
    """Each was done once, or refused; not all were refused."""
    endings = {one.uid: devices.endings.get(one.uid, []) for one in requests}
    assert not {uid: ended for uid, ended in endings.items() if ended not in ([Status.DONE], [Status.REJECTED])}
    assert [Status.DONE] in endings.values()


@pytest.mark.parametrize(("others", "has_limit"), quick_rows([(8, True)], [(8, False), (8, True), (0, True)]))
@pytest.mark.parametrize("policy", MANY)
def test_nothing_is_left_of_its_name(policy: str, others: int, has_limit: bool) -> None:
    devices = begun(policy, has_limit=has_limit)
    devices.play(mix(STAYS, 0.0, others))
    use_and_remove(devices, begin_s=40)
    assert traces(devices.controller, GONE) == []
    assert traces(devices.controller, STAYS) != []


@pytest.mark.parametrize("graph", [OTHER_STAGES, ONE_STAGE_MORE], ids=["other stages", "one stage more"])
@pytest.mark.parametrize("policy", MANY)
def test_the_next_of_its_name_may_have_other_stages(policy: str, graph: Graph) -> None:
    devices = begun(policy, has_limit=True)
    use_and_remove(devices)
    devices.serve(again(graph))
    requests = [*mix(GONE, 200, 24, 1), *mix(STAYS, 206, 24, 1)]
    devices.play(requests)
    assert_ended(devices, requests)
    names = {work.stage.name for work in devices.runs if work.stage.pipeline == GONE}
    assert names == {ENCODE, DIFFUSE, DECODE} | {spec.name for spec in graph.specs}


@pytest.mark.parametrize("policy", quick(ONE_OF_EACH, [name for name in ONLINE if name not in BY_COUNT]))
def test_the_next_of_its_name_is_predicted_as_if_it_were_the_first(policy: str) -> None:
    """The former one took three times as long as its table said, and ran out of memory."""
    used, fresh = begun(policy), begun(policy)
    use_and_remove(used)
    answers = []
    for devices in (used, fresh):
        devices.now_ns, devices.truth = ns_from_s(1000), {}
        devices.serve(again(ONE_STAGE_MORE))
        requests = mix(GONE, 1000, 12, 2)
        devices.play(requests)
        answers.append([(one.uid, *_answer(devices, one.uid)) for one in requests])
    assert answers[0] == answers[1]


def _answer(devices: Devices, uid: str) -> tuple[Any, ...]:
    accepted = devices.accepted.get(uid)
    return devices.endings[uid], accepted and (accepted.eta_ns, accepted.why)


@pytest.mark.parametrize("policy", MANY)
def test_a_work_of_it_may_still_run(policy: str) -> None:
    """Its client has gone away, and the work has not stopped yet when the model is removed, and when it is back."""
    devices = begun(policy)
    devices.serve(first(GONE))
    devices.hold = True
    requests = mix(GONE, 0, 4, loras=(UsedLora("ink", 0.5),))
    devices.play(requests, {one.uid: one.arrival_ns + ns_from_s(0.4) for one in requests})
    assert devices.num_held
    devices.remove(GONE)
    devices.now_ns, others, last = ns_from_s(30), mix(STAYS, 30, 4), mix(GONE, 30, 4, 1)
    for one in others:
        devices.handle(Submitted(one))
    devices.serve(again(OTHER_STAGES))
    for one in last:
        devices.handle(Submitted(one))
    devices.let_go()
    assert_ended(devices, [*others, *last])


@pytest.mark.parametrize("policy", MANY)
def test_what_is_known_does_not_grow_with_the_models_that_came_and_went(policy: str) -> None:
    devices, counts = begun(policy), []
    for number in range(30):
        name = f"{GONE}-{number}"
        devices.serve(first(name))
        devices.play(mix(name, 50 * number, 4, loras=(UsedLora("ink", 0.5),)))
        devices.remove(name)
        assert traces(devices.controller, GONE) == []
        counts.append(num_objects(devices.controller))
    assert max(counts[20:]) <= 1.02 * max(counts[10:20])


@pytest.mark.parametrize("policy", MANY)
def test_a_model_whose_stages_change_is_another(policy: str) -> None:
    """No server serves other stages by a name that is taken, but a log may say so."""
    changed, fresh = begun(policy), begun(policy)
    requests = mix(GONE, 0, 12)
    changed.serve(first(GONE), slower(first(GONE), 3.0))
    changed.play(requests)
    stage, one = again(ONE_STAGE_MORE).graph(GONE).stage(DIFFUSE), requests[0]
    for devices in (changed, fresh):
        devices.serve(again(ONE_STAGE_MORE))
    predicted = [devices.controller.costs.work_ns(stage, [one], 1) for devices in (changed, fresh)]
    assert predicted[0] == predicted[1]
    last = mix(GONE, 200, 12, 1)
    changed.play(last)
    assert_ended(changed, last)


@pytest.mark.parametrize("before", quick([2], [1, 2, 3, 6, 12, 20]))
@pytest.mark.parametrize("policy", MANY)
def test_a_model_goes_after_a_lora_of_another_that_was_used(policy: str, before: int) -> None:
    devices = begun(policy, has_limit=True)
    devices.serve(first(GONE))
    devices.play([replace(one, loras=(UsedLora("ink", 0.5),)) for one in mix(STAYS, 0, before)])
    devices.serve(replace(first(STAYS), loras={}))
    devices.remove(GONE)
    requests = mix(STAYS, devices.now_ns / NS_PER_S, 12, 1)
    devices.play(requests)
    assert_ended(devices, requests)
