"""An engine without devices whose every answer is programmed, and a real HTTP server around it in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import httpx
from fastapi import FastAPI

from builders import table
from clock import SkippingLoop, until_idle
from tilework.admission.contract import EtaPrediction
from tilework.core.actions import Accept, Reject
from tilework.core.checkpoint import Checkpoint
from tilework.core.graph.stage import DeviceKind, ResultKind, StageSpec
from tilework.core.model import Argument, ArgumentKind, ModelInfo, NotServed, PictureInput, StrengthRule
from tilework.core.request import DEFAULT_TERMS, Refusal, RefusalCode, Request, Shape, Status, Terms
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.wire.reports import CardReading, DeviceReading
from tilework.core.wire.spec import File, Image, Spec
from tilework.cost.table import CostTable
from tilework.runtime.observer import HeldComponent, Holding, Observer, Usage
from tilework.runtime.ticket import Outcome, Ticket, TicketPreview, Wanted, WorkSegment
from tilework.server.api.app import create_app
from tilework.server.config import ServerConfig
from tilework.server.main import Signals, serve
from tilework.server.reload import Reread
from tilework.store.durable import DurableDirectory
from waiting import PATIENCE_S

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
    arguments=(
        Argument(name="generator_device", kind=ArgumentKind.CHOICE, choices=("cpu",)),
        Argument(name="prompt_2", kind=ArgumentKind.TEXT),
        Argument(name="eta", kind=ArgumentKind.NUMBER, high=1.0),
        Argument(name="clip_skip", kind=ArgumentKind.INTEGER, high=2),
        Argument(name="target_size", kind=ArgumentKind.INTEGERS, high=64, count=2),
        Argument(name="skip_guidance_layers", kind=ArgumentKind.INTEGERS, high=3),
        Argument(name="sigmas", kind=ArgumentKind.SCHEDULE, high=20.0, more=1),
        Argument(name="timesteps", kind=ArgumentKind.SCHEDULE, high=999.0),
    ),
)

EDITOR = replace(
    INFO,
    name="tiny-editor",
    arguments=(
        *INFO.arguments,
        Argument(name="strength", kind=ArgumentKind.NUMBER, high=1.0, strength=StrengthRule.DOWN, default=0.5),
    ),
    pictures=(
        PictureInput(name="image", most=2),
        PictureInput(name="mask_image", is_mask=True),
        PictureInput(name="control_image"),
    ),
)
"""Takes pictures, and needs none."""
CLIPS = replace(INFO, name="tiny-clips", default_frames=5, max_frames=13, frame_multiple=4)
VIDEOS = replace(
    CLIPS,
    name="tiny-videos",
    default_fps=4.0,
    pictures=(PictureInput(name="image"),),
    stages=(
        *INFO.stages,
        StageSpec(
            name="export",
            inputs=("picture",),
            outputs=("video",),
            device_kind=DeviceKind.CPU,
            result=ResultKind.VIDEO,
        ),
    ),
)
"""Makes clips, and files of them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of one submission: its steps spread evenly over `delay_s`, with the previews that it asks for.

    The file of a video is `video`, if that is given. `is_held` leaves it queued until the test does something with it.
    `refuse` is why a stage of the model does not serve it.
    `refuse_s` is the earliest deadline of a refusal, from arrival, if there is a deadline; any other refusal has a
    `code`.
    """

    delay_s: float = 0.0
    is_held: bool = False
    fail: str | None = None
    expire: str | None = None
    refuse: str | None = None
    refusal: Refusal = Refusal.CONTENT
    refuse_s: float | None = None
    code: RefusalCode | None = None
    retry_ns: int | None = None
    bug: Exception | None = None
    num_bytes_short: int = 0
    is_noise: bool = False
    video: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class FakeHealth:
    num_devices_up: int
    num_devices: int
    num_jobs: int


@dataclass
class FakeEngine:
    """An engine, its start and its status. It serves each submission by the next plan of `script`, or by `plan` when
    the script is used up.

    Pictures are of one colour: red = (seed + frame) % 256. The file of a video has the pixels of its frames. `stop`
    cancels what is open, as the live engine does.
    Without `keeps` it forgets requests that have ended, as the live engine does, too.
    """

    plan: Plan = Plan()
    script: list[Plan] = field(default_factory=list)
    devices_up: int = 2
    draining: bool = False
    starting: str = "loading the model"
    starts: bool = True
    keeps: bool = True
    loop: asyncio.AbstractEventLoop | None = None
    specs: list[Spec] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    spec_of: dict[str, Spec] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    restored: list[tuple[Wanted, Checkpoint]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    info: ModelInfo = INFO
    others: tuple[ModelInfo, ...] = ()
    not_served: dict[str, NotServed] = field(default_factory=dict)
    policy: str = "edf"
    observer: Observer = field(default_factory=Observer)
    catalog: Any = None
    weights: str = "weights of "
    standing: Reject | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""
    predicted: tuple[Shape, ...] = ()

    @property
    def status(self) -> FakeEngine:
        return self

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return {one.name: one for one in (self.info, *self.others)}

    def standing_refusal(self) -> Reject | None:
        return self.standing

    def devices_with(self, model: str) -> tuple[int, ...]:
        return tuple(range(self.devices_up))

    def devices_serving(self, model: str) -> tuple[int, ...]:
        return (0, 1)

    def alone_ns(self, model: str, specs: Sequence[Spec]) -> int | None:
        return len(specs) * NS_PER_S

    def predicted_sizes(self, model: str) -> tuple[Shape, ...]:
        return self.predicted

    def is_on_host(self, model: str) -> bool:
        return False

    def cost_table(self) -> CostTable:
        """A step of 128 px takes 0.1 s; other sizes in proportion to their pixels."""
        return table(pipeline=self.info.name)

    def submit(
        self,
        specs: Mapping[str, Spec],
        *,
        model: str | None = None,
        deadline_ns: int | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> tuple[Ticket, ...] | Reject:
        now_ns = self.now_ns()
        info = self.info if model is None else self.models[model]
        wanted = {"model": info.name, "arrival_ns": now_ns, "deadline_ns": deadline_ns, "terms": terms}
        requests = [Wanted(uid=uid, spec=spec, **wanted).request(info) for uid, spec in specs.items()]
        plans = [self.script.pop(0) if self.script else self.plan for _ in requests]
        for plan in plans:
            if plan.bug is not None:
                raise plan.bug
            if plan.code is not None:
                return replace(self._refuse(requests, f"because {plan.code}", None, plan.code), retry_ns=plan.retry_ns)
            if plan.refuse_s is not None and deadline_ns is not None:
                earliest_ns = now_ns + ns_from_s(plan.refuse_s)
                refused = self._refuse(requests, "too much is ahead", earliest_ns, RefusalCode.DEADLINE)
                return replace(refused, retry_ns=earliest_ns - deadline_ns)
        tickets = tuple(map(self._ticket, specs.values(), requests))
        for ticket, plan in zip(tickets, plans, strict=True):
            if not plan.is_held:
                self._play(ticket, plan)
        return tickets

    def restore(self, kept: Sequence[tuple[Wanted, Checkpoint]]) -> tuple[Ticket, ...]:
        self.restored = list(kept)
        tickets = tuple(self._ticket(wanted.spec, wanted.request(self.models.get(wanted.model))) for wanted, _ in kept)
        for ticket, (wanted, _) in zip(tickets, kept, strict=True):
            if wanted.lost:
                self._resolve(ticket, Status.FAILED, wanted.lost, None)
            elif ticket.request.pipeline not in self.models:
                reason = f"the model {ticket.request.pipeline} is not served any more"
                ticket.refusal = Refusal.MODEL
                self._resolve(ticket, Status.FAILED, reason, None)
            elif not self.plan.is_held:
                self._play(ticket, self.plan)
        return tickets

    def release(self, uid: str) -> None:
        self.released.append(uid)

    def cancel(self, uid: str, reason: str) -> None:
        ticket = self.tickets.get(uid)
        if ticket is not None and not ticket.outcome.done():
            self.cancelled[uid] = reason
            self._resolve(ticket, Status.CANCELLED, reason, None)

    def identity(self, model: str, loras: Iterable[str] = ()) -> str:
        return ", ".join((self.weights + model, *loras))

    def predict(self, uid: str) -> EtaPrediction | None:
        ticket = self.tickets.get(uid)
        if ticket is None or ticket.outcome.done():
            return None
        return EtaPrediction(ticket.request.arrival_ns, ticket.eta_ns, ticket.eta_ns, ticket.eta_p90_ns, 0)

    def now_ns(self) -> int:
        """The time of the loop that it runs on, which tests can move."""
        seconds = time.monotonic() if self.loop is None else self.loop.time()
        return round(seconds * NS_PER_S)

    def health(self) -> FakeHealth:
        num_open = sum(not ticket.outcome.done() for ticket in self.tickets.values())
        return FakeHealth(
            num_devices_up=self.devices_up,
            num_devices=2,
            num_jobs=num_open,
        )

    def backlog_ns(self) -> int:
        return 0

    def usage(self) -> Usage:
        num_open = self.health().num_jobs
        running = min(num_open, self.devices_up)
        return Usage(
            waiting={"standard": num_open - running},
            running={"standard": running},
            backlog_ns=0,
            state_blob_bytes=0,
            memory_bytes={},
            kept={},
            resident_bytes={},
        )

    def holdings(self) -> Sequence[Holding]:
        weights = HeldComponent(models=(self.info.name,), name="transformer", num_bytes=3_000_000)
        room = {"total_bytes": 8_000_000, "free_bytes": 5_000_000, "used_bytes": None, "components": (weights,)}
        card = CardReading(busy=0.5, celsius=61, slowed_by=("temperature",))
        return [
            Holding(
                device_id=device_id,
                node=0,
                kind=DeviceKind.ACCELERATOR,
                readings=() if device_id else (DeviceReading(card=card, allocator=None),),
                **room,
            )
            for device_id in range(self.devices_up)
        ]

    def open_tickets(self) -> Iterator[Ticket]:
        return (ticket for ticket in list(self.tickets.values()) if not ticket.outcome.done())

    def drain(self) -> None:
        self.draining = True
        self.log.append("draining")

    async def start(self, observer: Observer) -> FakeEngine:
        self.observer = observer
        self.loop = asyncio.get_running_loop()
        if not self.starts:
            try:
                await asyncio.Event().wait()
            finally:
                self.log.append("stopped")
        self.log.append("started")
        return self

    async def stop(self) -> None:
        self.log.append("stopped")
        for uid in self.tickets:
            self.cancel(uid, "the engine has stopped")

    def _refuse(self, requests: list[Request], reason: str, earliest_ns: int | None, code: RefusalCode) -> Reject:
        for request in requests:
            self.observer.on_refused(request, code)
        return Reject(uid=requests[0].uid, reason=reason, earliest_ns=earliest_ns, code=code)

    def _ticket(self, spec: Spec, request: Request) -> Ticket:
        self.specs.append(spec)
        self.requests.append(request)
        eta_ns = request.arrival_ns + 250_000_000
        outcome = asyncio.get_running_loop().create_future()
        eta_p90_ns = 2 * eta_ns - request.arrival_ns
        ticket = Ticket(request=request, eta_ns=eta_ns, eta_p90_ns=eta_p90_ns, outcome=outcome)
        accept = Accept(len(self.requests), request.uid, eta_ns, eta_p90_ns, "nobody is ahead")
        ticket.note(request.arrival_ns, accept)
        self.tickets[request.uid] = ticket
        self.spec_of[request.uid] = spec
        return ticket

    def _play(self, ticket: Ticket, plan: Plan) -> None:
        self.begin(ticket.request.uid)
        loop, steps = asyncio.get_running_loop(), ticket.request.steps
        for step in range(1, steps):
            loop.call_later(plan.delay_s * step / steps, self.step, ticket.request.uid, step)
        loop.call_later(plan.delay_s, self.finish, ticket.request.uid, plan)

    # What a test may do with a request, on the loop (`Served.on_loop`).

    def begin(self, uid: str) -> None:
        ticket = self.tickets[uid]
        ticket.first_start_ns = ticket.request.arrival_ns
        ticket.is_running = True
        ticket.progress(0)

    def step(self, uid: str, step: int) -> None:
        """So many steps are done. Previews are small, those of clips have three frames; their red is the step."""
        ticket = self.tickets.get(uid)
        if ticket is None or ticket.outcome.done():
            return
        every = ticket.request.preview_every
        if every and step % every == 0 and step < ticket.request.steps:
            frames = min(3, self.spec_of[uid].frames)
            pixels = b"".join(bytes((step, 0, 80 * frame)) * 64 for frame in range(frames))
            ticket.show(TicketPreview(step, Image(8, 8, pixels, frames)))
        ticket.progress(step)

    def finish(self, uid: str, plan: Plan | None = None) -> None:
        if uid not in self.tickets or self.tickets[uid].outcome.done():
            return
        ticket, spec, plan = self.tickets[uid], self.spec_of[uid], plan or Plan()
        ticket.refusal = None if plan.refuse is None else plan.refusal
        if plan.refuse is not None:
            self._resolve(ticket, Status.CANCELLED, plan.refuse, None)
        elif plan.expire is not None:
            self._resolve(ticket, Status.EXPIRED, plan.expire, None)
        elif plan.fail is not None:
            self._resolve(ticket, Status.FAILED, plan.fail, None)
        else:
            reds = ((spec.seed + frame) % 256 for frame in range(spec.frames))
            pixels = b"".join(bytes((red, 0, 0)) * (spec.height * spec.width) for red in reds)
            if plan.is_noise:
                pixels = Random(spec.seed).randbytes(len(pixels))
            kept = pixels[: len(pixels) - plan.num_bytes_short]
            image = Image(spec.height, spec.width, kept, spec.frames)
            file = None if spec.video is None else File(plan.video or kept, "video/mp4")
            self._resolve(ticket, Status.DONE, "", image, file)

    def _resolve(
        self, ticket: Ticket, status: Status, reason: str, image: Image | None, file: File | None = None
    ) -> None:
        start_ns, end_ns = ticket.request.arrival_ns, self.now_ns()
        devices = (0,) if ticket.request.exact else (0, 1)
        segment = WorkSegment(
            stage="diffuse", devices=devices, num_steps=ticket.request.steps, start_ns=start_ns, end_ns=end_ns
        )
        outcome = Outcome(
            uid=ticket.request.uid,
            status=status,
            reason=reason,
            finished_ns=end_ns,
            image=image if file is None else None,
            segments=(segment,),
            file=file,
            refusal=ticket.refusal,
        )
        if image is not None:
            ticket.add(segment, 0)
        self.observer.on_ended(ticket, outcome)
        ticket.end(outcome)
        if not self.keeps:
            del self.tickets[ticket.request.uid], self.spec_of[ticket.request.uid]
            self.specs.clear()
            self.requests.clear()


def app_of(engine: Any, config: ServerConfig) -> FastAPI:
    """The application, with an engine that has started."""
    app = create_app(engine, config)
    app.state.add_engine(engine)
    app.state.readiness.engine = engine
    engine.observer = app.state.observer
    return app


@dataclass
class Served:
    """A live server: its address, its engine and its event loop."""

    url: str
    engine: FakeEngine
    loop: SkippingLoop
    signals: Signals
    http: httpx.Client

    def post(self, body: Any, **options: Any) -> httpx.Response:
        return self.http.post("/v1/images/generations", json=body, **options)

    def metric(self, line: str) -> float:
        """The value of a metric, named as it appears in the text: `name{label="value"}`."""
        text = self.http.get("/metrics").text
        found = [row.rpartition(" ")[2] for row in text.splitlines() if row.rpartition(" ")[0] == line]
        assert len(found) == 1, f"{line} appears {len(found)} times in\n{text}"
        return float(found[0])

    def on_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the server's loop and wait for its result."""

        async def call() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE_S)

    def skip(self, seconds: float) -> None:
        """Let this much time pass on the server's clock at once, and everything that is due by then happen."""
        self.on_loop(self.loop.skip, seconds)
        self.until_idle()

    def until_idle(self) -> None:
        """Let all happen that waits neither for time nor for another thread."""
        asyncio.run_coroutine_threadsafe(until_idle(self.loop), self.loop).result(PATIENCE_S)

    def tasks(self) -> set[asyncio.Task[Any]]:
        """Those of the server, but for the one that looks and for that of sse-starlette, which stays."""

        def found() -> set[asyncio.Task[Any]]:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            return {one for one in tasks if one.get_coro().__qualname__ != "_shutdown_watcher"}

        return self.on_loop(found)

    def reload(self) -> None:
        """Let the server read its settings again, and wait until it has."""
        self.on_loop(self.signals.reload.set)
        self.until_idle()

    def stop(self) -> None:
        """Send a signal and wait until it has come: a second one means something else."""
        self.on_loop(self.signals.end)


