"""Memory of a decode, computed before it runs: the decoding code runs on tensors without values.

`torch.device("meta")` makes tensors with shapes alone. All tensors that exist at a time are counted, and the workspace
of a convolution on a CPU. A decode repeats itself from latent to latent and from tile to tile, so each kind of chunk
runs once, and counts as often as it is made.

Rejected: a formula with factors for each class. It would have to be measured again for each configuration.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilework.pipelines.clips.decoders import ROWS, Chunks, decoder_of
from tilework.pipelines.clips.decoding import decode
from tilework.pipelines.errors import ModelNotFound, UnsupportedModel

_META = torch.device("meta")
TILING = ("use_tiling", "tile_")
"""Prefixes of the settings of an autoencoder's tiles."""
_UNFOLDED = 20_480
"""Largest product of the first four sizes for which torch's own convolution unfolds a float32 input on a CPU
(`ConvParams::use_mkldnn`); above it, and for other types, oneDNN copies the input.
"""

_BLOCK = 32
"""Largest block of channels in oneDNN's own layouts."""
_FORMATS: dict[int, tuple[Any, ...]] = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}


def decode_bytes(vae: Any, frames: int, height: int, width: int, *, tensors_alone: bool = False) -> int | None:
    """Return the peak bytes of the tensors of a clip's decode, beside the weights, with its pixels.

    Two copies of the pixels count, those that exist at the end. Workspaces of kernels count as on a CPU, or with
    `tensors_alone` not at all: no device takes less. `vae` may lie on the device "meta" (`from_config`). It decodes in
    tiles if it is set to that. Returns None if nothing is known of its class.
    """
    decoder = decoder_of(vae)
    if decoder is None:
        return None
    bare = _bare(vae)
    temporal, spatial = decoder.scales(bare)
    latents = torch.empty(
        (1, decoder.latent_channels(bare), 1 + (frames - 1) // temporal, height // spatial, width // spatial),
        dtype=next(vae.parameters()).dtype,
        device=_META,
    )
    given = (latents.new_empty(1),) if vae.config.get("timestep_conditioning") else ()
    with torch.no_grad(), TensorMeter(tensors_alone=tensors_alone) as meter:
        rehearsed = replace(
            decoder, whole=_Rehearsal(meter, decoder.whole, frames), tile=_Rehearsal(meter, decoder.tile, frames)
        )
        decode(rehearsed, bare, _pixels, latents, *given)
        return int(meter.peak_bytes)


def autoencoder_of(directory: Path, dtype: torch.dtype) -> Any:
    """Return the autoencoder of a model's directory from its configuration alone: it has shapes, and no weights.

    Raises:
        ModelNotFound: there is no configuration.
        UnsupportedModel: its class has no row in `decoders`, or is not in diffusers.
    """
    file = directory / "vae" / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{file}: cannot be read ({error}); name the directory of a diffusers model") from error
    name = config.get("_class_name")
    if name not in ROWS:
        raise UnsupportedModel(f"{file} names {name!r}; what a decode takes is known of {', '.join(ROWS)}")
    with _META:
        vae = getattr(diffusers, name).from_config(config)
    return nn.Module.to(vae, dtype)


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while entered, the bytes of tensors that were made and still exist: `live_bytes`, at most `peak_bytes`.

    A convolution counts with its kernel's workspace on a CPU, unless `tensors_alone`. Workspaces of other kernels, and
    of other devices, are not counted.
    """

    def __init__(self, *, tensors_alone: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_kernels = not tensors_alone
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def rise(self, num_bytes: int) -> None:
        """Count bytes that exist for a moment."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in _tensors(args):
            self._note(one, 0)  # It was there before.
        result = func(*args, **(kwargs or {}))
        for one in _tensors((result,)):
            self._note(one, one.untyped_storage().nbytes())
        convolves = self._counts_kernels and func is torch.ops.aten.convolution.default
        self.rise(_workspace(args, result) if convolves else 0)
        return result

    def _note(self, tensor: Tensor, num_bytes: int) -> None:
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, functools.partial(self._forget, key, num_bytes))
            self.live_bytes += num_bytes

    def _forget(self, key: int, num_bytes: int, _: object) -> None:
        del self._known[key]
        self.live_bytes -= num_bytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _workspace(args: Any, result: Tensor) -> int:
    """Return the bytes that a convolution takes on a CPU beside its tensors, at most.

    Its input is copied if its values are not contiguous. Then the input is unfolded, or input, weights and result are
    copied into blocks of channels.
    """
    inputs = args[0]
    weight = args[1]
    copied = 0 if any(inputs.is_contiguous(memory_format=one) for one in _FORMATS[inputs.ndim]) else inputs.nbytes
    if inputs.dtype == torch.float32 and prod(inputs.shape[:4]) <= _UNFOLDED:
        return int(copied + prod(weight.shape[1:]) * prod(result.shape[2:]) * inputs.element_size())
    return int(copied + sum(map(_in_blocks, (inputs, weight, result))))


