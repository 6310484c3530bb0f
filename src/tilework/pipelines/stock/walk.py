"""A request on its way through the stock call: encoding, iterations of the loop, the rest; and its replay.

The stock call cannot be moved, since it is a stack of frames. So another process *replays* it: it starts the same call
and gives the answers that were recorded during encoding. It answers the denoiser with NaN of the right shape, and the
sampler with NaN up to the last step that was made, which gets the true answer. From there on it is the same call: all
that an iteration passes to the next one goes through the sampler, the generator or the guider. That costs the code
between the calls, and no call of a model, unless the first iteration fills a cache for the others: that one is made
again.

If an iteration passes on something else, its request ends with NaN. That is an error here, and no wrong image.

tests/pipelines/test_stock.py checks every class of `tests/zoo` against that, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from tilework.pipelines.errors import RequestRefused, UnsupportedModel
from tilework.pipelines.sampler import memory_of
from tilework.pipelines.stock.answers import TouchedTensors, has_nan, has_unkept, hollow, kept, rebuilt, recorded
from tilework.pipelines.stock.component_calls import ComponentCall, Role, is_object
from tilework.pipelines.stock.coroutine import StockCall

_LOST = "between its steps the pipeline keeps more than a moving request can take along"
_TORCH = ""
_WITHIN = "/"  # Separates names in paths.
Ask = Callable[[ComponentCall], Any]
"""Answers a call."""
Encoded = tuple[str, Any]
"""A component, and its answer as named values; before it _TORCH and torch's generators, if it drew from them."""


