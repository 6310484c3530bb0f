"""The patch cache of a worker: what passes keep for the next passes of the same requests, within a memory limit."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from weakref import WeakKeyDictionary, ref

import torch

from tilework.core.packing import Reuse, Size
from tilework.patches.cached_layout import CachedLayout, Observe
from tilework.patches.csp import Csp
from tilework.patches.kept import KeptBatch, Key, joined
from tilework.patches.layout import PatchLayout, pack

_MAX_LAYOUTS = 64


class PatchCache:
    """A `core.packing.Pack` whose batches with `reuses` keep what their next passes can use, at most `most_bytes`.

    A batch with the same pictures as in their last pass finds everything in place. Otherwise rows are copied together
    once: those of pictures in both batches (the common set of PatchedServe section 5.2), and nothing for new pictures.
    Pictures that left but may return stay in a batch of their own. Kept rows live as long as their `Reuse` object: the
    expired set is that of requests that hold none any more. An error in a pass loses what was kept of its pictures.

    Nothing is evicted for others: requests that take turns would evict each other. Without room, blocks are computed
    whole. `observe` gets the changes from pass to pass.
    """

    def __init__(self, most_bytes: int, observe: Observe | None = None) -> None:
        self._most_bytes, self._observe = most_bytes, observe
        self._batches: WeakKeyDictionary[Reuse, KeptBatch] = WeakKeyDictionary()  # Last batch of each request.

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the kept rows take."""
        return sum(batch.num_bytes for batch in self._distinct())

    def __call__(
        self, sizes: tuple[Size, ...], multiple: int, device: torch.device, reuses: tuple[Reuse, ...] = ()
    ) -> PatchLayout:
        if not reuses:
            return pack(sizes, multiple, device)
        (patch,) = {reuse.patch for reuse in reuses}
        csp = _csp(sizes, patch, device)
        halves: Counter[Reuse] = Counter()
        given: list[Key] = []
        for reuse in reuses:
            given.append((ref(reuse), halves[reuse]))
            halves[reuse] += 1
        keys = tuple(given[index] for index in csp.order)
        counts = tuple(rows * columns for rows, columns in csp.grids)
        batch = self._taken(KeptBatch(keys, counts))
        others_bytes = self.num_bytes
        return CachedLayout(
            sizes,
            csp,
            batch,
            [reuses[index] for index in csp.order],
            self._observe,
            admit=lambda more: others_bytes + batch.num_bytes + more <= self._most_bytes,
            finish=lambda: self._put(batch),
        )

    def _taken(self, new: KeptBatch) -> KeptBatch:
        """Take out what is kept of the pictures of a `new` batch, until its pass ends."""
        sources = [self._batches.get(reuse) for key, _ in new.keys if (reuse := key()) is not None]
        known = {id(batch): batch for batch in sources if batch is not None}
        for batch in known.values():
            self._remove(batch)
        if len(known) == 1 and (same := next(iter(known.values()))).keys == new.keys:
            return same
        places = [
            (new, place) if batch is None or key not in batch.keys else (batch, batch.keys.index(key))
            for place, (key, batch) in enumerate(zip(new.keys, sources, strict=True))
        ]
        together = joined(places)
        for batch in known.values():
            if left := batch.without(frozenset(new.keys)):
                self._put(joined([(batch, place) for place in left]))
            batch.blocks.clear()
        return together

    def _put(self, batch: KeptBatch) -> None:
        for key, _ in batch.keys:
            if (reuse := key()) is not None:
                self._batches[reuse] = batch

    def _remove(self, batch: KeptBatch) -> None:
        for reuse in [reuse for reuse, one in self._batches.items() if one is batch]:
            del self._batches[reuse]

    def _distinct(self) -> list[KeptBatch]:
        return list({id(batch): batch for batch in self._batches.values()}.values())


@lru_cache(maxsize=_MAX_LAYOUTS)
def _csp(sizes: tuple[Size, ...], patch: Size, device: torch.device) -> Csp:
    return Csp.of(sizes, patch, device)
