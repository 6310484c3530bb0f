"""Pictures of several sizes in one forward pass, as a model family sees it, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Size = tuple[int, int]
"""Rows and columns of a picture as it enters the denoiser: latent cells, or tokens where these are what enters."""
IMAGE, TEXT = "image", "text"
"""The sequences that attention runs over: tokens of patches, and tokens of prompts."""


class Layout(Protocol):
    """How the pictures of one batch lie as *patches* of one size, which are the batch dimension of the denoiser.

    The batch has an order of its own; `split` and `assemble` take and give pictures in the caller's. A picture that
    goes through the denoiser twice (guidance) is two pictures here. Tensors are torch's, which this package does not
    know. Legend: P patches, R pictures, C channels, h and w the sides of a patch, L tokens, H heads, D width of a head.
    """

    @property
    def sizes(self) -> Sequence[Size]:
        """Of the pictures, in the caller's order."""

    @property
    def is_plain(self) -> bool:
        """Every picture is one patch: nothing crosses from patch to patch, and the stock forward serves as it is."""

    def arrange(self, things: Sequence[Any]) -> list[Any]:
        """What belongs to the pictures, from the caller's order into that of the batch."""

    def split(self, pictures: Sequence[Any]) -> Any:
        """(C, rows, columns) each, of `sizes` or of all sizes divided by one number, to patches (P, C, h, w)."""

    def assemble(self, patches: Any) -> list[Any]:
        """Undo `split`; each picture has memory of its own."""

    def per_patch(self, values: Any) -> Any:
        """From one row per picture (R, ...), in the batch's order, to one per patch (P, ...)."""

    def convolve(self, convolution: Any, patches: Any) -> Any:
        """A 3x3 convolution module with padding 1 over whole pictures; stride 1, or 2 if the patch's sides are even."""

    def normalise(self, norm: Any, patches: Any) -> Any:
        """A group normalisation module with the statistics of whole pictures, summed in float32; (P, C, ...)."""

    def convolve_activated(self, convolution: Any, norm: Any, patches: Any) -> Any:
        """`convolve` what `normalise` and then SiLU make of the patches."""

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


class Pack(Protocol):
    """Lay out a batch of pictures of these `sizes` on the denoiser's `device`.

    Sides of patches are multiples of `multiple`; only pictures that all have one size may have others.
    """

    def __call__(self, sizes: tuple[Size, ...], multiple: int, device: Any) -> Layout: ...


def choose_patch(sizes: Sequence[Size], multiple: int, cap: int | None = None) -> Size:
    """The largest patch that tiles pictures of all `sizes`, with sides that are multiples of `multiple`.

    Pictures of one size are patches themselves, whatever their sides. With `cap` no side is longer than that, but
    at least `multiple`: the smaller, the finer is the choice among patches, and the slower is the batch.

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
