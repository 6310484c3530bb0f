"""Attention kernels that a device has in this build of torch: each is called once, for each type of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilework.core.model import ATTENTIONS, DTYPES
from tilework.pipelines.errors import InvalidSource

Kernels = tuple[tuple[str, str], ...]
"""Types of numbers, and kernels that ran with them."""

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
_SIDE = 64
"""Number of tokens, and width of a head; every kernel supports it."""


def kernels_on(device: torch.device) -> Kernels:
    """Return the kernels that run on a device. This process uses the device from now on."""
    return tuple((dtype, name) for dtype in DTYPES for name in _BACKENDS if _runs(device, dtype, name))


def check_attention(attention: str, dtype: str, place: str, kernels: Collection[tuple[str, str]]) -> None:
    """Check that a place, such as a card of this name, has a kernel of attention. Raises InvalidSource otherwise."""
    if attention == ATTENTIONS[0] or (dtype, attention) in kernels:
        return
    there = [name for name in ATTENTIONS if name == ATTENTIONS[0] or (dtype, name) in kernels]
    raise InvalidSource(
        f"attention is {attention!r}, which {place} does not have for {dtype} with torch {torch.__version__}; choose "
        f"one of {', '.join(there)}"
    )


def _runs(device: torch.device, dtype: str, name: str) -> bool:
    tokens = torch.zeros(1, 1, _SIDE, _SIDE, dtype=getattr(torch, dtype), device=device)
    try:
        with warnings.catch_warnings(), sdpa_kernel(_BACKENDS[name]):
            warnings.simplefilter("ignore")  # The warnings say why it does not run.
            scaled_dot_product_attention(tokens, tokens, tokens).cpu()
    except RuntimeError:
        return False
    return True
