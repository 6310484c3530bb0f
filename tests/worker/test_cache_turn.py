"""A job that turns to a cache, or to none, between two of its steps."""

from __future__ import annotations

import pytest
import torch

import tiny
from tilework.core.cache import CacheChoice, CacheKind, CacheUse
from tilework.core.model import ModelSource
from tilework.patches.cache import PatchCache
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.worker.jobs import HeldJob

NOTHING, MUCH = CacheChoice(CacheKind.PATCH, 0.0), CacheChoice(CacheKind.PATCH, 0.5)
STEPS = 6


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "euler")
    return load(ModelSource(path=str(directory)))


def drawn(family: Family, *choices: CacheChoice | None) -> tuple[torch.Tensor, list[CacheUse | None]]:
    """The latents of a request after all its steps, each with one of the `choices`, and what each cache did."""
    spec = tiny.spec(height=96, width=96, steps=STEPS)
    job = HeldJob(spec=spec, itinerary=family.info.graph.itinerary(STEPS))
    job.take_outputs(dict(family.run("encode", [spec], [{}])[0]))
    job.state = family.begin(job.stage.name, job.spec, job.values)
    uses, cache = list[CacheUse | None](), PatchCache(1 << 30)
    for choice in choices:
        job.use_cache(family, choice)
        family.step([job.state], None if choice is None else cache)
        uses.append(job.state.take_cache_use())
    assert job.state.steps_done == STEPS
    latents = family.export(job.state)["latents"]
    assert isinstance(latents, torch.Tensor)
    return latents, uses


def test_the_steps_before_are_as_they_were_and_those_after_it_use_the_cache(family: Family) -> None:
    plain, none = drawn(family, *[None] * 6)
    same, whole = drawn(family, *[None] * 3, *[NOTHING] * 3)
    other, some = drawn(family, *[None] * 3, *[MUCH] * 3)
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
    assert none == [None] * 6
    assert whole[:3] == some[:3] == [None] * 3
    assert [use.skipped for use in whole[3:] if use] == [0, 0, 0]
    first, *later = [use.skipped for use in some[3:] if use]
    assert first == 0, "nothing is kept yet"
    assert min(later) > 0
    assert not torch.equal(other, plain)


def test_it_may_turn_back(family: Family) -> None:
    """As where a work that was planned before the turn runs after it."""
    _, uses = drawn(family, MUCH, MUCH, None, MUCH, MUCH, MUCH)
    assert uses[2] is None
    skipped = [use.skipped for use in uses if use]
    assert skipped[0] == skipped[2] == 0, "it begins anew"
    assert min(skipped[1], *skipped[3:]) > 0
