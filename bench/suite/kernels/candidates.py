"""Triton kernels that each save a pass over memory against what is used today. None has run on a GPU yet."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilework.patches.csp import Csp

_VALUES = 1024  # Of a program's tile.
_PIXELS, _CHANNELS = 128, 8


def modulate(tokens: Tensor, shift: Tensor, scale: Tensor, owners: Tensor, epsilon: float) -> Tensor:
    """adaLN of a packed batch: (P, L, C) normalised over C, times 1 + scale, plus shift, (R, C), of a patch's picture.

    One reading and one writing; torch's operators take three of each. Computed in float32 and rounded once.
    """
    count, length, channels = tokens.shape
    result = torch.empty_like(tokens)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        _modulate[(count * length,)](
            tokens.contiguous(),
            result,
            shift.contiguous(),
            scale.contiguous(),
            owners,
            length,
            channels,
            epsilon,
            CHANNELS=triton.next_power_of_2(channels),
        )
    return result


def split(pixels: Tensor, places: Tensor, num_patches: int) -> Tensor:
    """Patches (P, C, n) of pictures one behind another, (C, all), whose pixel i is at `places[i]`: see `Csp.split`.

    One reading and one writing; torch's operators take two of each.
    """
    channels, area = pixels.shape[0], len(places) // num_patches
    result = pixels.new_empty(num_patches, channels, area)
    _permute(pixels, result, places, area, is_split=True)
    return result


def assemble(patches: Tensor, places: Tensor) -> Tensor:
    """Undo `split`, by the same `places`: (P, C, n) to (C, all)."""
    num_patches, channels, area = patches.shape
    result = patches.new_empty(channels, num_patches * area)
    _permute(patches.contiguous(), result, places, area, is_split=False)
    return result


def stitch_scattered(
    patches: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, csp: Csp, *, silu: bool
) -> Tensor:
    """As `patches.stitch_kernel.stitch`, but each patch writes its edges into the frames of its neighbours.

    Nothing is read or normalised twice, and writes are scattered. Source: PatchedServe section 4.3.
    """
    count, channels, rows, columns = patches.shape
    result = patches.new_empty(count, channels, rows + 2, columns + 2)
    grid = (triton.cdiv(rows * columns, _PIXELS), count, triton.cdiv(channels, _CHANNELS))
    with torch.cuda.device_of(patches):  # type: ignore[no-untyped-call]
        _scatter[grid](
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


def _permute(source: Tensor, result: Tensor, places: Tensor, area: int, *, is_split: bool) -> None:
    total, channels = len(places), source.numel() // len(places)
    grid = (triton.cdiv(total, _VALUES), channels)
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]
        _move[grid](source.contiguous(), result, places, total, area, SPLIT=is_split, VALUES=_VALUES)


@triton.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit(do_not_specialize=["length", "channels"])  # type: ignore[untyped-decorator]
def _modulate(tokens, result, shift, scale, owners, length, channels, epsilon, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    is_channel = channel < channels
    value = tl.load(tokens + token * channels + channel, mask=is_channel, other=0.0).to(tl.float32)
    middle = tl.reduce(value, 0, _add) / channels
    value = tl.where(is_channel, value - middle, 0.0)
    value *= tl.rsqrt(tl.reduce(value * value, 0, _add) / channels + epsilon)
    picture = tl.load(owners + token // length) * channels + channel
    value *= 1 + tl.load(scale + picture, mask=is_channel, other=0.0).to(tl.float32)
    value += tl.load(shift + picture, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(result + token * channels + channel, value, mask=is_channel)


@triton.jit(do_not_specialize=["total", "area"])  # type: ignore[untyped-decorator]
def _move(source, result, places, total, area, SPLIT: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Some pixels of one channel: those of patches lie by patch, channel and pixel, those of pictures by channel."""
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    channel, channels = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    is_pixel = index < total
    in_patches = (index // area * channels + channel) * area + index % area
    in_pictures = channel * total + tl.load(places + index, mask=is_pixel, other=0)
    if SPLIT:
        tl.store(result + in_patches, tl.load(source + in_pictures, mask=is_pixel), mask=is_pixel)
    else:
        tl.store(result + in_pictures, tl.load(source + in_patches, mask=is_pixel), mask=is_pixel)


@triton.jit(do_not_specialize=["num_channels", "num_groups", "rows", "columns"])  # type: ignore[untyped-decorator]
def _scatter(  # type: ignore[no-untyped-def]
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
    """A tile of one patch: some of its pixels, in some channels. Each pixel of a frame is written by one program: by
    that of the neighbour there, or as a zero by the patch's own.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    patch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, is_pixel = channel < num_channels, pixel < rows * columns
    picture = tl.load(owners + patch)
    group = picture * num_groups + channel // (num_channels // num_groups)
    middle = tl.load(mean + group, mask=is_channel)
    scale = tl.load(weight + channel, mask=is_channel).to(tl.float32)
    scale *= tl.rsqrt(tl.load(variance + group, mask=is_channel, other=1.0))
    shift = tl.load(bias + channel, mask=is_channel).to(tl.float32)
    needed = is_channel[:, None] & is_pixel[None, :]
    origin = (patch * num_channels + channel) * rows * columns
    value = tl.load(patches + origin[:, None] + pixel[None, :], mask=needed, other=0.0).to(tl.float32)
    value = (value - middle[:, None]) * scale[:, None] + shift[:, None]
    if SILU:
        value = value / (1 + tl.exp(-value))
    row, column = pixel // columns, pixel % columns
    area = (rows + 2) * (columns + 2)
    inner = (row + 1) * (columns + 2) + column + 1
    frame = (patch * num_channels + channel) * area
    tl.store(result + frame[:, None] + inner[None, :], value, mask=needed)
    for direction in tl.static_range(8):
        place = direction + (direction > 3)  # DIRECTIONS leaves out the middle.
        down = place // 3 - 1
        right = place % 3 - 1
        at_edge = is_pixel
        if down == -1:
            at_edge &= row == 0
        if down == 1:
            at_edge &= row == rows - 1
        if right == -1:
            at_edge &= column == 0
        if right == 1:
            at_edge &= column == columns - 1
        neighbour = tl.load(neighbours + 8 * patch + direction)
        is_there = neighbour >= 0
        # In the neighbour's frame, or where this frame has none.
        target = tl.where(is_there, neighbour, patch)
        down_by = tl.where(is_there, -down * rows, down)
        right_by = tl.where(is_there, -right * columns, right)
        outer = (row + down_by + 1) * (columns + 2) + column + right_by + 1
        edge = (target * num_channels + channel) * area
        written = tl.where(is_there, value, 0.0)
        tl.store(result + edge[:, None] + outer[None, :], written, mask=is_channel[:, None] & at_edge[None, :])
