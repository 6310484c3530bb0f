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
from tilework.pipelines.hooks import SharedAttention, share_passes, share_sequence
from tilework.pipelines.parallel import Parallel

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
def test_each_processor_of_diffusers_calls_torchs_attention_once_without_a_mask(name: str) -> None:
    adapter, build, known = MODELS[name]
    pipeline = build()
    stock = pipeline.transformer.attn_processors
    assert {type(processor).__name__ for processor in stock.values()} == known, (
        f"diffusers has given {name} other attention processors; check that hooks.SharedAttention still fits them"
    )
    family = adapter(pipeline, name, {"max_sequence_length": 16}, "")
    shared = pipeline.transformer.attn_processors
    assert shared.keys() == stock.keys()
    assert all(isinstance(processor, SharedAttention) for processor in shared.values())
    state = tiny.begin(family, tiny.spec())
    with Attentions() as seen:
        family.predict([state])
    assert seen.masks == [None] * len(stock)


def test_only_the_second_attention_of_version_3_5_is_over_the_image_alone() -> None:
    pipeline = tiny.build_sd3(dual=True)
    StableDiffusion3(pipeline, "tiny", {}, "")
    names = [name for name in pipeline.transformer.attn_processors if ".attn2." in name]
    assert names == ["transformer_blocks.0.attn2.processor"]


def test_a_model_without_the_submodule_is_refused_by_name() -> None:
    model = tiny.build_sd3().transformer
    with pytest.raises(AttributeError, match="patchify"):
        share_sequence(model, Parallel(), image="patchify", text="context_embedder", output="proj_out")
    with pytest.raises(AttributeError, match="conv_last"):
        share_passes(model, Parallel(), output="conv_last")


def attend(mask: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    tensor = torch.zeros(1, 2, 4, 8)
    return lambda *_: scaled_dot_product_attention(tensor, tensor, tensor, attn_mask=mask)


def test_attention_that_does_not_pass_through_torch_is_an_error_in_a_group_only() -> None:
    elsewhere = lambda *_: "attended elsewhere"  # noqa: E731
    assert SharedAttention(elsewhere, Parallel(), ("image",))(torch.nn.Identity()) == "attended elsewhere"
    with pytest.raises(RuntimeError, match=r"0 times, not once.*DIFFUSERS_ATTN_BACKEND"):
        SharedAttention(elsewhere, in_a_group(), ("image",))(torch.nn.Identity())


def test_a_mask_is_refused_in_a_group_only() -> None:
    masked = attend(torch.zeros(4, 4))
    assert SharedAttention(masked, Parallel(), ("image",))(torch.nn.Identity()).shape == (1, 2, 4, 8)
    with pytest.raises(AssertionError, match="mask"):
        SharedAttention(masked, in_a_group(), ("image",))(torch.nn.Identity())
