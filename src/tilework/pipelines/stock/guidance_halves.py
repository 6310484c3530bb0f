"""The two passes of a guided step, made at the same time by the two halves of a group.

Stock pipelines that call their denoiser twice in an iteration, with and without the prompt, read the first answer only
when they have the second. So the first call is answered with tensors that are filled later: together with the second
one, or, if the stock code reads them before, on the spot by the whole group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tilework.pipelines.parallel import Parallel
from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.shared_calls import AskedCall, asked

_VIEWS = frozenset({Tensor.__getitem__, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device"))})
"""Functions that read no numbers of a tensor; the result of `__getitem__` lies in the same memory."""


class GuidanceHalves(TorchFunctionMode):
    """Answers the calls of one iteration (`Walk.iterate`); is entered while the stock code runs between them.

    `expected(component)` returns a denoiser's answers in an earlier iteration, call by call, without the numbers. All
    ranks of the group make the same choices, since they run the same code.
    """

    def __init__(self, parallel: Parallel, expected: Callable[[str], list[Any]]) -> None:
        super().__init__()
        self._parallel = parallel
        self._expected = expected
        self._num_calls = 0
        self._first: AskedCall | None = None
        self._buffers: list[Tensor] = []

    @property
    def is_open(self) -> bool:
        """True if a call has an answer that was not filled: the stock call cannot go on."""
        return self._first is not None

    def answer(self, call: ComponentCall) -> Any:
        """Return an answer, or tensors that are filled before anything reads them."""
        if call.role is not Role.DENOISER:
            self.answer_first()
            return call.run()
        if self._reads((call.args, dict(call.kwargs))):
            self.answer_first()
        self._num_calls += 1
        if self._num_calls == 1:
            return self._answer_later(call)
        if self._first is not None and self._first.is_like(asked(call)):
            return self._answer_both(self._first.call, call)
        self.answer_first()
        return call.run()

    def _answer_later(self, call: ComponentCall) -> Any:
        """Return tensors that are filled later, if another call is expected."""
        expected = self._expected(call.component)
        first = asked(call)
        if len(expected) != 2 or not first.rows:
            return call.run()
        self._first = first
        self._buffers = tensors_of(expected[0])
        return expected[0]

    def answer_first(self) -> None:
        """Answer the first call now, by the whole group."""
        if self._first is not None:
            self._fill(tensors_of(self._first.call.run()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._first is not None and func not in _VIEWS and self._reads((args, kwargs)):
            self.answer_first()
        return func(*args, **(kwargs or {}))

    def _answer_both(self, first: ComponentCall, second: ComponentCall) -> Any:
        with self._parallel.halved() as half:
            answer = (first, second)[half].run()
        traded = [self._parallel.trade(tensor) for tensor in tensors_of(answer)]
        self._fill([of_first for of_first, _ in traded])
        if half == 0:  # Its answer has the form of the other one's.
            for tensor, (_, of_second) in zip(tensors_of(answer), traded, strict=True):
                tensor.copy_(of_second)
        return answer

    def _reads(self, values: Any) -> bool:
        if self._first is None:
            return False
        filled_later = {tensor.untyped_storage().data_ptr() for tensor in self._buffers}
        found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return any(tensor.untyped_storage().data_ptr() in filled_later for tensor in found)

    def _fill(self, tensors: list[Tensor]) -> None:
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._first = None


def tensors_of(answer: Any) -> list[Tensor]:
    """Return the tensors of an answer, in order; those of an object as those of the tuple that it stands for."""
    if hasattr(answer, "to_tuple"):
        answer = answer.to_tuple()
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
