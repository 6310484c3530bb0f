"""Memory of a decode, planned without the model: from its worker's description of the autoencoder."""

from __future__ import annotations

import json
from typing import Any

import diffusers
import torch
from torch import nn

from tilework.core.model import DecodeMemory
from tilework.core.request import Shape
from tilework.pipelines.clips.decoders import decoder_of
from tilework.pipelines.clips.memory import TILING, decode_bytes

_META = torch.device("meta")


def decode_memory(vae: Any, most_bytes: int) -> DecodeMemory | None:
    """Return what `planned_bytes` needs to know of an autoencoder; None if nothing is known of its class."""
    if decoder_of(vae) is None:
        return None
    return DecodeMemory(
        autoencoder=type(vae).__name__,
        config=vae.to_json_string(),
        tiling=tuple((name, value) for name, value in vars(vae).items() if name.startswith(TILING)),
        dtype=str(vae.dtype).removeprefix("torch."),
        most_bytes=most_bytes,
        counts_kernels=vae.device.type == "cpu" and vae.dtype == torch.float32,
    )


def planned_bytes(memory: DecodeMemory, shape: Shape, degree: int) -> int:
    """Return the least memory of a decode on each of `degree` devices, with a band of rows each; see `decode_bytes`.

    Data that they get from each other is not counted. Tiles take as much as on one device.
    """
    with _META:
        vae: Any = getattr(diffusers, memory.autoencoder).from_config(json.loads(memory.config))
    nn.Module.to(vae, getattr(torch, memory.dtype))
    for name, value in memory.tiling:
        setattr(vae, name, value)
    decoder = decoder_of(vae)
    assert decoder is not None
    side = decoder.scales(vae)[1]
    rows = shape.height // side if memory.in_tiles else -(-shape.height // side // degree)
    tensors_alone = not memory.counts_kernels
    planned = decode_bytes(vae, shape.frames, rows * side, shape.width, tensors_alone=tensors_alone)
    assert planned is not None
    return planned
