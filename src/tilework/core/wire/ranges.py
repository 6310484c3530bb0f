"""The values that fields of messages may have, beyond their types: `comm.net` refuses others.

A range applies to a number itself, to the length of a text, and to each number or text in a collection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float


MOST_COUNT = 1 << 53

Count = Annotated[int, Range(0, MOST_COUNT)]
"""An id, a number of things or of bytes."""
Time = Annotated[int, Range(-MOST_COUNT << 8, MOST_COUNT << 8)]
"""Nanoseconds on some clock. It may have begun 70,000 years ago, and sums of two times do not leave 64 bits."""
Duration = Annotated[int, Range(0, 10**18)]
"""Nanoseconds: 30 years at most."""
Share = Annotated[float, Range(0, 1)]
Amount = Annotated[float, Range(0, 1e18)]
Text = Annotated[str, Range(0, 1 << 20)]
"""Text for people."""
Name = Annotated[str, Range(0, 1024)]
Port = Annotated[int, Range(1, (1 << 16) - 1)]
