"""Where diffusers' models are opened for `Parallel`. Beside `packing` and `slices` this relies on how they are built.

Hooks are installed once, when a model is loaded. At degree 1 each returns at once, and the stock code runs untouched.
What is relied on: the names of the submodules given below, and that every attention processor calls torch's
`scaled_dot_product_attention` exactly once, without a mask. tests/pipelines/test_hooks.py holds diffusers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tilework.pipelines.parallel import Parallel

IMAGE, TEXT = "image", "text"


def share_sequence(model: Any, parallel: Parallel, *, image: str, text: str, output: str, rotary: str = "") -> None:
    """Let ranks share the sequence of a diffusion transformer that attends jointly over text and image.

    Args:
        image: submodule whose output is the image tokens, (batch, tokens, width).
        text: submodule whose output is the text tokens.
        output: submodule that makes the prediction of each image token.
        rotary: submodule whose outputs are the rotary embeddings of text and image, in this order; called after both.

    Raises:
        AttributeError: the model has no such submodule.
    """
    _on_output(model, image, parallel, lambda tokens: parallel.split(tokens, IMAGE))
    _on_output(model, text, parallel, lambda tokens: parallel.split(tokens, TEXT))
    if rotary:
        _on_output(
            model, rotary, parallel, lambda tables: tuple(parallel.pick(table, (TEXT, IMAGE)) for table in tables)
        )
    _on_output(model, output, parallel, lambda tokens: parallel.gather(tokens, IMAGE))
    model.set_attn_processor(
        {
            name: SharedAttention(processor, parallel, (IMAGE,) if _is_image_only(name) else (TEXT, IMAGE))
            for name, processor in model.attn_processors.items()
        }
    )


def share_passes(model: Any, parallel: Parallel, *, output: str) -> None:
    """Let ranks share the two passes of guidance and nothing else: `output` is the submodule of the prediction.

    Raises:
        AttributeError: the model has no such submodule.
    """
    _on_output(model, output, parallel, lambda prediction: parallel.gather(prediction, None))


class SharedAttention:
    """A stock attention processor whose attention runs over the pieces of all ranks.

    Its own code runs at any degree; only the call of torch's attention is answered differently. Rejected: a processor
    of our own for each family (a copy to maintain), and the context-parallel slot of diffusers' processors (private,
    and SD3's has none). The detour costs 0.8 us for each torch call in a processor, and nothing at degree 1.
    """

    def __init__(self, stock: Callable[..., Any], parallel: Parallel, sequences: Sequence[str]) -> None:
        self._stock = stock
        self._parallel = parallel
        self._sequences = sequences

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError if the processor does not attend exactly once through torch: its result is wrong."""
        if not self._parallel.splits_sequence:
            return self._stock(attn, *args, **kwargs)
        with Detour(partial(self._parallel.attend, sequences=self._sequences)):
            return self._stock(attn, *args, **kwargs)


class Detour(TorchFunctionMode):
    """While entered, attention in this thread is that of `attend(query, key, value, scale)`, and is called once.

    Raises:
        RuntimeError: on leaving, if torch's attention was not called exactly once: the result is wrong.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, float | None], Tensor]) -> None:
        super().__init__()
        self._num_calls = 0
        self._answer = attend

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        if error_type is None and self._num_calls != 1:
            raise RuntimeError(
                f"an attention processor calls torch's scaled_dot_product_attention {self._num_calls} times, not once, "
                "so what it attends to cannot be shared or packed; unset DIFFUSERS_ATTN_BACKEND, or use degree 1 and "
                "batches of one"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        assert attn_mask is None, "a mask would have to be shared too; no family here has one"
        assert dropout_p == 0
        assert not is_causal
        return self._answer(query, key, value, scale)


def _on_output(model: Any, name: str, parallel: Parallel, change: Callable[[Any], Any]) -> None:
    """Change what a submodule returns, in groups only."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return None if parallel.degree == 1 else change(output)

    model.get_submodule(name).register_forward_hook(hook)


def _is_image_only(processor_name: str) -> bool:
    """Stable Diffusion 3.5 has a second attention in some blocks, over the image alone."""
    return ".attn2." in processor_name
