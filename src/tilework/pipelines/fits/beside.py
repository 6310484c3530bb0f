"""Memory of a device beside weights and the tensors of a run: waiting requests, and CUDA and its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilework.core.wire.commands import CACHE_BYTES, STATES_BYTES

CONTEXT_BYTES = 500_000_000
"""Bytes of a process's context: half a gigabyte on an H100 (`pipelines.cuda.look`); for other cards an assumption."""
WORKSPACES_BYTES = 2 * (32 << 20)
"""Bytes of cuBLAS and cuBLASLt: 32 MiB each on Hopper, which its reference recommends (`cublasSetWorkspace`) and torch
takes, and less on older cards.
"""
NCCL_BYTES = 2 * 32 * (4 << 20)
"""Bytes of a communicator: 4 MiB (NCCL_BUFFSIZE in its documentation) for each channel to either neighbour. The number
of 32 channels is assumed, not measured.
"""
LEAST_BYTES = 100_000_000
"""Least bytes of states, and of caches: a server works with less, but reads states again and recomputes kept data."""
UNPLANNED_BYTES = 500_000_000
"""Bytes for workspaces of kernels, for encodes, and for memory that the allocator cannot use: assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Memory that a worker holds beside models, in bytes, as one of `num_cards` that form groups.

    Waiting requests hold `states_bytes` at most, and the steps of requests with a cache `cache_bytes`. If models need
    it, they may take `spare_states_bytes` and `spare_cache_bytes` of these.
    """

    states_bytes: int = STATES_BYTES
    cache_bytes: int = CACHE_BYTES
    num_cards: int = 1
    spare_states_bytes: int = 0
    spare_cache_bytes: int = 0

    @staticmethod
    def of(states_bytes: int | None, cache_bytes: int | None) -> Beside:
        """Return the memory for these options; None: the default, of which models may take all but LEAST_BYTES."""
        return Beside(
            states_bytes=states_bytes or STATES_BYTES,
            cache_bytes=cache_bytes or CACHE_BYTES,
            spare_states_bytes=0 if states_bytes else STATES_BYTES - LEAST_BYTES,
            spare_cache_bytes=0 if cache_bytes else CACHE_BYTES - LEAST_BYTES,
        )

    def lowered(self, by: int) -> Beside:
        """Return the same with `by` bytes less of the spare memory, caches first; unchanged if there is not enough."""
        of_caches = min(by, self.spare_cache_bytes)
        of_states = by - of_caches
        if of_states > self.spare_states_bytes:
            return self
        return replace(self, states_bytes=self.states_bytes - of_states, cache_bytes=self.cache_bytes - of_caches)

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes of each part, by its purpose."""
        return {
            "CUDA's context": CONTEXT_BYTES,
            "cuBLAS": WORKSPACES_BYTES,
            "NCCL": NCCL_BYTES if self.num_cards > 1 else 0,
            "waiting requests": self.states_bytes,
            "step caches": self.cache_bytes,
            "what is not planned": UNPLANNED_BYTES,
        }

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def bound_bytes(self) -> int:
        """Bytes that options can lower: --states-memory and --cache-memory."""
        return self.states_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Plan of a start for each card, in bytes.

    After the start there are `weights_bytes` of models that stay, None if one of them is not planned, and CUDA's
    context. `later_bytes` come with requests: runs, weights that come and go, and all else. Weights that come and go
    may take `weights_room`; None: all stay. `beside` is left for the rest.
    """

    beside: Beside

    weights_room: int | None
    weights_bytes: int | None
    later_bytes: int


SERVER = Beside()
"""Memory beside models in a server, by default."""
NO_SERVER = Beside(states_bytes=0, cache_bytes=0)
"""Memory beside a model in its own process."""
