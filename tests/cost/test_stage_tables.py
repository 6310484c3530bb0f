"""The shipped tables of stages: what their authors derived from the rows (`checks`) follows from them by our costs.

Encode, diffuse and decode are called E, D and C, as in TridentServe; EDC is a device that holds all three.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any

import pytest

from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.component import num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.request import Request, Shape
from tilework.core.time import ns_from_s, s_from_ns
from tilework.cost.degrees import optimal_degree, optimal_latency_ns
from tilework.cost.shipped import shipped_path
from tilework.cost.table import CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, read_table

NAMES = ("sd3medium_l20", "flux1_l20", "cogvideox15_l20", "hunyuanvideo_l20")
LETTERS = {"E": ENCODE, "D": DIFFUSE, "C": DECODE}
REPLICAS = {"V0": "EDC", "V1": "DC", "V2": "ED", "V3": "D"}
"""The virtual replicas by the stages that they hold together, in the order in which they are tried."""
DEGREES = (1, 2, 4, 8)
NUM_DEVICES = 128


@dataclass(frozen=True)
class Derived:
    """What a table says of placements, worked out with our own cost functions."""

    document: dict[str, Any]

    @cached_property
    def table(self) -> CostTable:
        return parse_table(self.document)

    @cached_property
    def costs(self) -> TableCosts:
        return TableCosts(self.table)

    @property
    def pipeline(self) -> str:
        return self.table.rows[0].pipeline

    @property
    def steps(self) -> int:
        assert self.table.steps is not None
        return self.table.steps

    @property
    def checks(self) -> dict[str, Any]:
        checks: dict[str, Any] = self.document["checks"]
        return checks

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(self.table.slo_s)

    def request(self, size: str) -> Request:
        return Request(uid="a", pipeline=self.pipeline, shape=Shape.parse(size), steps=self.steps, arrival_ns=0)

    def optimal(self, letter: str, size: str) -> int:
        stage = self.costs.graph(self.pipeline).stage(LETTERS[letter])
        return optimal_degree(self.costs, stage, Shape.parse(size))

    def seconds(self, letter: str, size: str) -> float:
        """The latency of a stage at its optimal degree."""
        stage = self.costs.graph(self.pipeline).stage(LETTERS[letter])
        steps = self.steps if stage.has_steps else 1
        return s_from_ns(self.costs.work_ns(stage, [self.request(size)], self.optimal(letter, size), steps))

    def fits(self, letters: str, size: str, degrees: dict[str, int]) -> bool:
        """Whether a device has room for the weights of these stages and the largest activations, at these degrees."""
        stages = {letter: self.costs.graph(self.pipeline).stage(LETTERS[letter]) for letter in letters}
        weights = sum(one.num_bytes for stage in stages.values() for one in self.costs.weights.components(stage))
        asked = [self.request(size)]
        largest = max(
            self.costs.weights.activation_bytes(stage, asked, degrees[letter]) for letter, stage in stages.items()
        )
        assert self.costs.memory_bytes is not None
        return weights + largest <= self.costs.memory_bytes

    def least_degree(self, letters: str, size: str) -> int | None:
        """The least degree at which a size fits: D at it, C at it or its own optimal degree if that is less."""
        for degree in DEGREES:
            degrees = {"E": 1, "D": degree, "C": min(degree, self.optimal("C", size))}
            if self.fits(letters, size, degrees):
                return degree
        return None

    def replica(self, size: str) -> str:
        """The first virtual replica on which a size fits with D and C at their optimal degrees."""
        degrees = {letter: self.optimal(letter, size) for letter in LETTERS}
        return next(name for name, letters in REPLICAS.items() if self.fits(letters, size, degrees))

    def shares(self, mix: str) -> dict[str, float]:
        """The share of each size; of `dynamic` that of all its requests."""
        by_name, shares = self.table.mixes.by_name, dict.fromkeys(self.sizes, 0.0)
        weights = {mix: 1.0}
        if mix == "dynamic":
            blocks = self.table.mixes.dynamic
            weights = {
                name: fsum((one.to_min - one.from_min) * one.rate_factor * one.weights.get(name, 0.0) for one in blocks)
                for name in by_name
            }
        for name, weight in weights.items():
            for shape, share in by_name[name].items():
                shares[str(shape)] += weight * share / fsum(by_name[name].values()) / fsum(weights.values())
        return shares


def derived(name: str) -> Derived:
    path = shipped_path(name)
    assert path is not None
    return Derived(json.loads(path.read_text("utf-8")))


def assert_latencies_and_degrees(of: Derived) -> None:
    for size in of.sizes:
        best_s = s_from_ns(optimal_latency_ns(of.costs, of.pipeline, Shape.parse(size), of.steps))
        assert best_s == pytest.approx(of.checks["best_latency_s"][size], abs=6e-4), size
        assert best_s == pytest.approx(fsum(of.seconds(letter, size) for letter in LETTERS)), size
        assert of.table.slo_s[size] == pytest.approx(2.5 * best_s, abs=6e-4), size
        assert of.optimal("D", size) == of.checks["optimal_degree"][size], size
        assert of.optimal("C", size) == of.checks["optimal_decode_degree"][size], size


def assert_placements(of: Derived) -> None:
    for size in of.sizes:
        found = {letters: of.least_degree(letters, size) for letters in ("EDC", "DC", "ED", "D", "C", "E")}
        assert found == of.checks["least_degree_by_placement"][size], size
        assert of.replica(size) == of.checks["virtual_replica"][size], size


def assert_out_of_memory(of: Derived) -> None:
    """B1 has one degree for all; B2 to B4 run all stages of a request at D's optimal degree."""
    same = of.document["static_baselines"]["B1_degree"]

    def fits(size: str, degree: int) -> bool:
        return of.fits("EDC", size, {"E": 1, "D": degree, "C": degree})

    found = {
        f"B1 (degree {same})": [size for size in of.sizes if not fits(size, same)],
        "B2-B4 (optimal degree for all stages)": [size for size in of.sizes if not fits(size, of.optimal("D", size))],
    }
    assert found == of.checks["out_of_memory_colocated"]


