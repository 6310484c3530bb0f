"""The submitter's side of a request: a ticket that resolves to its one outcome, with the history of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tilework.core.actions import Action, RunWork
from tilework.core.cache import CacheUse
from tilework.core.checkpoint import Checkpoint
from tilework.core.model import ModelInfo
from tilework.core.request import Refusal, Request, Status, Terms
from tilework.core.wire.spec import File, Image, Spec
from tilework.core.work import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request to an engine, for a model. Times are on the engine's clock.

    A request that was accepted before may have lost what it needs: `lost` says what is missing.
    """

    uid: str
    model: str
    spec: Spec
    arrival_ns: int
    deadline_ns: int | None
    terms: Terms
    lost: str = ""

    def request(self, info: ModelInfo | None) -> Request:
        """Return the request for scheduling. Without `info` the model is not served, and it is never scheduled."""
        spec = self.spec
        terms = self.terms
        return Request(
            uid=self.uid,
            pipeline=self.model if info is None else info.name,
            shape=spec.shape,
            steps=spec.steps,
            arrival_ns=self.arrival_ns,
            seed=spec.seed,
            deadline_ns=self.deadline_ns,
            preview_every=spec.preview_every,
            exact=spec.exact,
            guided=info is None or spec.guidance_scale > info.guided_above or not info.two_passes,
            passes=1.0 if info is None else _passes(spec, info),
            loras=spec.loras,
            result=spec.result,
            cache=spec.cache,
            spare_cache=spec.spare_cache,
            on_miss=terms.on_miss,
            tenant=terms.tenant,
            priority=terms.priority,
            weight=terms.weight,
            tenant_weight=terms.tenant_weight,
            room=terms.room,
            promise_share=terms.promise_share,
        )


def _passes(spec: Spec, info: ModelInfo) -> float:
    """Return `core.request.Request.passes`: true guidance runs each pass twice, SD3 skips layers in a third pass."""
    given = spec.arguments
    if info.has_true_guidance(spec.negative_prompt, given):
        return 2.0
    if "skip_guidance_layers" in given and info.two_passes and spec.guidance_scale > 1:
        start, stop = (
            float(given.get(f"skip_layer_guidance_{name}", default))  # type: ignore[arg-type]
            for name, default in (("start", 0.01), ("stop", 0.2))
        )
        return 1.0 + max(0.0, stop - start) / 2
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One executed work of a request, on the engine's clock. `num_steps` is 0 for a stage without steps.

    A `sliced` work ran with less memory. `batch` requests shared its forward passes, this one included. `load_ns` is
    the time of loading weights before it. `cache_use` is what its cache computed and skipped, if the request has one.
    """

    stage: str
    devices: Group
    num_steps: int
    start_ns: int
    end_ns: int
    sliced: bool = False
    batch: int = 1
    load_ns: int = 0
    cache_use: CacheUse | None = None

    @property
    def is_exact(self) -> bool:
        """True if it ran as the stock pipeline would: on one device, alone in its forward passes, and whole."""
        return len(self.devices) == 1 and self.batch == 1 and not self.sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a request. Times are on the engine's clock.

    If and only if `status` is done, there is an `image`, or a `file` if it asked for a video. A request that its model
    does not serve has a `refusal`, and is cancelled with the model's reason.
    """

    uid: str
    status: Status
    reason: str
    finished_ns: int
    image: Image | None
    segments: tuple[Segment, ...]
    file: File | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """The look of an image after `steps_done` of its request's steps."""

    steps_done: int
    image: Image = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """An accepted request. `outcome` resolves exactly once; `steps_done` follows the running work.

    `eta_ns` is the finish predicted at its admission; by `eta_p90_ns` nine of ten such requests are done. `checkpoint`
    is where it began, `history` has every action that concerned the request, with its time, and `preview` is the latest
    one. For its client, a request that was `taken_back` by its submitter before anything else happened was never
    accepted.
    """

    request: Request
    eta_ns: int
    eta_p90_ns: int
    outcome: asyncio.Future[Outcome]
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    segments: list[Segment] = field(default_factory=list)
    history: list[tuple[int, Action]] = field(default_factory=list)
    steps_done: int = 0
    first_start_ns: int | None = None
    preview: Preview | None = None
    is_running: bool = False
    refusal: Refusal | None = None
    taken_back: bool = False
    _watchers: dict[int, Callable[[], None]] = field(default_factory=dict)
    _next_watcher: int = 0

    @property
    def status(self) -> Status:
        """Status of the request. A job that has begun and has no work now is paused."""
        if self.outcome.done() and not self.outcome.cancelled():
            return self.outcome.result().status
        if self.is_running:
            return Status.RUNNING
        return Status.QUEUED if self.first_start_ns is None else Status.PAUSED

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after every change, the end included; returns a function that ends that.

        The call does not say what has changed: a slow watcher reads the latest state, and nothing piles up.
        """
        number, self._next_watcher = self._next_watcher, self._next_watcher + 1
        self._watchers[number] = on_change

        def unwatch() -> None:
            self._watchers.pop(number, None)

        return unwatch

    def note(self, at_ns: int, action: Action) -> None:
        """Keep an action that concerns the request."""
        self.history.append((at_ns, action))
        self.is_running |= isinstance(action, RunWork)
        self._tell()

    def progress(self, steps_done: int) -> None:
        self.steps_done = steps_done
        self._tell()

    def show(self, preview: Preview) -> None:
        self.preview = preview
        self._tell()

    def add(self, segment: Segment, first_step: int) -> None:
        """Add a finished work, which began when `first_step` steps were done.

        A work of several devices is added when the last of them has reported: a later work may have been added before
        it.
        """
        is_latest = not self.segments or segment.start_ns >= self.segments[-1].start_ns
        self.segments.append(segment)
        self.segments.sort(key=lambda one: one.start_ns)
        self.first_start_ns = self.segments[0].start_ns
        if segment.num_steps and is_latest:
            self.steps_done = first_step + segment.num_steps
        self._tell()

    def pause(self) -> None:
        """Note that it has no work any more."""
        self.is_running = False
        self._tell()

    def end(self, outcome: Outcome) -> None:
        if not self.outcome.done():  # The waiter may have been cancelled itself.
            self.outcome.set_result(outcome)
        self._tell()

    def _tell(self) -> None:
        for on_change in tuple(self._watchers.values()):
            on_change()

    @property
    def queue_ns(self) -> int | None:
        """Time from arrival to the start of its first work; None while it has not started."""
        return None if self.first_start_ns is None else self.first_start_ns - self.request.arrival_ns
