"""The patch edge stitcher: it normalises patches into the frames that the next convolution reads, in one pass on GPUs.

Source: PatchedServe section 4.3. There a block of threads normalises a patch and writes its edges into the frames of
the neighbours. Here each patch fetches its frame: a few pixels are normalised twice, and all writes lie in a row.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tilework.patches.csp import Csp
from tilework.patches.operators import kernels_for, normalise_by, statistics, with_halo


def stitch(norm: nn.GroupNorm, patches: Tensor, csp: Csp, *, silu: bool) -> Tensor:
    """Normalise patches (P, C, h, w), apply SiLU if asked for, and add the pixels around: (P, C, h + 2, w + 2).

    Pixels outside of the picture are zero. GPUs use one kernel, which computes in float32 and rounds once. CPUs use
    three operators of torch, and so do GPUs where Triton is missing or finds no C compiler. Rejected for CPUs: SiLU
    that writes into the frames: it reads once less, and takes two to three times as long, since rows of patches are
    short.
    """
    return stitch_by(norm, patches, statistics(norm, patches, csp), csp, silu=silu)


def stitch_by(
    norm: nn.GroupNorm, patches: Tensor, of_pictures: tuple[Tensor, Tensor], csp: Csp, *, silu: bool
) -> Tensor:
    """Stitch by given `statistics`."""
    kernel = kernels_for(patches)
    if kernel is not None:
        stitched: Tensor = kernel.stitch(patches, *of_pictures, norm.weight, norm.bias, csp, silu=silu)
        return stitched
    normalised = normalise_by(norm, patches, of_pictures, csp.owners)
    return with_halo(functional.silu(normalised, inplace=True) if silu else normalised, csp)