def assert_mixes(of: Derived) -> None:
    for mix, expected in of.checks["by_mix"].items():
        shares = of.shares(mix)
        assert fsum(shares.values()) == pytest.approx(1.0)
        eligible = fsum(share for size, share in shares.items() if of.replica(size) == "V0")
        latencies = [fsum(share * of.seconds(one, size) for size, share in shares.items()) for one in LETTERS]
        device_s = [
            fsum(share * of.seconds(one, size) * of.optimal(one, size) for size, share in shares.items())
            for one in LETTERS
        ]
        assert eligible == pytest.approx(expected["v0_eligible_share"], abs=6e-4), mix
        assert latencies == pytest.approx(expected["mean_stage_latency_s"], abs=2e-3), mix
        assert device_s == pytest.approx(expected["mean_gpu_seconds"], rel=1e-3, abs=1e-3), mix
        split = [NUM_DEVICES * one / fsum(latencies) for one in latencies]
        assert split == pytest.approx(expected["split_128_by_latency"], abs=0.06), mix
        assert NUM_DEVICES / fsum(device_s) == pytest.approx(expected["rate_that_fills_128_gpus"], rel=1e-3), mix


@pytest.mark.parametrize("check", [assert_latencies_and_degrees, assert_placements, assert_out_of_memory, assert_mixes])
@pytest.mark.parametrize("name", NAMES)
def test_the_checks_of_a_table_follow_from_its_rows(name: str, check: Any) -> None:
    check(derived(name))


def changed(name: str, row: dict[str, Any], **values: Any) -> Derived:
    """The table with one row changed: the one that has all values of `row`."""
    document = derived(name).document
    found = [one for one in document["rows"] if row.items() <= one.items()]
    assert len(found) == 1
    found[0].update(values)
    return Derived(document)


FLUX_4096 = {"height": 4096, "batch": 1}
VIDEO_129 = {"height": 720, "frames": 129, "batch": 1}


