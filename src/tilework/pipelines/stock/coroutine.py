"""A stock pipeline's call as a coroutine that pauses at each call of a component.

It uses greenlets instead of threads: a switch takes a microsecond, all run on the worker's thread with its CUDA device,
and an unfinished one ends with its last reference. Rejected, after trying the same with Modular Diffusers' blocks, and
with `callback_on_step_end`: both know steps, but the first differs from the classic pipelines, by rounding or visibly,
and the second cannot pause before and after the loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from greenlet import getcurrent, greenlet
from torch import Tensor

from tilework.pipelines.caching.steps import CacheSlot
from tilework.pipelines.stock.component_calls import ComponentCall, Role


class StockCall(greenlet):  # type: ignore[misc]
    """One call of `pipeline`, which runs when it is resumed. It shares the modules, and changes only its `own` parts.

    `own` has a sampler or guider under each name under which the pipeline has one. A sampler that the call copies, for
    sound or for a single frame, is there as well once it has made a step: they are counted in the order of their first
    steps, which is the same in each call of a request.

    A stochastic sampler that the stock pipeline gives no generator draws from that of the request. Numbers that the
    call draws from torch's own generator are those after `torch.manual_seed` with the request's seed. In both cases the
    stock image depends on what else the process drew, here on the seed alone.

    Its denoisers are called with the cache in its `slot`, if there is one.

    Code inside pauses by `hub.switch`, where `hub` is the greenlet that resumed it. While it is paused no frame of it
    refers to the `StockCall`: nothing would ever free such a cycle, nor the tensors of a request that was stopped.
    """

    def __init__(self, pipeline: Any, arguments: Mapping[str, Any]) -> None:
        self.hub = getcurrent()
        self.slot = CacheSlot()
        self._generator = arguments.get("generator")
        self._torch_states = _seeded(_computing_device(pipeline), self._generator)
        mine = copy.copy(pipeline)
        self.own = {
            name: copy.deepcopy(part)
            for name, part in pipeline.components.items()
            if isinstance(part, SchedulerMixin | BaseGuidance)
        }
        for name, part in self.own.items():
            if isinstance(part, SchedulerMixin):
                kind: Any = type(part)
                _watch(kind)
            # Set like attributes, but past `__setattr__`, which would write them into the shared configuration.
            vars(mine)[name] = part
        self.result: Any = None
        super().__init__(lambda: mine(**arguments))

    def resume(self, answer: Any, watching: AbstractContextManager[Any] | None = None) -> ComponentCall | None:
        """Answer the call at which it paused, and run to the next one; return None if the call has its `result`.

        The first answer begins it, and is ignored. `watching` is entered while it runs.
        """
        self.hub = self.parent = getcurrent()  # It returns to its parent.
        with torch.no_grad(), self.randomness(), watching or nullcontext():
            paused = self.switch() if self.gr_frame is None and not self.dead else self.switch(answer)
        if self.dead:
            self.result = paused
            return None
        return cast(ComponentCall, paused)

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Give torch's own generators the states of the request while entered."""
        outside = [(one, one.get_state()) for one in self._torch_states]
        for one, state in self._torch_states.items():
            one.set_state(state)
        try:
            yield
        finally:
            for one, state in outside:
                self._torch_states[one] = one.get_state()
                one.set_state(state)

    @property
    def torch_states(self) -> list[Tensor]:
        """States that torch's own generators have for the request, the CPU's first."""
        return list(self._torch_states.values())

    @torch_states.setter
    def torch_states(self, states: list[Tensor]) -> None:
        self._torch_states = dict(zip(self._torch_states, (state.cpu() for state in states), strict=True))

    def step_call(self, sampler: Any, stock: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> ComponentCall:
        """Return a sampler's step as a call of its component. Called inside of the coroutine."""
        self.slot.end_iteration()
        name = next((name for name, part in self.own.items() if part is sampler), None)
        if name is None:
            name = f"copy {len(self.own)}"
            self.own[name] = sampler
        if self._generator is not None and _lacks_generator(type(sampler), len(args), kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return ComponentCall(sampler, name, "step", Role.SAMPLER, functools.partial(stock, sampler), args, kwargs)


def _computing_device(pipeline: Any) -> torch.device:
    """Return where a pipeline computes, and so draws noise; its weights may lie elsewhere, if hooks move them.

    diffusers' device has no index if hooks were given none: then it is the current device.
    """
    device: torch.device = pipeline._execution_device
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _seeded(device: torch.device, generator: torch.Generator | None) -> dict[torch.Generator, Tensor]:
    """Return torch's own generators with their states after `torch.manual_seed` with a generator's seed."""
    ours = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # Before this there are no generators of cards.
        ours.append(torch.cuda.default_generators[device.index])
    seed = 0 if generator is None else generator.initial_seed()
    return {one: torch.Generator(one.device).manual_seed(seed).get_state() for one in ours}


@functools.cache
def _watch(kind: Any) -> None:
    """Let the steps of a sampler's class pause the coroutine that makes them. Outside of one nothing changes.

    Rejected: a subclass, since pipelines ask for the very type of their sampler (Bria).
    """
    stock = kind.step

    @functools.wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = getcurrent()
        if not isinstance(here, StockCall):
            return stock(self, *args, **kwargs)
        hub = here.hub
        call = here.step_call(self, stock, args, kwargs)
        del here  # See `StockCall`.
        return hub.switch(call)

    kind.step = step


def _lacks_generator(kind: type, num_args: int, kwargs: Mapping[str, Any]) -> bool:
    index = _generator_index(kind)
    return index is not None and num_args < index and kwargs.get("generator") is None


@functools.cache
def _generator_index(kind: type) -> int | None:
    """Return the index of the generator among the arguments of a sampler's step, without self; None without one."""
    names = list(inspect.signature(kind.step).parameters)  # type: ignore[attr-defined]
    return names.index("generator") if "generator" in names else None
