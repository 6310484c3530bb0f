"""What lies on a device beside weights and the tensors of a run: of waiting requests, and of CUDA and its libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilework.core.wire.commands import CACHE_BYTES, STATES_BYTES

CONTEXT_BYTES = 500_000_000
"""Of a process: half a gigabyte on an H100 (`pipelines.cuda.look`). Of other cards it is assumed, not measured."""
WORKSPACES_BYTES = 2 * (32 << 20)
"""Of cuBLAS and cuBLASLt: 32 MiB each on Hopper, which its reference recommends (`cublasSetWorkspace`) and torch takes,
and less on older cards."""
NCCL_BYTES = 2 * 32 * (4 << 20)
"""Of a communicator: 4 MiB (NCCL_BUFFSIZE in its documentation) for each channel to either neighbour. That there are 32
channels is assumed, not measured."""
LEAST_BYTES = 100_000_000
"""Of states, and of caches: a server goes on with less, but reads states again and computes what was kept."""
UNPLANNED_BYTES = 500_000_000
"""What kernels take beside tensors, encodes, and what the allocator cannot use: assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a worker holds beside models, in bytes, as one of `num_cards` that form groups.

    Of waiting requests it holds `states_bytes` at most, and of the steps of requests with a cache `cache_bytes`. What
    models need of these they may take `spare_states_bytes` and `spare_cache_bytes` of.
    """

    states_bytes: int = STATES_BYTES
    cache_bytes: int = CACHE_BYTES
    num_cards: int = 1
    spare_states_bytes: int = 0
    spare_cache_bytes: int = 0

    @staticmethod
    def of(states_bytes: int | None, cache_bytes: int | None) -> Beside:
        """As options say it; None: the default, of which models may take all but LEAST_BYTES."""
        return Beside(
            states_bytes=states_bytes or STATES_BYTES,
            cache_bytes=cache_bytes or CACHE_BYTES,
            spare_states_bytes=0 if states_bytes else STATES_BYTES - LEAST_BYTES,
            spare_cache_bytes=0 if cache_bytes else CACHE_BYTES - LEAST_BYTES,
        )

    def lowered(self, by: int) -> Beside:
        """The same with this much less of what is to spare, caches first. As it is, if that is not enough."""
        of_caches = min(by, self.spare_cache_bytes)
        of_states = by - of_caches
        if of_states > self.spare_states_bytes:
            return self
        return replace(self, states_bytes=self.states_bytes - of_states, cache_bytes=self.cache_bytes - of_caches)

    @property
    def parts(self) -> Mapping[str, int]:
        """The bytes of each part, by what it is for."""
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
        """What options can lower: --states-memory and --cache-memory."""
        return self.states_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """What the plan of a start has for each card, in bytes.

    After it there are `weights_bytes` of models that stay, None if one of them is not planned, and CUDA's context.
    `later_bytes` come when requests do: runs, weights that come and go, and all else. Weights that come and go may take
    `weights_room`; None: all stay. `beside` is what is left for the rest.
    """

    beside: Beside

    weights_room: int | None
    weights_bytes: int | None
    later_bytes: int


SERVER = Beside()
"""Beside models in a server, by default."""
NO_SERVER = Beside(states_bytes=0, cache_bytes=0)
"""Beside a model in a process of its own."""