class Onlooker(Protocol):
    """Watches an iteration, and changes nothing of it."""

    def before_step(self, call: ComponentCall) -> None:
        """Note that a sampler is asked next."""

    def before_end(self, denoisers: Mapping[str, list[Any]], samplers: list[Any]) -> None:
        """Note that the iteration is over, except for being counted.

        Gets the hollow answers of the denoisers and the answers of the samplers, as a `Mark` has them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The position of a request after some iterations; what a replay needs besides the answers of the encoding.

    Attributes:
        num_iterations: how many were made.
        denoisers: hollow answers of each denoiser in an iteration that asked it most often, by component.
        samplers: the answers of the samplers in the last iteration.
        own: the memory of the request's samplers and guiders, and of the objects that they keep, by path.
        generators: the states of its generator at the last sampler's step of the last two iterations, or of the one.
            The code between the calls may draw, too, and put it where the sampler does not change it.
        fills_cache: True if the first iteration fills a cache for the others. A replay makes it again.
    """

    num_iterations: int
    denoisers: Mapping[str, Any]
    samplers: list[Any]
    own: Mapping[str, Mapping[str, Any]]
    generators: list[Tensor]
    fills_cache: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Walk:
    """A stock call that is under way. `pending` is the call at which it paused; None at the end.

    `encoded` are, by component, the recorded answers to the calls before the first one of a denoiser. If it
    `has_drawn_to_encode`, they may depend on the seed. A torn walk was interrupted where it cannot go on.
    """

    call: StockCall
    generator: torch.Generator
    pending: ComponentCall | None = None
    num_iterations: int = 0
    encoded: list[Encoded] = field(default_factory=list)
    has_drawn_to_encode: bool = False
    is_torn: bool = False
    _denoisers: dict[str, list[Any]] = field(default_factory=dict)
    _samplers: list[Any] = field(default_factory=list)
    _generators: list[Tensor] = field(default_factory=list)
    _fills_cache: bool = False
    _is_replayed: bool = False

    @property
    def is_in_loop(self) -> bool:
        """True if an iteration comes next."""
        return self.pending is not None and self.pending.role is not Role.OTHER

    def encode(self) -> None:
        """Run up to the loop, and record the answers of components."""
        touched = TouchedTensors()
        answers: list[Encoded] = []
        drawn: dict[int, list[Tensor]] = {}
        undrawn = self.generator.get_state()
        self._prepare(None, touched)
        while self.pending is not None and not self.is_in_loop:
            before = self.call.torch_states
            self.has_drawn_to_encode |= not torch.equal(self.generator.get_state(), undrawn)
            with self.call.randomness():  # A language model may draw its words.
                answer = self.pending.run()
            if not all(map(torch.equal, before, self.call.torch_states)):
                drawn[len(answers)] = self.call.torch_states
                self.has_drawn_to_encode = True
            answers.append((self.pending.component, recorded(answer)))
            self._prepare(answer, touched)
        if self.pending is not None:
            touched.note((self.pending.args, dict(self.pending.kwargs)))
        for index, (component, answer) in enumerate(answers):
            self.encoded += [(_TORCH, drawn[index])] if index in drawn else []
            self.encoded.append((component, kept(answer, touched)))

    def encoded_hollow(self, components: Collection[str]) -> list[Encoded]:
        """Return the encoded answers, with the shapes alone for answers of these components."""
        return [(name, hollow(answer) if name in components else answer) for name, answer in self.encoded]

    def encode_again(self, encoded: list[Encoded]) -> None:
        """Run up to the loop with answers that were recorded, or are hollow."""
        self.encoded = encoded
        self._resume(None)
        for component, answer in encoded:
            if component == _TORCH:
                self.call.torch_states = answer
            else:
                self._resume(rebuilt(answer))

    def expected(self, component: str) -> list[Any]:
        """Return a denoiser's answers in an iteration, call by call, without numbers; empty before the first one."""
        return [rebuilt(answer) for answer in self._denoisers.get(component, ())]

    def iterate(
        self, ask: Ask, watching: AbstractContextManager[Any] | None = None, onlooker: Onlooker | None = None
    ) -> None:
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
                if onlooker is not None:
                    with watching or nullcontext():  # Answers that come later must be there when it reads them.
                        onlooker.before_step(call)
                self.is_torn = True  # Until the iteration is over.
                answer = ask(call)
                samplers.append(kept(recorded(answer)))
                drawn = self.generator.get_state()
            else:
                answer = ask(call)
                values = recorded(answer)
                self._fills_cache |= call.keeps_state or has_unkept(values)
                denoisers.setdefault(call.component, []).append(hollow(values))
            self._resume(answer, watching)
        self._require(samplers)
        for component, answers in denoisers.items():  # Some iterations ask some of them more often.
            if len(answers) > len(self._denoisers.get(component, ())):
                self._denoisers[component] = answers
        if onlooker is not None:
            onlooker.before_end(self._denoisers, samplers)
        self._end_iteration(samplers, [*self._generators[-1:], drawn])

    def mark(self) -> Mark:
        """Return its present position. All of it belongs to the walk until the next iteration.

        Raises:
            UnsupportedModel: it was replayed, and that was not enough.
        """
        assert self._generators, "no iteration was made"
        if self._is_replayed and has_nan(self._samplers):
            raise UnsupportedModel(_LOST)
        return Mark(
            num_iterations=self.num_iterations,
            denoisers=dict(self._denoisers),
            samplers=self._samplers,
            own=dict(_memories(self.call.own)),
            generators=self._generators,
            fills_cache=self._fills_cache,
        )

    def replay(self, mark: Mark, ask: Ask | None = None) -> None:
        """Go on to the position of another walk of the same request. This one must not be further.

        `ask` answers the denoisers in the first iteration if that fills a cache; None: no denoiser is called any more.
        """
        assert self.num_iterations <= mark.num_iterations
        self._denoisers = dict(mark.denoisers)
        self._fills_cache = mark.fills_cache
        if mark.fills_cache and ask is not None and self.num_iterations == 0:
            self.iterate(ask)
        while (ahead := mark.num_iterations - self.num_iterations) > 0:
            samplers = mark.samplers if ahead == 1 else hollow(mark.samplers)
            self._replay_iteration(mark, samplers, mark.generators[-ahead:][:1] if ahead <= 2 else [])
            self._is_replayed = True
            if ahead == 1:  # Code after the sampler may have added to it again what was there already.
                self._put(mark.own)

    def skim(self, denoisers: Mapping[str, list[Any]], samplers: list[Any]) -> None:
        """Run to the end of the loop as if each iteration had these answers, as a `Mark` has them; asks no component.

        A denoiser that has not been asked yet is assumed to answer as the others do.
        """
        self._is_replayed = True
        usual = next(iter(denoisers.values()))
        counts: dict[str, int] = {}
        num_sampled = 0
        while (call := self.pending) is not None and call.role is not Role.OTHER:
            if call.role is Role.SAMPLER:
                answer = samplers[num_sampled % len(samplers)]
                num_sampled += 1
                counts.clear()
            else:
                known = denoisers.get(call.component, usual)
                index = counts.get(call.component, 0)
                answer = known[min(index, len(known) - 1)]
                num_sampled = 0
                counts[call.component] = index + 1
            self._resume(rebuilt(answer))

    def _replay_iteration(self, mark: Mark, samplers: list[Any], drawn: list[Tensor]) -> None:
        """Replay an iteration. `drawn` is the generator's state after it, if known and not reached anyway."""
        counts = dict.fromkeys(mark.denoisers, 0)
        num_sampled = 0
        while (call := self.pending) is not None:
            if call.role is Role.OTHER or (call.role is Role.DENOISER and num_sampled):
                break
            if call.role is Role.DENOISER:
                index, counts[call.component] = counts[call.component], counts[call.component] + 1
                answer = mark.denoisers[call.component][index]
            elif num_sampled == len(samplers):
                raise UnsupportedModel(_LOST)
            else:
                answer = samplers[num_sampled]
                num_sampled += 1
                if num_sampled == len(samplers):
                    self._put(mark.own)
                    for state in drawn:
                        self.generator.set_state(state.cpu())
            self._resume(rebuilt(answer))
        self._require(samplers[:num_sampled])
        self._end_iteration(mark.samplers, mark.generators)

    def finish(self, ask: Ask) -> Any:
        """Run to the end; return the result of the stock call. `ask` answers all calls; some of them may draw noise.

        Raises:
            UnsupportedModel: a denoiser or a sampler is called again; or it was replayed, and that was not enough.
        """
        while (call := self.pending) is not None:
            if call.role is not Role.OTHER:
                raise UnsupportedModel(f"the pipeline calls {call} after its loop")
            if self._is_replayed and has_nan(call.args) and not has_nan(self._samplers):
                raise UnsupportedModel(_LOST)
            self._resume(ask(call))
        return self.call.result

    def _prepare(self, answer: Any, touched: TouchedTensors) -> None:
        """Run on before the loop, where the call checks its arguments.

        Raises:
            RequestRefused: it cannot take them.
        """
        try:
            self._resume(answer, touched)
        except (TypeError, ValueError) as error:
            raise RequestRefused(f"the stock call does not take it: {error}") from error

    def _resume(self, answer: Any, watching: AbstractContextManager[Any] | None = None) -> None:
        try:
            self.pending = self.call.resume(answer, watching)
        except BaseException:
            self.is_torn = True
            raise

    def _require(self, samplers: list[Any]) -> None:
        if not samplers:
            raise UnsupportedModel(f"the pipeline calls {self.pending or 'nothing'} where a sampler should step")

    def _end_iteration(self, samplers: list[Any], generators: list[Tensor]) -> None:
        self._samplers = samplers
        self._generators = generators
        self.num_iterations += 1
        self.is_torn = False

    def _put(self, own: Mapping[str, Mapping[str, Any]]) -> None:
        for path, memory in own.items():
            name, *inner = path.split(_WITHIN)
            if name not in self.call.own:
                raise UnsupportedModel(_LOST)
            vars(reduce(getattr, inner, self.call.own[name])).update(memory)


def _memories(own: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the attributes that steps change, by the path of their object. Objects stay, and get another's values."""
    for path, part in own.items():
        memory = memory_of(part)
        objects = {name: value for name, value in memory.items() if is_object(value)}
        yield path, {name: value for name, value in memory.items() if name not in objects}
        yield from _memories({f"{path}{_WITHIN}{name}": value for name, value in objects.items()})
