"""The operators of a denoiser that look beyond a patch. All others (linear layers, activations, 1x1) work on patches
unchanged.

Exact up to rounding, unlike PatchedServe's: every value that crosses an edge is of the same layer and the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, scaled_dot_product_attention

from tilework.patches.csp import DIRECTIONS, AttentionRun, Csp

_log = logging.getLogger(__name__)
_UP, _LEFT, _RIGHT, _DOWN = (DIRECTIONS.index(step) for step in ((-1, 0), (0, -1), (0, 1), (1, 0)))


def with_halo(patches: Tensor, csp: Csp) -> Tensor:
    """Return patches (P, C, h, w) with the pixels around them, (P, C, h + 2, w + 2); zero outside of the picture.

    Corners belong to the four diagonal neighbours. They come with the rows of the patches above and below, whose own
    sides are already in place by then.
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


def edges(patches: Tensor) -> Tensor:
    """Return what other patches see of patches (P, C, h, w), a view (P, 2 w + 2 h + 1, C).

    First and last row, first and last column, and a pixel of zeros for what is outside of the picture (`Csp.frames`).
    """
    sides = (patches[:, :, 0], patches[:, :, -1], patches[:, :, :, 0], patches[:, :, :, -1])
    outside = patches.new_zeros(*patches.shape[:2], 1)
    return torch.cat([*sides, outside], dim=2).transpose(1, 2)


def with_halo_by(patches: Tensor, of_all: Tensor, frames: Tensor) -> Tensor:
    """Apply `with_halo` to some patches (K, C, h, w), given the `edges` of all and the `Csp.frames` of these.

    Rejected: a lookup for each of the eight neighbours, which takes three times as many calls; small models wait for
    calls, not for pixels.
    """
    count, channels, rows, columns = patches.shape
    pixels = of_all.flatten(0, 1).index_select(0, frames.flatten()).view(count, -1, channels).transpose(1, 2)
    above, below, left, right = pixels.split_with_sizes([columns + 2, columns + 2, rows, rows], dim=2)
    result = patches.new_empty(count, channels, rows + 2, columns + 2)
    result[:, :, 1:-1, 1:-1] = patches
    result[:, :, 0] = above
    result[:, :, -1] = below
    result[:, :, 1:-1, 0] = left
    result[:, :, 1:-1, -1] = right
    return result


def convolve_framed(convolution: nn.Conv2d, framed: Tensor) -> Tensor:
    """See `core.packing.Layout.convolve`; patches have the pixels around them, (P, C, h + 2, w + 2)."""
    assert convolution.kernel_size == (3, 3)
    assert convolution.padding == (1, 1)
    assert all(side % convolution.stride[0] == 0 for side in framed.shape[2:])
    return conv2d(framed, convolution.weight, convolution.bias, convolution.stride, groups=convolution.groups)


def statistics(norm: nn.GroupNorm, patches: Tensor, csp: Csp) -> tuple[Tensor, Tensor]:
    """Return mean, and variance with epsilon, of each picture and group of channels: (R, G) each, of float32.

    All patches are of one size, so a picture's moments are the means of those of its patches. These few numbers are
    averaged in float64: squares do not cancel, and TF32 cannot round them. Rejected: adding rows by index, whose order,
    and so rounding, differs from run to run on GPUs.
    """
    return pooled(moments(norm, patches), csp)


def moments(norm: nn.GroupNorm, patches: Tensor) -> Tensor:
    """Return mean, and mean square with epsilon, of each patch and group of channels: (P, 2 G), of float64."""
    of_patch, variance = _moments(norm, patches)
    of_patch = of_patch.double()
    return torch.cat([of_patch, torch.addcmul(variance.double(), of_patch, of_patch)], dim=1)


def pooled(of_patches: Tensor, csp: Csp) -> tuple[Tensor, Tensor]:
    """Return the `statistics`, given the `moments` of all patches."""
    mean, second = (csp.averages @ of_patches).chunk(2, dim=1)
    return mean.float(), torch.addcmul(second, mean, mean, value=-1).float()


