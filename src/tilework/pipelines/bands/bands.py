"""A stock decoder of diffusers on a band of the rows of an image or clip; it gets what it reads beyond the band.

Convolutions, and paddings for them, get the rows at the edges of the neighbouring bands. Group normalisation gets the
moments of all bands. An attention gets all rows, and each rank computes it whole: it is a small part of a decode.
Everything else treats rows alike, or makes several of each. Results differ from those of one device by rounding.

Rejected: a forward of our own for each class (a copy to keep up with diffusers), and rows around a band that are
decoded twice: after thirty convolutions that would be more than the band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tilework.core.comm import Comm
from tilework.pipelines.bands.decoders import attentions_of, is_known
from tilework.pipelines.bands.group import DecodeGroup
from tilework.pipelines.parallel import split_evenly

_ROWS = -2
_NEAREST = ("nearest", "nearest-exact")


class Bands:
    """Split of `num_rows` rows of latents among ranks; tensors made from them have a multiple of these rows."""

    def __init__(self, group: DecodeGroup, num_rows: int) -> None:
        self.group = group
        self._lengths = split_evenly(num_rows, group.size)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor, whose last dimensions are rows and columns."""
        if self.group.size == 1:
            return tensor
        lengths = self._scaled(tensor.shape[_ROWS], sum(self._lengths))
        return tensor.split_with_sizes(lengths, dim=_ROWS)[self.group.rank].contiguous()

    def joined(self, tensor: Tensor, dim: int = _ROWS) -> Tensor:
        """Return the rows of all ranks, along `dim`."""
        if self.group.size == 1:
            return tensor
        return self.group.joined(tensor, self._scaled(tensor.shape[dim], self._lengths[self.group.rank]), dim)

    def _scaled(self, found: int, of_latents: int) -> list[int]:
        scale, rest = divmod(found, of_latents)
        assert not rest, f"{found} rows are no multiple of {of_latents}"
        return [length * scale for length in self._lengths]

    def padded(self, tensor: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
        """Pad as `functional.pad`, with equal rows above and below; rows of neighbouring bands replace padding.

        Raises:
            RuntimeError: bands have fewer rows than the padding.
        """
        count = pad[2]
        rows = tensor.shape[_ROWS]
        if min(self._scaled(rows, self._lengths[self.group.rank])) < count:
            raise RuntimeError(f"a layer looks {count} rows far, and bands have fewer; use degree 1")
        above, below = self.group.traded(
            tensor.narrow(_ROWS, 0, count).contiguous(), tensor.narrow(_ROWS, rows - count, count).contiguous()
        )
        found = torch.cat([one for one in (above, tensor, below) if one is not None], dim=_ROWS)
        missing = *pad[:2], count if above is None else 0, count if below is None else 0, *pad[4:]
        return functional.pad(found, missing, mode, value) if any(missing) else found


def decode(vae: Any, comm: Comm | None, stock: Callable[..., Any], latents: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `stock`, the `decode` of `vae`; each rank of a `comm` decodes a band, and all get the whole.

    An autoencoder that cuts images into tiles itself does so on each rank.

    Raises:
        GroupBroken: a rank is lost.
    """
    if comm is None or getattr(vae, "use_tiling", False):
        return stock(latents, *args, **kwargs)
    with in_bands(vae, comm, latents) as bands:
        made = stock(bands.own(latents), *args, **kwargs)
        if isinstance(made, tuple):
            return (bands.joined(made[0]), *made[1:])
        made.sample = bands.joined(made.sample)
        return made


@contextmanager
def in_bands(vae: Any, comm: Comm | None, latents: Tensor) -> Iterator[Bands]:
    """Let the decoder of `vae` work on this rank's rows (`Bands.own`) of `latents` while entered.

    A band is the whole at degree 1, if there are fewer rows than ranks, and if the decoder is not known.
    """
    num_rows = latents.shape[_ROWS]
    shared = comm is not None and comm.size <= num_rows and is_known(vae)
    bands = Bands(DecodeGroup(comm if shared else None, latents.device), num_rows)
    if not shared:
        yield bands
        return
    beyond = _Beyond(bands)
    with ExitStack() as stack:
        for attention in attentions_of(vae):
            stack.enter_context(_made_whole(attention, bands, beyond))
        stack.enter_context(beyond)
        yield bands


@contextmanager
def _made_whole(module: nn.Module, bands: Bands, beyond: _Beyond) -> Iterator[None]:
    """Let a module compute all rows, and return those of this rank, while entered."""
    stock = module.forward

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = bands.joined(rows)
        beyond.is_paused = True
        made: Tensor = stock(whole, *args, **kwargs)
        beyond.is_paused = False
        return bands.own(made)

    module.forward = forward
    try:
        yield
    finally:
        delattr(module, "forward")


class _Beyond(TorchFunctionMode):
    """Lets functions that read beyond a band see the real values there, while entered and not paused."""

    def __init__(self, bands: Bands) -> None:
        super().__init__()
        self._bands = bands
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = None if self.is_paused else _ANSWERS.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        return answer(self._bands, func, *args, **(kwargs or {}))


def _convolution(
    bands: Bands,
    stock: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Convolve with rows of other bands, unless the rows were padded before (causal) or the kernel has one row."""
    reach = weight.shape[_ROWS] // 2
    if stride[_ROWS] != 1 or dilation[_ROWS] != 1 or padding[_ROWS] not in (0, reach):
        raise RuntimeError("a convolution that makes other numbers of rows cannot be shared; use degree 1")
    if padding[_ROWS]:
        rows = bands.padded(rows, (0, 0, reach, reach))
        padding = (*padding[:_ROWS], 0, padding[-1])
    return stock(rows, weight, bias, stride, padding, dilation, groups)


def _pad(
    bands: Bands,
    stock: Callable[..., Tensor],
    rows: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    above, below = pad[2:4] or (0, 0)
    if above != below:
        raise RuntimeError("a padding of one side cannot be shared; use degree 1")
    return bands.padded(rows, pad, mode, value) if above else stock(rows, pad, mode, value)


def _group_norm(
    bands: Bands,
    _stock: Callable[..., Tensor],
    rows: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise with the moments of all bands, merged as in Chan et al. (1979)."""
    assert rows.shape[0] == 1
    groups = rows.reshape(num_groups, -1).float()
    variance, mean = torch.var_mean(groups, dim=1, correction=0)
    count = torch.full_like(mean, groups.shape[1], dtype=torch.float64)
    counts, means, variances = bands.group.stacked(torch.stack([count, mean.double(), variance.double()])).unbind(1)
    shares = counts / counts.sum(0)
    whole = (shares * means).sum(0)
    spread = (shares * (variances + (means - whole).square())).sum(0)
    channels = rows.shape[1] // num_groups
    mean, variance = (one.float().repeat_interleave(channels) for one in (whole, spread))
    # With given moments, group and batch normalisation are the same.
    scale, shift = (None if one is None else one.float() for one in (weight, bias))
    return functional.batch_norm(rows, mean, variance, scale, shift, eps=eps)


def _interpolate(bands: Bands, stock: Callable[..., Tensor], rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Interpolate. Repeated rows do not depend on their neighbours."""
    made = stock(rows, *args, **kwargs)
    mode = kwargs.get("mode", args[2] if len(args) > 2 else _NEAREST[0])
    if mode not in _NEAREST or made.shape[_ROWS] % rows.shape[_ROWS]:
        raise RuntimeError(f"an interpolation of mode {mode} cannot be shared; use degree 1")
    return made


def _refused(_bands: Bands, stock: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(f"a decoder that calls {stock.__name__} cannot be shared; use degree 1")


_ANSWERS: Mapping[Any, Callable[..., Any]] = {
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    functional.pad: _pad,
    functional.group_norm: _group_norm,
    functional.interpolate: _interpolate,
    functional.scaled_dot_product_attention: _refused,
    functional.avg_pool2d: _refused,
    functional.max_pool2d: _refused,
    functional.conv_transpose2d: _refused,
    functional.conv_transpose3d: _refused,
    torch.randn: _refused,
    torch.randn_like: _refused,
}
"""Substitutes for functions of torch; each gets the bands, the function and its arguments."""
