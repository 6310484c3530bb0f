"""What `pipelines.hooks` relies on in diffusers still holds, and it says so where it does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import tiny
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.hooks import SharedAttention, share_passes
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.sequence import share

MODELS = {
    "sd3": (StableDiffusion3, tiny.build_sd3, {"JointAttnProcessor2_0"}),
    "sd3.5": (StableDiffusion3, partial(tiny.build_sd3, dual=True), {"JointAttnProcessor2_0"}),
    "flux": (Flux, tiny.build_flux, {"FluxAttnProcessor"}),
}


class Attentions(TorchFunctionMode):
    """The masks of all calls of torch's attention while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self.masks.append(args[3] if len(args) > 3 else kwargs.get("attn_mask"))
        return func(*args, **kwargs)


class Pair:
    """The first of two ranks that never answer."""

    rank, size = 0, 2


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def in_a_group() -> Parallel:
    parallel = Parallel()
    parallel.join(Pair(), guided=False)  # type: ignore[arg-type]
    return parallel


@pytest.mark.parametrize("name", MODELS)
def test_each_attention_of_diffusers_calls_torchs_attention_once_without_a_mask(name: str) -> None:
    adapter, build, known = MODELS[name]
    pipeline = build()
    stock = pipeline.transformer.attn_processors
    assert {type(processor).__name__ for processor in stock.values()} == known, (
        f"diffusers has given {name} other attention processors; check that hooks.SharedAttention still fits them"
    )
    family = adapter(pipeline, name, {"max_sequence_length": 16}, "")
    assert pipeline.transformer.attn_processors == stock, "some pipelines look at what a processor is"
    state = tiny.begin(family, tiny.spec())
    with Attentions() as seen:
        family.predict([state])
    assert seen.masks == [None] * len(stock)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_share_every_attention(name: str) -> None:
    _, build, _ = MODELS[name]
    transformer = build().transformer
    assert share(transformer, Parallel())
    forwards = {name: module.forward for name, module in transformer.named_modules() if hasattr(module, "processor")}
    assert all(isinstance(forward, SharedAttention) for forward in forwards.values())
    assert {f"{name}.processor" for name in forwards} == transformer.attn_processors.keys()


def test_only_the_second_attention_of_version_3_5_is_over_the_image_alone() -> None:
    transformer = tiny.build_sd3(dual=True).transformer
    share(transformer, Parallel())
    sequences = {
        name: module.forward._attend.keywords["queries"]
        for name, module in transformer.named_modules()
        if hasattr(module, "processor")
    }
    assert sequences == {
        "transformer_blocks.0.attn": ("image", "text"),
        "transformer_blocks.0.attn2": ("image",),
        "transformer_blocks.1.attn": ("image", "text"),
    }


def test_a_model_without_the_submodule_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="conv_last"):
        share_passes(tiny.build_sd3().transformer, Parallel(), output="conv_last")


def shared(stock: Callable[..., Any], parallel: Parallel) -> Any:
    """Calls the shared attention in a forward pass in which the image has 8 tokens, 4 of them here."""
    if parallel.degree > 1:
        parallel.begin_pass()
        parallel.split(torch.zeros(1, 8), "image")
    return SharedAttention(stock, parallel, ("image",))()


def attend(mask: torch.Tensor | None = None, **options: Any) -> Callable[..., torch.Tensor]:
    tensor = torch.zeros(1, 2, 4, 8)
    return lambda *_: scaled_dot_product_attention(tensor, tensor, tensor, attn_mask=mask, **options)


def elsewhere(*_: Any) -> str:
    return "attended elsewhere"


def test_attention_that_does_not_pass_through_torch_is_an_error_in_a_group_only() -> None:
    assert shared(elsewhere, Parallel()) == "attended elsewhere"
    with pytest.raises(RuntimeError, match=r"0 times, not once.*DIFFUSERS_ATTN_BACKEND"):
        shared(elsewhere, in_a_group())


def test_a_mask_of_queries_and_keys_is_refused_in_a_group_only() -> None:
    masked = attend(torch.zeros(4, 4))
    assert shared(masked, Parallel()).shape == (1, 2, 4, 8)
    for mask in (torch.zeros(4, 4), torch.zeros(1, 1, 4, 4), torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 1, 8)):
        with pytest.raises(RuntimeError, match="mask of shape"):
            shared(attend(mask), in_a_group())


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.5}, {"enable_gqa": True}])
def test_other_attention_is_refused_in_a_group_only(options: dict[str, Any]) -> None:
    assert shared(attend(**options), Parallel()).shape == (1, 2, 4, 8)
    with pytest.raises(RuntimeError, match=next(iter(options)).removesuffix("_p")):
        shared(attend(**options), in_a_group())
