"""The operators of a denoiser that look beyond a patch. All others (linear layers, activations, 1x1) work on patches
unchanged.

Exact up to rounding, unlike PatchedServe's: every value that crosses an edge is of the same layer and the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, scaled_dot_product_attention

from tilework.core.packing import IMAGE
from tilework.patches.csp import DIRECTIONS, Csp

_UP, _LEFT, _RIGHT, _DOWN = (DIRECTIONS.index(step) for step in ((-1, 0), (0, -1), (0, 1), (1, 0)))


def with_halo(patches: Tensor, csp: Csp) -> Tensor:
    """Patches (P, C, h, w) with the pixels around them, (P, C, h + 2, w + 2); zero outside of the picture.

    The corners, which belong to the four diagonal neighbours, come with the rows of those above and below, whose own
    sides are in place by then.
    """
    count, channels, rows, columns = patches.shape
    wide = patches.new_empty(count + 1, channels, rows + 2, columns + 2)
    wide[-1] = 0  # Read for NO_PATCH.
    result = wide[:-1]
    result[:, :, 1:-1, 1:-1] = patches
    result[:, :, 1:-1, 0] = wide[:, :, 1:-1, -2].index_select(0, csp.sources[_LEFT])
    result[:, :, 1:-1, -1] = wide[:, :, 1:-1, 1].index_select(0, csp.sources[_RIGHT])
    result[:, :, 0] = wide[:, :, -2].index_select(0, csp.sources[_UP])
    result[:, :, -1] = wide[:, :, 1].index_select(0, csp.sources[_DOWN])
    return result


def convolve(convolution: nn.Conv2d, patches: Tensor, csp: Csp) -> Tensor:
    """See `core.packing.Layout.convolve`."""
    return convolve_framed(convolution, with_halo(patches, csp))


def convolve_framed(convolution: nn.Conv2d, framed: Tensor) -> Tensor:
    """The same for patches that have the pixels around them, (P, C, h + 2, w + 2)."""
    assert convolution.kernel_size == (3, 3)
    assert convolution.padding == (1, 1)
    assert all(side % convolution.stride[0] == 0 for side in framed.shape[2:])
    return conv2d(framed, convolution.weight, convolution.bias, convolution.stride, groups=convolution.groups)


def statistics(norm: nn.GroupNorm, patches: Tensor, csp: Csp) -> tuple[Tensor, Tensor]:
    """Mean, and variance with epsilon, of each picture and group of channels: (R, G) each, of float32.

    All patches are of one size, so a picture's moments are the means of those of its patches. These few numbers are
    averaged in float64: squares do not cancel, and TF32 cannot round them. Rejected: adding rows by index, whose order,
    and so rounding, differs from run to run on GPUs.
    """
    of_patch, variance = _moments(norm, patches)
    of_patch = of_patch.double()
    moments = torch.cat([of_patch, torch.addcmul(variance.double(), of_patch, of_patch)], dim=1)
    mean, second = (csp.averages @ moments).chunk(2, dim=1)
    return mean.float(), torch.addcmul(second, mean, mean, value=-1).float()


def _moments(norm: nn.GroupNorm, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and variance with epsilon, of each patch and group of channels: (P, G) each."""
    kernels = kernels_for(patches)
    if kernels is not None:
        mean, variance = kernels.moments(patches, norm.num_groups, norm.eps)
        return mean, variance
    count, channels = patches.shape[:2]
    pixels = patches[0, 0].numel()
    # It gives the statistics and a result that is thrown away, and yet takes a tenth of `var_mean` on CPUs.
    _, mean, scale = torch.native_group_norm(
        patches.float().contiguous(), None, None, count, channels, pixels, norm.num_groups, norm.eps
    )
    return mean, scale.double().pow(-2)  # It is one over the root of variance and epsilon.


def kernels_for(patches: Tensor) -> ModuleType | None:
    """The kernels for the device of these patches; None on CPUs, and where Triton is not installed."""
    return _kernels() if patches.is_cuda else None


@cache
def _kernels() -> ModuleType | None:
    """Imported on first use: Triton is optional."""
    if find_spec("triton") is None:
        return None
    from tilework.patches import stitch_kernel

    return stitch_kernel


def normalise(norm: nn.GroupNorm, patches: Tensor, csp: Csp) -> Tensor:
    """See `core.packing.Layout.normalise`."""
    count, channels = patches.shape[:2]
    per_channel = torch.stack(statistics(norm, patches, csp)).repeat_interleave(channels // norm.num_groups, dim=2)
    mean, variance = per_channel.index_select(1, csp.owners).flatten(1)
    # With given statistics, both kinds of normalisation are one; every channel of every patch is a channel of its own.
    normalised = batch_norm(
        patches.reshape(1, count * channels, *patches.shape[2:]),
        mean,
        variance,  # With epsilon.
        norm.weight.float().repeat(count),
        norm.bias.float().repeat(count),
        eps=torch.finfo(torch.float32).tiny,  # Adds nothing. Some versions of torch refuse zero.
    )
    return normalised.view_as(patches)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    csp: Csp,
    queries: Mapping[str, int],
    keys: Mapping[str, int],
) -> Tensor:
    """See `core.packing.Layout.attend`. Pictures with equal numbers of patches share a call, whatever their shape."""
    output = torch.empty_like(query)
    for pictures, patches in csp.runs:
        rows = pictures.stop - pictures.start
        asked, known = (_slices(parts, csp, pictures, patches) for parts in (queries, keys))
        attended = scaled_dot_product_attention(
            _rows(query, asked, rows), _rows(key, known, rows), _rows(value, known, rows), scale=scale
        )
        pieces = attended.split_with_sizes([(part.stop - part.start) // rows for part in asked], dim=2)
        for part, piece in zip(asked, pieces, strict=True):
            torch.unflatten(output[0, :, part], 1, (rows, -1)).copy_(piece.transpose(0, 1))
    return output


def _slices(parts: Mapping[str, int], csp: Csp, pictures: slice, patches: slice) -> list[slice]:
    """Where the tokens of a run of pictures lie in each part of a sequence."""
    slices, begin = [], 0
    for name, num_tokens in parts.items():
        run, total = (patches, csp.num_patches) if name == IMAGE else (pictures, len(csp.order))
        each = num_tokens // total
        slices.append(slice(begin + run.start * each, begin + run.stop * each))
        begin += num_tokens
    return slices


def _rows(sequence: Tensor, parts: list[slice], rows: int) -> Tensor:
    """A run's tokens, (rows, H, tokens, D), out of the sequence of the whole batch, (1, H, L, D)."""
    pieces = [torch.unflatten(sequence[0, :, part], 1, (rows, -1)).transpose(0, 1) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
