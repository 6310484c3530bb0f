"""The network by which producers of other nodes reach a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCHEME: Final = "ucx://"
"""Beginning of the addresses of such rings."""
_UNFENCED: Final = {"cma", "knem", "xpmem"}
_SHARED: Final = {"sm", "shm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Address at which producers reach a ring, and the transports that they may use.

    `host`: an address of this node that producers can connect to. `port`: 0 takes one that is free.

    `transports`: what UCX may use, as in its variable UCX_TLS; both ends use the same. The default excludes shared
    memory: compare-and-swaps of network cards are not atomic with those of processors, and within a node a ring without
    a network is faster. Of shared memory `posix` and `sysv` are possible. `cma`, `knem` and `xpmem` are not: by these a
    producer writes without the consumer's worker, which could not end that.
    """

    host: str
    port: int = 0
    transports: str = "^shm"

    def __post_init__(self) -> None:
        names = set(self.transports.removeprefix("^").split(","))
        if self.transports.startswith("^"):
            is_fenced = bool(names & _SHARED) or names >= _UNFENCED
        else:
            is_fenced = not names & (_UNFENCED | _SHARED | {"all", "mm"})
        if not is_fenced:
            raise ValueError(f"transports: {self.transports!r} lets producers write by {', '.join(sorted(_UNFENCED))}")
