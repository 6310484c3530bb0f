"""The cost table that a server starts from: what is known of this machine and model, and measurements of the rest."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import tilework
from tilework.core.cost_row import Batch, CostRow
from tilework.core.model import ModelInfo, ModelSource, Source
from tilework.core.request import Shape
from tilework.core.wire import Loaded
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.rows import merge_rows, missing_batches, row_key
from tilework.cost.table import CostTable

_log = logging.getLogger(__name__)
MAX_BATCH = 12


class Measurer(Protocol):
    """Devices that can be measured; an executor that has been started."""

    @property
    def profile_key(self) -> ProfileKey:
        """Under what circumstances they measure."""

    async def calibrate(
        self, batches: tuple[Batch, ...], degree: int = 1, num_runs: int | None = None
    ) -> tuple[CostRow, ...]:
        """Measure at this degree on all devices at once, in disjoint groups; the rows of all groups."""


@dataclass(frozen=True, slots=True)
class CostCache:
    """Where measured costs are kept from one start to the next. `refresh` ignores what is there and measures anew."""

    profiles: Profiles
    refresh: bool = False


def profile_key(source: Source, num_workers: int, loaded: Loaded) -> ProfileKey:
    """Workers on CPUs share them and their memory, and so slow each other down; each GPU is a worker's own."""
    return ProfileKey(
        hardware=loaded.hardware,
        model=loaded.identity,
        dtype=source.dtype if isinstance(source, ModelSource) else "modelled",
        threads=source.threads,
        workers=num_workers if source.device == "cpu" else 1,
        libraries=loaded.info.library,
    )


def calibration_shapes(info: ModelInfo) -> tuple[Shape, ...]:
    """Squares of half, one and one and a half times the default size, as far as the model goes."""
    sides = {round(info.default_height * share / info.side_multiple) * info.side_multiple for share in (0.5, 1.0, 1.5)}
    return tuple(Shape(side, side) for side in sorted(sides) if info.side_multiple <= side <= info.max_side)


def calibration_batches(info: ModelInfo) -> tuple[Batch, ...]:
    """Of these two and four of the smallest, the smallest two, and three, two and one from the smallest on.

    None for a model whose requests share nothing, and no mixes of one size.
    """
    shapes = calibration_shapes(info)
    steps = tuple(shape for index, shape in enumerate(shapes) for _ in range(len(shapes) - index))
    mixes = (shapes[:2], steps) if len(shapes) > 1 else ()
    return (shapes[:1] * 2, shapes[:1] * 4, *mixes) if info.packs else ()


def random_batches(shapes: Sequence[Shape], number: int, seed: int = 0) -> tuple[Batch, ...]:
    """Batches of 2 to MAX_BATCH of these shapes, with no two of the same members; fewer if there are no more.

    A larger number begins with the same ones.
    """
    rng, drawn = Random(seed), dict[Batch, None]()
    number = min(number, math.comb(MAX_BATCH + len(shapes), len(shapes)) - len(shapes) - 1)
    while len(drawn) < number:
        drawn[tuple(sorted(rng.choices(shapes, k=rng.randint(2, MAX_BATCH))))] = None
    return tuple(drawn)


async def measure(
    measurer: Measurer, wanted: Sequence[tuple[Batch, int]], num_runs: int | None = None
) -> AsyncIterator[tuple[CostRow, ...]]:
    """Measure batches at degrees, one after another: the rows of each, made from those of all groups.

    A batch that does not run has no rows. A caller that is cancelled while it waits keeps all rows before.
    """
    for batch, degree in wanted:
        yield merge_rows(await measurer.calibrate((batch,), degree, num_runs))


async def start_costs(
    measurer: Measurer,
    info: ModelInfo,
    degrees: Sequence[int],
    cache: CostCache | None = None,
    on_measuring: Callable[[int, int], None] = lambda _num_done, _num_all: None,
) -> CostTable | None:
    """The table for a start: all that is known under the measurer's key, and measured now what that lacks.

    It has every stage at the calibration shapes and each of `degrees`, and a step of the calibration batches, except
    where one cannot run; what was measured is saved for the next start. None if nothing is known and nothing runs.
    Every device is warm afterwards, also when nothing had to be measured. A cache that cannot be used is a warning: the
    server then measures at every start. `on_measuring` is called with how many of how many measurements are done.
    """
    key, singles = measurer.profile_key, tuple((shape,) for shape in calibration_shapes(info))
    known = _load(cache, key) or key.table(())
    missing = [(one, degree) for degree in degrees for one in missing_batches(known.rows, info.name, singles, degree)]
    missing += [(batch, 1) for batch in missing_batches(known.rows, info.name, calibration_batches(info), 1)]
    fresh: list[CostRow] = []
    num_done = 0
    on_measuring(num_done, len(missing))
    async for measured in measure(measurer, missing):
        fresh += measured
        num_done += 1
        on_measuring(num_done, len(missing))
    _save(cache, key, tuple(fresh))
    if not any((batch, 1) in missing for batch in singles):  # Encode and decode are cold: a first picture would pay.
        await measurer.calibrate(singles[:1])
    rows = {row_key(row): row for row in (*fresh, *known.rows)}
    return replace(known, rows=tuple(rows.values())) if rows else None


def _load(cache: CostCache | None, key: ProfileKey) -> CostTable | None:
    if cache is None or cache.refresh:
        return None
    try:
        return cache.profiles.latest(key)
    except ProfilesUnavailable as error:
        _log.warning("measured costs of earlier starts cannot be used: %s", error)
        return None


def _save(cache: CostCache | None, key: ProfileKey, rows: tuple[CostRow, ...]) -> None:
    if cache is None or not rows:
        return
    try:
        cache.profiles.save(
            Profile(
                key=key,
                origin=ProfileOrigin.CALIBRATION,
                rows=rows,
                tilework=tilework.__version__,
                created_unix_ns=time.time_ns(),
            )
        )
    except ProfilesUnavailable as error:
        _log.warning("the next start will have to measure again: %s", error)
