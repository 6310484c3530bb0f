"""Requests with a cache on real workers: what is skipped, what a move costs, and that others are left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tiny
from batching import batching  # noqa: F401
from runtime.rig import PingPong, Rig, assert_nothing_is_left
from tilework.control.log import replay
from tilework.core.cache import CacheChoice, CacheKind, CacheUse
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.wire.spec import Image, Spec
from tilework.core.work import Plan
from tilework.pipelines.draw import draw
from tilework.pipelines.loading import load
from tilework.policy import registry
from tilework.runtime.ticket import Outcome


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "euler")
    return ModelSource(path=str(directory))


def specs() -> dict[str, Spec]:
    """Every second request has a cache."""
    choice = CacheChoice(CacheKind.PATCH, 0.05)
    sides = (96, 128, 96)
    return {
        f"r{index}": tiny.spec(
            height=sides[index % 3],
            width=96,
            seed=index,
            steps=6,
            guidance_scale=4.0,
            prompt="a large red circle on a blue background",
            cache=choice if index % 2 else None,
        )
        for index in range(6)
    }


def used(outcome: Outcome) -> CacheUse:
    return sum((one.cache_use for one in outcome.segments if one.cache_use is not None), CacheUse())


def pictures(source: ModelSource, policy: str, num_workers: int) -> dict[str, tuple[Image, CacheUse]]:
    registry._GIVEN["ping-pong"] = PingPong
    rig = Rig(source, policy, num_workers)
    try:
        rig.start()
        outcomes = rig.outcomes(specs())
        assert_nothing_is_left(rig.engine)
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()
        registry._GIVEN.pop("ping-pong")
    found = {}
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        found[outcome.uid] = outcome.image, used(outcome)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "num_workers"), [("batches", 1), ("ping-pong", 2)])
def test_some_have_a_cache_and_all_get_their_pictures(source: ModelSource, policy: str, num_workers: int) -> None:
    """`batches` lets all share that may; `ping-pong` moves each request after every step, which loses what is kept."""
    found = pictures(source, policy, num_workers)
    family = load(source)
    for uid, spec in specs().items():
        image, use = found[uid]
        if spec.cache is None:
            assert use == CacheUse()
            differences = np.abs(tiny.pixels(image).astype(int) - tiny.pixels(draw(family, spec)).astype(int))
            assert differences.max() <= 1
        elif policy == "ping-pong":
            assert use.computed > 0 == use.skipped
        else:
            assert 0.1 < use.saving < 0.9


class Turning(PingPong):
    """One step at a time, and after two of them each request is late, so that it gets its spare cache."""

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        behind = [one for one in view.waiting() if one.request.spare_cache and one.left.num_steps_left <= 4]
        if behind:
            return Plan(dropped_to_best_effort=tuple((one.job_id, "it is late") for one in behind))
        return PingPong.plan(self, view, costs, now_ns)


@pytest.mark.slow
def test_requests_that_fall_behind_turn_to_their_caches(source: ModelSource) -> None:
    registry._GIVEN["turning"] = Turning
    rig = Rig(source, "turning", 1)
    asked = {uid: replace(spec, cache=None, spare_cache=spec.cache) for uid, spec in specs().items()}
    try:
        rig.start()
        outcomes = rig.outcomes(asked)
        assert_nothing_is_left(rig.engine)
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()
        registry._GIVEN.pop("turning")
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        steps = [one.cache_use for one in outcome.segments if one.num_steps]
        turned = asked[outcome.uid].spare_cache is not None
        assert [use is not None for use in steps] == [turned and done >= 2 for done in range(6)]
        assert (used(outcome).skipped > 0) is turned
