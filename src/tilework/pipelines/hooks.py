"""Hooks of `Parallel` in diffusers' models. With `packing` and `slices`, this relies on the models' internals.

Hooks are installed once, when a model is loaded. At degree 1 each returns at once, and the stock code runs untouched.
They rely on one fact: every attention module calls torch's `scaled_dot_product_attention` exactly once, and so does
the native backend of diffusers' dispatcher. tests/pipelines/test_hooks.py checks it. `sequence` lists the modules to
hook, as data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tilework.pipelines.parallel import Parallel

Attend = Callable[[Tensor, Tensor, Tensor, float | None, Tensor | None], Tensor]
"""Attention by query, key, value, scale and mask."""


def share_passes(model: Any, parallel: Parallel, *, output: str) -> None:
    """Let ranks share the two passes of guidance and nothing else: `output` is the submodule of the prediction.

    Raises:
        AttributeError: the model has no such submodule.
    """

    def hook(module: nn.Module, args: Any, prediction: Tensor) -> Tensor | None:
        return None if parallel.degree == 1 else parallel.gather(prediction, None)

    model.get_submodule(output).register_forward_hook(hook)


class SharedAttention:
    """The forward of an attention module whose attention runs over the pieces of all ranks; see `Parallel.attend`.

    Its own code runs at any degree; only the call of torch's attention is answered differently. Rejected: a wrapped
    processor (some pipelines look at what the processor is), a processor of our own for each family (a copy to
    maintain), and the context-parallel slot of diffusers' processors (private, and SD3's has none). The detour costs
    0.8 us for each torch call in a processor, and nothing at degree 1.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        parallel: Parallel,
        queries: Sequence[str],
        keys: Sequence[str] | None = None,
        pairs: bool = False,
    ) -> None:
        functools.update_wrapper(self, stock)
        self._stock = stock
        self._parallel = parallel
        self._attend = functools.partial(
            parallel.attend, queries=queries, keys=queries if keys is None else keys, pairs=pairs
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Raises RuntimeError if it does not attend exactly once through torch: its result is wrong."""
        if not self._parallel.splits_sequence:
            return self._stock(*args, **kwargs)
        with Detour(self._attend):
            return self._stock(*args, **kwargs)


class Detour(TorchFunctionMode):
    """Replaces the one call of attention in this thread by `attend`, while entered.

    Raises:
        RuntimeError: on leaving, if torch's attention was not called exactly once: the result is wrong.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._num_calls = 0
        self._answer = attend

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        if error_type is None and self._num_calls != 1:
            raise RuntimeError(
                f"an attention calls torch's scaled_dot_product_attention {self._num_calls} times, not once, "
                "so what it attends to cannot be shared or packed; unset DIFFUSERS_ATTN_BACKEND, or use degree 1 and "
                "batches of one"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.reshape and not args[0].numel():
            return _reshape_nothing(*args)
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self._num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p or is_causal or enable_gqa:
            raise RuntimeError(
                f"an attention has dropout {dropout_p}, is_causal {is_causal}, enable_gqa {enable_gqa}, which cannot "
                "be shared or packed; use degree 1 and batches of one"
            )
        return self._answer(query, key, value, scale, attn_mask)


def _reshape_nothing(tensor: Tensor, *shape: Any) -> Tensor:
    """Reshape a tensor without elements, on a rank without tokens, where torch cannot infer -1.

    The size for -1 is what it would be for one token.
    """
    sizes = list(shape[0] if isinstance(shape[0], Sequence) else shape)
    if -1 in sizes:
        others = math.prod(max(size, 1) for size in sizes)
        sizes[sizes.index(-1)] = math.prod(max(size, 1) for size in tensor.shape) // others
    return tensor.new_empty(sizes)
