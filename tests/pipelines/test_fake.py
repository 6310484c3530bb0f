"""Model folders with random weights."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tiny
from quick import quick, quick_rows
from tilework.core.model import ModelSource
from tilework.pipelines.fake.component import FakeModel, Weights
from tilework.pipelines.fake.models import MODELS
from tilework.pipelines.fake.write import _save_weights, build, write_model
from tilework.pipelines.loading import load, load_stock
from tilework.pipelines.model_index import read_model_index

SMALL: dict[str, dict[str, object]] = {
    "text_encoder": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "text_encoder_2": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "unet": {
        "sample_size": 8,
        "block_out_channels": (32, 32, 64),
        "attention_head_dim": (2, 2, 4),
        "transformer_layers_per_block": 1,
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
    "vae": {"block_out_channels": (32, 32, 32, 32), "sample_size": 64, "layers_per_block": 1},
}
"""Sizes for SDXL at which a CPU draws in seconds."""


def small_sdxl() -> FakeModel:
    parts = dict(MODELS["SDXL"].components)
    for name, sizes in SMALL.items():
        part = parts[name]
        assert isinstance(part, Weights)
        more = {"projection_dim": 32} if name.startswith("text") else {}
        parts[name] = replace(part, config={**part.config, **sizes, **more})
    return replace(MODELS["SDXL"], components=parts)


def write(model: FakeModel, directory: Path, device: str) -> int:
    return write_model(model, directory, torch.float32, torch.device(device))


def test_a_folder_is_a_model_that_draws(tmp_path: Path) -> None:
    num_bytes = write(small_sdxl(), tmp_path, "cpu")
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert num_bytes <= files <= num_bytes * 1.01
    family = load(ModelSource(path=str(tmp_path)))
    state = tiny.begin(family, tiny.spec())
    tiny.iterate(family, state)
    pixels = tiny.pixels(tiny.decode(family, state))
    assert pixels.std() > 1  # A picture of noise, not of one colour.


def test_without_weights_all_names_and_shapes_are_there_and_no_room_is_taken(tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    assert write(small_sdxl(), full, "cpu") == write(small_sdxl(), empty, "meta")
    paths = [path.relative_to(full) for path in full.rglob("*.safetensors")]
    assert len(paths) == 4
    for path in paths:
        assert _shapes(empty / path) == _shapes(full / path)
    assert sum(path.stat().st_blocks * 512 for path in empty.rglob("*.safetensors")) < 1e6
    unet = load_stock(ModelSource(path=str(empty))).unet
    assert not any(parameter.any() for parameter in unet.parameters())


def test_a_host_holds_no_more_than_a_weight_beside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may lie in its memory, too. Each copy of a weight to the host is another tensor, as on a device."""
    copies: list[weakref.ref[torch.Tensor]] = []

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        assert not any(one() is not None for one in copies)
        copies.append(weakref.ref(copy := tensor.clone()))
        return copy

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", cpu)
        write(small_sdxl(), tmp_path, "cpu")
    assert len(copies) == sum(len(_shapes(path)) for path in tmp_path.rglob("*.safetensors"))


def test_a_file_has_the_values_of_a_module_whatever_their_types(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    buffers = {"is_set": torch.tensor([True, False, True]), "index": torch.arange(7), "scale": torch.tensor(0.5)}
    for name, value in {**buffers, "none": torch.empty(0, 4)}.items():
        module.register_buffer(name, value)
    module.weight.data = torch.randn(3, 5, dtype=torch.bfloat16).T
    file = tmp_path / "model.safetensors"
    num_bytes = _save_weights(module, file)
    found, places = load_file(file), json.loads(file.read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert found.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)
        assert places[name]["data_offsets"][0] % value.itemsize == 0
    assert num_bytes == sum(value.nbytes for value in found.values())


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "component", "number"),
    quick_rows(
        [("SDXL", "unet", 2.567e9), ("FLUX.1-dev", "text_encoder_2", 4.762e9), ("LTX-2", "connectors", 1.431e9)],
        [
            ("SDXL", "unet", 2.567e9),
            ("SD3-medium", "transformer", 2.028e9),
            ("SD3.5-large", "transformer", 8.057e9),
            ("FLUX.1-dev", "transformer", 11.90e9),
            ("FLUX.1-dev", "text_encoder_2", 4.762e9),
            ("FLUX.2-dev", "transformer", 32.22e9),
            ("FLUX.2-dev", "text_encoder", 24.01e9),
            ("Qwen-Image", "transformer", 20.43e9),
            ("Z-Image-Turbo", "transformer", 6.155e9),
            ("Wan2.2-T2V-A14B", "transformer_2", 14.29e9),
            ("HunyuanVideo-1.5", "transformer", 8.327e9),
            ("HunyuanVideo-1.5", "text_encoder_2", 0.2193e9),
            ("LTX-2", "transformer", 18.88e9),
            ("LTX-2", "connectors", 1.431e9),
            ("LTX-2", "text_encoder", 12.187e9),
        ],
    ),
)
def test_a_component_has_as_many_weights_as_its_model(name: str, component: str, number: float) -> None:
    part = MODELS[name].components[component]
    assert isinstance(part, Weights)
    module = build(part, torch.bfloat16, torch.device("meta"))
    assert sum(each.numel() for each in module.parameters()) == pytest.approx(number, rel=1e-3)


@pytest.mark.parametrize("name", quick(("SDXL", "FLUX.1-dev", "Wan2.2-T2V-A14B"), MODELS))
def test_the_folder_of_every_model_can_be_served(name: str, tmp_path: Path) -> None:
    write(MODELS[name], tmp_path, "meta")
    index = read_model_index(str(tmp_path))
    assert index.components["_class_name"] == MODELS[name].pipeline
    parts = {part for part in index.components if (tmp_path / part).is_dir()}
    assert parts == set(MODELS[name].components)


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError):
        write(MODELS["SDXL"], tmp_path, "meta")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
