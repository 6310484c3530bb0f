"""A stock pipeline's call as a coroutine that pauses at each call of a component.

Greenlets rather than threads: a switch takes a microsecond, all run on the worker's thread with its CUDA device, and an
unfinished one ends with its last reference. Rejected, after the same was tried with Modular Diffusers' blocks, and with
`callback_on_step_end`: both know what is a step, but the first differs from the classic pipelines, by rounding or
visibly, and the second cannot pause before and after the loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from greenlet import getcurrent, greenlet

from tilework.pipelines.stock.component_calls import ComponentCall, Role


class StockCall(greenlet):  # type: ignore[misc]
    """One call of `pipeline`, which runs when it is resumed. It shares the modules; `own` are what it changes itself.

    `own` has a sampler or guider under each name that the pipeline has one under, and each copy that the call makes of
    a sampler for itself, such as that for sound, from its first step on. A stochastic sampler that the stock
    pipeline gives no generator draws from that of the request: there the stock picture depends on what else the
    process drew, here on the seed alone.
    """

    def __init__(self, pipeline: Any, arguments: Mapping[str, Any]) -> None:
        self._hub = getcurrent()
        self._generator = arguments.get("generator")
        mine = copy.copy(pipeline)
        self.own = {
            name: copy.deepcopy(part)
            for name, part in pipeline.components.items()
            if isinstance(part, SchedulerMixin | BaseGuidance)
        }
        for name, part in self.own.items():
            if isinstance(part, SchedulerMixin):
                part.__class__ = _watched(part.__class__)
            # As attributes are set past `__setattr__`, which would write them into the shared configuration.
            vars(mine)[name] = part
        self.result: Any = None
        super().__init__(lambda: mine(**arguments))

    def resume(self, answer: Any, watching: AbstractContextManager[Any] | None = None) -> ComponentCall | None:
        """Answer the call at which it paused, and run on to the next one; None if it has returned its `result`.

        The first answer begins it, and is ignored. `watching` is entered while it runs.
        """
        self._hub = getcurrent()
        with torch.no_grad(), watching or nullcontext():
            paused = self.switch() if self.gr_frame is None and not self.dead else self.switch(answer)
        if self.dead:
            self.result = paused
            return None
        return cast(ComponentCall, paused)

    def pause(self, call: ComponentCall) -> Any:
        """Called inside: give a call away, and return its answer."""
        return self._hub.switch(call)

    def step_call(self, sampler: Any, stock: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> ComponentCall:
        """Called inside: a sampler's step as a call of its component."""
        name = next((name for name, part in self.own.items() if part is sampler), None)
        if name is None:
            name = f"copy {len(self.own)}"
            self.own[name] = sampler
        if self._generator is not None and _lacks_generator(type(sampler), len(args), kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return ComponentCall(sampler, name, "step", Role.SAMPLER, functools.partial(stock, sampler), args, kwargs)


@functools.cache
def _watched(kind: Any) -> Any:
    """A subclass of a sampler's class whose steps pause the coroutine that makes them. Its name is the same."""
    stock = kind.step

    @functools.wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = getcurrent()
        assert isinstance(here, StockCall), "a request's own sampler steps outside of its coroutine"
        return here.pause(here.step_call(self, stock, args, kwargs))

    return type(
        kind.__name__, (kind,), {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )


def _lacks_generator(kind: type, num_args: int, kwargs: Mapping[str, Any]) -> bool:
    index = _generator_index(kind)
    return index is not None and num_args < index and kwargs.get("generator") is None


@functools.cache
def _generator_index(kind: type) -> int | None:
    """The index of the generator among the arguments of a sampler's step, self excluded; None if there is none."""
    names = list(inspect.signature(kind.step).parameters)  # type: ignore[attr-defined]
    return names.index("generator") if "generator" in names else None
