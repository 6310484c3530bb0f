"""A model whose stages do not fit on a device together, and which waits where an accelerator would compute.

Weights and their loads are real. The time of a step and of a decode is a sleep: four workers that computed would share
two cores, as no four devices do, and other work of the machine would decide how long stages take.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from tilework.pipelines.model_index import shipped_directory

ADAPTER = "suite.waiting_model:WaitingPipeline"
DENOISER_BYTES, VAE_BYTES = 420_000_000, 310_000_000
_SIZES = {"height": 32, "width": 32}  # By default: sizes near these are measured when a server starts.
_STEP_S, _DECODE_S = 0.25, 0.45  # At 16 px; in proportion to the side.
_LEAST_SIDE = 4  # Of latents.


class WaitingPipeline(StableDiffusion3Pipeline):  # type: ignore[misc]  # It has no types.
    """Stable Diffusion 3 whose denoiser and decoder wait before they compute, with weights that they do not use."""

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        text_encoder_3: Any,
        tokenizer_3: Any,
        image_encoder: Any = None,
        feature_extractor: Any = None,
    ) -> None:
        super().__init__(
            transformer=transformer,
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            text_encoder_3=text_encoder_3,
            tokenizer_3=tokenizer_3,
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
        )
        for module, num_bytes in ((transformer, DENOISER_BYTES), (vae, VAE_BYTES)):
            module.register_buffer("unused", torch.full((num_bytes // 4,), 1.0))
        transformer.register_forward_pre_hook(_waiting(_STEP_S), with_kwargs=True)
        vae.decoder.register_forward_pre_hook(_waiting(_DECODE_S), with_kwargs=True)


def _waiting(seconds: float) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def wait(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        latents: Tensor = args[0] if args else options["hidden_states"]
        time.sleep(seconds * latents.shape[-1] / _LEAST_SIDE)

    return wait


def save_waiting_model(directory: Path) -> None:
    """`shapes`, to be served by `ADAPTER`."""
    shutil.copytree(shipped_directory(), directory)
    settings = directory / "tilework.json"
    settings.write_text(json.dumps(json.loads(settings.read_text("utf-8")) | _SIZES), "utf-8")
