"""Devices of pipelines in cost tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders import PIPELINE, request, table
from tilework.cost.demand import step_degrees
from tilework.cost.table import BadCostTable, check_devices, merged, without
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json

TABLE = replace(table(degrees=(1, 2, 4)), devices={PIPELINE: (0, 3)})


def test_a_table_keeps_the_devices_of_a_pipeline() -> None:
    assert parse_table(table_json(TABLE)) == TABLE
    assert "devices" not in table_json(table())
    assert parse_table(table_json(table()) | {"devices": {PIPELINE: None}}).devices == {}
    assert merged([TABLE, table(pipeline="other")]).devices == {PIPELINE: (0, 3)}
    assert without(merged([TABLE, table(pipeline="other")]), {PIPELINE}).devices == {}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([0], "devices is [0]; expected an object by pipeline"),
        ({PIPELINE: []}, "devices.toy is []; expected a list of devices from 0, each once, or null for all"),
        ({PIPELINE: [1, 1]}, "devices.toy is [1, 1]; expected"),
        ({PIPELINE: [False]}, "devices.toy is [False]; expected"),
        ({"toys": [0]}, "devices has 'toys', and the rows are of toy; rename it"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(devices: Any, said: str) -> None:
    with pytest.raises(BadCostTable) as error:
        parse_table(table_json(table()) | {"devices": devices})
    assert said in str(error.value)


def test_a_device_that_there_is_not_is_named() -> None:
    check_devices(TABLE, 4, "it.json")
    with pytest.raises(
        BadCostTable, match=r"it.json: devices.toy has 3, and there are 3 devices, from 0; leave it out"
    ):
        check_devices(TABLE, 3, "it.json")


def test_no_group_is_wider_than_the_widest_pool_can_be() -> None:
    assert step_degrees(request("a"), TableCosts(TABLE)) == (1, 2)
    one = replace(TABLE, devices={PIPELINE: (2,)})
    assert step_degrees(request("a"), TableCosts(one)) == (1,)
