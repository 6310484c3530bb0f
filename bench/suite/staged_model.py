"""A model whose stages do not fit on a device together, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from suite.cases.weights import save_model

_DECODER_CHANNELS = (32, 128, 768)
_SIZES = {"height": 64, "width": 64}  # By default: sizes near these are measured when a server starts.


def save_staged_model(directory: Path, layers: int) -> dict[str, int]:
    """`shapes` with a denoiser of `layers` of about 100 MB in float32, and a VAE of 310 MB.

    Returns the bytes of each component on a device, by its name.
    """
    import torch
    from diffusers import AutoencoderKL

    save_model(directory, layers)
    settings = directory / "tilework.json"
    settings.write_text(json.dumps(json.loads(settings.read_text("utf-8")) | _SIZES), "utf-8")
    place = directory / "vae"
    config: dict[str, Any] = json.loads((place / "config.json").read_text("utf-8"))
    options = {name: value for name, value in config.items() if not name.startswith("_")}
    shutil.rmtree(place)
    torch.manual_seed(1)
    AutoencoderKL(**options | {"block_out_channels": _DECODER_CHANNELS}).save_pretrained(place)
    return {
        part: sum(path.stat().st_size for path in (directory / part).glob("*.safetensors"))
        for part in ("text_encoder", "text_encoder_2", "transformer", "vae")
    }
