"""What can be loaded, how it lies in memory, and what is said about the rest."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines import loading, model_index
from tilework.pipelines.errors import (
    InvalidDefaults,
    InvalidSource,
    ModelError,
    ModelNotFound,
    UnsafeWeights,
    UnsupportedModel,
)
from tilework.pipelines.loading import load


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def modules(family: Any) -> list[torch.nn.Module]:
    return [part for part in family._pipeline.components.values() if isinstance(part, torch.nn.Module)]


def test_info_has_the_limits_that_the_api_needs(saved: Path) -> None:
    info = load(ModelSource(path=str(saved))).info
    assert (info.name, info.family) == ("tiny-sd3", "sd3")
    assert (info.side_multiple, info.max_side) == (16, 192)
    assert (info.default_height, info.default_width) == (64, 64)
    assert (info.default_steps, info.default_guidance_scale) == (4, 7.0)
    assert 100_000 < info.parameters < 1_000_000
    assert torch.__version__ in info.library


@pytest.mark.parametrize(
    ("build", "family", "two_passes", "max_degree", "stock"),
    [
        (tiny.build_sd3, "sd3", True, 4, (28, 7.0, 64, 192)),
        (tiny.build_flux, "flux", False, 5, (28, 3.5, 1024, 2048)),
        (tiny.build_sdxl, "sdxl", True, 2, (50, 5.0, 64, 128)),
        (tiny.build_sd, "sd", True, 2, (50, 7.5, 64, 128)),
        (partial(tiny.build_sdxl, distilled=True), "sdxl", False, 1, (50, 5.0, 64, 128)),
    ],
)
def test_info_of_each_family(
    build: Callable[[], Any],
    family: str,
    two_passes: bool,
    max_degree: int,
    stock: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    """A degree beyond the number of heads, twice with a second pass, would leave ranks without work."""
    build().save_pretrained(tmp_path)
    info = load(ModelSource(path=str(tmp_path))).info
    assert (info.family, info.two_passes, info.max_degree) == (family, two_passes, max_degree)
    assert (info.default_steps, info.default_guidance_scale, info.default_height, info.max_side) == stock
    assert info.side_multiple == (8 if family in ("sd", "sdxl") else 16)
    assert info.parameters < 1_000_000


def test_without_defaults_of_its_own_a_model_gets_those_of_the_stock_pipeline(directory: Path) -> None:
    (directory / "tilework.json").unlink()
    info = load(ModelSource(path=str(directory))).info
    assert (info.name, info.default_steps, info.default_guidance_scale) == ("model", 28, 7.0)
    assert (info.default_height, info.default_width, info.max_side) == (64, 64, 192)


def test_weights_lie_aligned_and_apart_from_the_file(saved: Path) -> None:
    for module in modules(load(ModelSource(path=str(saved)))):
        assert not module.training
        for tensor in (*module.parameters(), *module.buffers()):
            assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_that_of_the_source(saved: Path, dtype: str) -> None:
    family = load(ModelSource(path=str(saved), dtype=dtype))
    state = tiny.begin(family, tiny.spec(steps=1))
    tiny.finish(family, state)
    assert state.latents.dtype == getattr(torch, dtype)
    assert tiny.decode(family, state).height == 64


def test_a_directory_needs_no_network(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    from_pretrained = loading.DiffusionPipeline.from_pretrained

    def load_locally(path: str, **options: Any) -> Any:
        assert options["local_files_only"] is True
        return from_pretrained(path, **options)

    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", load_locally)
    monkeypatch.setattr(socket.socket, "connect", lambda *call: calls.append(call))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *call: calls.append(call))
    load(ModelSource(path=str(saved)))
    assert calls == []


def test_the_shipped_model_has_no_t5_and_loads() -> None:
    info = load(ModelSource(path="shapes")).info
    assert (info.name, info.side_multiple, info.default_height) == ("shapes", 8, 128)
    assert 3_000_000 < info.parameters < 8_000_000


def pickle_weights(file: Path, pickled: str) -> None:
    torch.save(load_file(file), file.with_name(pickled))
    file.unlink()


def refused_as_pickled(directory: Path) -> str:
    with pytest.raises(UnsafeWeights) as caught:
        load(ModelSource(path=str(directory)))
    return str(caught.value)


def test_pickled_weights_are_refused_with_the_command_that_converts_all_of_them(saved: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / """it's "here" $HOME"""))
    pickle_weights(directory / "vae" / "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.bin")
    pickle_weights(directory / "text_encoder" / "model.safetensors", "pytorch_model.bin")
    message = refused_as_pickled(directory)
    assert message.startswith(f"{directory / 'text_encoder' / 'pytorch_model.bin'}: pickled weights are not read")
    python, option, code = shlex.split(message.partition("convert them with: ")[2])
    assert (python, option) == ("python", "-c")
    exec(code, {})
    load(ModelSource(path=str(directory)))
    for file in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        before, after = load_file(saved / file), load_file(directory / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("pickled", "kind"),
    [
        ("diffusion_pytorch_model.ckpt", ["diffusers", "AutoencoderKL"]),
        ("diffusion_pytorch_model.bin", ["diffusers", "A; import os"]),
        ("diffusion_pytorch_model.bin", ["diffusers; import os", "A"]),
        ("diffusion_pytorch_model.a').b.bin", ["diffusers", "AutoencoderKL"]),
    ],
)
def test_there_is_no_command_from_names_that_are_none(directory: Path, pickled: str, kind: list[str]) -> None:
    """It would run what the directory says."""
    pickle_weights(directory / "vae" / "diffusion_pytorch_model.safetensors", pickled)
    index = directory / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"vae": kind}))
    message = refused_as_pickled(directory)
    assert "python" not in message
    assert "import" not in message
    assert message.endswith("fetch the model as safetensors")


