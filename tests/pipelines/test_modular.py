"""Directories of modular pipelines: they are loaded as the class that the index names, and no code of them is run."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import tilework
import tiny
from tilework.cli.app import app
from tilework.core.model import ModelSource
from tilework.pipelines import model_index
from tilework.pipelines.errors import ModelError, ModelNotFound, UnsafeWeights, UnsupportedModel
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import STOCK, read_model_index
from tilework.pipelines.modular.index import MODULAR_INDEX
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.registry import ZOO, build

MODEL = ZOO["modular-qwen-image"]
Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("modular")
    build(MODEL).save_pretrained(str(directory), safe_serialization=True, overwrite_modular_index=True)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model: its index still names the place where it was saved."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(directory: Path, **values: Any) -> None:
    path = directory / MODULAR_INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edited(**values: Any) -> Spoil:
    return lambda directory: edit(directory, **values)


def sourced(component: str, **values: Any) -> Spoil:
    """Change where the index says that a component is."""

    def spoil(directory: Path) -> None:
        library, kind, spec = json.loads((directory / MODULAR_INDEX).read_text())[component]
        edit(directory, **{component: [library, kind, spec | values]})

    return spoil


def weights(directory: Path, component: str) -> Path:
    (file,) = (directory / component).glob("*.safetensors")
    return file


def without_a_tensor(component: str) -> Spoil:
    def spoil(directory: Path) -> None:
        file = weights(directory, component)
        tensors = load_file(file)
        del tensors[min(tensors)]
        save_file(tensors, file, {"format": "pt"})

    return spoil


def test_a_directory_is_loaded_and_its_reference_is_the_modular_class(directory: Path) -> None:
    made = load(ModelSource(path=str(directory)))
    assert (made.info.family, made.info.name) == (MODEL.class_name, "model")
    stock = tilework.reference(str(directory))
    assert type(stock).__name__ == MODEL.class_name
    expected = requests.stock_pixels(MODEL, stock, seed=1)
    assert np.array_equal(requests.alone(made, requests.spec_of(MODEL, made, seed=1)), expected)


def test_the_guidance_scale_is_that_of_the_guider(directory: Path) -> None:
    made, stock = load(ModelSource(path=str(directory))), tilework.reference(str(directory))
    spec = replace(requests.spec_of(MODEL, made, seed=1), guidance_scale=1.7)
    usual = requests.stock_pixels(MODEL, stock, seed=1)
    stock.update_components(guider=stock.guider.new(guidance_scale=1.7))
    expected = requests.stock_pixels(MODEL, stock, seed=1)
    assert not np.array_equal(expected, usual)
    assert np.array_equal(requests.alone(made, spec), expected)


def test_a_directory_needs_no_network(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *call: calls.append(call))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *call: calls.append(call))
    load(ModelSource(path=str(directory)))
    assert calls == []


def test_weights_come_from_the_directory_wherever_it_was_saved(
    saved: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place that the index remembers still exists, with other weights."""
    file = weights(directory, "transformer")
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    (here, there) = (load(ModelSource(path=str(place)))._pipeline.transformer for place in (directory, saved))
    for name, tensor in here.state_dict().items():
        assert torch.allclose(tensor, there.state_dict()[name] + 1)


def test_weights_of_a_variant_are_loaded(directory: Path) -> None:
    for component in ("transformer", "vae"):
        file = weights(directory, component)
        file.rename(file.with_suffix(".fp16.safetensors"))
    assert read_model_index(str(directory)).variant == "fp16"
    load(ModelSource(path=str(directory)))


