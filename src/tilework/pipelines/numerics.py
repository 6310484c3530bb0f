"""The settings of torch that decide the last bits of a picture."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from tilework.core.model import ATTENTIONS


def pin_numerics(threads: int, attention: str = ATTENTIONS[0]) -> None:
    """Set how this process computes, the same on every machine; call it before anything is computed.

    On CPUs the number of threads decides the order in which sums are made; torch chooses it by the number of cores.

    On GPUs torch computes convolutions of float32 in TF32 by default, which keeps 10 bits of each factor. TF32 is off
    here, so that the bounds of float32 hold (docs/exactness.md); bfloat16 is the choice for speed. A stock pipeline
    with torch's defaults differs in these bits.

    The attention back end is diffusers' default, whatever the environment variable DIFFUSERS_ATTN_BACKEND says: torch's
    `scaled_dot_product_attention`, which U-Nets call directly. Torch chooses its kernel in each call by device, dtype,
    shape, mask and strides of the inputs, and by switches of the process that are not touched here (such as
    `torch.backends.cuda.enable_flash_sdp`). So one request alone has the same kernel each time. Another `attention` of
    `ATTENTIONS` is one kernel for all calls of transformers (diffusers' `_native_cudnn` and the like). All of them are
    one call of torch's attention, which `hooks` relies on.
    """
    torch.set_num_threads(threads)
    name = attention if attention == ATTENTIONS[0] else f"_native_{attention}"
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName(name))
    # The older of torch's two interfaces: after the newer one has set them, libraries that read these fail.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
