"""What requests cost is remembered by what it depends on."""

from __future__ import annotations

from itertools import product

import pytest

from builders import request
from policy.drafted import COSTS, GRAPH
from tilework.policy.lookahead.request_costs import RequestCosts

STEPS = (10, 20, 5)
"""At the same position, requests with so many steps have other shares of draft and painting before them."""


@pytest.mark.parametrize("order", [STEPS, STEPS[::-1]])
def test_the_costs_of_a_request_depend_on_no_other(order: tuple[int, ...]) -> None:
    shared = RequestCosts()
    for num_steps, position, num_devices in product(order, range(7), (1, 2)):
        asked, left = request("a", steps=num_steps), GRAPH.itinerary(num_steps).at[position]
        alone = RequestCosts().of(asked, left, num_devices, COSTS)
        assert shared.of(asked, left, num_devices, COSTS) == alone, (num_steps, position, num_devices)
    assert len({RequestCosts().of(request("a", steps=n), GRAPH.itinerary(n).at[5], 2, COSTS).speeds for n in STEPS}) > 1