def test_a_directory_with_both_indices_is_the_classic_pipeline(directory: Path) -> None:
    components = {"transformer": ["diffusers", "QwenImageTransformer2DModel"], "vae": [None, None]}
    (directory / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline", **components}))
    index = read_model_index(str(directory))
    assert (index.is_modular, index.components["_class_name"]) == (False, "QwenImagePipeline")


CODE = "raise SystemExit('code of a directory was run')"


def custom_blocks(directory: Path) -> None:
    auto_map = {"ModularPipelineBlocks": "block.Blocks"}
    (directory / "modular_config.json").write_text(json.dumps({"auto_map": auto_map, "requirements": None}))
    (directory / "block.py").write_text(CODE)


def custom_model(directory: Path) -> None:
    """A component whose configuration names a class in a file beside its weights."""
    config = directory / "transformer" / "config.json"
    values = json.loads(config.read_text()) | {"auto_map": {"AutoModel": "mine.Mine"}, "_class_name": "Mine"}
    config.write_text(json.dumps(values))
    (directory / "transformer" / "mine.py").write_text(CODE)
    sourced("transformer", type_hint=["diffusers", "AutoModel"])(directory)


REFUSED: dict[str, tuple[Spoil, type[ModelError], str]] = {
    "blocks with code": (custom_blocks, UnsupportedModel, r"modular_config\.json: names blocks that are Python code"),
    "a model with code": (custom_model, ModelError, "cannot be loaded"),
    "unknown blocks": (
        edited(_blocks_class_name="MyBlocks"),
        UnsupportedModel,
        "names the blocks 'MyBlocks', which diffusers .* does not have.*'QwenImageAutoBlocks'",
    ),
    "blocks made by hand": (
        edited(_blocks_class_name="SequentialPipelineBlocks"),
        UnsupportedModel,
        "names the blocks 'SequentialPipelineBlocks'",
    ),
    "another class": (
        edited(_class_name="ModularPipeline"),
        UnsupportedModel,
        r"modular_model_index\.json names the pipeline class 'ModularPipeline', which is not served",
    ),
    "a component elsewhere": (
        lambda directory: [
            sourced("vae", pretrained_model_name_or_path="someone/vae")(directory),
            shutil.rmtree(directory / "vae"),
        ],
        ModelNotFound,
        "vae: is missing; .* takes vae from 'someone/vae', but a directory is read without any network",
    ),
    "a folder above": (sourced("vae", subfolder="../vae"), UnsupportedModel, r"has vae in the folder '\.\./vae'"),
    "a component of any library": (
        sourced("vae", type_hint=["os", "system"]),
        UnsupportedModel,
        "names vae a 'system' of 'os'; components are classes of diffusers or transformers",
    ),
    "no source": (edited(vae=["diffusers", "AutoencoderKL", None]), ModelNotFound, "has no source of vae"),
    "no VAE": (
        sourced("vae", pretrained_model_name_or_path=None),
        ModelNotFound,
        r"modular_model_index\.json names no vae, without which nothing can be drawn",
    ),
    "pickled weights": (
        lambda directory: weights(directory, "vae").rename(directory / "vae" / "diffusion_pytorch_model.bin"),
        UnsafeWeights,
        "pickled weights are not read",
    ),
    "no weights": (
        lambda directory: weights(directory, "transformer").unlink(),
        ModelNotFound,
        r"transformer: there is no \*\.safetensors",
    ),
    "damaged weights": (
        lambda directory: weights(directory, "transformer").write_bytes(b"no tensors"),
        ModelNotFound,
        r"transformer/.*\.safetensors: cannot be read",
    ),
    "a weight is missing": (without_a_tensor("transformer"), ModelNotFound, "transformer: its files hold no"),
    "a text weight is missing": (without_a_tensor("text_encoder"), ModelNotFound, "text_encoder: its files hold no"),
    "a sampler without seed": (
        sourced("scheduler", type_hint=["diffusers", "DPMSolverSDEScheduler"]),
        UnsupportedModel,
        "names the sampler DPMSolverSDEScheduler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_one_error(name: str, directory: Path) -> None:
    spoil, error, complaint = REFUSED[name]
    spoil(directory)
    with pytest.raises(error, match=complaint):
        load(ModelSource(path=str(directory), adapter=None))


@pytest.mark.parametrize("name", ["modular-flux", "modular-flux2-klein", "modular-krea2", "modular-sdxl"])
def test_a_picture_has_the_size_that_was_asked_for(name: str) -> None:
    """FLUX's blocks cut off what is no multiple of 16 px, without a word."""
    tiny.prepare()
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    side = 5 * made.info.side_multiple
    spec = replace(requests.spec_of(ZOO[name], made, seed=1), height=side, width=side)
    assert requests.alone(made, spec).size == side * side * 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [("modular-wan21", (81, 480, 832)), ("modular-ltx", (161, 512, 704)), ("modular-ltx2", (49, 512, 704))],
)
def test_a_model_of_clips_has_defaults(name: str, shape: tuple[int, int, int]) -> None:
    """Wan's blocks leave them to the pipeline, those of LTX differ, and those of LTX-2 have none."""
    info = StockPipeline(build(ZOO[name]), name, {}, "").info
    assert (info.default_frames, info.default_height, info.default_width) == shape


def test_a_clip_of_a_modular_pipeline_is_loaded_and_comes_as_pixels(tmp_path: Path) -> None:
    model = ZOO["modular-ltx-image"]
    made = requests.family(model, tmp_path)
    spec = requests.spec_of(model, made, seed=1)
    stock = tilework.reference(str(tmp_path))
    drawn = requests.alone(made, spec)
    assert drawn.size == spec.frames * spec.height * spec.width * 3
    assert np.array_equal(drawn, requests.stock_pixels(model, stock, seed=1))


def test_generate_draws_with_a_modular_directory(directory: Path, tmp_path: Path) -> None:
    options = ["--model", str(directory), "--size", "64x64", "--steps", "2", "-o", str(tmp_path / "out.png")]
    result = CliRunner().invoke(app, ["generate", "a red fox", *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_modular_model_of_the_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(_path: str, file: str) -> str:
        if file != MODULAR_INDEX:
            raise EntryNotFoundError("404")
        return str(saved / MODULAR_INDEX)

    monkeypatch.setattr(model_index, "_require_hub", lambda _path: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    index = read_model_index("someone/model")
    assert (index.is_modular, index.adapter, index.directory) == (True, STOCK, None)
    assert index.components["vae"] == ["diffusers", "AutoencoderKLQwenImage"]


def test_a_single_file_of_the_hub_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sourced("vae", pretrained_model_name_or_path="https://huggingface.co/a/b/blob/main/vae.ckpt")(directory)
    contents = json.loads((directory / MODULAR_INDEX).read_text())
    monkeypatch.setattr(model_index, "_hub_index", lambda _path: contents)
    with pytest.raises(UnsafeWeights, match="takes vae from the single file"):
        read_model_index("someone/model")