@pytest.mark.parametrize(
    ("check", "of"),
    [
        (assert_latencies_and_degrees, changed("flux1_l20", FLUX_4096 | {"stage": ENCODE}, seconds=0.122)),
        (assert_latencies_and_degrees, changed("flux1_l20", FLUX_4096 | {"stage": DECODE, "degree": 2}, seconds=9.0)),
        (assert_latencies_and_degrees, changed("flux1_l20", FLUX_4096 | {"stage": DIFFUSE, "degree": 1}, seconds=1.0)),
        (assert_placements, changed("flux1_l20", FLUX_4096 | {"stage": DECODE, "degree": 2}, activation_bytes=10**9)),
        (
            assert_placements,
            changed("hunyuanvideo_l20", VIDEO_129 | {"stage": DIFFUSE, "degree": 8}, activation_bytes=6 * 10**9),
        ),
        (
            assert_out_of_memory,
            changed("flux1_l20", FLUX_4096 | {"stage": DECODE, "degree": 8}, activation_bytes=12 * 10**9),
        ),
        (assert_mixes, changed("flux1_l20", FLUX_4096 | {"stage": DIFFUSE, "degree": 8}, seconds=6.3)),
    ],
)
def test_a_changed_row_is_noticed(check: Any, of: Derived) -> None:
    with pytest.raises(AssertionError):
        check(of)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_the_bytes_of_weights_and_activations_together(name: str) -> None:
    table = read_table(name)
    for row in table.rows:
        assert row.peak_bytes is not None
        assert row.activation_bytes is not None
        assert row.peak_bytes - row.activation_bytes == table.components[row.pipeline][row.stage].num_bytes


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_has_a_component_of_its_own_and_decode_may_be_shared(name: str) -> None:
    table = read_table(name)
    costs, pipeline = TableCosts(table), table.rows[0].pipeline
    stages = costs.graph(pipeline).stages
    assert [costs.weights.components(stage)[0].digest for stage in stages] == [
        f"{pipeline}/{stage.name}" for stage in stages
    ]
    assert [len(costs.weights.components(stage)) for stage in stages] == [1, 1, 1]
    assert [stage.allows(8) for stage in stages] == [False, True, True]
    assert num_bytes(costs.weights.all) <= (costs.memory_bytes or 0), "a device holds all stages, without activations"


def test_two_pipelines_share_a_device_only_in_turn() -> None:
    both = TableCosts(read_table("flux1_l20+hunyuanvideo_l20"))
    assert num_bytes(both.weights.all) > (both.memory_bytes or 0)
    assert merged([read_table("flux1_l20"), read_table("cogvideox15_l20")]).memory_bytes == both.memory_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_moves_between_stages_takes_milliseconds(name: str) -> None:
    of = derived(name)
    for size in of.sizes:
        asked = of.request(size)
        after_encode = _after(of.costs, asked, 1)
        after_diffuse = _after(of.costs, asked, 1 + of.steps)
        state_bytes = {
            row.stage: row.state_bytes
            for row in of.table.rows
            if row.state_bytes is not None and row.shape == asked.shape
        }
        for progress, stage in ((after_encode, ENCODE), (after_diffuse, DIFFUSE)):
            for nodes, speed in (((1, 1), 1e10), ((0, 1), 1.1e10)):
                expected_ns = ns_from_s(0.0005 + state_bytes[stage] / speed)
                assert of.costs.move_ns(asked, progress, nodes) == pytest.approx(expected_ns, abs=2)
                assert expected_ns < 3_000_000


def _after(costs: TableCosts, asked: Request, position: int) -> Cursor:
    return costs.graph(asked.pipeline).itinerary(asked.steps).at[position]


@pytest.mark.parametrize("name", NAMES)
def test_the_rates_of_the_blocks_are_1_on_average(name: str) -> None:
    blocks = read_table(name).mixes.dynamic
    assert fsum((one.to_min - one.from_min) * one.rate_factor for one in blocks) / 30 == pytest.approx(1.0, abs=1e-4)
