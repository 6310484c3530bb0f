"""DDiT's theoretical allocation: its models by hand, and the dynamic program against every partition."""

from __future__ import annotations

from itertools import combinations, product
from math import factorial, inf

import pytest
from figures.ddit_allocation import (
    Allocation,
    Objective,
    RequestClass,
    Share,
    batch_s,
    groups_within_nodes,
    optimal_allocation,
    queue_s,
)
from hypothesis import given
from hypothesis import strategies as st


def request_class(name: str, amount: float, **service_s: float) -> RequestClass:
    """`service_s` by degree, as p1=2.0."""
    return RequestClass(name=name, amount=amount, service_s={int(key[1:]): value for key, value in service_s.items()})


# The models.


def test_a_backlog_takes_the_rounds_of_the_fullest_group() -> None:
    assert [batch_s(7, 2.0, num_groups) for num_groups in (1, 2, 3, 7, 9)] == [14.0, 8.0, 6.0, 2.0, 2.0]


def test_one_group_waits_as_equation_6_says() -> None:
    rate, service_s = 0.3, 2.0
    rho = rate * service_s
    assert queue_s(rate, service_s, 1) == pytest.approx(service_s + rho * service_s / (2 * (1 - rho)))


@pytest.mark.parametrize("num_groups", [1, 2, 5, 16])
def test_several_groups_wait_half_as_long_as_m_m_c_and_serve_in_full(num_groups: int) -> None:
    """Equation 7, but for what is halved in it."""
    service_s, load = 1.5, 0.8 * num_groups
    rho = load / num_groups
    tail = load**num_groups / (factorial(num_groups) * (1 - rho))
    empty = 1 / (tail + sum(load**n / factorial(n) for n in range(num_groups)))
    wait_s = tail * empty * service_s / (num_groups * (1 - rho))
    assert queue_s(load / service_s, service_s, num_groups) == pytest.approx(service_s + wait_s / 2)


def test_rare_requests_wait_little_and_take_the_whole_service_time() -> None:
    assert queue_s(1e-9, 2.0, 4) == pytest.approx(2.0)


def test_groups_that_cannot_keep_up_have_an_unbounded_queue() -> None:
    assert queue_s(2.0, 1.0, 2) == inf
    assert queue_s(1.99, 1.0, 2) < inf


# Groups within nodes.


def test_the_example_of_the_paper() -> None:
    """The first of two nodes of eight and one device of the second are taken; the other seven are left."""
    assert groups_within_nodes(9, 16, 1, 8) == 7
    assert groups_within_nodes(9, 16, 4, 8) == 1


@pytest.mark.parametrize(
    ("first", "end", "degree", "num_groups"),
    [
        (0, 16, 8, 2),
        (4, 12, 8, 0),
        (4, 12, 4, 2),
        (2, 14, 4, 2),
        (3, 3, 1, 0),
        (7, 9, 1, 2),
        (7, 9, 2, 0),
        (0, 24, 8, 3),
    ],
)
def test_no_group_crosses_nodes(first: int, end: int, degree: int, num_groups: int) -> None:
    assert groups_within_nodes(first, end, degree, 8) == num_groups


# The dynamic program.

SMALL, LARGE = request_class("small", 6, p1=1.0, p2=0.9), request_class("large", 2, p1=8.0, p2=4.2, p4=2.2)


def test_a_backlog_on_eight_devices_by_hand() -> None:
    """Small ones take 6 x 1 s of one device at best, large ones 2 x 8 s; wider or more groups only take more."""
    found = optimal_allocation([SMALL, LARGE], num_devices=8, devices_per_node=8, model=batch_s)
    assert found == Allocation(
        cost=22.0,
        shares=(
            Share(name="small", first=6, end=7, degree=1, num_groups=1, seconds=6.0),
            Share(name="large", first=7, end=8, degree=1, num_groups=1, seconds=16.0),
        ),
    )


def test_the_best_mean_latency_by_hand() -> None:
    """Small ones take 1 s on six devices, 2 s on three, 3 s on two; large ones 4.2 s on four, as two pairs.

    Three quarters are small: 3/4 x 2 s + 1/4 x 4.2 s on three and four devices; one device is left, which helps nobody.
    """
    found = optimal_allocation(
        [SMALL, LARGE], num_devices=8, devices_per_node=8, model=batch_s, objective=Objective.LATENCY
    )
    assert found.cost == pytest.approx(0.75 * 2 + 0.25 * 4.2)
    assert [(share.end - share.first, share.degree) for share in found.shares] == [(3, 1), (4, 2)]


def test_too_few_devices_keep_up_with_no_class() -> None:
    found = optimal_allocation([request_class("a", 1.0, p1=3.0)], num_devices=3, devices_per_node=8)
    assert found == Allocation(cost=inf, shares=())


def every_cost(classes, num_devices, devices_per_node, model, objective):
    """The cost of every partition into consecutive ranges, the first of which is nobody's."""
    total = sum(one.amount for one in classes)
    for cuts in combinations(range(num_devices), len(classes)):
        ranges = list(zip(cuts, (*cuts[1:], num_devices), strict=True))
        for degrees in product(*(one.service_s for one in classes)):
            cost = 0.0
            for one, degree, (first, end) in zip(classes, degrees, ranges, strict=True):
                crossing = [device_id // devices_per_node for device_id in range(first, end)]
                groups = sum(crossing.count(node) // degree for node in set(crossing))
                seconds = model(one.amount, one.service_s[degree], groups) if groups else inf
                cost += seconds * ((end - first) if objective is Objective.OCCUPANCY else one.amount / total)
            yield cost


CLASSES = st.lists(
    st.tuples(st.floats(0.05, 2.0), st.lists(st.floats(0.2, 3.0), min_size=1, max_size=3)), min_size=1, max_size=3
).map(
    lambda drawn: [
        RequestClass(name=str(index), amount=amount, service_s={2**power: s for power, s in enumerate(times)})
        for index, (amount, times) in enumerate(drawn)
    ]
)


@given(CLASSES, st.integers(1, 7), st.integers(1, 5), st.sampled_from([batch_s, queue_s]), st.sampled_from(Objective))
def test_it_finds_the_best_of_all_partitions(classes, num_devices, devices_per_node, model, objective) -> None:
    found = optimal_allocation(
        classes, num_devices=num_devices, devices_per_node=devices_per_node, model=model, objective=objective
    )
    best = min(every_cost(classes, num_devices, devices_per_node, model, objective), default=inf)
    assert found.cost == pytest.approx(best)
    assert (found.cost == inf) == (not found.shares)
