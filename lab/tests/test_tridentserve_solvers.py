"""Ways, rewards and solvers of TridentServe's program."""

from __future__ import annotations

from random import Random

import pytest

from builders import job
from policy.published.tridentserve_runs import ED, EDC, FLUX, C, ask, by_declared, named, serve
from tilework.core.request import Request
from tilework.cost.table_costs import TableCosts
from tilework.policy.published.tridentserve.layout import Pool, PoolLayout
from tilework.policy.published.tridentserve.program import PoolOption, shortest_first, solve_quickly
from tilework.policy.published.tridentserve.ways import Profiles, Way, Ways
from tilework.policy.toolkit.tasks import TaskPrices, TaskReader
from tilework_lab.policies.tridentserve_ilp import solve, value_of


def ways_of(asked: Request, layout: PoolLayout, paper_times: bool = False) -> tuple[Way, ...]:
    costs, profiles = TableCosts(FLUX), Profiles()
    profiles.set_devices(FLUX.memory_bytes, (8, 8))
    task = TaskReader({}, costs, 8, 0).read(job(0, asked, done=costs.start(asked)))
    assert task is not None
    return Ways(layout, profiles, costs, paper_times).of(task)


def test_ways_are_computed_again_when_costs_have_learned_of_such_requests() -> None:
    costs, profiles, prices = TableCosts(FLUX), Profiles(), TaskPrices()
    profiles.set_devices(FLUX.memory_bytes, (8, 8))
    one, other = ask("a", 0.0, "2048x2048"), ask("b", 0.0, "512x512")
    ways = Ways(TWO_KINDS, profiles, costs)

    def of(asked: Request) -> tuple[Way, ...]:
        task = TaskReader({}, costs, 8, 0, prices).read(job(0, asked, done=costs.start(asked)))
        assert task is not None
        return ways.of(task)

    before, same = of(one), of(other)
    assert of(one) is before
    step = costs.graph("flux.1").stepped[0]
    costs.observe(step, (one,), 1, 1, 3 * costs.work_ns(step, (one,), 1))
    after = {(way.pool, way.degree): way.run_ns for way in of(one)}
    assert any(after.get((way.pool, way.degree), 0) > way.run_ns for way in before)
    assert of(other) is same
    assert ways.is_of(TWO_KINDS)
    assert not ways.is_of(PoolLayout.colocated({0: range(8)}))
    profiles.forget()
    assert not ways.is_of(TWO_KINDS), "what fits is asked for again"


TWO_KINDS = PoolLayout(
    {0: range(8), 1: range(8, 16)},
    {one: Pool("flux.1", EDC if one < 8 else ED if one < 14 else C) for one in range(16)},
)


def test_ways_are_the_types_that_fit_at_efficient_degrees() -> None:
    """2048 px is efficient on up to two devices; without C, it is decoded elsewhere, which takes as long."""
    found = {(way.pool.kind, way.degree): way for way in ways_of(ask("a", 0.0, "2048x2048"), TWO_KINDS)}
    assert found.keys() == {(EDC, 1), (EDC, 2), (ED, 1), (ED, 2)}
    assert found[EDC, 2].run_ns == found[ED, 2].run_ns == pytest.approx(14.32e9, rel=1e-3)
    assert (found[EDC, 2].penalty, found[ED, 2].penalty) == (0, 2 * 17)
    large = {(way.pool.kind, way.degree) for way in ways_of(ask("a", 0.0, "4096x4096"), TWO_KINDS)}
    assert large == {(ED, 1), (ED, 2), (ED, 4)}, "six devices are free for it on a node"


def test_the_papers_times_leave_out_what_is_elsewhere() -> None:
    found = {(way.pool.kind, way.degree): way for way in ways_of(ask("a", 0.0, "2048x2048"), TWO_KINDS, True)}
    assert found[EDC, 2].run_ns - found[ED, 2].run_ns == pytest.approx(2.8e9, rel=1e-3)


def test_without_auxiliaries_a_type_is_no_way() -> None:
    pools = {one: Pool("flux.1", EDC if one < 8 else ED) for one in range(16)}
    layout = PoolLayout({0: range(8), 1: range(8, 16)}, pools)
    assert {way.pool.kind for way in ways_of(ask("a", 0.0, "2048x2048"), layout)} == {EDC}
    assert not ways_of(ask("a", 0.0, "4096x4096"), layout)


def test_a_request_goes_where_least_is_sent_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [(ask("x", 0.0, "4096x4096"), 0.2), (ask("y", 0.0, "1024x1024"), 2.8)]
    seen = serve([ask(str(n), 0.0, "512x512") for n in range(8)], named(monkeypatch, lambda: by_declared(declared)))
    kinds = [kinds.pop() for _, kinds in seen.of("encode")]
    num = sum(len(group) for group, name in seen.places[0][1].groups if name == "EDC")
    assert 1 <= num < 8
    assert kinds[:num] == ["EDC"] * num


def programs(num: int, rng: Random) -> list[tuple[list[list[PoolOption]], dict[Pool, int]]]:
    """Decisions like those of FLUX: small requests fit on two types, large ones on one; some are late."""
    first, second = Pool("flux.1", EDC), Pool("flux.1", ED)
    found = []
    for _ in range(num):
        groups = []
        for _ in range(rng.randint(5, 80)):
            reward = 1_000_000 if rng.random() < 0.7 else rng.randint(100_000, 900_000)
            widths = rng.choice(((1,), (1,), (1, 2), (2, 4), (1, 2, 4, 8), (4, 8)))
            pools = (second,) if widths[-1] == 8 else (first, second)
            groups.append(
                [
                    PoolOption(width, reward + 100 * width - 10 * at, pool)
                    for at, pool in enumerate(pools)
                    for width in widths
                ]
            )
        found.append((groups, {first: rng.randint(0, 60), second: rng.randint(0, 70)}))
    return found


def test_the_quick_solver_is_nearly_as_good_as_the_ilp() -> None:
    shares = []
    for groups, capacities in programs(60, Random(5)):
        chosen, best = solve_quickly(groups, capacities), solve(groups, capacities)
        shares.append(value_of(groups, chosen) / best.bound if best.bound else 1.0)
    assert sum(shares) / len(shares) >= 0.99
    assert min(shares) >= 0.9


def test_a_pool_gives_up_what_another_one_can_run() -> None:
    """Both fit on EDC, one on ED as well, which is a little worse: together they are worth more than apart."""
    first, second = Pool("", EDC), Pool("", ED)
    both, only = [PoolOption(1, 100, first), PoolOption(1, 99, second)], [PoolOption(1, 90, second)]
    assert solve_quickly([both, only], {second: 1, first: 1}) == [0, 0]


def test_shortest_first_takes_the_widest_option_of_the_first_type_with_room() -> None:
    first, second = Pool("", EDC), Pool("", ED)
    long = [PoolOption(width, 1, pool, 90) for pool in (second, first) for width in (1, 2)]
    short = [PoolOption(width, 1, pool, 10) for pool in (second, first) for width in (1, 2)]
    assert shortest_first([long, short], {first: 3, second: 2}) == [1, 3]
    assert shortest_first([long, short], {first: 1, second: 2}) == [None, 1]
