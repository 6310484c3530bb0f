"""A request as the scheduler sees it. Prompts are not part of it: see `core.wire.spec.Spec`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from tilework.core.cache import CacheChoice
from tilework.core.graph.stage import ResultKind
from tilework.core.lora import UsedLora
from tilework.core.priority import DEFAULT_CLASS


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Size of the output in pixels and frames (1 for an image)."""

    height: int
    width: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        return self.height * self.width * self.frames

    def latent_pixels(self, frames_per_latent: int) -> float:
        """Return the measure that times and bytes grow with: the pixels of a frame times the latent frames."""
        return latent_pixels((self.height, self.width, self.frames), frames_per_latent)

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}"
        return size if self.frames == 1 else f"{size}x{self.frames}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Undo `str`: WIDTHxHEIGHT, or WIDTHxHEIGHTxFRAMES. Raises ValueError for anything else."""
        parts = text.split("x")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"{text!r} is no shape")
        width, height, *frames = map(int, parts)
        return cls(height, width, *frames)


def latent_pixels(size: tuple[int, int, int], frames_per_latent: int) -> float:
    """Return `Shape.latent_pixels` of height, width and frames."""
    height, width, frames = size
    return height * width * (frames if frames_per_latent == 1 else 1 + (frames - 1) / frames_per_latent)


class OnMiss(StrEnum):
    """Treatment of a request whose deadline cannot be met."""

    BEST_EFFORT = "best_effort"
    """Serve it late."""
    REJECT = "reject"
    """Refuse it at admission, unless its deadline can be promised."""
    DROP = "drop"
    """Drop it as soon as its deadline cannot be met, at admission or later: it is worthless when late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms on which a request is accepted and ordered among others: all images of a call have the same.

    Attributes:
        on_miss: the treatment if the deadline cannot be met.
        tenant: the client that the request is charged to.
        priority: name of the priority class (see `core.priority`).
        weight: weight of the request, the product of its tenant's and its class's.
        tenant_weight: the tenant's factor of `weight`.
        room: how full the queue may be, from 0 to 1, for the request to be accepted.
        promise_share: the share of all that may be promised that its tenant may hold, from 0 to 1.
    """

    on_miss: OnMiss = OnMiss.BEST_EFFORT
    tenant: str = "default"
    priority: str = DEFAULT_CLASS
    weight: float = 1.0
    tenant_weight: float = 1.0
    room: float = 1.0
    promise_share: float = 1.0

    @property
    def as_fields(self) -> dict[str, Any]:
        """Values by name, as arguments of the `Request` that is accepted on these terms."""
        return {name: getattr(self, name) for name in Terms.__slots__}


DEFAULT_TERMS = Terms()


MOST_KNOWN = 4096
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """A dict of `most` keys, for values by shapes or the like. One more key, and the one set first is dropped.

    Clients choose the shapes, so their number has no bound. If all were dropped at once, all would be computed anew at
    once.
    """

    __slots__ = ("most",)

    def __init__(self, most: int = MOST_KNOWN) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]

    def renew(self, key: Key, value: Value) -> None:
        """Set a value as the latest, so that it is dropped last."""
        self.pop(key, None)
        self[key] = value


class StepClass(NamedTuple):
    """Requests of one step class have the same stages, with steps of the same cost on the same devices."""

    pipeline: str
    shape: Shape
    guided: bool
    preview_every: int
    passes: float
    exact: bool
    loras: tuple[UsedLora, ...]
    result: ResultKind
    cache: CacheChoice | None


class RequestClass:
    """Requests of one class have the same total cost on the same devices. Its hash is computed once."""

    __slots__ = ("_hash", "step", "steps")

    def __init__(self, step: StepClass, steps: int) -> None:
        self.step = step
        self.steps = steps
        self._hash = hash((step, steps))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestClass) and (self.step, self.steps) == (other.step, other.steps)

    def __repr__(self) -> str:
        return f"RequestClass({self.step}, {self.steps})"


