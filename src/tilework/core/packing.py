"""The interface of packed batches, pictures of several sizes in one forward pass, and the choice of their patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilework.core.cache import CacheUse

Size = tuple[int, int]
"""Rows and columns of a picture as it enters the denoiser: latent cells, or tokens where the denoiser takes tokens."""
IMAGE, TEXT = "image", "text"
"""The sequences that attention runs over: tokens of patches, and tokens of prompts."""


class Layout(Protocol):
    """The pictures of one batch as *patches* of one size, which are the batch dimension of the denoiser.

    The batch has an order of its own; `split` takes and `assemble` returns pictures in the caller's order. A picture
    that goes through the denoiser twice (guidance) is two pictures here. Tensors are torch's, typed `Any` because this
    package does not import torch. Legend: P patches, R pictures, C channels, h and w the sides of a patch, L tokens, H
    heads, D width of a head.
    """

    @property
    def sizes(self) -> Sequence[Size]:
        """The sizes of the pictures, in the caller's order."""

    @property
    def is_plain(self) -> bool:
        """Whether every picture is one patch, so that the model's own forward pass is used unchanged."""

    @property
    def leaves_out(self) -> bool:
        """Whether blocks may compute some patches only, so that no two passes need be alike."""

    def arrange(self, things: Sequence[Any]) -> list[Any]:
        """Reorder one thing per picture from the caller's order to the batch's."""

    def split(self, pictures: Sequence[Any]) -> Any:
        """Cut pictures (C, rows, columns) into patches (P, C, h, w); `sizes` may all be divided by one number."""

    def assemble(self, patches: Any) -> list[Any]:
        """Undo `split`; each picture is a copy."""

    def per_patch(self, values: Any) -> Any:
        """Repeat rows of pictures (R, ...), in the batch's order, to one row per patch (P, ...)."""

    def convolve(self, convolution: Any, patches: Any) -> Any:
        """Apply a 3x3 convolution with padding 1 to whole pictures; stride 1, or 2 if the patch's sides are even."""

    def normalise(self, norm: Any, patches: Any) -> Any:
        """Apply a group normalisation with the statistics of whole pictures, summed in float32; (P, C, ...)."""

    def convolve_activated(self, convolution: Any, norm: Any, patches: Any) -> Any:
        """`normalise`, then SiLU, then `convolve`."""

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None,
        queries: Mapping[str, int],
        keys: Mapping[str, int],
    ) -> Any:
        """Attention of each picture over itself and its text; (1, H, L, D) each, for the whole batch.

        `queries` and `keys` say what lies in the sequences, in this order: the number of tokens of all patches
        (IMAGE) and of all texts (TEXT), picture after picture.
        """

    def run_block(self, index: int, states: Sequence[Any], run: RunBlock, has_text: bool) -> list[Any]:
        """The outputs (P, ...) of a block of the denoiser, of which `index` is the place.

        `states` are its inputs (P, ...) that depend on the picture. A layout may have fewer patches computed, and
        completes what `run` returns for these. If the block `has_text`, it runs even if no patch is computed.
        """

    def finish(self) -> None:
        """End a forward pass that raised no error."""


Take = Callable[[Any], Any]
"""Takes those patches out of a tensor (P, ...) that a block computes."""
RunBlock = Callable[[Take], list[Any]]
"""Runs a block for the patches that are taken, and returns its outputs for these."""


PredictChange = Callable[[int, Any], Any]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reuse:
    """What a request lets packed passes keep of it from one to the next, and what came of that.

    The object is the key of what is kept: another one, of a request that was moved or begun anew, finds nothing.

    Attributes:
        threshold: a patch of a block is not computed if its input has changed by less than this part, as the mean
            square of the change over that of the input; 0: each is.
        whole: whether a picture's patches are computed all or not at all.
        patch: the size of its patches, of which a pass has one.
        predict: by how much the output of a block is about to change, (P), by its index and the change of its input,
            (P): that is what the threshold is for. None: it is for the change of the input.
        use: what came of it.
    """

    threshold: float
    whole: bool
    patch: Size
    predict: PredictChange | None = None
    use: CacheUse = field(default_factory=CacheUse)


class Pack(Protocol):
    """Lay out a batch of pictures of these `sizes` on the denoiser's `device`.

    Sides of patches are multiples of `multiple`, unless all pictures have one size. `reuses` are those of the pictures,
    all with one size of patches, or none; equal ones follow each other, for the halves of guidance.
    """

    def __call__(
        self, sizes: tuple[Size, ...], multiple: int, device: Any, reuses: tuple[Reuse, ...] = ()
    ) -> Layout: ...


def choose_patch(sizes: Sequence[Size], multiple: int, cap: int | None = None) -> Size:
    """The largest patch that tiles pictures of all `sizes`, with sides that are multiples of `multiple`.

    Pictures of one size are patches themselves, whatever their sides. With `cap` no side is longer than that, but at
    least `multiple`: a smaller cap gives a finer choice among patches and a slower batch.

    Raises:
        ValueError: the sizes differ, and a side is not a multiple of `multiple`.
    """
    odd = [size for size in sizes if size[0] % multiple or size[1] % multiple]
    if len(set(sizes)) == 1 and (cap is None or odd):
        return sizes[0]
    if odd:
        raise ValueError(f"a picture is {odd[0][0]} x {odd[0][1]}; its sides must be multiples of {multiple}")
    rows, columns = (math.gcd(*sides) // multiple for sides in zip(*sizes, strict=True))
    most = max(cap // multiple, 1) if cap is not None else max(rows, columns)
    return multiple * _divisor(rows, most), multiple * _divisor(columns, most)


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
