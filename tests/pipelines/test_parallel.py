"""A request that several processes share is the one that a single process runs, at every degree and across changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

import tiny
from quick import quick
from ranks import Counting, Ranks, Spoilt
from tilework.core.comm import Comm
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import shipped_directory
from tilework.pipelines.parallel import Parallel, split_evenly
from tilework.pipelines.serialization import SerializedState, deserialize, room, serialize

# Relative to the largest value: guided predictions of `shapes` reach 12, and a stock step of it in float32 is itself
# 1.5e-5 away from one in float64.
TOLERANCE = 1e-5
SMALL, ODD = (64, 64), (240, 272)
# Two heads (fewer than ranks), three (with the second attention of version 3.5), five; the model that is shipped.
TRANSFORMERS = ("sd3", "sd3.5", "flux", "shapes")
STOCK = {
    "sd3": partial(tiny.build_sd3, max_side=320),
    "sd3.5": partial(tiny.build_sd3, max_side=320, num_heads=3, dual=True),
    "flux": tiny.build_flux,
    "sdxl": tiny.build_sdxl,
    "sdxl-noisy": partial(tiny.build_sdxl, "sdxl-ancestral"),
}
ADAPTERS = {
    "sd3": StableDiffusion3,
    "sd3.5": StableDiffusion3,
    "flux": Flux,
    "sdxl": StableDiffusionXL,
    "sdxl-noisy": StableDiffusionXL,
}


@cache
def family(name: str) -> Family:
    if name == "shapes":
        return load(ModelSource(path="shapes"))
    return ADAPTERS[name](
        STOCK[name](), name, {"max_sequence_length": tiny.TEXT_LENGTH} if name in TRANSFORMERS else {}, ""
    )


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def request(name: str, size: tuple[int, int] = SMALL, **changes: Any) -> Spec:
    """`size` is for 16 px per token; `shapes` has 8 and gets the same 15 x 17 tokens, since it does not draw 272 px."""
    scale = 2 if (name, size) == ("shapes", ODD) else 1
    return tiny.spec(height=size[0] // scale, width=size[1] // scale, **changes)


def guided(model: Family, spec: Spec) -> bool:
    return model.info.two_passes and spec.guidance_scale > 1


def predict_together(comm: Comm, name: str, spec: Spec, spoilt: bool = False) -> Tensor:
    """On each rank: the prediction of the second step."""
    model = family(name)
    state = tiny.begin(model, spec)
    tiny.iterate(model, state)
    model.parallel.join(Spoilt(comm) if spoilt else comm, guided(model, spec))
    try:
        return model.predict([state])[0]
    finally:
        model.parallel.leave()


def predict_alone(name: str, spec: Spec) -> Tensor:
    model = family(name)
    state = tiny.begin(model, spec)
    tiny.iterate(model, state)
    return model.predict([state])[0]


def error(result: Tensor, reference: Tensor) -> float:
    assert reference.abs().max() > 1, "a flat reference would prove nothing"
    return float((result - reference).abs().max() / reference.abs().max())


def assert_close(results: list[Tensor], reference: Tensor) -> None:
    for result in results:
        assert torch.equal(result, results[0]), "ranks would drift apart"
        assert error(result, reference) <= TOLERANCE


@pytest.mark.parametrize("size", quick([ODD], [SMALL, ODD]), ids=["64x64", "240x272"])
@pytest.mark.parametrize("scale", quick([4.0], [4.0, 1.0]), ids=["guided", "unguided"])
@pytest.mark.parametrize("name", quick(("sd3.5", "flux"), TRANSFORMERS))
def test_a_shared_prediction_equals_that_of_one_process(
    ranks: Ranks, name: str, scale: float, size: tuple[int, int]
) -> None:
    spec = request(name, size, guidance_scale=scale)
    reference = predict_alone(name, spec)
    for degree in (1, 2, 3, 4):
        assert_close(ranks.run(degree, predict_together, name, spec), reference)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [4.0, 1.0], ids=["guided", "unguided"])
def test_ranks_share_the_passes_of_a_u_net_and_spare_ones_repeat_them(ranks: Ranks, scale: float, degree: int) -> None:
    spec = tiny.spec(guidance_scale=scale)
    assert_close(ranks.run(degree, predict_together, "sdxl", spec), predict_alone("sdxl", spec))


def count_rows(comm: Comm, name: str, spec: Spec) -> tuple[int, int, int]:
    """Batch rows and image tokens that this rank computed in one forward pass, and its collectives."""
    model, counting = family(name), Counting(comm)
    denoiser = model._pipeline.unet if name == "sdxl" else model._pipeline.transformer
    seen: list[torch.Size] = []
    output = denoiser.conv_out if name == "sdxl" else denoiser.proj_out
    hook = output.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    try:
        predict_together(counting, name, spec)
    finally:
        hook.remove()
    return seen[-1][0], seen[-1][1], counting.num_calls


def test_each_rank_computes_its_share_only(ranks: Ranks) -> None:
    """64 px are 16 tokens; the tiny SD3 has two attentions, with two exchanges each, and one gather ends the pass."""
    passes, half, odd = (ranks.run(degree, count_rows, "sd3", tiny.spec()) for degree in (2, 4, 3))
    assert passes == [(1, 16, 1)] * 2
    assert half == [(1, 8, 5)] * 4
    assert odd == [(2, 6, 5), (2, 5, 5), (2, 5, 5)]
    assert [rows for rows, _, _ in ranks.run(2, count_rows, "sdxl", tiny.spec())] == [1, 1]


def test_an_exchange_that_goes_wrong_is_seen(ranks: Ranks) -> None:
    for name in TRANSFORMERS:
        spec = tiny.spec(guidance_scale=1.0)
        spoilt = ranks.run(4, predict_together, name, spec, True)
        assert error(spoilt[0], predict_alone(name, spec)) > 1e-3, name


Box = tuple[bytes, list[bytes]]


def take_steps(comm: Comm, name: str, spec: Spec, box: Box | None, num_steps: int) -> tuple[Box, Tensor]:
    """On each rank: take the state out of its box, or begin; run some steps together; put the state back."""
    model = family(name)
    state = begin_steps(model, spec)
    if box is not None:
        buffers = [room(len(buffer)) for buffer in box[1]]
        for place, buffer in zip(buffers, box[1], strict=True):
            place[:] = buffer
        exported = deserialize(SerializedState(box[0], buffers), model.device)
        state = model.restore(state.stage, spec, {"conditioning": state.conditioning.tensors}, exported)
    model.parallel.join(comm, guided(model, spec))
    for _ in range(num_steps):
        tiny.iterate(model, state)
    model.parallel.leave()
    serialized = serialize(model.export(state))
    return (serialized.head, [bytes(buffer) for buffer in serialized.buffers]), state.latents


@pytest.mark.parametrize("size", quick([ODD], [SMALL, ODD]), ids=["64x64", "240x272"])
@pytest.mark.parametrize("name", quick(("sd3", "shapes", "sdxl-noisy"), [*TRANSFORMERS, "sdxl", "sdxl-noisy"]))
def test_a_request_whose_degree_changes_ends_as_the_stock_pipeline(
    ranks: Ranks, name: str, size: tuple[int, int]
) -> None:
    spec = request(name, size, steps=6)
    pipeline = stock_shapes() if name == "shapes" else STOCK[name]()
    reference = tiny.run_stock(pipeline, spec, 0 if name == "shapes" else tiny.TEXT_LENGTH).latents[-1]
    box: Box | None = None
    for degree, num_steps in ((1, 1), (2, 1), (4, 2), (3, 1), (1, 1)):
        results = ranks.run(degree, take_steps, name, spec, box, num_steps)
        box = results[0][0]
    assert_close([latents for _, latents in results], reference)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("flux", {"true_cfg_scale": 3.0, "negative_prompt": "a cross"}),
        ("sd3.5", {"skip_guidance_layers": (1,), "skip_layer_guidance_stop": 0.9}),
        ("sdxl", {"guidance_rescale": 0.7}),
    ],
    ids=["flux", "sd3.5", "sdxl"],
)
def test_arguments_that_add_passes_do_so_at_every_degree(ranks: Ranks, name: str, arguments: dict[str, Any]) -> None:
    negative = arguments.get("negative_prompt", "")
    given = {key: value for key, value in arguments.items() if key != "negative_prompt"}
    spec = request(name, steps=4, negative_prompt=negative, arguments=given)
    reference = tiny.run_stock(STOCK[name](), spec, arguments=arguments).latents[-1]
    box: Box | None = None
    for degree, num_steps in ((2, 1), (4, 1), (3, 1), (1, 1)):
        results = ranks.run(degree, take_steps, name, spec, box, num_steps)
        box = results[0][0]
    assert_close([latents for _, latents in results], reference)


def stop_when_asked(comm: Comm, spec: Spec, asked_at: tuple[int, ...]) -> int:
    """On each rank: steps taken until a stop is agreed; rank i asks for one from step asked_at[i] on."""
    model = family("sd3")
    state = tiny.begin(model, spec)
    model.parallel.join(comm, True)
    assert not model.parallel.stop_agreed
    for step in range(spec.steps):
        model.parallel.wants_stop = step >= asked_at[comm.rank]
        tiny.iterate(model, state)
        if model.parallel.stop_agreed:
            break
    model.parallel.wants_stop = False
    model.parallel.leave()
    return state.steps_done


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_all_stop_at_the_step_where_rank_0_wants_to(ranks: Ranks, degree: int) -> None:
    """Rank 0 asks at the third step; others ask earlier or never, which changes nothing."""
    for asked_at in ((2, 0, 9, 0), (2, 9, 9, 9), (2, 2, 0, 1)):
        assert ranks.run(degree, stop_when_asked, tiny.spec(steps=5), asked_at) == [3] * degree
    assert ranks.run(degree, stop_when_asked, tiny.spec(steps=5), (9, 0, 0, 0)) == [5] * degree


class Silent:
    """A communicator that nobody may use."""

    rank, size = 1, 4


def test_changing_the_degree_needs_no_communication() -> None:
    parallel, comm = Parallel(), Silent()
    parallel.join(comm, guided=True)  # type: ignore[arg-type]
    assert parallel.degree == 4
    parallel.leave()
    assert parallel.degree == 1


def test_after_leaving_the_stock_code_runs_again() -> None:
    spec = tiny.spec()
    before = predict_alone("sd3", spec)
    model = family("sd3")
    model.parallel.join(Silent(), guided=True)  # type: ignore[arg-type]
    model.parallel.leave()
    assert model.parallel.degree == 1
    assert torch.equal(predict_alone("sd3", spec), before)


def test_parts_are_even_and_add_up() -> None:
    assert split_evenly(7, 3) == [3, 2, 2]
    assert split_evenly(2, 4) == [1, 1, 0, 0]
    assert split_evenly(0, 2) == [0, 0]


def stock_shapes() -> Any:
    return StableDiffusion3Pipeline.from_pretrained(
        shipped_directory(), local_files_only=True, dtype=torch.float32, text_encoder_3=None, tokenizer_3=None
    )
