"""Metrics: the declared ones are those that there are, and a real engine moves every one of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest

import tilework
import tiny
from builders import PIPELINE
from server.exported import samples, value
from stages import DECODE, DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.control.watchdog import WatchdogConfig
from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.model import SimulatedSource
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.request import DEFAULT_TERMS, OnMiss, RefusalCode, Status, Terms
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.wire.reports import AllocatorReading, CardReading, DeviceReading, Ended, KeptStates
from tilework.cost.table import CostTable
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Ticket
from tilework.server.api.app import create_app
from tilework.server.config import ServerConfig
from tilework.server.metrics.families import FAMILIES
from waiting import until

CACHE = {
    f"tilework_encode_cache_{name}" for name in ("bytes", "hits", "misses")
}  # See tests/live/test_encode_cache.py.


PLACEMENT = {
    *(f"tilework_placement_{name}" for name in ("devices", "backlog", "busy_ratio", "completions_per_second")),
    "tilework_placement_changes_total",
    "tilework_weights_free_bytes",
}  # Without a policy that places stages, and without weights, they do not move; see below.


FRONT_ENDS = {"tilework_frontend_refusals_total"}  # Seen to move in `test_frontends`.
PATCHES = "tilework_cached_patches_total"  # No simulated device has a patch cache.
OF_CALLS = {"tilework_warnings_total", "tilework_webhook_attempts_total"}  # In `test_foreign_fields`, `test_webhooks`.
OF_DISKS = {"tilework_unready", "tilework_disk_free_bytes"}  # In `test_durable`.
OF_STORES = {
    "tilework_spool_bytes",
    "tilework_spool_entries",
    "tilework_store_unwritten_seconds",
}  # In `test_spooled_calls`.
CONSTANT = {
    "tilework_bad_reports",
    "tilework_build_info",
    "tilework_devices",
    "tilework_promise_margin_ratio",
    "tilework_promise_margin_seconds",
    PATCHES,
    *OF_DISKS,
    *OF_STORES,
    *CACHE,
    *PLACEMENT,
    *FRONT_ENDS,
    *OF_CALLS,
}

# What is exported: by family, and by sample.


def family_of(sample: str, kinds: dict[str, str]) -> str:
    """The documented name of a sample."""
    stem = re.sub(r"_(bucket|count|sum)$", "", sample)
    return stem if kinds.get(stem) == "histogram" else sample


def kinds_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def labels_of(text: str) -> dict[str, set[str]]:
    """The labels of each family."""
    kinds = kinds_of(text)
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, pairs in samples(text):
        labels[family_of(name, kinds)].update(dict(pairs))
    return labels


# A real engine on simulated devices, and the HTTP API around it.


STEP_S, SIDE = 0.02, 256
ROWS = (
    CostRow(pipeline=PIPELINE, stage=DIFFUSE, height=SIDE, width=SIDE, seconds=STEP_S),
    CostRow(pipeline=PIPELINE, stage=DECODE, height=SIDE, width=SIDE, seconds=0.01),
)


TABLE = CostTable(hardware="two simulated devices", rows=ROWS, steps=5)
SLOW = replace(ROWS[1], seconds=3 * ROWS[1].seconds)  # A decode takes longer than the table says.
SOURCE = SimulatedSource(pipeline=PIPELINE, hardware=TABLE.hardware, steps=5, rows=(ROWS[0], SLOW))


GB = 10**9
CARD = CardReading(
    busy=0.97,
    total_bytes=80 * GB,
    used_bytes=30 * GB,
    celsius=61,
    watts=540.5,
    limit_watts=700.0,
    hertz=1_755_000_000,
    most_hertz=1_980_000_000,
    slowed_by=("power cap",),
)
ALLOCATOR = AllocatorReading(
    reserved_bytes=9, allocated_bytes=7, peak_bytes=8, split_bytes=2, num_retries=3, num_failures=1
)


class Rig:
    """Two devices under `edf`; a request that loses a work fails at once."""

    def __init__(self) -> None:
        self.executor = LocalExecutor(LocalConfig(num_workers=2, sources=(SOURCE,), restart_delay_s=0.05))
        controller = ControllerConfig(policy="edf", max_attempts=1)
        watchdog = WatchdogConfig(tick_ns=NS_PER_S // 10, least_ns=2 * NS_PER_S)
        self.starting = EngineStart(EngineConfig(controller=controller, watchdog=watchdog, table=TABLE), self.executor)
        self.app = app = create_app(self.starting, ServerConfig())
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)
        self.texts: list[str] = []

    async def read(self) -> str:
        self.texts.append((await self.http.get("/metrics")).text)
        return self.texts[-1]

    async def post(self, **body: Any) -> int:
        return (await self.http.post("/v1/images/generations", json={"prompt": "x"} | body)).status_code

    def submit(self, uid: str, steps: int, slo_s: float | None = None, terms: Terms = DEFAULT_TERMS) -> Ticket:
        spec = tiny.spec(height=SIDE, width=SIDE, steps=steps, guidance_scale=1.0)
        deadline_ns = None if slo_s is None else self.engine.now_ns() + ns_from_s(slo_s)
        answer = self.engine.submit({uid: spec}, deadline_ns=deadline_ns, terms=terms)
        assert isinstance(answer, tuple)
        return answer[0]

    async def done(self) -> None:
        """On time and fetched later, late, refused, wrong, with previews."""
        assert await self.post(slo_s=60, response_format="url", priority="interactive") == 200
        assert await self.post(slo_s=0.05) == 200
        assert await self.post(slo_s=0.05, on_miss="reject") == 429
        assert await self.post(n=0) == 400
        assert await self.post(num_inference_steps=4, preview_every=1) == 200
        assert await self.post(slo_s=60, on_miss="reject") == 200

    async def crowded(self) -> None:
        """Two have a device each when an urgent one comes: one of them waits, and goes on on the other's."""
        tickets = [self.submit("first", 60), self.submit("second", 60)]
        await until(lambda: all(ticket.steps_done > 0 for ticket in tickets))
        tickets.append(self.submit("urgent", 75, slo_s=30))
        await until(lambda: not all(ticket.is_running for ticket in tickets[:2]))
        await self.read()
        for ticket in tickets:
            assert (await ticket.outcome).status is Status.DONE

    async def guarded(self) -> None:
        """Two run, a promise waits, then come two with earlier deadlines: `edf` would start both before it."""
        running = [self.submit(uid, 150, slo_s=6) for uid in ("before 0", "before 1")]
        self.submit("promised later", 150, slo_s=7, terms=Terms(on_miss=OnMiss.REJECT))
        for uid in ("earlier 0", "earlier 1"):
            self.submit(uid, 100, slo_s=6.2)
        await until(lambda: self.engine.status.usage().guard.starts_vetoed > 0)
        await self.read()
        for ticket in running:
            assert (await ticket.outcome).status is Status.DONE
        for uid in ("promised later", "earlier 0", "earlier 1"):
            self.engine.cancel(uid, "seen enough")
        await until(lambda: not any(device.works for device in self.engine._controller.tracker.devices))

    async def cancelled(self) -> None:
        ticket = self.submit("unwanted", 200, slo_s=60)
        await until(lambda: ticket.steps_done > 0)
        self.engine.cancel("unwanted", "not wanted")
        assert (await ticket.outcome).status is Status.CANCELLED
        await until(lambda: not any(device.works for device in self.engine._controller.tracker.devices))

    async def lost(self) -> None:
        """A worker is killed, and the request that it ran fails, although it was promised."""
        ticket = self.submit("promised", 50, slo_s=60, terms=Terms(on_miss=OnMiss.REJECT))
        await until(lambda: ticket.steps_done > 0)
        pid = self.executor.pids.get(
            str(next(device.device_id for device in self.engine._controller.tracker.devices if device.works))
        )
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await ticket.outcome).status is Status.FAILED
        await self.read()
        await until(lambda: self.engine.status.health().num_devices_up == 2)

    async def remembered(self) -> None:
        """What workers on accelerators report beside the ends of works, here of one that is not known any more."""
        for device_id in range(2):
            memory_bytes, kept = (device_id + 1) << 30, KeptStates(1000 + device_id, 3, 2)
            self.executor._listener.on_report(device_id, Ended(1 << 40, 0, 0, 0, memory_bytes=memory_bytes, kept=kept))
        self.app.state.observer.on_weights_loaded(
            0, LoadSource.HOST, 1000, NS_PER_S
        )  # Simulated devices have no weights.
        await self.read()

    def read_devices(self) -> None:
        """What workers on CUDA devices say of these, every few seconds."""
        for device_id, worker_bytes in ((0, 20 * GB), (1, None)):
            card = replace(CARD, worker_bytes=worker_bytes)
            self.executor._report(device_id, DeviceReading(card=card, allocator=ALLOCATOR))

    async def stuck(self) -> None:
        """A worker does not answer any more, and is killed when it has not for long enough; then the disk is full."""
        ticket = self.submit("stuck", 50)
        await until(lambda: ticket.steps_done > 0)
        (device,) = (device for device in self.engine._controller.tracker.devices if device.works)
        pid = self.executor.pids.get(str(device.device_id))
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await ticket.outcome
        self.engine._control._on_log_lost()
        await self.read()
        await until(lambda: self.engine.status.health().num_devices_up == 2)

    async def run(self) -> None:
        self.engine = await self.starting.start(self.app.state.observer)
        self.app.state.add_engine(self.engine)
        self.app.state.readiness.engine = self.engine
        await self.read()
        await self.remembered()
        await self.done()
        await self.crowded()
        await self.guarded()
        await self.cancelled()
        ballast = bytearray(os.urandom(1 << 24))
        await self.lost()
        await self.stuck()
        self.read_devices()
        await self.read()
        assert ballast
        await self.http.aclose()
        await self.engine.stop()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What was exported before, during and after a history with everything in it."""
    rig = Rig()
    asyncio.run(asyncio.wait_for(rig.run(), 60))
    return rig.texts


@pytest.mark.slow
def test_what_is_exported_is_declared(texts: list[str]) -> None:
    """And so documented (tests/deploy/test_queries.py). Without values those of PLACEMENT show no labels here."""
    assert kinds_of(texts[-1]) == {family.name: str(family.kind) for family in FAMILIES}
    for family in FAMILIES:
        expected = set() if family.name in PLACEMENT else set(family.label_names)
        assert labels_of(texts[-1])[family.name] - {"le"} == expected, family.name


@pytest.mark.slow
def test_labels_have_the_values_that_are_declared(texts: list[str]) -> None:
    kinds = kinds_of(texts[-1])
    declared = {(family.name, label.name): label.values for family in FAMILIES for label in family.labels}
    seen = {
        (family_of(name, kinds), label, value)
        for text in texts
        for name, pairs in samples(text)
        for label, value in pairs
        if label != "le"
    }
    assert [one for one in seen if declared[one[:2]] and one[2] not in declared[one[:2]]] == []
    assert any(declared[name, label] for name, label, _ in seen)


@pytest.mark.slow
def test_every_metric_moves(texts: list[str]) -> None:
    kinds = kinds_of(texts[-1])
    moved = {
        family_of(key[0], kinds)
        for before, after in pairwise(map(samples, texts))
        for key in before.keys() | after.keys()
        if before.get(key, 0.0) != after.get(key, 0.0)
    }
    assert {family.name for family in FAMILIES} - moved == CONSTANT
    about = {"version": tilework.__version__, "policy": "edf", "model": PIPELINE}
    assert value(texts[-1], "tilework_build_info", **about) == 1
    assert value(texts[-1], "tilework_devices") == 2


@pytest.mark.slow
def test_it_counts_what_has_happened(texts: list[str]) -> None:
    last = texts[-1]

    def now(name: str, **labels: str) -> float:
        """The sum over what has these labels."""
        keys = samples(last).items()
        return sum(number for (found, pairs), number in keys if found == name and labels.items() <= set(pairs))

    outcomes = {"done": 9, "failed": 2, "cancelled": 4, "rejected": 1}
    assert {name: now("tilework_requests_total", outcome=name) for name in outcomes} == outcomes
    assert now("tilework_requests_total", **{"class": "interactive", "outcome": "done"}) == 1
    assert now("tilework_refusals_total", reason="deadline_unreachable") == now("tilework_refusals_total") == 1
    assert now("tilework_deadlines_total", result="on_time", size="256x256") == 5
    assert now("tilework_deadlines_total", result="late") == 2, "the late one and the failed one"
    assert [now("tilework_promises_total", result=name) for name in ("kept", "broken")] == [1, 1]
    assert now("tilework_promise_interventions", kind="start_vetoed") >= 1
    assert now("tilework_slack_seconds_bucket", le="0.0") == 1
    assert now("tilework_slack_seconds_count") == 6
    assert now("tilework_previews_total") == 3
    assert now("tilework_device_losses_total") == 2
    assert now("tilework_stuck_works_total") == now("tilework_log_losses_total") == 1
    assert now("tilework_works_total", ending="lost") >= 1
    assert now("tilework_works_total", ending="stopped") == now("tilework_work_stops_total") >= 1
    assert now("tilework_steps_total") >= 5 + 5 + 4 + 5 + 60 + 60 + 75
    assert now("tilework_store_entries") >= 1
    assert now("tilework_jobs_running") == now("tilework_jobs_queued") == now("tilework_backlog_device_seconds") == 0
    assert now("tilework_state_blob_bytes") == 0, "open requests have ended"
    waiting = [samples(text)["tilework_jobs_queued", frozenset({("class", "standard")})] for text in texts]
    assert max(waiting) == 1
    assert min(samples(text)["tilework_devices_up", frozenset()] for text in texts) == 1


@pytest.mark.slow
def test_memory_of_devices_is_as_they_said_until_they_are_lost(texts: list[str]) -> None:
    def told(text: str, what: str = "memory_bytes") -> dict[str, float]:
        found = samples(text).items()
        return {dict(pairs)["device"]: number for (name, pairs), number in found if name == f"tilework_device_{what}"}

    assert told(texts[0]) == {}, "nothing is made up for CPUs"
    assert told(texts[1]) == {"0": 1 << 30, "1": 2 << 30}
    assert told(texts[1], "kept_bytes") == {"0": 1000, "1": 1001}
    assert told(texts[1], "spills") == {"0": 3, "1": 3}
    assert told(texts[1], "returns") == {"0": 2, "1": 2}
    assert len(told(texts[-1])) == 1, "one worker was lost"


@pytest.mark.slow
def test_devices_are_busy_for_as_long_as_works_ran(texts: list[str]) -> None:
    last = samples(texts[-1])
    busy_s = sum(number for (name, _), number in last.items() if name == "tilework_device_busy_seconds_total")
    done_s = sum(number for (name, _), number in last.items() if name == "tilework_work_seconds_sum")
    assert done_s <= busy_s * (1 + 1e-9) <= done_s + 0.5, "but for what was stopped"
    assert done_s >= (5 + 5 + 4 + 5 + 60 + 60 + 75) * STEP_S


@pytest.mark.slow
def test_known_labels_are_there_from_the_start(texts: list[str]) -> None:
    first = samples(texts[0])
    for name in DEFAULT_CLASSES:
        for outcome in ("done", "failed", "cancelled", "expired", "rejected"):
            assert first["tilework_requests_total", frozenset({("class", name), ("outcome", outcome)})] == 0
    for reason in (*RefusalCode, "too_many_open"):
        assert first["tilework_refusals_total", frozenset({("reason", str(reason))})] == 0
    for device_id in ("0", "1"):
        for counter in ("device_busy_seconds", "bubble_seconds", "device_losses"):
            assert first[f"tilework_{counter}_total", frozenset({("device", device_id)})] == 0


@pytest.mark.slow
def test_cards_say_whose_memory_it_is_and_what_slows_them(texts: list[str]) -> None:
    last = texts[-1]
    used = {labels: number for (name, labels), number in samples(last).items() if name == "tilework_card_memory_bytes"}
    assert used == {
        frozenset({("device", "0"), ("user", "worker")}): 20 * GB,
        frozenset({("device", "0"), ("user", "others")}): 10 * GB,
        frozenset({("device", "1"), ("user", "any")}): 30 * GB,
    }
    assert value(last, "tilework_card_slowed", device="0", reason="power cap") == 1
    assert value(last, "tilework_card_slowed", device="0", reason="temperature") == 0
    assert value(last, "tilework_card_busy_ratio", device="1") == 0.97
