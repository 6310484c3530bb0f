"""Settings of torch that decide the last bits of an image, and the check for values that are no pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from tilework.core.model import ATTENTIONS

_REMEDY = (
    "serve the model with --dtype bfloat16 or float32, ask for smaller scales of guidance and LoRAs, or fetch the "
    "model again if its files may be damaged"
)


class NotFinite(ArithmeticError):
    """The values of a request are NaN or infinite; their pixels would be black or noise."""


def pin_numerics(threads: int, attention: str = ATTENTIONS[0]) -> None:
    """Set how this process computes, the same on every machine; call it before anything is computed.

    On CPUs the number of threads decides the order of sums; torch chooses it by the number of cores.

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
    # torch has two interfaces. Libraries that read these older ones fail if the newer one has set them.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite. Waits for the device.

    The least and the greatest value suffice, because a NaN becomes both. So the values are read once; `isfinite` takes
    20 times as long.
    """
    if values.is_meta or not values.is_floating_point() or not values.numel():
        return True
    extremes = torch.aminmax(values if values.itemsize > 1 else values.float())
    return bool(torch.isfinite(torch.stack(extremes)).all())


def require_finite(values: Tensor, what: str) -> None:
    """Check decoded values. Raises NotFinite if some are NaN or infinite."""
    if not is_finite(values):
        raise NotFinite(f"the decoded {what} has values that are NaN or infinite; {_REMEDY}")


def check_pictures(pipeline: Any) -> None:
    """Let a stock pipeline raise NotFinite instead of making pixels of values that are NaN or infinite.

    All images and frames pass a processor's `postprocess`, or the pipeline's own `numpy_to_pil`. Their bits stay.
    """
    for part in list(vars(pipeline).values()):
        if callable(getattr(part, "postprocess", None)):
            part.postprocess = _checked(part.postprocess)
    if hasattr(pipeline, "numpy_to_pil"):
        pipeline.numpy_to_pil = _checked(pipeline.numpy_to_pil)


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            values = torch.from_numpy(argument) if isinstance(argument, np.ndarray) else argument
            if isinstance(values, Tensor):
                require_finite(values, "image")
        return make(*args, **kwargs)

    return checked
