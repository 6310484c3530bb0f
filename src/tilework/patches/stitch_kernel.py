"""The kernels of `stitcher.stitch` for GPUs. They need Triton, which builds of torch for CUDA include."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilework.patches.csp import Csp

_PIXELS, _CHANNELS = 128, 8  # Of a program's tile: 1024 values.
_VALUES = 4096  # Read at once by a program of `_moments`.


def moments(patches: Tensor, num_groups: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return mean, and variance with epsilon, of each patch and group of channels: (P, G) each, of float32."""
    count = patches.shape[0]
    mean, variance = patches.new_empty(2, count, num_groups, dtype=torch.float32)
    num_values = patches[0].numel() // num_groups
    with torch.cuda.device_of(patches):  # type: ignore[no-untyped-call]
        _moments[(count * num_groups,)](patches.contiguous(), mean, variance, num_values, epsilon, VALUES=_VALUES)
    return mean, variance


def stitch(
    patches: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, csp: Csp, *, silu: bool
) -> Tensor:
    """Turn (P, C, h, w) into (P, C, h + 2, w + 2), of the same dtype; computed in float32 and rounded once.

    `mean` and `variance`, which includes epsilon, are those of `operators.statistics`, (R, G); `weight` and `bias` are
    per channel.
    """
    count, channels, rows, columns = patches.shape
    result = patches.new_empty(count, channels, rows + 2, columns + 2)
    grid = (triton.cdiv(result[0, 0].numel(), _PIXELS), count, triton.cdiv(channels, _CHANNELS))
    with torch.cuda.device_of(patches):  # type: ignore[no-untyped-call]
        _stitch[grid](
            patches.contiguous(),
            result,
            mean,
            variance,
            weight,
            bias,
            csp.owners,
            csp.neighbours,
            channels,
            mean.shape[1],
            rows,
            columns,
            SILU=silu,
            PIXELS=_PIXELS,
            CHANNELS=_CHANNELS,
        )
    return result


@triton.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


# Sizes are not specialised on: a new mix must not wait for the compiler.
@triton.jit(do_not_specialize=["num_values"])  # type: ignore[untyped-decorator]
def _moments(patches, mean, variance, num_values, epsilon, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Compute one group of channels of one patch, which is contiguous. The second reading finds it in the cache."""
    program = tl.program_id(0).to(tl.int64)
    first = patches + program * num_values
    index = tl.arange(0, VALUES)
    total = tl.full([VALUES], 0.0, tl.float32)
    for start in range(0, num_values, VALUES):
        total += tl.load(first + start + index, mask=start + index < num_values, other=0.0).to(tl.float32)
    middle = tl.reduce(total, 0, _add) / num_values
    total = tl.full([VALUES], 0.0, tl.float32)
    for start in range(0, num_values, VALUES):
        is_value = start + index < num_values
        value = tl.load(first + start + index, mask=is_value, other=0.0).to(tl.float32)
        value = tl.where(is_value, value - middle, 0.0)
        total += value * value
    tl.store(mean + program, middle)
    tl.store(variance + program, tl.reduce(total, 0, _add) / num_values + epsilon)


@triton.jit(do_not_specialize=["num_channels", "num_groups", "rows", "columns"])  # type: ignore[untyped-decorator]
def _stitch(  # type: ignore[no-untyped-def]
    patches,
    result,
    mean,
    variance,
    weight,
    bias,
    owners,
    neighbours,
    num_channels,
    num_groups,
    rows,
    columns,
    SILU: tl.constexpr,  # noqa: N803
    PIXELS: tl.constexpr,  # noqa: N803
    CHANNELS: tl.constexpr,  # noqa: N803
):
    """Write a tile of one patch of the result: some pixels in some channels, which share where each pixel comes from.

    The tile fetches what it needs, from other patches too, so every value is written once and programs are independent.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    patch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    area = (rows + 2) * (columns + 2)

    row = pixel // (columns + 2) - 1
    column = pixel % (columns + 2) - 1
    down = (row >= rows).to(tl.int32) - (row < 0).to(tl.int32)
    right = (column >= columns).to(tl.int32) - (column < 0).to(tl.int32)
    place = 3 * down + right  # -4 to 4; DIRECTIONS leaves out the middle.
    source = tl.load(
        neighbours + 8 * patch + place + 4 - (place > 0).to(tl.int32),
        mask=(place != 0) & (pixel < area),
        other=patch,
    )
    inside = source >= 0
    row -= down * rows
    column -= right * columns

    is_channel = channel < num_channels
    picture = tl.load(owners + patch)
    group = picture * num_groups + channel // (num_channels // num_groups)
    middle = tl.load(mean + group, mask=is_channel)
    scale = tl.load(weight + channel, mask=is_channel).to(tl.float32)
    scale *= tl.rsqrt(tl.load(variance + group, mask=is_channel, other=1.0))
    shift = tl.load(bias + channel, mask=is_channel).to(tl.float32)

    needed = is_channel[:, None] & (pixel < area)[None, :]
    origin = (source * num_channels * rows + row) * columns + column
    value = tl.load(
        patches + origin[None, :] + (channel * rows * columns)[:, None], mask=needed & inside[None, :], other=0.0
    ).to(tl.float32)
    value = (value - middle[:, None]) * scale[:, None] + shift[:, None]
    if SILU:
        value = value / (1 + tl.exp(-value))
    value = tl.where(inside[None, :], value, 0.0)
    target = patch * num_channels * area + pixel
    tl.store(result + target[None, :] + (channel * area)[:, None], value, mask=needed)
