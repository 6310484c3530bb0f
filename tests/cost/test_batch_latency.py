"""The learned model of batch latency: its predictions, where it is used, its file format, and its accuracy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from builders import PIPELINE, PROFILE_KEY
from stages import DECODE, DIFFUSE, stage_of
from tilework.control.controller import ControllerConfig
from tilework.control.log import header_line, read_log
from tilework.core.cost_row import CostRow
from tilework.core.graph.stage import Stage
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.cost.batch_latency import BatchLatencyModel, Layer
from tilework.cost.learning import MIN_MIXED, learn
from tilework.cost.profile import Profile, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.cost.rows import batch_key
from tilework.cost.table import BadCostTable, CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, table_json

STEP = stage_of(PIPELINE, DIFFUSE)
SMALL, WIDE, LARGE = Shape(512, 512), Shape(512, 768), Shape(1024, 1024)
ALONE_S = {SMALL: 1.0, WIDE: 1.5, LARGE: 4.0}
KEY = PROFILE_KEY


def turned(shape: Shape) -> Shape:
    return Shape(shape.width, shape.height, shape.frames)


def together(seconds: float, *shapes: Shape, **more: Any) -> CostRow:
    return CostRow.of(shapes, **{"pipeline": PIPELINE, "stage": DIFFUSE} | more, seconds=seconds)


ALONE = tuple(together(seconds, shape) for shape, seconds in ALONE_S.items())


def batch_model(weights: tuple[float, ...] = (0.0,) * 4, bias: float = 0.0, **more: Any) -> BatchLatencyModel:
    """Of one layer: the logarithm is linear in how many are small, how many large, of sizes and of patches."""
    given = {"shapes": (SMALL, LARGE), "max_batch": 4, "max_patches": 20, "error": 0.1, "num_rows": 100} | more
    return BatchLatencyModel(layers=(Layer((weights,), (bias,)),), **given)


def table(one: BatchLatencyModel, *rows: CostRow) -> CostTable:
    return CostTable(hardware="toy", rows=(*ALONE, *rows), batch_models={PIPELINE: one})


def batch_s(costs: CostTable, *shapes: Shape, stage: Stage = STEP) -> float:
    return TableCosts(costs).run_ns(stage, shapes, 1) / NS_PER_S


# Predictions.


@pytest.mark.parametrize(
    ("weights", "value"),
    [
        ((1.0, 0.0, 0.0, 0.0), 2.0),
        ((0.0, 1.0, 0.0, 0.0), 1.0),
        ((0.0, 0.0, 1.0, 0.0), 2.0),
        ((0.0, 0.0, 0.0, 0.1), 0.6),
    ],
)
def test_it_sees_members_of_each_shape_sizes_and_patches(weights: tuple[float, ...], value: float) -> None:
    """Two of 512 px and one of 1024 px are six patches of 512 px."""
    members = batch_key((SMALL, LARGE, SMALL))
    assert batch_model(weights, -0.5).ratio(members) == pytest.approx(math.exp(value - 0.5))


def test_between_layers_negative_values_become_zero() -> None:
    first = Layer(((1.0, 0.0, 0.0, 0.0), (-1.0, 0.0, 0.0, 0.0)), (0.0, 0.0))
    network = replace(batch_model(), layers=(first, Layer(((0.25, 100.0),), (0.0,))))
    assert network.ratio(batch_key((SMALL, SMALL))) == pytest.approx(math.exp(0.5))


def test_a_shape_on_its_side_counts_as_that_shape_but_makes_smaller_patches() -> None:
    one = batch_model((0.0, 0.0, 0.0, 0.1), shapes=(SMALL, WIDE))
    assert one.ratio(batch_key((WIDE, WIDE))) == one.ratio(batch_key((turned(WIDE),) * 2)) == math.exp(0.1 * 2)
    assert one.ratio(batch_key((WIDE, turned(WIDE)))) == pytest.approx(math.exp(0.1 * 12)), "of 256 px"


@pytest.mark.parametrize("batch", [(SMALL, WIDE), (SMALL,) * 5, (SMALL, Shape(512, 512, 2))])
def test_it_predicts_nothing_for_other_shapes_or_more_members(batch: tuple[Shape, ...]) -> None:
    assert batch_model().ratio(batch_key(batch)) is None
    assert batch_model(max_patches=4).ratio(batch_key((SMALL, LARGE))) is None, "five patches"


# Where it is used.


def test_a_measured_batch_precedes_the_model_which_precedes_the_savings_of_batches_of_one_size() -> None:
    costs = table(batch_model(bias=math.log(0.8)), together(1.7, SMALL, SMALL), together(9.0, SMALL, LARGE))
    assert batch_s(costs, LARGE, SMALL) == 9.0
    assert batch_s(costs, SMALL, SMALL, SMALL) == pytest.approx(0.8 * 3.0)
    assert batch_s(costs, SMALL, SMALL, LARGE) == pytest.approx(0.8 * 6.0)
    assert batch_s(costs, WIDE, WIDE) == pytest.approx(3.0 - 0.3)


def test_it_is_used_for_steps_at_degree_1_and_no_batch_is_cheaper_than_its_longest_member() -> None:
    rows = (together(2.0, LARGE, stage=DECODE), together(3.0, LARGE, degree=2))
    costs = table(batch_model(bias=math.log(0.1)), *rows)
    assert batch_s(costs, LARGE, LARGE) == 4.0
    assert batch_s(costs, LARGE, LARGE, stage=stage_of(PIPELINE, DECODE)) == 4.0
    assert TableCosts(costs).run_ns(STEP, (LARGE, LARGE), 2) == 6 * NS_PER_S


# File format.


def test_it_survives_a_file_and_the_header_of_a_log_to_the_last_bit() -> None:
    costs = table(batch_model((0.1, 1 / 3, -2e-17, 0.7), 0.3, shapes=(SMALL, Shape(512, 768, 5))))
    assert parse_table(json.loads(json.dumps(table_json(costs)))) == costs
    header, _ = read_log([header_line("1", ControllerConfig(), costs)])
    assert header.table == costs


def test_tables_that_are_joined_keep_their_batch_models() -> None:
    other = replace(
        table(batch_model(bias=1.0)), rows=(together(1.0, SMALL, pipeline="b"),), batch_models={"b": batch_model()}
    )
    assert merged([table(batch_model()), other]).batch_models == {PIPELINE: batch_model(), "b": batch_model()}


def test_the_database_returns_the_newest_model(tmp_path: Path) -> None:
    store = Profiles(tmp_path / "costs.sqlite")
    for at, one in ((10, batch_model(bias=1.0)), (30, None), (20, batch_model(bias=2.0))):
        made = Profile(
            key=KEY, origin=ProfileOrigin.PROFILE, rows=ALONE, tilework="0", created_unix_ns=at, batch_model=one
        )
        store.save(made)
        assert one in [entry.batch_model for entry in store.entries()]
    known = store.latest(KEY, PIPELINE)
    assert known is not None
    assert known.batch_models == {PIPELINE: batch_model(bias=2.0)}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("shapes",), ["big"], "'big' is no shape"),
        (("shapes",), ["512x512"], "its layers do not fit each other"),
        (("layers", 0, "biases"), [0.0, 0.0], "its layers do not fit each other"),
        (("layers", 0, "biases"), [math.nan], "a weight is not finite"),
        (("layers",), [], "its last layer must have one output"),
        (("max_batch",), None, "not a batch model: TypeError"),
    ],
)
def test_an_invalid_model_is_refused_with_its_error(path: tuple[Any, ...], value: object, said: str) -> None:
    document = json.loads(json.dumps(table_json(table(batch_model()))))
    place = document["batch_models"][PIPELINE]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(BadCostTable) as caught:
        parse_table(document)
    assert str(caught.value).startswith("batch_models: ")
    assert said in str(caught.value)
    assert "tilework profile --mixed" in str(caught.value)


# Learning.


def modelled_s(batch: tuple[Shape, ...]) -> float:
    """A fixed part, one by pixels, and one by the edges of patches."""
    side = math.gcd(*(shape.height for shape in batch))
    edges = sum(shape.pixels for shape in batch) / side if len(set(batch)) > 1 else 0
    return 0.3 + sum(shape.pixels for shape in batch) / 1e6 + edges / 1e4


def measured(number: int, noise: float = 0.02, seed: int = 1) -> list[CostRow]:
    """Three sizes alone, and random batches of 2 to 12; each time is off by some `noise`."""
    rng, shapes = Random(seed), (SMALL, Shape(768, 768), LARGE)
    batches = {(shape,) for shape in shapes}
    while len(batches) < number + len(shapes):
        batches.add(tuple(sorted(rng.choices(shapes, k=rng.randint(2, 12)))))
    return [together(modelled_s(batch) * rng.gauss(1, noise), *batch) for batch in sorted(batches)]


def test_without_noise_and_with_two_percent_it_predicts_batches_that_it_has_not_seen() -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    exact, noisy = learn(measured(200, noise=0.0), STEP), learn(measured(200), STEP)
    assert exact is not None
    assert noisy is not None
    assert exact.error < 0.02
    assert exact.error < noisy.error < 0.037
    assert noisy.num_rows == 200
    singles = [together(modelled_s((shape,)), shape) for shape in noisy.shapes]
    costs = CostTable(hardware="toy", rows=tuple(singles), batch_models={PIPELINE: noisy})
    others = [row.shapes for row in measured(100, seed=2) if row.batch != 1]
    errors = [abs(batch_s(costs, *batch) / modelled_s(batch) - 1) for batch in others]
    assert sum(errors) / len(errors) < 0.03


def test_the_same_rows_in_any_order_give_the_same_network_and_another_seed_another() -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    rows = measured(120)
    first = learn(rows, STEP)
    assert first is not None
    Random(3).shuffle(rows)
    other = [replace(row, pipeline="other") for row in rows]
    assert (
        learn([*rows, *other, together(9.0, SMALL, LARGE, stage=DECODE), together(9.0, SMALL, degree=2)], STEP) == first
    )
    assert learn(rows, STEP, seed=1) != first


def test_from_few_mixes_or_without_single_outputs_nothing_is_learned() -> None:
    rows = measured(150)
    mixed = [row for row in rows if not isinstance(row.batch, int)]
    others = [row for row in rows if isinstance(row.batch, int)]
    assert learn([*others, *mixed[: MIN_MIXED - 1]], STEP) is None
    assert learn(mixed, STEP) is None
    assert learn(rows, stage_of("another", DIFFUSE)) is None
