"""LoRAs of tiny models, with random weights, as training scripts save them; and stock pipelines that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

ATTENTION = ("to_q", "to_k", "to_v")


def denoiser_of(pipeline: Any) -> Any:
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def save_lora(
    pipeline: Any,
    file: Path,
    seed: int,
    targets: Sequence[str] = ATTENTION,
    text_encoder: bool = False,
    rank: int = 4,
    part: str = "",
) -> Path:
    """A LoRA of a pipeline, which is spoilt by it: of these layers of its denoiser, and of its first text encoder.

    `part` names the denoiser if it is not `unet` or `transformer`.
    """
    torch.manual_seed(seed)
    kind = "unet" if hasattr(pipeline, "unet") else "transformer"
    layers = {f"{kind}_lora_layers": _weights(getattr(pipeline, part or kind), targets, rank)}
    if text_encoder:
        layers["text_encoder_lora_layers"] = _weights(pipeline.text_encoder, ("q_proj", "v_proj"), rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    type(pipeline).save_lora_weights(file.parent, weight_name=file.name, safe_serialization=True, **layers)
    return file


def use_stock(pipeline: Any, files: Mapping[str, Path], scales: Mapping[str, float]) -> Any:
    """The stock pipeline with these LoRAs, by stock means. PEFT's names have no dots."""
    for name, file in files.items():
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name.replace(".", "_"))
    pipeline.set_adapters([name.replace(".", "_") for name in scales], list(scales.values()))
    return pipeline


def _weights(module: Any, targets: Sequence[str], rank: int) -> dict[str, Any]:
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=list(targets))
    return dict(get_peft_model_state_dict(inject_adapter_in_model(config, module)))
