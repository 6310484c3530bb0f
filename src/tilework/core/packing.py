"""The interface of packed batches, images of several sizes in one forward pass, and the choice of their patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilework.core.cache import CacheUse

Size = tuple[int, int]
"""Rows and columns of an image as it enters the denoiser: latent cells, or tokens where the denoiser takes tokens."""
IMAGE, TEXT = "image", "text"
"""Names of the sequences that attention runs over: tokens of patches, and tokens of prompts."""


class Layout(Protocol):
    """The images of one batch as *patches* of one size, which are the batch dimension of the denoiser.

    The batch has an order of its own; `split` takes and `assemble` returns images in the caller's order. An image that
    goes through the denoiser twice (guidance) is two images here. Tensors are torch's, typed `Any` because this package
    does not import torch. Legend: P patches, R images, C channels, h and w the sides of a patch, L tokens, H heads, D
    width of a head.
    """

    @property
    def sizes(self) -> Sequence[Size]:
        """Sizes of the images, in the caller's order."""

    @property
    def is_plain(self) -> bool:
        """True if every image is one patch, so that the model's own forward pass is used unchanged."""

    @property
    def leaves_out(self) -> bool:
        """True if blocks may compute only some patches, so that two passes may differ."""

    def arrange(self, things: Sequence[Any]) -> list[Any]:
        """Reorder a list with one entry per image from the caller's order to the batch's."""

    def split(self, pictures: Sequence[Any]) -> Any:
        """Cut images (C, rows, columns) into patches (P, C, h, w); `sizes` may all be divided by one number."""

    def assemble(self, patches: Any) -> list[Any]:
        """Undo `split`; each image is a copy."""

    def per_patch(self, values: Any) -> Any:
        """Repeat rows of images (R, ...), in the batch's order, to one row per patch (P, ...)."""

    def convolve(self, convolution: Any, patches: Any) -> Any:
        """Apply a 3x3 convolution with padding 1 to whole images; stride 1, or 2 if the patch's sides are even."""

    def normalise(self, norm: Any, patches: Any) -> Any:
        """Apply a group normalisation with the statistics of whole images, summed in float32; (P, C, ...)."""

    def convolve_activated(self, convolution: Any, norm: Any, patches: Any) -> Any:
        """Apply `normalise`, then SiLU, then `convolve`."""

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None,
        queries: Mapping[str, int],
        keys: Mapping[str, int],
    ) -> Any:
        """Let each image attend to itself and its text; (1, H, L, D) each, for the whole batch.

        `queries` and `keys` describe the sequences, part by part in this order: the number of tokens of all patches
        (IMAGE) and of all texts (TEXT), image after image.
        """

    def run_block(self, index: int, states: Sequence[Any], run: RunBlock, has_text: bool) -> list[Any]:
        """Return the outputs (P, ...) of the block at place `index` of the denoiser.

        `states` are those of its inputs (P, ...) that depend on the image. A layout may have fewer patches computed,
        and then completes what `run` returns for these. If the block `has_text`, it runs even if no patch is computed.
        """

    def finish(self) -> None:
        """End a forward pass that raised no error."""


Take = Callable[[Any], Any]
"""Function that takes those patches out of a tensor (P, ...) that a block computes."""
RunBlock = Callable[[Take], list[Any]]
"""Function that runs a block for the patches that are taken, and returns its outputs for these."""


PredictChange = Callable[[int, Any], Any]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reuse:
    """Settings by which packed passes may reuse earlier results of a request, and how much they reused.

    The object is the key of what is kept. A request that was moved or begun anew has another object and finds nothing.

    Attributes:
        threshold: a patch of a block is not computed if its input has changed by less than this part: the mean square
            of the change over the mean square of the input. 0: each patch is computed.
        whole: True if an image's patches are computed all or not at all.
        patch: the size of its patches; all patches of a pass have one size.
        predict: returns by how much the output of a block is about to change, (P), from the index of the block and the
            change of its input, (P); the threshold is then for that. None: it is for the change of the input.
        use: the patches that were computed and skipped so far.
    """

    threshold: float
    whole: bool
    patch: Size
    predict: PredictChange | None = None
    use: CacheUse = field(default_factory=CacheUse)


class Pack(Protocol):
    """Lay out a batch of images of these `sizes` on the denoiser's `device`.

    Sides of patches are multiples of `multiple`, unless all images have one size. `reuses` are those of the images, all
    with one size of patches, or none; equal ones follow each other, for the halves of guidance.
    """

    def __call__(
        self, sizes: tuple[Size, ...], multiple: int, device: Any, reuses: tuple[Reuse, ...] = ()
    ) -> Layout: ...


def choose_patch(sizes: Sequence[Size], multiple: int, cap: int | None = None) -> Size:
    """Return the largest patch that tiles images of all `sizes`, with sides that are multiples of `multiple`.

    Images of one size are patches themselves, whatever their sides. With `cap` no side is longer than `cap`, but at
    least `multiple`: a smaller cap gives a finer choice among patches and a slower batch.

    Raises:
        ValueError: the sizes differ, and a side is not a multiple of `multiple`.
    """
    odd = [size for size in sizes if size[0] % multiple or size[1] % multiple]
    if len(set(sizes)) == 1 and (cap is None or odd):
        return sizes[0]
    if odd:
        raise ValueError(f"an image is {odd[0][0]} x {odd[0][1]}; its sides must be multiples of {multiple}")
    rows, columns = (math.gcd(*sides) // multiple for sides in zip(*sizes, strict=True))
    most = max(cap // multiple, 1) if cap is not None else max(rows, columns)
    return multiple * _divisor(rows, most), multiple * _divisor(columns, most)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
