"""The settings of torch that decide the last bits of a picture."""

from __future__ import annotations

import torch


def pin_numerics(threads: int) -> None:
    """Set how this process computes, the same on every machine; call it before anything is computed.

    On CPUs the number of threads decides the order in which sums are made; torch chooses it by the number of cores.

    On GPUs torch computes convolutions of float32 in TF32 by default, which keeps 10 bits of each factor. TF32 is off
    here, so that the bounds of float32 hold (docs/exactness.md); bfloat16 is the choice for speed. A stock pipeline
    with torch's defaults differs in these bits. No GPU has been measured.
    """
    torch.set_num_threads(threads)
    # The older of torch's two interfaces: after the newer one has set them, libraries that read these fail.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
