"""Cost of steps with a cache, relative to the same steps without: each request is drawn both ways, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from tilework.core.cache import CacheChoice, CacheUse
from tilework.core.cost_row import CostRow
from tilework.core.wire.commands import CACHE_BYTES
from tilework.core.wire.spec import Spec
from tilework.patches.cache import PatchCache
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.family import Family
from tilework.worker.synchronize import synchronize


@dataclass(frozen=True, slots=True)
class _DrawnSteps:
    """Seconds of all steps of some requests together, and the share of each that was skipped."""

    seconds: float
    skipped: tuple[float, ...]


def cached_row(family: Family, row: CostRow, batches: Sequence[Sequence[Spec]], choice: CacheChoice) -> CostRow:
    """Return the cost row of steps with a cache, beside `row`, which is without, from requests of its sizes.

    Each of the `batches` has one request for each of the shapes of `row`. Each batch makes all its steps without the
    cache and with it. The result is the seconds of `row`, times the ratio of both: if several devices measured `row` at
    once, they slowed each other down, and would do so with a cache.
    """
    _draw(family, batches[0], None)  # Warms up.
    without, cached = list[_DrawnSteps](), list[_DrawnSteps]()
    for specs in batches:
        without.append(_draw(family, specs, None))
        cached.append(_draw(family, specs, choice))
    skipped = [share for one in cached for share in one.skipped]
    return replace(
        row,
        seconds=row.seconds * sum(one.seconds for one in cached) / sum(one.seconds for one in without),
        p99_seconds=None,
        peak_bytes=None,
        activation_bytes=None,
        state_bytes=None,
        num_runs=len(batches),
        cache=choice,
        skipped=fmean(skipped),
        skipped_std=pstdev(skipped),
    )


def _draw(family: Family, specs: Sequence[Spec], choice: CacheChoice | None) -> _DrawnSteps:
    states = [begin_steps(family, replace(spec, cache=choice)) for spec in specs]
    pack = PatchCache(CACHE_BYTES) if choice is not None or len(states) > 1 else None
    synchronize(family.device)
    start_s = time.perf_counter()
    for _ in range(states[0].num_steps):
        family.step(states, pack)
    synchronize(family.device)
    seconds = time.perf_counter() - start_s
    return _DrawnSteps(seconds, tuple((state.take_cache_use() or CacheUse()).saving for state in states))
