"""What a request may let the steps of its denoising keep from one to the next, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class CacheKind(StrEnum):
    """What is kept and used again where little has changed since.

    PATCH: the outputs of each block for each patch; IMAGE: the same, for whole pictures only. The others are the
    library's, and leave out all blocks of a step but one or none. FBCACHE (FirstBlockCache) computes the first block,
    and adds what the others added last if that has changed little. TAYLORSEER computes the steps at a fixed interval,
    and extrapolates the output of the blocks from these.
    """

    PATCH = "patch"
    IMAGE = "image"
    FBCACHE = "fbcache"
    TAYLORSEER = "taylorseer"

    @property
    def is_of_steps(self) -> bool:
        """Whether it leaves out whole steps; then each request is alone on one device."""
        return self in (CacheKind.FBCACHE, CacheKind.TAYLORSEER)

    @property
    def setting(self) -> CacheSetting:
        """The number that a request gives with it."""
        return SETTINGS[self]


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """The number of a kind of cache: a THRESHOLD, by how much something may change, or an INTERVAL in steps.

    `usual` are those that are tried to see what the kind saves, and what it does to pictures; the mildest comes first.

    The threshold of PATCH and IMAGE is for the input of a block, as the mean square of the change over that of the
    input. That of FBCACHE is for what the first block adds, as the mean absolute change over its mean absolute value.
    """

    name: Literal["threshold", "interval"]
    default: float
    least: float
    most: float
    usual: tuple[float, ...]


IF_LATE, OFF = "if_late", "off"
CacheName = Literal["off", "patch", "image", "fbcache", "taylorseer", "if_late"]
"""What a request or a server may give as its cache: a kind, none, or PATCH if it would be late without."""
BLOCK_CACHES: tuple[str, ...] = (OFF, "patch", "image", IF_LATE)
"""Without those of whole steps: those that rows of a cost table are measured for, and that workloads may name."""
DEFAULT_THRESHOLD = 0.003
MAX_THRESHOLD = 1.0
LEAST_INTERVAL, MAX_INTERVAL = 1, 100
_OF_BLOCKS = CacheSetting("threshold", DEFAULT_THRESHOLD, 0.0, MAX_THRESHOLD, (0.001, 0.003, 0.01, 0.03))
SETTINGS: Mapping[CacheKind, CacheSetting] = {
    CacheKind.PATCH: _OF_BLOCKS,
    CacheKind.IMAGE: _OF_BLOCKS,
    CacheKind.FBCACHE: CacheSetting("threshold", 0.05, 0.0, MAX_THRESHOLD, (0.02, 0.05, 0.1, 0.2)),
    CacheKind.TAYLORSEER: CacheSetting("interval", 5, LEAST_INTERVAL, MAX_INTERVAL, (2, 3, 5, 8)),
}
"""The defaults of FBCACHE and TAYLORSEER are the library's."""


@dataclass(frozen=True, slots=True, order=True)
class CacheChoice:
    """A kind of cache, and the `value` of its setting."""

    kind: CacheKind
    value: float

    @property
    def threshold(self) -> float | None:
        """None if the kind has none."""
        return self.value if self.kind.setting.name == "threshold" else None

    @property
    def interval(self) -> int | None:
        """None if the kind has none."""
        return int(self.value) if self.kind.setting.name == "interval" else None

    def __str__(self) -> str:
        return f"{self.kind.value}={self.value!r}"

    @classmethod
    def parse(cls, text: str) -> CacheChoice:
        """Undo `str`. Raises ValueError."""
        kind, _, value = text.partition("=")
        return cls(CacheKind(kind), float(value))


def choice_of(name: str, threshold: float) -> CacheChoice | None:
    """The cache that one of `BLOCK_CACHES` stands for; with IF_LATE it is the one that a deadline may buy."""
    if name == OFF:
        return None
    return CacheChoice(CacheKind.PATCH if name == IF_LATE else CacheKind(name), threshold)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a cache did for a request: patches of blocks that were `computed` and `skipped`.

    For a cache of whole steps the picture is one patch. `off` says why it did not work throughout; empty if it did.
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
