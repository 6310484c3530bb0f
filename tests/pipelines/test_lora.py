"""Requests with LoRAs get the stock pipeline's picture with these LoRAs, whatever was drawn before and beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from loras import save_lora, use_stock
from quick import quick
from ranks import Ranks
from tilework.core.comm import Comm
from tilework.core.lora import UsedLora
from tilework.core.wire.spec import Spec
from tilework.patches.layout import pack
from tilework.pipelines.draw import begin_steps, draw
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.family import Family
from tilework.pipelines.lora import InvalidLora
from tilework.pipelines.stock.stock_pipeline import StockPipeline

# Layers whose outputs hooks of ours change, and convolutions, beside the usual ones.
TRANSFORMER = ("to_q", "to_k", "to_v", "norm1.linear", "norm_out.linear", "proj_out", "x_embedder")
U_NET = ("to_q", "to_v", "conv1", "conv_out")


TOLERANCE = 1e-5  # Relative to the largest value, as in test_parallel.


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    return float((result - reference).abs().max() / reference.abs().max())


@dataclass(frozen=True)
class Model:
    build: Callable[[], Any]
    family: Callable[..., Family]
    targets: tuple[str, ...]


MODELS = {
    "flux": Model(tiny.build_flux, Flux, TRANSFORMER),
    "sd3": Model(tiny.build_sd3, StableDiffusion3, (*TRANSFORMER[:-1], "pos_embed.proj")),
    "sdxl": Model(tiny.build_sdxl, StableDiffusionXL, U_NET),
    "stock-sd3": Model(tiny.build_sd3, StockPipeline, TRANSFORMER[:-1]),
    "stock-sdxl": Model(tiny.build_sdxl, StockPipeline, U_NET),
}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Path]]:
    """Two LoRAs of each model: `ink`, which is of a text encoder, too, and `chalk.v2`."""
    root = tmp_path_factory.mktemp("loras")
    return {
        name: {
            "ink": save_lora(model.build(), root / name / "ink.safetensors", 1, model.targets, text_encoder=True),
            "chalk.v2": save_lora(model.build(), root / name / "chalk.v2.safetensors", 2),
        }
        for name, model in MODELS.items()
    }


def plain(name: str) -> Family:
    overrides = {"max_sequence_length": tiny.TEXT_LENGTH} if name in ("flux", "sd3") else {}
    return MODELS[name].family(MODELS[name].build(), name, overrides, "")


def loaded(name: str, files: Mapping[str, Mapping[str, Path]]) -> Family:
    """A model with both of its LoRAs."""
    family = plain(name)
    for lora, file in files[name].items():
        family.loras.add(lora, file)
    return family


def stock(name: str, files: Mapping[str, Mapping[str, Path]], scales: Mapping[str, float], spec: Spec) -> np.ndarray:
    pipeline = MODELS[name].build()
    if scales:
        use_stock(pipeline, files[name], scales)
    length = 256 if name.startswith("stock") else tiny.TEXT_LENGTH
    return tiny.run_stock(pipeline, spec, max_sequence_length=length).pixels


def used(scales: Mapping[str, float]) -> tuple[UsedLora, ...]:
    return tuple(UsedLora(name, scale) for name, scale in scales.items())


@pytest.mark.parametrize("name", quick(("stock-sdxl",), MODELS))
def test_pictures_equal_stock_bit_for_bit(name: str, files: Mapping[str, Mapping[str, Path]]) -> None:
    family, spec = loaded(name, files), tiny.spec(steps=3)
    for scales in ({}, {"ink": 1.0}, {"chalk.v2": 0.6, "ink": 0.5}, {}, {"chalk.v2": 1.5}):
        family.loras.use(used(scales))
        assert np.array_equal(tiny.pixels(draw(family, spec)), stock(name, files, scales, spec)), scales
    pictures = [stock(name, files, scales, spec) for scales in ({}, {"ink": 1.0})]
    assert not np.array_equal(*pictures), "a LoRA without effect proves nothing"


BATCHED = ("flux", "sd3", "sdxl")


@pytest.mark.parametrize("name", BATCHED)
def test_requests_with_the_same_loras_share_forward_passes(name: str, files: Mapping[str, Mapping[str, Path]]) -> None:
    family, specs = loaded(name, files), [tiny.spec(steps=2, seed=seed) for seed in (1, 2)]
    family.loras.use(used({"ink": 1.0}))
    together, alone = ([begin_steps(family, spec) for spec in specs] for _ in range(2))
    family.step(together, pack)
    for state, other in zip(together, alone, strict=True):
        family.step([other])
        assert error(state.latents, other.latents) <= TOLERANCE


@pytest.mark.parametrize("name", BATCHED)
def test_mixed_sizes_without_loras_are_packed_as_if_there_were_none(
    name: str, files: Mapping[str, Mapping[str, Path]]
) -> None:
    specs = [tiny.spec(steps=2), tiny.spec(steps=2, width=128)]
    latents = []
    for family in (loaded(name, files), plain(name)):
        states = [begin_steps(family, spec) for spec in specs]
        family.step(states, pack)
        latents.append([state.latents for state in states])
    for with_loras, without in zip(*latents, strict=True):
        assert torch.equal(with_loras, without)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def step_together(comm: Comm, name: str, files: Mapping[str, Mapping[str, Path]], spec: Spec) -> Any:
    """On each rank: what the picture is made of after two steps that the group shares."""
    tiny.prepare()
    family = loaded(name, files)
    family.loras.use(used({"chalk.v2": 0.7, "ink": 1.0}))
    state = begin_steps(family, spec)
    family.join(comm, spec)
    try:
        family.step([state])
        family.step([state])
    finally:
        family.parallel.leave()
    return state.latents


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl"])
@pytest.mark.parametrize("degree", quick([2], [2, 3]))
def test_groups_draw_what_one_device_draws(
    ranks: Ranks, name: str, degree: int, files: Mapping[str, Mapping[str, Path]]
) -> None:
    spec = tiny.spec(steps=2)
    family = loaded(name, files)
    family.loras.use(used({"chalk.v2": 0.7, "ink": 1.0}))
    alone = begin_steps(family, spec)
    family.step([alone])
    family.step([alone])
    for latents in ranks.run(degree, step_together, name, files, spec):
        assert error(latents, alone.latents) <= TOLERANCE


def test_one_that_was_removed_can_be_added_again(files: Mapping[str, Mapping[str, Path]]) -> None:
    family, spec = loaded("flux", files), tiny.spec(steps=2)
    family.loras.use(used({"ink": 1.0}))
    family.loras.remove("ink")
    assert np.array_equal(tiny.pixels(draw(family, spec)), stock("flux", files, {}, spec))
    family.loras.add("ink", files["flux"]["ink"])
    family.loras.use(used({"ink": 1.0}))
    assert np.array_equal(tiny.pixels(draw(family, spec)), stock("flux", files, {"ink": 1.0}, spec))


def test_what_an_added_one_changes_and_how_large_it_is(files: Mapping[str, Mapping[str, Path]]) -> None:
    family = plain("sdxl")
    ink, chalk = (family.loras.add(name, file) for name, file in files["sdxl"].items())
    assert ink.changes == {"unet", "text_encoder"}
    assert chalk.changes == {"unet"}
    assert chalk.num_bytes == sum(one.nbytes for one in load_file(files["sdxl"]["chalk.v2"]).values())


@pytest.mark.parametrize("other", ["sdxl", "flux", "cut", "absent", "text", "pointer"])
def test_a_file_that_does_not_fit_is_refused_and_leaves_no_trace(
    other: str, files: Mapping[str, Mapping[str, Path]], tmp_path: Path
) -> None:
    whole = files["flux"]["ink"].read_bytes()
    wrong = {"sdxl": files["sdxl"]["ink"], "flux": files["flux"]["ink"], "absent": tmp_path / "absent.safetensors"}
    file = wrong.get(other, tmp_path / ("cut.safetensors" if other == "cut" else "notes.txt"))
    if other in ("cut", "text"):
        file.write_bytes(whole[: len(whole) // 2])
    if other == "pointer":
        file = tmp_path / "pointer.safetensors"
        file.write_bytes(tiny.LFS_POINTER)
    model = "sd3" if other == "flux" else "flux"
    family, spec = loaded(model, files), tiny.spec(steps=2)
    with pytest.raises(InvalidLora, match=rf"{file.name}.*`git lfs pull`" if other == "pointer" else file.name):
        family.loras.add("wrong", file)
    family.loras.use(used({"ink": 1.0}))
    assert np.array_equal(tiny.pixels(draw(family, spec)), stock(model, files, {"ink": 1.0}, spec))
