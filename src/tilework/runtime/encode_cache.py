"""Encoded inputs of earlier requests, by content: a request for the same with another seed starts after its encode.

Theory of operation. The stages before a request's first steps encode its texts and pictures. Families declare the
outputs that they would write for any seed (`family.ANY_SEED`). Those are kept under a key of all that determines them:
the weights of these stages, by content, and the request without its seed. A later request with this key starts from a
checkpoint, like a request that a server takes over from the server before it. So no policy, cost or device depends on
this, and a device that has dropped its encoder need not load it.

A blob in the cache is another name of the same file, and so is each copy that a request gets: none takes memory, and
each is removed by its owner. An exact request shares with exact ones alone: their encodings were computed alone.

Rejected: a cache in each worker. Admission and the policy would not know of it, and would load an encoder for it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace

from tilework.core.checkpoint import Checkpoint
from tilework.core.graph.itinerary import Itinerary
from tilework.core.policy import CostModel
from tilework.core.request import Request
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.spec import Spec
from tilework.runtime.executor import ExecutorBlobs

_NOT_ENCODED = frozenset({"seed", "preview_every", "pictures"})
"""Fields of a spec that are not in a key; pictures are included by their pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Size of the cache now, and the numbers of requests that found something in it, or did not, since the start."""

    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0


class EncodeCache:
    """Keeps up to `max_bytes` of encoded inputs; those used longest ago are dropped first. With 0 it does nothing."""

    def __init__(self, max_bytes: int, blobs: ExecutorBlobs) -> None:
        self._max_bytes = max_bytes
        self._blobs = blobs
        self._kept: OrderedDict[str, Checkpoint] = OrderedDict()
        self._num_bytes = self._num_hits = self._num_misses = 0
        self._encoded: dict[int, set[int]] = {}  # The stages whose outputs are the same for any seed, by job.

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(num_bytes=self._num_bytes, num_hits=self._num_hits, num_misses=self._num_misses)

    def find(self, request: Request, spec: Spec, costs: CostModel) -> Checkpoint:
        """Return a checkpoint after the encode of a new request, of blobs that belong to it; empty if there is none.

        Raises UnknownCost.
        """
        itinerary = costs.start(request).itinerary
        if not self._max_bytes or not num_leading(itinerary):
            return Checkpoint()
        key = _key(itinerary, spec, costs)
        kept = self._kept.get(key)
        copies = Checkpoint() if kept is None else self._copied(kept)
        if kept is None or not copies.states:
            self._num_misses += 1
            self._drop(key)
            return Checkpoint()
        self._kept.move_to_end(key)
        self._num_hits += 1
        return copies

    def note(
        self, job_id: int, request: Request, spec: Spec, index: int, costs: CostModel, states: Callable[[], Checkpoint]
    ) -> None:
        """Note that the stage with this index has written outputs of a job that are the same for any seed.

        If all stages before the steps have, their outputs are kept: `states` gives the blobs of the job.
        """
        itinerary = costs.start(request).itinerary
        num = num_leading(itinerary)
        if not self._max_bytes or index >= num:
            return
        self._encoded.setdefault(job_id, set()).add(index)
        if len(self._encoded[job_id]) < num or (key := _key(itinerary, spec, costs)) in self._kept:
            return
        written = [state for state in states().states if state.index < num]
        num_bytes = sum(state.blob.num_bytes for state in written)
        if len(written) < num or num_bytes > self._max_bytes:
            return
        copies = self._copied(Checkpoint(tuple(written)))
        if copies.states:
            self._kept[key] = copies
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def forget(self, job_id: int) -> None:
        """Forget a job that has ended."""
        self._encoded.pop(job_id, None)

    def _copied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the same states in blobs of their own; empty if one is gone."""
        copies: list[SavedState] = []
        for state in checkpoint.states:
            blob = self._blobs.copy(state.blob)
            if blob is None:
                for one in copies:
                    self._blobs.discard(one.blob)
                return Checkpoint()
            copies.append(replace(state, blob=blob))
        return Checkpoint(tuple(copies))

    def _drop(self, key: str) -> None:
        for blob in self._kept.pop(key, Checkpoint()).blobs:
            self._num_bytes -= blob.num_bytes
            self._blobs.discard(blob)

    def lose(self, gone: Collection[StateBlob]) -> None:
        """Drop entries that cannot be used without these blobs."""
        lost = set(gone)
        for key in [key for key, kept in self._kept.items() if not lost.isdisjoint(kept.blobs)]:
            self._drop(key)

    def clear(self) -> None:
        for key in list(self._kept):
            self._drop(key)


def num_leading(itinerary: Itinerary) -> int:
    """Return how many stages come before the first with steps; 0 if there are no steps."""
    return next((index for index, stage in enumerate(itinerary.stages) if stage.has_steps), 0)


def _key(itinerary: Itinerary, spec: Spec, costs: CostModel) -> str:
    """Return a digest of all that the stages before the steps read."""
    stages = itinerary.stages[: num_leading(itinerary)]
    weights = [[component.digest for component in costs.weights.components(stage)] for stage in stages]
    asked = [(one.name, getattr(spec, one.name)) for one in fields(spec) if one.name not in _NOT_ENCODED]
    digest = hashlib.sha256(repr((stages, weights, asked)).encode())
    for name, pictures in sorted(spec.pictures.items()):
        for picture in pictures:
            digest.update(repr((name, picture.height, picture.width, picture.frames)).encode())
            digest.update(picture.pixels)
    return digest.hexdigest()
