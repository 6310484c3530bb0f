"""Images with and without a cache, drawn as a worker draws them: what `tilework quality` compares."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilework.core.cache import CacheChoice, CacheUse
from tilework.core.wire.commands import CACHE_BYTES
from tilework.core.wire.spec import Image, Spec
from tilework.patches.cache import PatchCache
from tilework.pipelines.draw import draw
from tilework.pipelines.family import Family, StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """An image of the `index`-th spec; `steps_s` is the time of its denoising, without encode and decode."""

    index: int
    choice: CacheChoice | None
    image: Image
    use: CacheUse
    steps_s: float


def draw_each(family: Family, specs: Sequence[Spec], choices: Sequence[CacheChoice]) -> Iterator[Drawn]:
    """Draw each spec without a cache, and then with each of the `choices`."""
    for index, spec in enumerate(specs):
        for choice in (None, *choices):
            yield _drawn(family, index, replace(spec, cache=choice))


def _drawn(family: Family, index: int, spec: Spec) -> Drawn:
    cache = PatchCache(CACHE_BYTES)
    uses = [CacheUse()]
    times_s = [0.0]

    def step(state: StepState) -> None:
        start_s = time.perf_counter()
        family.step([state], cache if spec.cache is not None else None)
        times_s.append(time.perf_counter() - start_s)
        uses.append(state.take_cache_use() or CacheUse())

    image = draw(family, spec, step=step)
    return Drawn(index=index, choice=spec.cache, image=image, use=sum(uses, CacheUse()), steps_s=sum(times_s))