@lru_cache(maxsize=MOST_KNOWN)
def _class_of(step: StepClass, steps: int) -> RequestClass:
    """Return the class with these values: nearly always one object, which a dict finds without `__eq__`."""
    return RequestClass(step, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Terms):
    """An image (or clip) to make.

    Attributes:
        deadline_ns: absolute, on the controller's clock; None means best effort.
        guided: True if classifier-free guidance doubles each step. Cost tables describe guided steps.
        preview_every: a preview is decoded after every `preview_every` steps; 0 means never.
        passes: the factor by which its steps take longer than those that cost tables describe, since arguments add
            forward passes to them. Such a request shares no forward pass.
        exact: its steps run on one device without sharing a forward pass, and no stage is sliced. So its image is that
            of the stock pipeline bit for bit, in any dtype and under any load.
        loras: those that it uses, by name, each once.
        result: the kind of result that it asks for; a video file takes one more stage.
        cache: the cache of its steps. The cost table says how much less time they take, corrected by other requests
            with the same cache. They share forward passes with these requests alone.
        spare_cache: the cache that it gets if it is expected to miss its deadline without. Admission decides that, and
            later the policy (see `core.actions.UseCache`).
        cost_class: its class (see `cost_key`).
    """

    uid: str
    pipeline: str
    shape: Shape
    steps: int
    arrival_ns: int
    seed: int = 0
    deadline_ns: int | None = None
    guided: bool = True
    preview_every: int = 0
    passes: float = 1.0
    exact: bool = False
    loras: tuple[UsedLora, ...] = ()
    result: ResultKind = ResultKind.PIXELS
    cache: CacheChoice | None = None
    spare_cache: CacheChoice | None = None
    cost_class: RequestClass = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Every event asks for the class of its requests, so it is made once."""
        step = StepClass(
            self.pipeline,
            self.shape,
            self.guided,
            self.preview_every,
            self.passes,
            self.exact,
            self.loras,
            self.result,
            self.cache,
        )
        object.__setattr__(self, "cost_class", _class_of(step, self.steps))

    @property
    def is_promise(self) -> bool:
        """True if it is accepted only with the promise that its deadline will be met."""
        return self.on_miss is OnMiss.REJECT and self.deadline_ns is not None

    @property
    def with_spare_cache(self) -> Request:
        """Same request, with its spare cache as the cache of its steps."""
        return self if self.spare_cache is None else replace(self, cache=self.spare_cache, spare_cache=None)

    @property
    def has_single_steps(self) -> bool:
        """True if each of its steps runs on one device: it is exact, or has a cache of whole steps."""
        return self.exact or (self.cache is not None and self.cache.kind.is_of_steps)

    @property
    def is_dropped_if_late(self) -> bool:
        """True if it ends as soon as its deadline cannot be met."""
        return self.on_miss is OnMiss.DROP and self.deadline_ns is not None

    def met_deadline(self, status: Status, end_ns: int) -> bool | None:
        """Return whether a request with this end meets its deadline; one that failed or expired misses it.

        None without a deadline, and for a request that was refused or cancelled.
        """
        if self.deadline_ns is None or status in (Status.REJECTED, Status.CANCELLED):
            return None
        return status is Status.DONE and end_ns <= self.deadline_ns


def step_key(request: Request) -> StepClass:
    """Return the step class of a request."""
    return request.cost_class.step


def cost_key(request: Request) -> RequestClass:
    """Return the class of a request."""
    return request.cost_class


EXACT_NEEDS_MORE = "it is exact, so several devices cannot share its steps and no stage can be sliced"
"""Reason why an exact request may need more memory than another, in words for clients."""


class RefusalCode(StrEnum):
    """Reason for which admission refuses a request."""

    DEADLINE = "deadline_unreachable"
    QUEUE = "queue_full"
    TENANT = "tenant_share"
    NO_DEVICE = "no_device"
    UNKNOWN_COST = "unknown_cost"
    MEMORY = "too_large"
    WEIGHTS = "weights_too_large"
    LORAS = "loras_too_large"


class Refusal(StrEnum):
    """Reason for which a model does not serve a request: the content that it asks for, a value that the model's call
    does not take, or a model or LoRA that is gone.
    """

    CONTENT = "content"
    VALUE = "value"
    MODEL = "model"


class Status(StrEnum):
    """The status of a job. Final ones are entered exactly once."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EXPIRED = "expired"
    """Dropped, as its deadline could not be met any more (`OnMiss.DROP`)."""

    @property
    def is_final(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING, Status.PAUSED)
