"""The files of a model, as far as they are known, and the first file that differs between two copies of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilework.core.wire.ranges import Count, Name


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """A file of `num_bytes`. `quick` is a digest of all of it, or of a sample if it is large.

    `whole` is a digest of all of it where `quick` has a sample; empty while that was not read.
    """

    num_bytes: Count
    quick: Name
    whole: Name = ""

    def may_equal(self, other: FileContent) -> bool:
        """Return whether both may hold the same, as far as both are known."""
        if (self.num_bytes, self.quick) != (other.num_bytes, other.quick):
            return False
        return not (self.whole and other.whole) or self.whole == other.whole


ModelContent = Mapping[str, FileContent]
"""The files of a model, by their names within its directory."""


def first_difference(one: ModelContent, other: ModelContent, owner: str) -> str | None:
    """Return the first file by name in which `one` differs from `other`, in words; None if all may be equal.

    `owner` is the holder of `other`, such as "node 0".
    """
    for name in sorted({*one, *other}):
        if name not in other:
            return f"it has {name}, which {owner} does not have"
        if name not in one:
            return f"it has no {name}, which {owner} has"
        if not one[name].may_equal(other[name]):
            sizes = one[name].num_bytes, other[name].num_bytes
            size = f"sizes {sizes[0]:,} and {sizes[1]:,}" if sizes[0] != sizes[1] else f"both have {sizes[0]:,} bytes"
            return f"{name} differs from {owner}'s ({size})"
    return None
