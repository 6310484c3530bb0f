"""Compilation by regions: the blocks that a denoiser repeats are compiled once, for all sizes."""

from __future__ import annotations

from typing import Any

from tilework.pipelines.components import denoisers_of
from tilework.pipelines.errors import UnsupportedModel


def compile_blocks(pipeline: Any) -> None:
    """Let the repeated blocks of all denoisers be compiled when they first run: `compile_repeated_blocks` of diffusers.

    Shapes are dynamic, so that a request of another size compiles nothing anew. There is one exception: if the first
    image has as many tokens as its text, torch takes the two lengths for one, and the next size is compiled once more.

    Raises:
        UnsupportedModel: a denoiser does not say which of its blocks repeat themselves.
    """
    for name, denoiser in denoisers_of(pipeline).items():
        if not getattr(denoiser, "_repeated_blocks", None):
            raise UnsupportedModel(
                f"{name} is to be compiled, and {type(denoiser).__name__} names no repeated blocks; leave out --compile"
            )
        denoiser.compile_repeated_blocks(dynamic=True)