def test_an_incomplete_model_is_refused(directory: Path) -> None:
    (directory / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=str(directory)):
        load(ModelSource(path=str(directory)))


def test_another_pipeline_class_is_refused_with_the_reason(directory: Path) -> None:
    index = json.loads((directory / "model_index.json").read_text())
    (directory / "model_index.json").write_text(json.dumps(index | {"_class_name": "MarigoldDepthPipeline"}))
    with pytest.raises(
        UnsupportedModel, match=r"'MarigoldDepthPipeline', which is not served \(no test.*`tilework classes` lists"
    ):
        load(ModelSource(path=str(directory)))


@pytest.mark.parametrize(
    ("defaults", "complaint"),
    [
        ({"step": 4}, "unknown key 'step'; known are name, steps"),
        ({"steps": 0}, "steps is 0; choose at least 1"),
        ({"steps": 4.0}, "steps is 4.0; write a whole number"),
        ({"steps": True}, "steps is True; write a whole number"),
        ({"guidance_scale": "7"}, "guidance_scale is '7'; write a number"),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan; write a number"),
        ({"guidance_scale": -1}, "guidance_scale is -1; choose at least 0"),
        ({"height": 72}, "height is 72; choose a multiple of 16"),
        ({"width": 128, "max_side": 96}, "width is 128; choose at most 96"),
        ({"max_side": 1024}, "max_side is 1024; choose at most 192"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513; choose at most 512"),
        ({"num_frames": 5}, "num_frames is 5; choose at most 1"),
        ({"name": ""}, "name is ''; write a text"),
        ({"words": ["red"]}, r"words is \['red'\]; write lists of single words in lower case by their kind"),
        ({"words": {"colour": "red"}}, "words is .*; write lists"),
        ({"words": {"colour": []}}, "words is .*; write lists"),
        ({"words": {"colour": ["Red"]}}, "words is .*; write lists"),
        ({"words": {"colour": ["dark red"]}}, "words is .*; write lists"),
    ],
)
def test_wrong_defaults_are_refused(directory: Path, defaults: dict[str, Any], complaint: str) -> None:
    tiny.write_defaults(directory, **defaults)
    with pytest.raises(InvalidDefaults, match=complaint):
        load(ModelSource(path=str(directory)))


@pytest.mark.parametrize("text", ["[]", "{"])
def test_defaults_that_are_no_object_are_refused(directory: Path, text: str) -> None:
    (directory / "tilework.json").write_text(text)
    with pytest.raises(InvalidDefaults, match=r"tilework\.json"):
        load(ModelSource(path=str(directory)))


def test_defaults_of_the_model_reach_its_info(directory: Path) -> None:
    tiny.write_defaults(directory, guidance_scale=3, max_side=96, height=32)
    info = load(ModelSource(path=str(directory))).info
    assert (info.default_guidance_scale, info.max_side, info.default_height) == (3.0, 96, 32)


@pytest.mark.parametrize(
    ("source", "error", "complaint"),
    [
        (ModelSource(path="/nowhere"), ModelNotFound, "'/nowhere', which does not exist; give a directory"),
        (ModelSource(path="./nowhere"), ModelNotFound, "'./nowhere', which does not exist; give a directory"),
        (ModelSource(path="/"), ModelNotFound, r"which has no model_index\.json; give a diffusers directory"),
        (ModelSource(path="/", dtype="int8"), InvalidSource, "dtype is 'int8'; choose one of float32"),
        (ModelSource(path="/", device="tape"), InvalidSource, "device is 'tape'; choose one of cpu, cuda"),
    ],
)
def test_wrong_sources_are_refused(source: ModelSource, error: type[ModelError], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        load(source)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("sdxl.safetensors", "a checkpoint in a single file, which .*; give a directory in diffusers' layout"),
        ("sdxl.CKPT", "a checkpoint in a single file"),
        ("model_index.json", "the index of a model; give its directory, '"),
        ("flow.py", r"a file of Python; if it defines a workflow, give .*flow\.py:NAME"),
        ("notes", r"a file; give a directory that holds model_index\.json, or a hub id"),
    ],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_file_is_no_model_and_is_named_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, complaint: str, is_relative: bool
) -> None:
    """Also where its name could be a hub id."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / name).touch()
    monkeypatch.chdir(tmp_path)
    path = f"models/{name}" if is_relative else str(folder / name)
    with pytest.raises(ModelNotFound, match=f"'{path}', which is {complaint}"):
        model_index.read_model_index(path)


def test_a_hub_id_is_asked_for_with_safetensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(path: str, **options: Any) -> Any:
        asked.update(options, path=path)
        return tiny.build_sd3()

    index = {"_class_name": "StableDiffusion3Pipeline", "text_encoder_3": [None, None]}
    monkeypatch.setattr(model_index, "_hub_index", lambda path: index)
    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", from_pretrained)
    assert load(ModelSource(path="someone/model")).info.name == "someone/model"
    assert asked["path"] == "someone/model"
    assert asked["use_safetensors"] is True
    assert asked["local_files_only"] is False
    assert asked["text_encoder_3"] is None
