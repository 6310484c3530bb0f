"""A packed batch that computes, in each block, only the patches whose input has changed since their last pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tilework.core.cache import CacheUse
from tilework.core.packing import IMAGE, Reuse, RunBlock, Size
from tilework.patches import operators, stitcher
from tilework.patches.csp import AttentionRun, Csp
from tilework.patches.kept import KeptBatch, KeptBlock, square_sums
from tilework.patches.layout import PatchLayout

_NO_ROOM = "some blocks were computed whole: the memory for caches is used up"

Observe = Callable[[int, Tensor, Tensor], None]
"""Gets each block that was computed whole: its index, and how much its input and its output have changed, (P)."""


class CachedLayout(PatchLayout):
    """The operators of a batch; `kept` holds what the last passes of its pictures left, in the batch's order.

    Within a block, only a set of patches is computed. Operators that look beyond a patch take what they need of the
    other patches from `kept`. So a block needs not know about the cache. `reuses` has one entry per picture, in the
    batch's order. `admit` says whether there is room for this number of further bytes.

    Source: PatchedServe section 5.1. Unlike there, an input is compared with the one that its output was computed
    from, not with the last one, so that slow changes add up.
    """

    def __init__(
        self,
        sizes: tuple[Size, ...],
        csp: Csp,
        kept: KeptBatch,
        reuses: Sequence[Reuse],
        observe: Observe | None,
        admit: Callable[[int], bool],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(sizes, csp)
        self.is_plain, self.leaves_out = False, True  # A picture of one patch is kept, too.
        self._kept, self._reuses, self._observe, self._admit, self._finish = kept, reuses, observe, admit, finish
        self._spans = [slice(first, end) for first, end in pairwise(csp.picture_offsets)]
        thresholds = torch.tensor([reuse.threshold for reuse in reuses], dtype=torch.float32)
        self._thresholds = thresholds.to(csp.owners.device).index_select(0, csp.owners)
        self._block: _RunningBlock | None = None

    def per_patch(self, values: Tensor) -> Tensor:
        return super().per_patch(values) if self._whole else values.index_select(0, self._some.owners)

    def convolve(self, convolution: nn.Conv2d, patches: Tensor) -> Tensor:
        return operators.convolve_framed(convolution, self._framed(patches))

    def normalise(self, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        owners = self.csp.owners if self._whole else self._some.owners
        return operators.normalise_by(norm, patches, self._statistics(norm, patches), owners)

    def convolve_activated(self, convolution: nn.Conv2d, norm: nn.GroupNorm, patches: Tensor) -> Tensor:
        if not self._whole:
            return self.convolve(convolution, silu(self.normalise(norm, patches), inplace=True))
        of_pictures = self._statistics(norm, patches)
        framed = stitcher.stitch_by(norm, patches, of_pictures, self.csp, silu=True)
        self._keep(lambda: operators.edges(framed[:, :, 1:-1, 1:-1]))
        return operators.convolve_framed(convolution, framed)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        queries: Mapping[str, int],
        keys: Mapping[str, int],
    ) -> Tensor:
        known, values = (self._completed(sequence, keys) for sequence in (key, value))
        return operators.attend(query, known, values, scale, self._runs if self._whole else self._some.runs, queries)

    def run_block(self, index: int, states: Sequence[Tensor], run: RunBlock, has_text: bool) -> list[Tensor]:
        kept = self._kept.blocks.get(index)
        change = None if kept is None or not any(kept.has) else _change(states, kept.states, kept.squares)
        computed = None if kept is None or change is None else self._computed(index, kept, change)
        self._count(computed)
        if kept is None or computed is None:
            with self._inside(_RunningBlock()) as block:
                outputs = run(lambda rows: rows)
            if self._observe is not None and kept is not None and change is not None:
                self._observe(index, change, _change(outputs, kept.outputs, square_sums(kept.outputs)))
            own = [state.clone() for state in states] if kept is None else kept.copied(states)
            return self._store(index, KeptBlock(own, square_sums(states), outputs, block.sites))
        if not computed and not has_text:
            return kept.outputs
        some = _Some.of(computed, self.csp)
        taken = [state.index_select(0, some.patches) for state in states]
        known = {id(state): rows for state, rows in zip(states, taken, strict=True)}
        with self._inside(_RunningBlock(some=some, known=kept.sites)):
            outputs = run(lambda rows: known[id(rows)] if id(rows) in known else rows.index_select(0, some.patches))
        if not computed:
            return kept.outputs
        kept.replace(some.patches, taken, outputs)
        return self._store(index, kept)

    def finish(self) -> None:
        self._finish()

    def _computed(self, index: int, kept: KeptBlock, change: Tensor) -> list[int] | None:
        """Return the patches that a block computes, or None for all of them. Waits for the device once."""
        predict = self._reuses[0].predict  # All requests of a pass are for one model.
        change = change if predict is None else predict(index, change)
        reused: list[bool] = (change < self._thresholds).tolist()
        for has, reuse, span in zip(kept.has, self._reuses, self._spans, strict=True):
            if not has or (reuse.whole and not all(reused[span])):
                reused[span] = [False] * (span.stop - span.start)
        return [patch for patch, is_reused in enumerate(reused) if not is_reused] if any(reused) else None

    def _count(self, computed: list[int] | None) -> None:
        for reuse, span in zip(self._reuses, self._spans, strict=True):
            num_patches = span.stop - span.start
            num_computed = num_patches if computed is None else sum(span.start <= one < span.stop for one in computed)
            reuse.use += CacheUse(num_computed, num_patches - num_computed)

    def _store(self, index: int, block: KeptBlock) -> list[Tensor]:
        """Keep a block if there is room; return its outputs."""
        block.has = [True] * len(self._reuses)
        before = self._kept.blocks.get(index)
        if self._admit(block.num_bytes - (before.num_bytes if before else 0)):
            self._kept.blocks[index] = block
            return block.outputs
        self._kept.blocks.pop(index, None)
        for reuse in self._reuses:
            reuse.use += CacheUse(off=_NO_ROOM)
        return block.outputs

    @contextmanager
    def _inside(self, block: _RunningBlock) -> Iterator[_RunningBlock]:
        assert self._block is None, "blocks do not lie in blocks"
        self._block = block
        try:
            yield block
        finally:
            self._block = None

    @property
    def _whole(self) -> bool:
        """True while all patches are computed."""
        return self._block is None or self._block.some is None

    @property
    def _some(self) -> _Some:
        assert self._block is not None
        assert self._block.some is not None
        return self._block.some

    def _framed(self, patches: Tensor) -> Tensor:
        if self._whole:
            self._keep(lambda: operators.edges(patches))
            return operators.with_halo(patches, self.csp)
        frames = self._some.frames_of((patches.shape[2], patches.shape[3]))
        return operators.with_halo_by(patches, self._complete(operators.edges(patches)), frames)

    def _statistics(self, norm: nn.GroupNorm, patches: Tensor) -> tuple[Tensor, Tensor]:
        moments = operators.moments(norm, patches)
        if self._whole:
            self._keep(lambda: moments)
        else:
            moments = self._complete(moments)
        return operators.pooled(moments, self.csp)

    def _completed(self, sequence: Tensor, lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the parts of keys or values by name, with the tokens of all patches."""
        parts = operators.parts_of(sequence, lengths)
        if IMAGE not in parts:
            return parts
        num_patches = self.csp.num_patches if self._whole else len(self._some.patches)
        tokens = parts[IMAGE][0]
        each = tokens.shape[1] // num_patches if num_patches else 0
        rows = torch.unflatten(tokens, 1, (num_patches, each)).transpose(0, 1)  # (P, H, tokens, D)
        if self._whole:
            self._keep(lambda: rows)
            return parts
        return parts | {IMAGE: self._complete(rows).transpose(0, 1).flatten(1, 2)[None]}

    def _keep(self, rows: Callable[[], Tensor]) -> None:
        """Keep what other patches see of all patches, (P, ...), for this call of an operator in the block."""
        if self._block is not None:
            self._block.sites.append(rows())

    def _complete(self, rows: Tensor) -> Tensor:
        """Return what other patches see of all patches at this call, given `rows` of the computed ones, (K, ...)."""
        assert self._block is not None
        known = self._block.next_known()
        return known.index_copy_(0, self._some.patches, rows) if len(rows) else known


