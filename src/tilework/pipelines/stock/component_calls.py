"""Interception of a stock pipeline's calls of its components, and the purpose of each call.

A pipeline is Python code around components: text encoders, a denoiser, a sampler, a VAE. Only they compute for long, so
only their calls are intercepted. Everything between them stays the stock code, whatever the pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from greenlet import getcurrent
from torch import nn

from tilework.pipelines.caching.steps import CacheSlot
from tilework.pipelines.components import is_denoiser

_METHODS = ("encode", "decode", "generate")  # Besides a call of the module itself.


class Role(Enum):
    """Purpose of a call: a DENOISER is asked in each iteration of the loop, a SAMPLER ends one."""

    DENOISER = "denoiser"
    SAMPLER = "sampler"
    OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class ComponentCall:
    """A call of a component that has not been answered. `run` answers it as the stock pipeline would be answered.

    `owner` is the component whose method it is, and `component` its name. A call of a denoiser is answered with the
    cache that is in the `slot` then, in a `context` of it.
    """

    owner: Any
    component: str
    method: str
    role: Role
    stock: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    slot: CacheSlot = field(default_factory=CacheSlot)
    context: str = ""

    @property
    def is_cached(self) -> bool:
        """True if its answer depends on what earlier calls of its request have left."""
        return self.slot.cache is not None

    @property
    def keeps_state(self) -> bool:
        """True if it gets a cache, or an object of diffusers in which it may keep something for later."""
        of_cache = any("cache" in name and value is not None for name, value in self.kwargs.items())
        return of_cache or any(map(is_object, (*self.args, *self.kwargs.values())))

    def run(self) -> Any:
        if self.slot.cache is None:
            return self.stock(*self.args, **self.kwargs)
        return self.slot.cache.call(self.owner, self.context, self.stock, *self.args, **self.kwargs)

    def __str__(self) -> str:
        return f"{self.component}.{self.method}"


def is_object(value: Any) -> bool:
    """Return whether a value is of a class of diffusers and no module: a cache, or the moving average of a guider."""
    of_diffusers = type(value).__module__.startswith("diffusers.") and hasattr(value, "__dict__")
    return of_diffusers and not isinstance(value, nn.Module)


def watch_components(pipeline: Any) -> None:
    """Let stock calls that run as a coroutine (`coroutine.StockCall`) pause where they call a module. Call it once.

    A module gets a subclass of its class, of the same name, whose call pauses before any hook: the call may later run
    at another degree. Other methods are replaced on the module. Modules stay where they are, since pipelines read much
    else of them. Outside of a coroutine nothing changes.
    """
    for name, component in pipeline.components.items():
        if not isinstance(component, nn.Module):
            continue
        role = Role.DENOISER if is_denoiser(component) else Role.OTHER
        component.__class__ = _paused(component.__class__, name, role)
        for method in _METHODS:
            if hasattr(component, method):
                _watch(component, name, method, role)


def _paused(kind: Any, name: str, role: Role) -> Any:
    stock = kind.__call__

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        hub = getattr(getcurrent(), "hub", None)
        if hub is None:
            return stock(self, *args, **kwargs)
        run = functools.partial(stock, self)
        if role is not Role.DENOISER:
            return hub.switch(ComponentCall(self, name, "forward", role, run, args, kwargs))
        slot = getcurrent().slot
        return hub.switch(ComponentCall(self, name, "forward", role, run, args, kwargs, slot, slot.next_context()))

    place = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": ask}
    if hasattr(kind, "cache_context"):
        place["cache_context"] = _told(kind.cache_context)
    return type(kind.__name__, (kind,), place)


def _told(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pipeline's `cache_context` for calls of its denoiser, which also names the stock call's slot."""

    @contextmanager
    def cache_context(self: Any, name: str, **given: Any) -> Iterator[None]:
        slot: CacheSlot | None = getattr(getcurrent(), "slot", None)
        with stock(self, name, **given), nullcontext() if slot is None else slot.named(name):
            yield

    return cache_context


def config_of(part: Any) -> Mapping[str, Any]:
    """Return the configuration of a model; empty if it has none, as several control networks together."""
    return getattr(part, "config", None) or {}


def _watch(component: Any, name: str, method: str, role: Role) -> None:
    stock = getattr(component, method)

    @functools.wraps(stock)
    def ask(*args: Any, **kwargs: Any) -> Any:
        hub = getattr(getcurrent(), "hub", None)
        if hub is None:
            return stock(*args, **kwargs)
        return hub.switch(ComponentCall(component, name, method, role, stock, args, kwargs))

    setattr(component, method, ask)
