"""One measured duration: a line of a cost table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilework.core.cache import CacheChoice
from tilework.core.request import Shape

Batch = tuple[Shape, ...]
"""Shapes of the outputs that are made together; one shape for a single output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One line of a cost table: seconds per step (stages with steps) or per request (others).

    `seconds` is the median of `num_runs` runs; with 0 runs it is predicted. With fewer than 100 runs `p99_seconds` is
    the longest of them.
    `peak_bytes` is the most memory that was in use on one device, weights included; `activation_bytes` is what the work
    needs there beyond the weights of its stage. `state_bytes` is the part of a request's state that must be moved after
    this stage, or between two of its steps.

    `batch` is the number of outputs of this shape that are made together. For a mixed batch it holds the shapes of all,
    ordered by pixels; height, width and frames are then those of the last one. `CostRow.of` makes rows of any batch.

    `cache` is the cache that the requests have; None: none. `skipped` is the share of their patches of blocks that the
    cache skips, from 0 to 1: the mean of many requests, whose standard deviation is `skipped_std`. `seconds` is then
    the mean time of a step over all steps of such requests.
    """

    pipeline: str
    stage: str
    height: int
    width: int
    frames: int = 1
    degree: int = 1
    batch: int | Batch = 1
    link: str = "none"
    seconds: float
    p99_seconds: float | None = None
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    state_bytes: int | None = None
    num_runs: int | None = None
    cache: CacheChoice | None = None
    skipped: float = 0.0
    skipped_std: float = 0.0

    @classmethod
    def of(cls, shapes: Sequence[Shape], **fields: Any) -> CostRow:
        """Return the row of a batch of these shapes, given in any order."""
        arranged = tuple(sorted(shapes, key=lambda shape: (shape.pixels, shape)))
        last = arranged[-1]
        batch = arranged if len(set(arranged)) > 1 else len(arranged)
        return cls(height=last.height, width=last.width, frames=last.frames, batch=batch, **fields)

    @property
    def is_predicted(self) -> bool:
        """True if it is still to be measured: `seconds` follow from other rows, or from a run that was not warm."""
        return self.num_runs == 0

    @property
    def shape(self) -> Shape:
        """Shape of the largest output."""
        return Shape(self.height, self.width, self.frames)

    @property
    def shapes(self) -> Batch:
        """Shapes of all outputs that are made together."""
        return (self.shape,) * self.batch if isinstance(self.batch, int) else self.batch
