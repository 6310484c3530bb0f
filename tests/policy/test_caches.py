"""Requests with a cache: whom they share works with, and what their steps are taken to cost."""

from __future__ import annotations

import pytest

from builders import PIPELINE, POLICIES, batched, request, simulate
from policy.test_lora_batches import SHARING, shared
from stages import DIFFUSE, stage_of
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.request import Request, Shape
from tilework.cost.table_costs import TableCosts

CACHES = None, CacheChoice(CacheKind.PATCH, 0.1), CacheChoice(CacheKind.PATCH, 0.2), CacheChoice(CacheKind.IMAGE, 0.1)


def crowd(*caches: CacheChoice | None) -> list[Request]:
    """Twelve requests at once, with these caches in turn."""
    return [request(str(n), n / 100, slo_s=30, cache=caches[n % len(caches)]) for n in range(12)]


@pytest.mark.parametrize("policy", POLICIES)
def test_members_of_a_work_have_equal_caches(policy: str) -> None:
    groups = shared(simulate(crowd(*CACHES), policy, num_devices=1, costs=batched()))
    assert all(len({one.cache for one in group}) == 1 for group in groups)


@pytest.mark.parametrize("policy", sorted(SHARING))
def test_requests_with_equal_caches_share(policy: str) -> None:
    assert shared(simulate(crowd(CACHES[1]), policy, num_devices=1, costs=batched())), "none shares"


def test_what_a_cache_saves_is_learned_for_it_alone() -> None:
    costs = TableCosts(batched())

    def step_ns(asked: Request) -> int:
        stage = costs.start(asked).stepped
        assert stage is not None
        return costs.work_ns(stage, [asked], 1)

    plain, cached, other = (request("a", cache=cache) for cache in CACHES[:3])
    larger = request("b", cache=CACHES[1], side=256)
    before_ns, larger_ns = step_ns(plain), step_ns(larger)
    assert step_ns(cached) == step_ns(other) == before_ns
    stage = costs.start(cached).stepped
    assert stage is not None
    for _ in range(40):
        costs.observe(stage, [cached], 1, 5, 5 * before_ns // 2)
    assert step_ns(plain) == step_ns(other) == before_ns
    assert step_ns(cached) == pytest.approx(before_ns / 2, rel=0.01)
    assert step_ns(larger) == pytest.approx(larger_ns / 2, rel=0.01), "of a size that has not been measured, too"
    assert costs.run_ns(stage_of(PIPELINE, DIFFUSE), (Shape(128, 128),), 1) == before_ns
