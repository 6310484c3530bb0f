"""An engine without devices whose every answer is programmed, and a real HTTP server around it in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import ns_from_s
from tilework.core.wire import Image, ModelInfo, Spec
from tilework.runtime.ticket import Outcome, Refusal, Segment, Ticket
from tilework.server.config import ServerConfig
from tilework.server.main import StopSignals, serve

INFO = ModelInfo(
    name="tiny-shapes",
    family="fake",
    side_multiple=16,
    max_side=512,
    default_height=64,
    default_width=48,
    default_steps=4,
    default_guidance_scale=4.5,
    parameters=1000,
    library="none",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of one submission. `refuse_s` is the earliest deadline of a refusal, from arrival."""

    delay_s: float = 0.0
    fail: str | None = None
    refuse_s: float | None = None
    no_device: bool = False
    bug: Exception | None = None
    num_bytes_short: int = 0


@dataclass(frozen=True, kw_only=True)
class FakeHealth:
    num_devices_up: int
    num_devices: int
    num_jobs: int
    num_running: int
    draining: bool


@dataclass
class FakeEngine:
    """Serves each submission by the next plan of `script`, or by `plan` when the script is used up.

    Pictures are of one colour: red = seed % 256. `stop` cancels what is open, as the live engine does.
    """

    plan: Plan = Plan()
    script: list[Plan] = field(default_factory=list)
    devices_up: int = 2
    draining: bool = False
    start_s: float = 0.0
    specs: list[Spec] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    info: ModelInfo = INFO
    policy: str = "edf"

    def submit(
        self,
        spec: Spec,
        *,
        uid: str,
        deadline_ns: int | None,
        on_miss: OnMiss,
        tenant: str = "default",
        priority: int = 0,
    ) -> Ticket | Refusal:
        plan = self.script.pop(0) if self.script else self.plan
        now_ns = self.now_ns()
        if plan.bug is not None:
            raise plan.bug
        if plan.no_device:
            return Refusal(uid=uid, reason="no device is up", earliest_ns=None)
        if plan.refuse_s is not None:
            return Refusal(uid=uid, reason="too much is ahead", earliest_ns=now_ns + ns_from_s(plan.refuse_s))
        ticket = self._ticket(spec, uid, deadline_ns, on_miss, now_ns)
        asyncio.get_running_loop().call_later(plan.delay_s, self._finish, ticket, spec, plan)
        return ticket

    def cancel(self, uid: str, reason: str) -> None:
        ticket = self.tickets.get(uid)
        if ticket is not None and not ticket.outcome.done():
            self.cancelled[uid] = reason
            self._resolve(ticket, Status.CANCELLED, reason, None)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def health(self) -> FakeHealth:
        num_open = sum(not ticket.outcome.done() for ticket in self.tickets.values())
        return FakeHealth(
            num_devices_up=self.devices_up,
            num_devices=2,
            num_jobs=num_open,
            num_running=min(num_open, self.devices_up),
            draining=self.draining,
        )

    def drain(self) -> None:
        self.draining = True
        self.log.append("draining")

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)
        self.log.append("started")

    async def stop(self) -> None:
        self.log.append("stopped")
        for uid in self.tickets:
            self.cancel(uid, "the engine has stopped")

    def _ticket(self, spec: Spec, uid: str, deadline_ns: int | None, on_miss: OnMiss, now_ns: int) -> Ticket:
        request = Request(
            uid=uid,
            pipeline=INFO.name,
            shape=spec.shape,
            steps=spec.steps,
            arrival_ns=now_ns,
            seed=spec.seed,
            deadline_ns=deadline_ns,
            on_miss=on_miss,
        )
        self.specs.append(spec)
        self.requests.append(request)
        outcome = asyncio.get_running_loop().create_future()
        ticket = Ticket(request=request, eta_ns=now_ns + 250_000_000, outcome=outcome, first_start_ns=now_ns)
        self.tickets[uid] = ticket
        return ticket

    def _finish(self, ticket: Ticket, spec: Spec, plan: Plan) -> None:
        if ticket.outcome.done():
            return
        if plan.fail is not None:
            self._resolve(ticket, Status.FAILED, plan.fail, None)
        else:
            pixels = bytes((spec.seed % 256, 0, 0)) * (spec.height * spec.width)
            image = Image(spec.height, spec.width, pixels[: len(pixels) - plan.num_bytes_short])
            self._resolve(ticket, Status.DONE, "", image)

    def _resolve(self, ticket: Ticket, status: Status, reason: str, image: Image | None) -> None:
        start_ns, end_ns = ticket.request.arrival_ns, self.now_ns()
        segment = Segment(
            stage="diffuse", gpus=(0, 1), num_steps=ticket.request.steps, start_ns=start_ns, end_ns=end_ns
        )
        outcome = Outcome(
            uid=ticket.request.uid, status=status, reason=reason, finished_ns=end_ns, image=image, segments=(segment,)
        )
        ticket.outcome.set_result(outcome)


@dataclass
class Served:
    """A live server: its address, its engine and its event loop."""

    url: str
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    signals: StopSignals
    http: httpx.Client

    def post(self, body: Any, **options: Any) -> httpx.Response:
        return self.http.post("/v1/images/generations", json=body, **options)

    def metric(self, line: str) -> float:
        """The value of a metric, named as it appears in the text: `name{label="value"}`."""
        text = self.http.get("/metrics").text
        found = [row.rpartition(" ")[2] for row in text.splitlines() if row.rpartition(" ")[0] == line]
        assert len(found) == 1, f"{line} appears {len(found)} times in\n{text}"
        return float(found[0])

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1  # Without this one.

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(5)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.signals.send)


@contextmanager
def serving(engine: FakeEngine, **settings: Any) -> Iterator[Served]:
    """Run `serve` on a free port of the loopback until the block is left."""
    started = threading.Event()
    parts: dict[str, Any] = {}
    signals = StopSignals()

    def on_ready(url: str) -> None:
        parts.update(url=url, loop=asyncio.get_running_loop())
        started.set()

    def run() -> None:
        try:
            asyncio.run(serve(engine, ServerConfig(port=0, **settings), on_ready=on_ready, signals=signals))
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    assert parts, "the server did not start"
    with httpx.Client(base_url=parts["url"], timeout=10) as client:
        served = Served(parts["url"], engine, parts["loop"], signals, client)
        try:
            yield served
        finally:
            if thread.is_alive() and not signals.stop.is_set():
                served.stop()
    thread.join(15)
    assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until the condition holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.01)
