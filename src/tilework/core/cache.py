"""Caches that the steps of a request may use to reuse results of earlier steps, and how much each cache saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class CacheKind(StrEnum):
    """Kind of cache: what is kept, and used again where little has changed since.

    PATCH: the outputs of each block for each patch; IMAGE: the same, for whole images only. The other kinds are the
    library's, and leave out all blocks of a step but one or none. FBCACHE (FirstBlockCache) computes the first block;
    if its output has changed little, it adds what the other blocks added last. TAYLORSEER computes the steps at a fixed
    interval, and extrapolates the output of the blocks from these.
    """

    PATCH = "patch"
    IMAGE = "image"
    FBCACHE = "fbcache"
    TAYLORSEER = "taylorseer"

    @property
    def is_of_steps(self) -> bool:
        """True if it leaves out whole steps; then each request runs alone on one device."""
        return self in (CacheKind.FBCACHE, CacheKind.TAYLORSEER)

    @property
    def setting(self) -> CacheSetting:
        """Setting whose value a request gives with this kind."""
        return SETTINGS[self]


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """The setting of a kind of cache: a THRESHOLD, by how much something may change, or an INTERVAL in steps.

    `usual` are the values that are tried to see what the kind saves, and how it changes images; the mildest first.

    The threshold of PATCH and IMAGE is for the input of a block: the mean square of the change over the mean square of
    the input. The threshold of FBCACHE is for what the first block adds: its mean absolute change over its mean
    absolute value.
    """

    name: Literal["threshold", "interval"]
    default: float
    least: float
    most: float
    usual: tuple[float, ...]


IF_LATE, OFF = "if_late", "off"
CacheName = Literal["off", "patch", "image", "fbcache", "taylorseer", "if_late"]
"""Name that a request or a server may give as its cache: a kind, none, or PATCH only if it would be late without."""
BLOCK_CACHES: tuple[str, ...] = (OFF, "patch", "image", IF_LATE)
"""Names except those of caches of whole steps. Cost tables may have rows for these, and workloads may name them."""
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
"""Setting of each kind. The defaults of FBCACHE and TAYLORSEER are the library's."""


@dataclass(frozen=True, slots=True, order=True)
class CacheChoice:
    """A kind of cache, and the `value` of its setting."""

    kind: CacheKind
    value: float

    @property
    def threshold(self) -> float | None:
        """Value of the setting if it is a threshold, else None."""
        return self.value if self.kind.setting.name == "threshold" else None

    @property
    def interval(self) -> int | None:
        """Value of the setting if it is an interval, else None."""
        return int(self.value) if self.kind.setting.name == "interval" else None

    def __str__(self) -> str:
        return f"{self.kind.value}={self.value!r}"

    @classmethod
    def parse(cls, text: str) -> CacheChoice:
        """Undo `str`. Raises ValueError."""
        kind, _, value = text.partition("=")
        return cls(CacheKind(kind), float(value))


def choice_of(name: str, threshold: float) -> CacheChoice | None:
    """Return the cache that one of `BLOCK_CACHES` stands for; for IF_LATE, the one that a late request gets."""
    if name == OFF:
        return None
    return CacheChoice(CacheKind.PATCH if name == IF_LATE else CacheKind(name), threshold)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Numbers of patches of blocks that a cache `computed` and `skipped` for a request.

    For a cache of whole steps the image is one patch. `off` says why the cache did not work throughout, if so.
    """

    computed: int = 0
    skipped: int = 0
    off: str = ""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.computed + other.computed, self.skipped + other.skipped, self.off or other.off)

    @property
    def saving(self) -> float:
        """Part of the patches that was skipped, 0 to 1."""
        return self.skipped / max(self.computed + self.skipped, 1)