def _moments(norm: nn.GroupNorm, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean, and variance with epsilon, of each patch and group of channels: (P, G) each."""
    kernels = kernels_for(patches)
    if kernels is not None:
        mean, variance = kernels.moments(patches, norm.num_groups, norm.eps)
        return mean, variance
    count, channels = patches.shape[:2]
    pixels = math.prod(patches.shape[2:])
    # This also gives a result that is thrown away, and yet takes a tenth of the time of `var_mean` on CPUs.
    _, mean, scale = torch.native_group_norm(
        patches.float().contiguous(), None, None, count, channels, pixels, norm.num_groups, norm.eps
    )
    return mean, scale.double().pow(-2)  # `scale` is one over the root of variance plus epsilon.


def kernels_for(patches: Tensor) -> ModuleType | None:
    """Return the kernels for the device of these patches; None on CPUs, or if Triton is missing or cannot compile."""
    return _kernels() if patches.is_cuda else None


@cache
def _kernels() -> ModuleType | None:
    """Import the kernels on first use: Triton is optional, and so is the C compiler that it calls when it starts."""
    if find_spec("triton") is None:
        return None
    from triton.runtime.driver import driver

    try:
        driver.active.get_current_device()
    except Exception as error:  # Triton's own error, the compiler's, or the linker's.
        _log.warning("Triton cannot be used, so that patches are stitched in several passes: %r", error)
        return None
    from tilework.patches import stitch_kernel

    return stitch_kernel


def normalise(norm: nn.GroupNorm, patches: Tensor, csp: Csp) -> Tensor:
    """See `core.packing.Layout.normalise`."""
    return normalise_by(norm, patches, statistics(norm, patches, csp), csp.owners)


def normalise_by(norm: nn.GroupNorm, patches: Tensor, of_pictures: tuple[Tensor, Tensor], owners: Tensor) -> Tensor:
    """Normalise by given `statistics`; `owners` are the pictures of these patches."""
    count, channels = patches.shape[:2]
    per_channel = torch.stack(of_pictures).repeat_interleave(channels // norm.num_groups, dim=2)
    mean, variance = per_channel.index_select(1, owners).flatten(1)
    # With given statistics, group and batch normalisation are the same; each channel of each patch is one channel here.
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
    key: Mapping[str, Tensor],
    value: Mapping[str, Tensor],
    scale: float | None,
    runs: Sequence[AttentionRun],
    queries: Mapping[str, int],
) -> Tensor:
    """See `core.packing.Layout.attend`. Pictures of a run share a call; `key` and `value` come by the parts' names."""
    output = torch.empty_like(query)
    asking, answered = (parts_of(sequence, queries) for sequence in (query, output))
    for run in runs:
        asked = {name: run.asked(name) for name in queries}
        attended = scaled_dot_product_attention(
            _rows([_piece(asking[name], *span, run) for name, span in asked.items()]),
            _rows([_piece(tokens, *run.known(name), run) for name, tokens in key.items()]),
            _rows([_piece(tokens, *run.known(name), run) for name, tokens in value.items()]),
            scale=scale,
        )
        targets = [_piece(answered[name], *span, run) for name, span in asked.items()]
        pieces = attended.split_with_sizes([target.shape[2] for target in targets], dim=2)
        for target, piece in zip(targets, pieces, strict=True):
            target.copy_(piece)
    return output


def parts_of(sequence: Tensor, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the parts of a sequence of the whole batch, (1, H, L, D), by name, in this order."""
    return dict(zip(lengths, sequence.split_with_sizes(list(lengths.values()), dim=2), strict=True))


def _piece(tokens: Tensor, first: int, end: int, total: int, run: AttentionRun) -> Tensor:
    """Return a run's tokens, (pictures, H, tokens, D): `first` to `end` of `total` equal units of the whole."""
    each = tokens.shape[2] // total if total else 0
    piece = tokens[0, :, first * each : end * each]
    rows = run.pictures.stop - run.pictures.start
    return torch.unflatten(piece, 1, (rows, (end - first) // rows * each)).transpose(0, 1)


def _rows(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