def _change(rows: Sequence[Tensor], before: Sequence[Tensor], squares: Tensor) -> Tensor:
    """Return the sum of squares of each patch's change, over `squares`, that of the values before: (P), of float32."""
    return square_sums([new - old for new, old in zip(rows, before, strict=True)]) / squares


@dataclass(slots=True, eq=False)
class _Some:
    """Some patches of a batch: their places, their pictures, the runs of their queries, and the pixels around them."""

    patches: Tensor
    owners: Tensor
    runs: list[AttentionRun]
    csp: Csp
    _frames: dict[Size, Tensor] = field(default_factory=dict)

    def frames_of(self, patch: Size) -> Tensor:
        """Return the `Csp.frames` of these patches."""
        if patch not in self._frames:
            self._frames[patch] = self.csp.frames(patch).index_select(0, self.patches)
        return self._frames[patch]

    @classmethod
    def of(cls, computed: list[int], csp: Csp) -> _Some:
        patches = torch.tensor(computed, dtype=torch.long).to(csp.owners.device)
        counts = [sum(first <= one < end for one in computed) for first, end in pairwise(csp.picture_offsets)]
        return cls(
            patches=patches,
            owners=csp.owners.index_select(0, patches),
            runs=csp.runs(counts),
            csp=csp,
        )


@dataclass(slots=True, eq=False)
class _RunningBlock:
    """The block that runs now: what its operators see of all patches, in the order of their calls.

    With `some` patches, `known` holds what the last pass left; without, `sites` collects what this pass leaves.
    """

    some: _Some | None = None
    known: Sequence[Tensor] = ()
    sites: list[Tensor] = field(default_factory=list)
    _next: int = 0

    def next_known(self) -> Tensor:
        self._next += 1
        return self.known[self._next - 1]