@contextmanager
def serving(
    engine: FakeEngine,
    on_progress: Callable[[str], None] = lambda _text: None,
    reread: Callable[[], Reread] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Run `serve` on a free port of the loopback until the block is left, with a `durable` directory or not."""
    started = threading.Event()
    parts: dict[str, Any] = {}
    signals = Signals()

    def on_ready(url: str, _engine: object) -> None:
        parts.update(url=url, loop=asyncio.get_running_loop())
        started.set()

    def run() -> None:
        config = ServerConfig(port=0, **settings)
        no_walk = patch("tilework.server.main.rare_collections", nullcontext)
        directory = nullcontext() if config.durable is None else closing(DurableDirectory(Path(config.durable)))
        try:
            # A collection would walk all that the tests before have loaded.
            with directory as durable, asyncio.Runner(loop_factory=SkippingLoop) as runner, no_walk:
                more: dict[str, Any] = {
                    "on_progress": on_progress,
                    "signals": signals,
                    "durable": durable,
                    "reread": reread,
                }
                runner.run(serve(engine, config, on_ready=on_ready, **more))
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    assert parts, "the server did not start"
    with httpx.Client(base_url=parts["url"]) as client:
        served = Served(parts["url"], engine, parts["loop"], signals, client)
        try:
            yield served
        finally:
            if thread.is_alive() and not signals.stop.is_set():
                served.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not stop"
