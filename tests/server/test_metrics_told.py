"""Metrics that are told directly what has happened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import PIPELINE, request
from fake_engine import FakeEngine, Plan, serving
from server.exported import samples, value
from stages import DIFFUSE, stage_of
from tilework.core.request import OnMiss, RefusalCode, Request, Shape, Status
from tilework.core.time import NS_PER_S, START_MARGINS, Margin, Margins, ns_from_s
from tilework.core.wire.reports import AllocatorReading, CardReading, DeviceReading, Ending
from tilework.core.work import Group, Member, NewPlacement, Work
from tilework.policy.traits import PlacementStatus
from tilework.runtime.bubbles import Bubbles
from tilework.runtime.observer import EndedWork
from tilework.runtime.ticket import Outcome, Ticket, WorkSegment
from tilework.runtime.worker_process import resident_bytes
from tilework.server.metrics.levels import Levels
from tilework.server.metrics.metrics import Metrics
from tilework.sets.window import UseWindow
from tilework.store.memory import MemoryStore


def metrics_of(engine: FakeEngine) -> Metrics:
    metrics = Metrics(UseWindow(NS_PER_S))
    metrics.register(Levels(engine, MemoryStore(max_bytes=1, ttl_ns=1), lambda: None, None))
    return metrics


def test_what_no_card_tells_has_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    silent = DeviceReading(card=CardReading(celsius=61), allocator=None)
    allocator = AllocatorReading(
        reserved_bytes=9, allocated_bytes=7, peak_bytes=8, split_bytes=2, num_retries=3, num_failures=1
    )
    readings = {"0.1": silent, "1": DeviceReading(card=None, allocator=allocator)}
    usage = replace(engine.status.usage(), readings=readings)
    monkeypatch.setattr(engine, "usage", lambda: usage)
    told = metrics_of(engine)
    found = {key for key in samples(told.text().decode()) if re.match("tilework_(card|allocator)_", key[0])}
    assert {name for name, labels in found if ("device", "0.1") in labels} == {"tilework_card_temperature_celsius"}
    assert all(name.startswith("tilework_allocator_") for name, labels in found if ("device", "1") in labels)
    assert len(found) == 7


def test_stages_whose_costs_are_off_are_shown_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    usage = replace(engine.status.usage(), cost_deviations={("toy", DIFFUSE): 2.5})
    monkeypatch.setattr(engine, "usage", lambda: usage)
    found = samples(metrics_of(engine).text().decode())
    off = {dict(labels)["stage"]: ratio for (name, labels), ratio in found.items() if "cost_deviation" in name}
    assert off == {DIFFUSE: 2.5}


def test_the_margin_of_promises_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    margin = Margin(fixed_ns=NS_PER_S // 4, permille=14)
    usage = replace(engine.status.usage(), margins=Margins(admission=margin, guard=START_MARGINS.guard))
    monkeypatch.setattr(engine, "usage", lambda: usage)
    text = metrics_of(engine).text().decode()
    assert value(text, "tilework_promise_margin_seconds") == 0.25
    assert value(text, "tilework_promise_margin_ratio") == 0.014


def test_what_a_policy_counts_for_its_placement_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    status = PlacementStatus(
        name="ED", num_devices=2, window_ns=60 * NS_PER_S, completions=30, busy_ns=90 * NS_PER_S, backlog=7
    )
    usage = replace(engine.status.usage(), placements=(status,), weights_free_bytes={0: 5, 1: 6})
    monkeypatch.setattr(engine, "usage", lambda: usage)
    told = metrics_of(engine)
    told.on_placed(NewPlacement(groups=(((0, 1), "ED"),), why="new"))
    text = told.text().decode()
    names = ("devices", "backlog", "completions_per_second", "busy_ratio")
    assert [value(text, f"tilework_placement_{name}", placement="ED") for name in names] == [2, 7, 0.5, 0.75]
    assert [value(text, "tilework_weights_free_bytes", device=device) for device in "01"] == [5, 6]
    assert value(text, "tilework_placement_changes_total") == 1


def metrics() -> tuple[Metrics, Callable[..., float]]:
    """Metrics of an engine that does nothing, and the value of one of them, by name and labels."""
    told = metrics_of(FakeEngine())
    return told, lambda name, **labels: value(told.text().decode(), f"tilework_{name}", **labels)


def ended(
    devices: Group = (0,),
    steps: int = 4,
    *,
    start_s: float = 0.0,
    end_s: float = 1.0,
    shape: Shape | None = None,
    ending: Ending = Ending.DONE,
) -> EndedWork:
    one = request("a") if shape is None else replace(request("a"), shape=shape)
    work = Work(
        work_id=1,
        stage=stage_of(PIPELINE, DIFFUSE),
        members=(Member(1, 1, 1, 0),),
        devices=devices,
        num_steps=steps,
        why="",
    )
    return EndedWork(
        work=work,
        requests=(one,),
        ending=ending,
        steps_done=steps,
        predicted_ns=NS_PER_S // 2,
        start_ns=ns_from_s(start_s),
        end_ns=ns_from_s(end_s),
        correction=1.5,
    )


def test_a_work_of_a_group_keeps_all_its_devices_busy() -> None:
    told, now = metrics()
    for device_id in range(3):
        told.on_joined(device_id, 0)
    told.on_decided(0, 50_000, num_waiting=1)
    told.on_work_ended(ended((0, 2), start_s=0.25))
    told.on_work_ended(ended((2,), start_s=1.5, end_s=1.75))
    told.on_work_ended(ended((2,), steps=3, start_s=2.0, end_s=2.5, ending=Ending.STOPPED))
    assert [now("device_busy_seconds_total", device=str(device_id)) for device_id in range(3)] == [0.75, 0, 1.5]
    assert [now("bubble_seconds_total", device=str(device_id)) for device_id in range(3)] == [0.25, 0, 1.0]
    assert now("steps_total", degree="2") == 4
    assert now("steps_total", degree="1") == 7, "those before a stop, too"
    assert now("works_total", stage=DIFFUSE, degree="1", ending="stopped") == 1
    assert now("step_seconds_sum", size="128x128", degree="2") == 0.75 / 4
    assert now("work_seconds_count", stage=DIFFUSE, size="128x128", degree="1") == 1, "a stopped one is no measure"
    assert now("prediction_ratio_bucket", stage=DIFFUSE, le="0.5") == 0
    assert now("prediction_ratio_bucket", stage=DIFFUSE, le="0.7") == 1
    assert now("prediction_ratio_bucket", stage=DIFFUSE, le="2.0") == 2
    assert now("cost_correction_ratio", stage=DIFFUSE, size="128x128", degree="2") == 1.5
    assert now("decision_seconds_bucket", le="5e-05") == 1


def test_a_shared_work_has_no_size_and_the_steps_of_all() -> None:
    told, now = metrics()
    told.on_joined(0, 0)
    alone = ended(steps=4)
    work = replace(alone.work, members=(Member(1, 1, 1, 0), Member(2, 1, 4, 3)))
    large = replace(request("b"), shape=Shape(256, 256))
    told.on_work_ended(replace(alone, work=work, requests=(*alone.requests, large)))
    told.on_work_ended(alone)
    assert now("steps_total", degree="1") == 3 * 4
    assert now("step_seconds_sum", size="shared", degree="1") == 0.25
    assert now("work_seconds_count", stage=DIFFUSE, size="128x128", degree="1") == 1
    assert now("device_busy_seconds_total", device="0") == 2


def test_a_request_pays_for_its_share_of_shared_works() -> None:
    told, now = metrics()
    whole = outcome_of(Status.DONE, 4.0)
    segments = tuple(replace(segment, batch=4) for segment in whole.segments)
    told.on_ended(ticket_of(request("a"), 2.5), replace(whole, segments=segments))
    told.on_ended(ticket_of(request("b"), 2.5), whole)
    alone_s = sum((one.end_ns - one.start_ns) * len(one.devices) for one in whole.segments) / NS_PER_S
    assert now("request_device_seconds_sum", size="128x128") == pytest.approx(1.25 * alone_s)


def test_a_lost_device_is_idle_from_when_it_is_back() -> None:
    told, now = metrics()
    told.on_joined(0, 0)
    told.on_decided(0, 1, num_waiting=1)
    told.on_lost(0)
    told.on_work_ended(ended())  # Of a group whose other member has reported since.
    assert now("device_busy_seconds_total", device="0") == 0
    told.on_joined(0, ns_from_s(10))
    told.on_work_ended(ended(start_s=11, end_s=12))
    assert (now("bubble_seconds_total", device="0"), now("device_losses_total", device="0")) == (1, 1)


def test_a_client_cannot_make_labels_without_end() -> None:
    told, _ = metrics()
    told.on_joined(0, 0)
    for side in range(16, 16 * 101, 16):
        told.on_work_ended(ended(shape=Shape(side, side)))
    labels = {dict(pairs).get("size") for name, pairs in samples(told.text().decode()) if "work_seconds" in name}
    assert len(labels) == 33
    assert "other" in labels
    assert len(told._works._meters) == 32


def ticket_of(one: Request, eta_s: float) -> Ticket:
    return Ticket(request=one, eta_ns=ns_from_s(eta_s), eta_p90_ns=0, outcome=None)  # type: ignore[arg-type]


def outcome_of(status: Status, finished_s: float) -> Outcome:
    segment = WorkSegment(stage=DIFFUSE, devices=(0, 1), num_steps=4, start_ns=0, end_ns=NS_PER_S)
    finished_ns = ns_from_s(finished_s)
    return Outcome(uid="a", status=status, reason="", finished_ns=finished_ns, image=None, segments=(segment,))


@pytest.mark.parametrize(
    ("status", "finished_s", "result", "promise"),
    [
        (Status.DONE, 3.0, "on_time", "kept"),
        (Status.DONE, 3.001, "late", "broken"),
        (Status.FAILED, 1.0, "late", "broken"),
        (Status.CANCELLED, 1.0, None, None),
    ],
)
def test_a_deadline_is_kept_missed_or_given_up(
    status: Status, finished_s: float, result: str | None, promise: str | None
) -> None:
    one = request("a", slo_s=3.0, on_miss=OnMiss.REJECT)
    told, _ = metrics()
    told.on_ended(ticket_of(one, 2.5), outcome_of(status, finished_s))
    found = samples(told.text().decode())
    seen = {dict(pairs)["result"] for (name, pairs), n in found.items() if name == "tilework_deadlines_total" and n}
    kept = {dict(pairs)["result"] for (name, pairs), n in found.items() if name == "tilework_promises_total" and n}
    assert seen == ({result} if result else set())
    assert kept == ({promise} if promise else set())
    slacks = found.get(("tilework_slack_seconds_count", frozenset({("class", "standard"), ("size", "128x128")})), 0)
    assert slacks == (status is Status.DONE)


def test_slack_and_errors_of_the_predicted_end_have_signs() -> None:
    told, now = metrics()
    for finished_s, eta_s in ((4.0, 2.5), (1.0, 3.0)):
        told.on_ended(ticket_of(request("a", slo_s=3.0), eta_s), outcome_of(Status.DONE, finished_s))
    about = {"class": "standard", "size": "128x128"}
    slack = [now("slack_seconds_bucket", **about, le=le) for le in ("-2.0", "-1.0", "1.0", "2.0")]
    assert slack == [0, 1, 1, 2], "one second late, two early"
    assert [now("eta_error_seconds_bucket", le=le) for le in ("-5.0", "-2.0", "1.0", "2.0")] == [0, 1, 1, 2]
    assert [now("eta_error_ratio_bucket", le=le) for le in ("0.3", "0.5", "1.0", "2.0")] == [0, 1, 1, 2]
    assert now("request_device_seconds_sum", size="128x128") == 4
    assert now("request_latency_seconds_sum", **{"class": "standard"}) == 5


@given(st.lists(st.integers(0, 20), max_size=12), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=8))
def test_bubbles_are_the_gaps_in_which_an_image_waited(gaps: list[int], works: list[tuple[int, int]]) -> None:
    """Against counting each tick; works are told when they have ended, after all that happened meanwhile."""
    flips = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    waited = [sum(flip <= tick for flip in flips) % 2 for tick in range(400)]
    bubbles, at, pending, idle_since = Bubbles(), 0, list(flips), 0
    bubbles.idle_from(0, 0)
    for gap, run in works:
        start, end = at + gap, at + gap + run
        while pending and pending[0] <= end:
            flip = pending.pop(0)
            bubbles.set_waiting(bool((len(flips) - len(pending)) % 2), flip)
        assert bubbles.ran(0, start, end) == sum(waited[idle_since:start])
        at = idle_since = end


def test_memory_of_processes_is_read_where_it_can_be() -> None:
    own = resident_bytes(os.getpid())
    assert own is not None
    assert 10 << 20 < own < 1 << 40
    assert resident_bytes(2**22 + 1) is None, "beyond the largest process id"


def test_refusals_have_their_reasons() -> None:
    told, now = metrics()
    told.on_refused(replace(request("a"), priority="batch"), RefusalCode.QUEUE)
    assert now("refusals_total", reason="queue_full") == 1
    assert now("requests_total", **{"class": "batch", "outcome": "rejected"}) == 1


def test_a_tenants_limit_is_a_reason_too(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.default]\nmax_open = 1")
    with serving(FakeEngine(plan=Plan(is_held=True)), tenants=str(file), drain_s=0) as server:
        assert server.post({"prompt": "x"}, headers={"Prefer": "respond-async"}).status_code == 202
        assert server.post({"prompt": "x", "priority": "batch"}).status_code == 429
        assert server.metric('tilework_refusals_total{reason="too_many_open"}') == 1
        assert server.metric('tilework_requests_total{class="batch",outcome="rejected"}') == 1