def _in_blocks(tensor: Tensor) -> int:
    """Return the bytes of a tensor whose channels are padded to a block."""
    return int(tensor.nbytes // tensor.shape[1] * -(-tensor.shape[1] // _BLOCK) * _BLOCK)


@dataclass(frozen=True, slots=True)
class _Course:
    """The chunks of a clip: their shapes, the bytes kept between them, and the most that one takes for a moment."""

    shapes: tuple[torch.Size, ...]
    kept_bytes: int
    rise_bytes: int


@dataclass(slots=True)
class _Rehearsal:
    """The chunks of a decoder. Computes none once they repeat themselves, nor for latents of a known shape."""

    meter: TensorMeter
    chunks: Chunks
    frames: int
    _courses: dict[torch.Size, _Course] = field(default_factory=dict)

    def __call__(self, vae: Any, latents: Tensor, *given: Any, **named: Any) -> Iterator[Tensor]:
        course = self._courses.get(latents.shape)
        if course is None:
            yield from self._first(latents, self.chunks(vae, latents, *given, **named))
            return
        kept = torch.empty(course.kept_bytes, dtype=torch.uint8, device=_META)
        yield from self._repeated(latents, course.shapes, course.rise_bytes)
        del kept

    def _first(self, latents: Tensor, chunks: Iterator[Tensor]) -> Iterator[Tensor]:
        shapes: list[torch.Size] = []
        kept = rise = 0
        while (made := self._next(chunks)) is not None:
            chunk, grown, risen = made
            del made
            shapes.append(chunk.shape)
            kept, rise = kept + grown, max(rise, risen)
            yield chunk
            del chunk
            if len(shapes) > 1 and shapes[-1] == shapes[-2] and grown == 0:
                left = (self.frames - sum(shape[2] for shape in shapes)) // shapes[-1][2]
                yield from self._repeated(latents, (shapes[-1],) * left, rise)
                shapes += [shapes[-1]] * left
                break
        self._courses[latents.shape] = _Course(tuple(shapes), max(kept, 0), rise)

    def _next(self, chunks: Iterator[Tensor]) -> tuple[Tensor, int, int] | None:
        """Return the next chunk, the further bytes kept after it, and its momentary bytes; None after the last one."""
        before, peak = self.meter.live_bytes, self.meter.peak_bytes
        self.meter.peak_bytes = before
        chunk = next(chunks, None)
        risen = self.meter.peak_bytes - before
        self.meter.peak_bytes = max(peak, self.meter.peak_bytes)
        if chunk is None:
            return None
        return chunk, self.meter.live_bytes - before - chunk.untyped_storage().nbytes(), risen

    def _repeated(self, latents: Tensor, shapes: tuple[torch.Size, ...], rise_bytes: int) -> Iterator[Tensor]:
        for shape in shapes:
            self.meter.rise(rise_bytes)
            yield latents.new_empty(shape)


def _pixels(frames: Tensor) -> Tensor:
    """Imitate the memory of a processor that makes pixels of frames."""
    values = (frames * 0.5 + 0.5).clamp(0, 1)
    return values[0].permute(1, 2, 3, 0).float().to(torch.uint8)


def _bare(vae: Any) -> Any:
    """Return the same autoencoder without its weights, with the same tiles."""
    with _META:
        bare = type(vae).from_config(vae.config)
    nn.Module.to(bare, next(vae.parameters()).dtype)
    for name, value in vars(vae).items():
        if name.startswith(TILING):
            setattr(bare, name, value)
    bare.blend_v = bare.blend_h = lambda _beside, tile, _extent: tile  # Row by row in place, in thousands of calls.
    return bare
