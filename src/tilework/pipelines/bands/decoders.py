"""Decoders of diffusers that a group can share, and their modules that need all rows.

tests/pipelines/test_bands.py checks each of them against the result of one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

ATTENTIONS: Mapping[str, str | None] = {
    "AutoencoderKL": "Attention",
    "AutoencoderKLCogVideoX": None,
    "AutoencoderKLFlux2": "Attention",
    "AutoencoderKLHunyuanVideo15": "HunyuanVideo15AttnBlock",
    "AutoencoderKLLTX2Video": None,
    "AutoencoderKLLTXVideo": None,
    "AutoencoderKLQwenImage": "QwenImageAttentionBlock",
    "AutoencoderKLWan": "WanAttentionBlock",
}
"""Classes of attentions, if any, by class of the autoencoder. A class without a row runs at degree 1."""


def is_known(vae: Any) -> bool:
    """Return whether each rank can decode a band."""
    return type(vae).__name__ in ATTENTIONS and not draws_noise(vae)


def draws_noise(vae: Any) -> bool:
    """Return whether the decoder adds noise, as some of LTX do: ranks that decode parts would draw other numbers."""
    added = vae.config.get("decoder_inject_noise", False)
    return any(added) if isinstance(added, list | tuple) else bool(added)


def attentions_of(vae: Any) -> Iterator[nn.Module]:
    """Return the modules of a known decoder that need all rows."""
    wanted = ATTENTIONS[type(vae).__name__]
    return (module for module in vae.decoder.modules() if type(module).__name__ == wanted)
