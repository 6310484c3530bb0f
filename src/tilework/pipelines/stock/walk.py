"""A request on its way through the stock call: encoding, iterations of the loop, the rest; also where it was before.

The stock call cannot be moved, since it is a stack of frames. So another process *replays* it: it starts the same call,
gives the answers that were recorded while it encoded, answers the denoiser with zeros of the right shape, and the
sampler with zeros up to the last step that was made, which gets the true answer. From there on it is the same call: all
that an iteration hands to the next one goes through the sampler, the generator or the guider. That costs the code
between the calls, and no call of a model.

tests/pipelines/test_stock.py holds every class of `tests/zoo` to that, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.sampler import memory_of
from tilework.pipelines.stock.answers import TouchedTensors, hollow, rebuilt, recorded
from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.coroutine import StockCall

Ask = Callable[[ComponentCall], Any]
"""Answers a call."""
Encoded = tuple[str, Any]
"""A component, and what it answered, as named values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a request is after some iterations; what a replay needs besides the answers of the encoding.

    Attributes:
        num_iterations: how many were made.
        denoisers: hollow answers of each denoiser in an iteration that asked it most often, by component.
        samplers: the answers of the samplers in the last iteration.
        own: the memory of the request's samplers and guiders, by component.
        generator: the state of its generator.
    """

    num_iterations: int
    denoisers: Mapping[str, Any]
    samplers: list[Any]
    own: Mapping[str, Mapping[str, Any]]
    generator: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Walk:
    """A stock call that is under way. `pending` is the call at which it paused; None at the end.

    `encoded` are, by component, the recorded answers to the calls before the first one of a denoiser. A torn walk was
    interrupted where it cannot go on.
    """

    call: StockCall
    generator: torch.Generator
    pending: ComponentCall | None = None
    num_iterations: int = 0
    encoded: list[Encoded] = field(default_factory=list)
    is_torn: bool = False
    _denoisers: dict[str, list[Any]] = field(default_factory=dict)
    _samplers: list[Any] = field(default_factory=list)
    _generator_state: Tensor | None = None

    @property
    def is_in_loop(self) -> bool:
        """Whether an iteration comes next."""
        return self.pending is not None and self.pending.role is not Role.OTHER

    def encode(self) -> None:
        """Run up to the loop, and record what components answer."""
        touched = TouchedTensors()
        answers: list[tuple[str, Any]] = []
        self._resume(None, touched)
        while self.pending is not None and not self.is_in_loop:
            answers.append((self.pending.component, self.pending.run()))
            self._resume(answers[-1][1], touched)
        if self.pending is not None:
            touched.note((self.pending.args, dict(self.pending.kwargs)))
        self.encoded = [(component, recorded(answer, touched)) for component, answer in answers]

    def encoded_hollow(self, components: Collection[str]) -> list[Encoded]:
        """What was encoded, with the shapes alone of what these components answered."""
        return [(name, hollow(answer) if name in components else answer) for name, answer in self.encoded]

    def encode_again(self, encoded: list[Encoded]) -> None:
        """Run up to the loop with answers that were recorded, or are hollow."""
        self.encoded = encoded
        self._resume(None)
        for _, answer in encoded:
            self._resume(rebuilt(answer))

    def expected(self, component: str) -> list[Any]:
        """What a denoiser answers in an iteration, call by call, with zeros; empty before the first iteration."""
        return [rebuilt(answer) for answer in self._denoisers.get(component, ())]

    def iterate(self, ask: Ask, watching: AbstractContextManager[Any] | None = None) -> None:
        """Make one iteration of the loop; `ask` answers denoisers and samplers. `watching` is entered between calls.

        Raises:
            UnsupportedModel: something else is called between two steps.
        """
        denoisers: dict[str, list[Any]] = {}
        samplers: list[Any] = []
        while (call := self.pending) is not None:
            if call.role is Role.OTHER or (call.role is Role.DENOISER and samplers):
                break
            if call.role is Role.SAMPLER:
                self.is_torn = True  # Until the iteration is over.
                answer = ask(call)
                samplers.append(recorded(answer))
                self._generator_state = self.generator.get_state()
            else:
                answer = ask(call)
                denoisers.setdefault(call.component, []).append(hollow(recorded(answer)))
            self._resume(answer, watching)
        self._require(samplers)
        for component, answers in denoisers.items():  # Some are asked more often in some iterations.
            if len(answers) > len(self._denoisers.get(component, ())):
                self._denoisers[component] = answers
        self._end_iteration(samplers)

    def mark(self) -> Mark:
        """Where it is now. All of it is the walk's own until the next iteration."""
        assert self._generator_state is not None, "no iteration was made"
        return Mark(
            num_iterations=self.num_iterations,
            denoisers=dict(self._denoisers),
            samplers=self._samplers,
            own={name: memory_of(part) for name, part in self.call.own.items()},
            generator=self._generator_state,
        )

    def replay(self, mark: Mark) -> None:
        """Go on to where another walk of the same request was. This one must not be further."""
        assert self.num_iterations <= mark.num_iterations
        self._denoisers = dict(mark.denoisers)
        while self.num_iterations < mark.num_iterations:
            is_last = self.num_iterations + 1 == mark.num_iterations
            self._replay_iteration(mark, mark.samplers if is_last else hollow(mark.samplers))
            if is_last:  # The code behind the sampler may have written into it what was there already.
                self._put(mark.own)

    def _replay_iteration(self, mark: Mark, samplers: list[Any]) -> None:
        counts = dict.fromkeys(mark.denoisers, 0)
        num_sampled = 0
        while (call := self.pending) is not None:
            if call.role is Role.OTHER or (call.role is Role.DENOISER and num_sampled):
                break
            if call.role is Role.DENOISER:
                index, counts[call.component] = counts[call.component], counts[call.component] + 1
                answer = mark.denoisers[call.component][index]
            else:
                answer = samplers[num_sampled]
                num_sampled += 1
                if num_sampled == len(samplers):
                    self._put(mark.own)
                    self.generator.set_state(mark.generator.cpu())
            self._resume(rebuilt(answer))
        self._require(samplers[:num_sampled])
        self._generator_state = mark.generator
        self._end_iteration(mark.samplers)

    def finish(self, ask: Ask) -> Any:
        """Run to the end; returns what the stock call returns. `ask` answers all calls.

        Raises:
            UnsupportedModel: a denoiser or a sampler is called again.
        """
        while (call := self.pending) is not None:
            if call.role is not Role.OTHER:
                raise UnsupportedModel(f"the pipeline calls {call} after its loop")
            self._resume(ask(call))
        return self.call.result

    def _resume(self, answer: Any, watching: AbstractContextManager[Any] | None = None) -> None:
        try:
            self.pending = self.call.resume(answer, watching)
        except BaseException:
            self.is_torn = True
            raise

    def _require(self, samplers: list[Any]) -> None:
        if not samplers:
            raise UnsupportedModel(f"the pipeline calls {self.pending or 'nothing'} where a sampler should step")

    def _end_iteration(self, samplers: list[Any]) -> None:
        self._samplers = samplers
        self.num_iterations += 1
        self.is_torn = False

    def _put(self, own: Mapping[str, Mapping[str, Any]]) -> None:
        for name, memory in own.items():
            vars(self.call.own[name]).update(memory)
