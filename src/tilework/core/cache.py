"""What a request may let the steps of its denoising keep from one to the next, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class CacheKind(StrEnum):
    """What is kept and used again where little has changed since.

    PATCH: the outputs of each block for each patch; IMAGE: the same, for whole pictures only.
    """

    PATCH = "patch"
    IMAGE = "image"


IF_LATE, OFF = "if_late", "off"
CacheName = Literal["off", "patch", "image", "if_late"]
"""What a request or a server may give as its cache: a kind, none, or PATCH if it would be late without."""
DEFAULT_THRESHOLD = 0.003
MAX_THRESHOLD = 1.0


@dataclass(frozen=True, slots=True, order=True)
class CacheChoice:
    """A kind of cache, and by how much a block's input may change for its last output to be used again.

    The `threshold` is a part of the input, as the mean square of the change over that of the input, from 0 to 1.
    """

    kind: CacheKind
    threshold: float = DEFAULT_THRESHOLD

    def __str__(self) -> str:
        return f"{self.kind.value}={self.threshold!r}"

    @classmethod
    def parse(cls, text: str) -> CacheChoice:
        """Undo `str`. Raises ValueError."""
        kind, _, threshold = text.partition("=")
        return cls(CacheKind(kind), float(threshold))


def choice_of(name: str, threshold: float) -> CacheChoice | None:
    """The cache that a `CacheName` stands for; with IF_LATE it is the one that a deadline may buy."""
    if name == OFF:
        return None
    return CacheChoice(CacheKind.PATCH if name == IF_LATE else CacheKind(name), threshold)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache did for a request: patches of blocks that were `computed` and `skipped`.

    `off` says why it did not work throughout; empty if it did.
    """

    computed: int = 0
    skipped: int = 0
    off: str = ""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.computed + other.computed, self.skipped + other.skipped, self.off or other.off)

    @property
    def saving(self) -> float:
        """The part of the patches that was skipped, 0 to 1."""
        return self.skipped / max(self.computed + self.skipped, 1)
