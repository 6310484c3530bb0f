"""A directory from which no model can be loaded is one clear error, which names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.errors import ModelError, ModelNotFound, UnsupportedModel
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import INDEX, read_model_index

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of each kind, whole, by name."""
    tiny.prepare()
    parent = tmp_path_factory.mktemp("models")
    for name, build in {"sd3": tiny.build_sd3, "sdxl": tiny.build_sdxl, "sd": tiny.build_sd}.items():
        tiny.save(build(), parent / name, name)
    return parent


@pytest.fixture
def spoilt(saved: Path, tmp_path: Path) -> Callable[[str, Spoil], Path]:
    def make(name: str, spoil: Spoil) -> Path:
        directory = Path(shutil.copytree(saved / name, tmp_path / "model"))
        spoil(directory)
        return directory

    return make


def edit(file: str, directory: Path, **values: Any) -> None:
    """Change values of a JSON file; those that are ... are removed."""
    path = directory / file
    contents = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in contents.items() if value is not ...}))


def edited(file: str, **values: Any) -> Spoil:
    return partial(edit, file, **values)


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def rewritten(component: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Change the tensors of a component's weights."""

    def spoil(directory: Path) -> None:
        file = weights_of(directory / component)
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return spoil


def renamed(variant: str, *components: str) -> Spoil:
    def spoil(directory: Path) -> None:
        for component in components:
            file = weights_of(directory / component)
            file.rename(file.with_suffix(f".{variant}.safetensors"))

    return spoil


def add_lora(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("to_q.weight")).removesuffix("weight")
    tensors[f"{name}base_layer.weight"] = tensors.pop(f"{name}weight")
    tensors[f"{name}lora_A.default.weight"] = torch.zeros(2, 32)


def shrink(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.zeros(3)


MODELS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
NORM = "text_model.final_layer_norm.weight"
BY_FILES: dict[str, tuple[str, Spoil, type[ModelError], str]] = {
    "T5 is deleted": (
        "sd3",
        lambda directory: shutil.rmtree(directory / "text_encoder_3"),
        ModelNotFound,
        r'text_encoder_3: is missing.*T5EncoderModel.*set "text_encoder_3" to \[null, null\]',
    ),
    "an empty tokenizer": (
        "sd3",
        lambda directory: [file.unlink() for file in (directory / "tokenizer").iterdir()],
        ModelNotFound,
        "tokenizer: is missing or empty",
    ),
    "a tokenizer without words": (
        "sd3",
        lambda directory: (directory / "tokenizer" / "tokenizer.json").unlink(),
        ModelNotFound,
        "tokenizer: there is no vocabulary",
    ),
    "a list of classes": (
        "sd3",
        edited(INDEX, _class_name=["a", "StableDiffusion3Pipeline"]),
        UnsupportedModel,
        r"names the pipeline class \['a', 'StableDiffusion3Pipeline'\], which is not served",
    ),
    "a LoRA": (
        "sd3",
        rewritten("transformer", add_lora),
        UnsupportedModel,
        r"transformer/.*safetensors: holds a LoRA that is not fused \(.*\); fuse it with",
    ),
    "a sampler without a seed": (
        "sdxl",
        edited(INDEX, scheduler=["diffusers", "DPMSolverSDEScheduler"]),
        UnsupportedModel,
        "sampler DPMSolverSDEScheduler, which draws noise that no seed decides",
    ),
    "truncated weights": (
        "sd3",
        lambda directory: (file := weights_of(directory / "vae")).write_bytes(file.read_bytes()[:-100]),
        ModelNotFound,
        r"vae/.*safetensors: cannot be read .*; fetch the model again",
    ),
    "weights that were not pulled": (
        "sd3",
        lambda directory: weights_of(directory / "vae").write_bytes(tiny.LFS_POINTER),
        ModelNotFound,
        r"vae/.*safetensors: is a pointer of Git LFS, not the file itself; run `git lfs pull` in its directory",
    ),
    "pickled weights that were not pulled": (
        "sd3",
        lambda directory: [
            weights_of(directory / "vae").unlink(),
            (directory / "vae" / "diffusion_pytorch_model.bin").write_bytes(tiny.LFS_POINTER),
        ],
        ModelNotFound,
        r"vae/.*bin: is a pointer of Git LFS",
    ),
    "a vocabulary that was not pulled": (
        "sd3",
        lambda directory: (directory / "tokenizer" / "tokenizer.json").write_bytes(tiny.LFS_POINTER),
        ModelNotFound,
        r"tokenizer/tokenizer\.json: is a pointer of Git LFS",
    ),
    "a vocabulary of another format that was not pulled": (
        "sd3",
        lambda directory: (directory / "tokenizer_3" / "spiece.model").write_bytes(tiny.LFS_POINTER),
        ModelNotFound,
        r"tokenizer_3/spiece\.model: is a pointer of Git LFS",
    ),
    "no configuration": (
        "sd3",
        lambda directory: (directory / "vae" / "config.json").unlink(),
        ModelNotFound,
        r"vae: there is no config\.json",
    ),
    "no weights": (
        "sd3",
        lambda directory: weights_of(directory / "vae").unlink(),
        ModelNotFound,
        r"vae: there is no \*\.safetensors",
    ),
    "half a configuration": (
        "sd3",
        lambda directory: (directory / "vae" / "config.json").write_text("{"),
        ModelNotFound,
        r"vae/config\.json: cannot be read as JSON",
    ),
    "a list for a configuration": (
        "sd3",
        lambda directory: (directory / "vae" / "config.json").write_text("[]"),
        ModelNotFound,
        r"vae/config\.json: holds a list",
    ),
    "two variants": (
        "sd3",
        lambda directory: (renamed("fp16", "vae")(directory), renamed("bf16", "transformer")(directory)),
        ModelNotFound,
        r"different variants only \(bf16, fp16\)",
    ),
}
BY_LOADING: dict[str, tuple[str, Spoil, type[ModelError], str]] = {
    "a weight is missing": (
        "sd3",
        rewritten("transformer", lambda tensors: tensors.pop("norm_out.linear.weight")),
        ModelNotFound,
        r"transformer: its files hold no norm_out\.linear\.weight",
    ),
    "a weight of a text encoder is missing": (
        "sd3",
        rewritten("text_encoder", lambda tensors: tensors.pop(NORM)),
        ModelNotFound,
        rf"text_encoder: its files hold no {NORM}",
    ),
    "a weight of a text encoder has another shape": (
        "sd3",
        rewritten("text_encoder", partial(shrink, name=NORM)),
        ModelNotFound,
        rf"text_encoder: its files hold no {NORM} of the shape",
    ),
    "no autoencoder": ("sd3", edited(INDEX, vae=[None, None]), ModelNotFound, "names no vae"),
    "a component is not named": ("sd3", edited(INDEX, vae=...), ModelNotFound, "model: cannot be loaded"),
    "an unknown class": (
        "sd3",
        edited(INDEX, transformer=["diffusers", "NoSuchTransformer"]),
        ModelNotFound,
        "NoSuchTransformer",
    ),
    "a configuration of nonsense": (
        "sd3",
        edited("transformer/config.json", num_layers="two"),
        UnsupportedModel,
        "model: cannot be loaded; its files do not fit its classes",
    ),
    "a size of nonsense": (
        "sdxl",
        edited("unet/config.json", sample_size=[8, 8, 8]),
        UnsupportedModel,
        r"unet/config\.json: sample_size is \[8, 8, 8\]; write one number, or \[height, width\]",
    ),
}


@pytest.mark.parametrize("name", BY_FILES)
def test_what_the_files_show_is_refused_before_anything_is_loaded(
    name: str, spoilt: Callable[[str, Spoil], Path]
) -> None:
    model, spoil, error, words = BY_FILES[name]
    with pytest.raises(error, match=words):
        read_model_index(str(spoilt(model, spoil)))


@pytest.mark.parametrize("name", BY_LOADING)
def test_what_loading_shows_is_one_error_with_the_place(name: str, spoilt: Callable[[str, Spoil], Path]) -> None:
    model, spoil, error, words = BY_LOADING[name]
    with pytest.raises(error, match=words):
        load(ModelSource(path=str(spoilt(model, spoil))))


@pytest.mark.parametrize("components", [MODELS, MODELS[:1]], ids=["all", "one"])
def test_weights_in_files_of_a_variant_are_loaded(
    components: tuple[str, ...], saved: Path, spoilt: Callable[[str, Spoil], Path]
) -> None:
    directory = spoilt("sd3", renamed("fp16", *components))
    assert read_model_index(str(directory)).variant == "fp16"
    assert drawn(directory).equal(drawn(saved / "sd3"))


def test_whole_weights_are_preferred_to_a_variant(spoilt: Callable[[str, Spoil], Path]) -> None:
    directory = spoilt("sd3", lambda directory: None)
    for component in MODELS:
        file = weights_of(directory / component)
        shutil.copy(file, file.with_suffix(".fp16.safetensors"))
    assert read_model_index(str(directory)).variant is None


def drawn(directory: Path) -> torch.Tensor:
    family = load(ModelSource(path=str(directory)))
    state = tiny.begin(family, tiny.spec(steps=1))
    tiny.finish(family, state)
    return state.latents


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_a_size_may_be_a_list_of_height_and_width(model: str, spoilt: Callable[[str, Spoil], Path]) -> None:
    directory = spoilt(model, edited("unet/config.json", sample_size=[8, 12]))
    (directory / "tilework.json").unlink()
    info = load(ModelSource(path=str(directory))).info
    assert (info.default_height, info.default_width, info.max_side) == (64, 96, 192)


def test_an_odd_size_becomes_the_next_smaller_one_that_can_be_drawn(spoilt: Callable[[str, Spoil], Path]) -> None:
    directory = spoilt("sd3", edited("transformer/config.json", sample_size=9))
    (directory / "tilework.json").unlink()
    info = load(ModelSource(path=str(directory))).info
    assert (info.default_height, info.default_width) == (64, 64)
