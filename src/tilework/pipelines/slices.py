"""The decoder of diffusers' `AutoencoderKL` in slices: the same image, at a fraction of the memory.

Most of a decode's memory are the temporaries of its widest layers. Here each residual block, each doubling of the
sides and the head run over bands of rows, with as many rows around a band as the operation reads. The result replaces
its input if it fits there. Only the means and variances of group normalisation are not local to rows: they are gathered
over all bands first, which computes the first half of each residual block twice. Rejected: tiles as in diffusers, which
have their own statistics and are blended, so that the image is a different one.

Like `hooks`, `packing` and `clips.decoders`, this module relies on the internals of diffusers' models;
tests/pipelines/test_slices.py checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from tilework.core.comm import Comm
from tilework.pipelines.bands import bands

_BAND_PIXELS = 1 << 14  # Bands of any image take the same memory: 8 MiB for each 128 channels in float32.
_LEAST_ROWS = 8
_Rows = Callable[[Tensor], Tensor]


def decode(vae: Any, latents: Tensor, sliced: bool, comm: Comm | None = None) -> Tensor:
    """Decode the latents (1, channels, rows, columns) of one image with `vae`; the ranks of a `comm` share the work.

    `sliced` gives the same up to rounding: within 1e-5 in float32, for pixels from -1 to 1. It takes less than half of
    the memory and a fifth to a half more time. A decoder that is built otherwise than those of the families here
    decodes as a whole all the same. A sliced decode is not shared.
    """
    if not sliced or not _is_known(vae):
        whole: Tensor = bands.decode(vae, comm, vae.decode, latents, return_dict=False)[0]
        return whole
    if vae.post_quant_conv is not None:
        latents = vae.post_quant_conv(latents)
    return _decoder(vae.decoder, latents)


def _is_known(vae: Any) -> bool:
    decoder = getattr(vae, "decoder", None)
    if not isinstance(decoder, Decoder) or not isinstance(decoder.conv_norm_out, nn.GroupNorm):
        return False
    resnets = [resnet for block in decoder.up_blocks for resnet in block.resnets]
    upsamplers = [upsampler for block in decoder.up_blocks for upsampler in block.upsamplers or ()]
    return (
        all(type(block).__name__ == "UpDecoderBlock2D" for block in decoder.up_blocks)
        and all(type(resnet) is ResnetBlock2D and resnet.upsample is None for resnet in resnets)
        and all(type(upsampler) is Upsample2D and upsampler.norm is None for upsampler in upsamplers)
    )


def _decoder(decoder: Any, latents: Tensor) -> Tensor:
    """Run `Decoder.forward`; up to the middle block the sides are an eighth of the image's."""
    picture: Tensor = decoder.mid_block(decoder.conv_in(latents), None)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            picture = _resnet(resnet, picture)
        for upsampler in block.upsamplers or ():
            picture = picture.clone()  # Its memory may be that of a layer with more channels.
            picture = _through(upsampler, picture, reach=1, scale=2)
    return _head(decoder, picture)


def _resnet(resnet: Any, picture: Tensor) -> Tensor:
    """Run `ResnetBlock2D.forward` without an embedding of the time."""
    norm1 = _norm(resnet.norm1, lambda rows: rows, picture, reach=0)

    def first(rows: Tensor) -> Tensor:
        inner: Tensor = resnet.conv1(resnet.nonlinearity(norm1(rows)))
        return inner

    norm2 = _norm(resnet.norm2, first, picture, reach=1)

    def both(rows: Tensor) -> Tensor:
        added = resnet.conv2(resnet.nonlinearity(norm2(first(rows))))
        kept = rows if resnet.conv_shortcut is None else resnet.conv_shortcut(rows)
        result: Tensor = (kept + added) / resnet.output_scale_factor
        return result

    return _through(both, picture, reach=2)


def _head(decoder: Any, picture: Tensor) -> Tensor:
    norm = _norm(decoder.conv_norm_out, lambda rows: rows, picture, reach=0)
    pixels = _through(lambda rows: decoder.conv_out(decoder.conv_act(norm(rows))), picture, reach=1)
    return pixels.clone()  # Its memory is that of the layers before.


def _norm(norm: nn.GroupNorm, before: _Rows, picture: Tensor, reach: int) -> _Rows:
    """Return `norm` for bands, with the statistics that it would have on `before` of the whole image."""
    mean, variance = _statistics(norm.num_groups, (band for _, band in _bands(before, picture, reach)))
    channels = norm.num_channels // norm.num_groups
    mean, variance = mean.repeat_interleave(channels), variance.repeat_interleave(channels)
    weight, bias = norm.weight.to(mean.dtype), norm.bias.to(mean.dtype)
    # With given statistics, group and batch normalisation are the same; this one runs without temporaries.
    return lambda rows: batch_norm(rows, mean, variance, weight, bias, eps=norm.eps)


def _statistics(num_groups: int, bands: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each group of channels over all bands, float32; merged as in Chan et al. (1979)."""
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for band in bands:
        groups = band.reshape(num_groups, -1).float()
        num_new = groups.shape[1]
        variance, new_mean = torch.var_mean(groups, dim=1, correction=0)
        variance, new_mean = variance.double(), new_mean.double()
        mean, squares = mean.to(new_mean), squares.to(variance)
        total = count + num_new
        difference = new_mean - mean
        squares = squares + variance * num_new + difference.square() * (count * num_new / total)
        mean, count = mean + difference * (num_new / total), total
    return mean.float(), (squares / count).float()


def _through(run: _Rows, picture: Tensor, reach: int, scale: int = 1) -> Tensor:
    """Apply `run` to the whole image; reuse its memory if the result has the same sides and no more channels.

    A result is written one band late: the next band still reads `reach` rows of this one's input.
    """
    assert reach <= _LEAST_ROWS
    rows, columns = scale * picture.shape[2], scale * picture.shape[3]
    result: Tensor | None = None
    late: tuple[int, Tensor] | None = None
    for top, band in _bands(run, picture, reach, scale):
        if result is None:
            num_channels = band.shape[1]
            fits = scale == 1 and num_channels <= picture.shape[1]
            result = picture[:, :num_channels] if fits else picture.new_empty((1, num_channels, rows, columns))
        if late is not None:
            _write(result, *late)
        late = top, band
    assert result is not None
    assert late is not None
    _write(result, *late)
    return result


def _write(result: Tensor, top: int, band: Tensor) -> None:
    result[:, :, top : top + band.shape[2]] = band


def _bands(run: _Rows, picture: Tensor, reach: int, scale: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Apply `run` to each band of the image; yield its rows of the result, with the index of the first.

    At the image's edges `run` pads as it does for the whole; what it makes of the edges of bands is cut off.
    """
    num_rows = picture.shape[2]
    step = max(_LEAST_ROWS, _BAND_PIXELS // (picture.shape[3] * scale * scale))
    for top in range(0, num_rows, step):
        bottom, above = min(top + step, num_rows), max(0, top - reach)
        made = run(picture[:, :, above : bottom + reach])
        yield top * scale, made[:, :, (top - above) * scale : (bottom - above) * scale]
