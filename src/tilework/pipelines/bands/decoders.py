"""Which decoders of diffusers a group can share, and which of their modules need all rows.

tests/pipelines/test_bands.py holds each of them to what one device makes.
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
"""By class of the autoencoder the class of its attentions, if it has some. One without a row runs at degree 1."""


def is_known(vae: Any) -> bool:
    """Whether ranks can have a band of its decode each."""
    return type(vae).__name__ in ATTENTIONS and not draws_noise(vae)


def draws_noise(vae: Any) -> bool:
    """Whether its decoder adds noise, as some of LTX do: ranks that decode parts would draw other numbers."""
    added = vae.config.get("decoder_inject_noise", False)
    return any(added) if isinstance(added, list | tuple) else bool(added)


def attentions_of(vae: Any) -> Iterator[nn.Module]:
    """The modules of a known decoder that need all rows."""
    wanted = ATTENTIONS[type(vae).__name__]
    return (module for module in vae.decoder.modules() if type(module).__name__ == wanted)
