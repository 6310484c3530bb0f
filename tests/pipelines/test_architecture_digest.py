"""What the cost of a model depends on: its configurations, and neither its weights nor what it is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilework.core.model import ModelSource
from tilework.pipelines.identity import architecture, model_identity

FILES: dict[str, dict[str, Any]] = {
    "model_index.json": {
        "_class_name": "StableDiffusionXLPipeline",
        "_diffusers_version": "0.19.0",
        "_name_or_path": "base",
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "safety_checker": [None, None],
    },
    "scheduler/scheduler_config.json": {"_class_name": "EulerDiscreteScheduler", "beta_end": 0.012},
    "text_encoder/config.json": {"hidden_size": 32, "torch_dtype": "float32", "eos_token_id": 2},
    "tokenizer/tokenizer_config.json": {"model_max_length": 77, "name_or_path": "base"},
    "tokenizer/vocab.json": {"a": 0},
    "unet/config.json": {"_class_name": "UNet2DConditionModel", "layers": 2, "attention": {"heads": 8}},
    "tilework.json": {"name": "base", "height": 128},
}
Change = Callable[[dict[str, dict[str, Any]]], object]


def source(place: Path, change: Change = lambda _files: None, weights: bytes = b"1") -> ModelSource:
    """A model of these files, after a change."""
    files = json.loads(json.dumps(FILES))
    change(files)
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(content))
    (place / "unet" / "weights.safetensors").write_bytes(weights)
    (place / "README.md").write_text(f"made by {place.name}")
    return ModelSource(path=str(place))


SAME: dict[str, Change] = {
    "only weights": lambda _files: None,
    "name": lambda files: files["tilework.json"].update(name="anime"),
    "versions": lambda files: files["model_index.json"].update(_diffusers_version="0.30", _name_or_path="anime"),
    "dtype of the files": lambda files: files["text_encoder/config.json"].update(torch_dtype="float16", eos_token_id=7),
    "words": lambda files: files["tokenizer/vocab.json"].update(b=1),
    "sampler of as many passes": lambda files: (
        files["model_index.json"].update(scheduler=["diffusers", "DPMSolverMultistepScheduler"]),
        files["scheduler/scheduler_config.json"].update(_class_name="DPMSolverMultistepScheduler", beta_end=1),
    ),
}
OTHER: dict[str, Change] = {
    "layers": lambda files: files["unet/config.json"].update(layers=3),
    "heads": lambda files: files["unet/config.json"].update(attention={"heads": 4}),
    "class": lambda files: files["model_index.json"].update(unet=["diffusers", "UNet2DModel"]),
    "length of prompts": lambda files: files["tokenizer/tokenizer_config.json"].update(model_max_length=512),
    "default size": lambda files: files["tilework.json"].update(height=256),
    "sampler of two passes": lambda files: files["model_index.json"].update(
        scheduler=["diffusers", "HeunDiscreteScheduler"]
    ),
    "a component": lambda files: files["model_index.json"].update(image_encoder=["transformers", "CLIPVisionModel"]),
}


@pytest.mark.parametrize("change", SAME)
def test_models_whose_steps_cost_the_same_have_one_architecture(tmp_path: Path, change: str) -> None:
    base, tuned = source(tmp_path / "base"), source(tmp_path / "tuned", SAME[change], b"12")
    assert model_identity(base) != model_identity(tuned)
    assert architecture(base) == architecture(tuned)


@pytest.mark.parametrize("change", OTHER)
def test_what_changes_the_cost_is_another_architecture(tmp_path: Path, change: str) -> None:
    assert architecture(source(tmp_path / "base")) != architecture(source(tmp_path / "other", OTHER[change]))


def test_settings_and_code_are_a_part_of_it(tmp_path: Path) -> None:
    base = source(tmp_path / "base")
    known = architecture(base)
    assert known.startswith("StableDiffusionXLPipeline@")
    others = [replace(base, vae_tiling=True), replace(base, compiles=True), replace(base, quantize=(("", "fp8"),))]
    assert len({known, *map(architecture, others)}) == 4
    (tmp_path / "base" / "unet" / "model.py").write_text("class UNet: ...")
    assert architecture(base) != known


def test_a_model_without_an_index_is_its_own_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    mine = ModelSource(path=str(tmp_path / "mine"), adapter="mine:Mine")
    assert architecture(mine) == model_identity(mine)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    unknown = ModelSource(path="some/model")
    assert architecture(unknown) == model_identity(unknown) == "some/model"


def test_a_model_from_the_hub_has_the_architecture_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache, commit = tmp_path / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    source(cache / "snapshots" / commit)
    assert architecture(ModelSource(path="some/model")) == architecture(source(tmp_path / "base"))
