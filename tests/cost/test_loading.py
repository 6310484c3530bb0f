"""How long weights take to load and states to move, and their part of a cost table's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, request, row, table
from stages import DIFFUSE, ENCODE, STAGES, at_start, stage_of
from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.cost.loading import Link, MeasuredLink
from tilework.cost.table import BadCostTable, CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, read_table, table_json
from tilework.cost.tabled import UnknownCost
from tilework.cost.weights import TableWeights

DENOISER, VAE, INK = Component("d1", 600), Component("v1", 40), Component("i1", 7)
SPEEDS = {LoadSource.DISK: 10.0, LoadSource.HOST: 100.0, LoadSource.PEER: 400.0}
FULL = replace(
    table(),
    components={PIPELINE: {"denoiser": DENOISER, "vae": VAE}},
    loras={
        PIPELINE: {
            "ink": Lora(changes=frozenset({"denoiser", "text"}), component=INK, slowdown=1.5),
            "chalk": Lora(changes=frozenset({"text_encoder"})),
        }
    },
    memory_bytes=620,
    load_bytes_per_s=SPEEDS,
    links={"device": Link(1000.0, 0.5), "node": Link(100.0)},
)


def test_a_table_with_components_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(FULL)), "utf-8")
    assert read_table(path) == FULL
    assert "components" not in table_json(table()), "files without weights stay as they were"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": -1}, r"memory_bytes is -1; expected a whole number of bytes"),
        ({"host_bytes": 2.5}, r"host_bytes is 2.5; expected a whole number of bytes"),
        ({"load_bytes_per_s": {}}, r"load_bytes_per_s has no disk, and there are components"),
        ({"load_bytes_per_s": {"disk": 1, "tape": 1}}, r"has 'tape'; expected disk, page_cache, host, peer"),
        ({"load_bytes_per_s": {"disk": 0}}, r"load_bytes_per_s.disk is 0; expected bytes per second"),
        ({"load_bytes_per_s": [1]}, r"load_bytes_per_s is \[1\]; expected an object"),
        ({"components": {PIPELINE: 3}}, r"components.toy is 3; expected an object by name"),
        ({"components": {PIPELINE: {"vae": {"bytes": 3}}}}, r"components.toy.vae.digest is None; expected text"),
        ({"components": {PIPELINE: {"vae": {"digest": "a", "bytes": "3"}}}}, r"components.toy.vae.bytes is '3'"),
        ({"components": {PIPELINE: {"vae": 3}}}, r"components.toy.vae is 3; expected an object with digest and bytes"),
        (
            {"components": {PIPELINE: {"a": {"digest": "a", "bytes": 3}, "b": {"digest": "a", "bytes": 4}}}},
            r"components.toy.b.bytes is 4, and 3 elsewhere for the same digest",
        ),
        ({"loras": {PIPELINE: 3}}, r"loras.toy is 3; expected an object by name"),
        ({"loras": {PIPELINE: {"ink": {}}}}, r"loras.toy.ink is {}; expected an object with changes"),
        ({"loras": {PIPELINE: {"ink": {"changes": ["a"], "slowdown": 0}}}}, r"loras.toy.ink.slowdown is 0; expected"),
        ({"loras": {PIPELINE: {"ink": {"changes": ["a"], "digest": ""}}}}, r"loras.toy.ink.digest is ''; expected"),
        ({"links": {"moon": {}}}, r"links has 'moon'; expected 'device' or 'node'"),
        ({"links": {"node": 3}}, r"links.node is 3; expected an object with bytes_per_s"),
        ({"links": {"node": {"bytes_per_s": None}}}, r"links.node.bytes_per_s is None; expected bytes per second"),
        ({"links": {"node": {"bytes_per_s": 1, "seconds": -1}}}, r"links.node.seconds is -1; expected seconds"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCostTable, match=message):
        parse_table(table_json(FULL) | changes)


def test_joined_tables_are_of_devices_of_one_memory() -> None:
    other = replace(table(pipeline="other"), components={"other": {"vae": VAE}})
    with pytest.raises(BadCostTable, match="memory_bytes is 620 in one and None in another"):
        merged([FULL, other])
    both = merged([FULL, replace(FULL, rows=other.rows, components=other.components, loras={})])
    assert both.all_components == (DENOISER, INK, VAE), "the same weights once"


def test_stages_need_the_components_that_the_table_knows() -> None:
    costs = TableCosts(FULL)
    named = {stage: costs.weights.components(stage_of(PIPELINE, stage)) for stage in STAGES}
    assert named == {"encode": (), "diffuse": (DENOISER,), "decode": (VAE,)}
    assert num_bytes(costs.weights.all) == 647
    assert TableCosts(table()).weights.all == ()


def test_requests_need_and_wait_for_their_loras() -> None:
    costs = TableCosts(FULL)
    ink, chalk = UsedLora("ink", 0.5), UsedLora("chalk", 1.0)
    plain, inked = request("a"), request("b", loras=(ink, chalk))
    stages = {stage.name: stage for stage, _ in costs.start(inked).pieces}
    assert costs.weights.components(stages[DIFFUSE]) == (DENOISER, INK)
    assert stages[ENCODE].loras == (chalk,)
    assert INK in costs.weights.all
    step, inked_step = stage_of(PIPELINE, DIFFUSE), stages[DIFFUSE]
    assert costs.work_ns(inked_step, [inked], 1) == pytest.approx(1.5 * costs.work_ns(step, [plain], 1))
    assert costs.work_ns(stages[ENCODE], [inked], 1) == costs.work_ns(stage_of(PIPELINE, ENCODE), [plain], 1), (
        "only steps"
    )
    with pytest.raises(UnknownCost, match="'toy' has no LoRA 'other'"):
        costs.start(request("c", loras=(UsedLora("other", 1.0),)))


def test_the_time_of_steps_with_loras_is_learned_by_their_number() -> None:
    costs = TableCosts(replace(FULL, loras={PIPELINE: {name: Lora(changes=frozenset({"denoiser"})) for name in "abc"}}))
    plain, one, other, two = (
        request(name, loras=tuple(UsedLora(lora, 1.0) for lora in loras))
        for name, loras in (("p", ""), ("o", "a"), ("q", "b"), ("t", "ab"))
    )

    def step_ns(asked: Request) -> int:
        stage = costs.start(asked).stepped
        assert stage is not None
        return costs.work_ns(stage, [asked], 1)

    usual_ns = step_ns(plain)
    assert step_ns(one) == step_ns(two) == usual_ns
    stage = costs.start(one).stepped
    assert stage is not None
    for _ in range(60):
        costs.observe(stage, [one], 1, 1, 2 * usual_ns)
    assert step_ns(one) == step_ns(other) == pytest.approx(2 * usual_ns, rel=0.02)
    assert step_ns(two) == step_ns(plain) == usual_ns
    for _ in range(60):
        costs.observe(stage_of(PIPELINE, DIFFUSE), [plain], 1, 1, usual_ns // 2)
    assert step_ns(one) == pytest.approx(usual_ns, rel=0.02), "they follow what is learned without"


def test_a_part_of_a_table_replaces_what_was_known_of_its_pipelines() -> None:
    other = replace(FULL, rows=table(pipeline="other", step_s=0.3).rows, components={"other": {"vae": VAE}}, loras={})
    costs = TableCosts(FULL)
    costs.serve(other)
    assert costs.work_ns(costs.graph("other").stage(DIFFUSE), [replace(request("a"), pipeline="other")], 1) > 0
    costs.serve(replace(FULL, rows=table(step_s=0.2).rows, loras={}))
    assert costs.work_ns(stage_of(PIPELINE, DIFFUSE), [request("a")], 1) == pytest.approx(0.2 * NS_PER_S)
    assert INK not in costs.weights.all
    costs.remove(PIPELINE)
    assert costs.weights.all == (VAE,)
    with pytest.raises(UnknownCost):
        costs.start(request("a"))


def test_the_first_part_with_weights_says_how_fast_they_are_loaded() -> None:
    """What is known already counts."""
    costs = TableCosts(
        replace(FULL, rows=table(pipeline="functions").rows, components={}, loras={}, load_bytes_per_s={})
    )
    assert costs.weights.load_ns(600) == 0
    costs.serve(FULL)
    assert costs.weights.load_ns(600, LoadSource.HOST) == 6 * NS_PER_S
    slower = {source: speed / 2 for source, speed in FULL.load_bytes_per_s.items()}
    costs.serve(replace(FULL, load_bytes_per_s=slower))
    assert costs.weights.load_ns(600, LoadSource.HOST) == 6 * NS_PER_S


def test_loads_take_bytes_over_speed_and_are_corrected_by_source() -> None:
    costs = TableCosts(FULL)
    assert costs.weights.load_ns(600, LoadSource.HOST) == 6 * NS_PER_S
    assert costs.weights.load_ns(600) == 60 * NS_PER_S, "from the slowest"
    before = costs.version
    assert costs.weights.observe(600, LoadSource.HOST, 12 * NS_PER_S)
    assert costs.version == before, "works take as long as before"
    assert costs.weights.load_ns(300, LoadSource.HOST) == 6 * NS_PER_S
    assert costs.weights.load_ns(300, LoadSource.DISK) == 30 * NS_PER_S
    assert not costs.weights.observe(600, LoadSource.HOST, 12 * NS_PER_S)
    assert costs.weights.load_ns(300, LoadSource.HOST) == 6 * NS_PER_S, "as expected"


def test_one_slow_load_counts_as_four_times_the_expected_time_at_most() -> None:
    times = TableWeights(FULL, 0.5)
    times.observe(10, LoadSource.DISK, 1000 * NS_PER_S)
    assert times.load_ns(10, LoadSource.DISK) == 4 * NS_PER_S
    times.observe(10, LoadSource.DISK, NS_PER_S)
    assert times.load_ns(10, LoadSource.DISK) == 2.5 * NS_PER_S


def test_the_quickest_source_with_a_speed_is_used() -> None:
    times = TableWeights(FULL, 0.5)
    assert times.quickest_source(frozenset(LoadSource)) is LoadSource.PEER
    assert times.quickest_source(frozenset({LoadSource.DISK, LoadSource.PAGE_CACHE})) is LoadSource.DISK
    times.observe(100, LoadSource.PEER, 100 * NS_PER_S)
    times.observe(100, LoadSource.PEER, 100 * NS_PER_S)
    assert times.quickest_source(frozenset(LoadSource)) is LoadSource.HOST, "measured to be slower"
    assert TableWeights(replace(FULL, load_bytes_per_s={}), 0.5).load_ns(10) == 0


def moving(*rows: Any, **fields: Any) -> TableCosts:
    return TableCosts(CostTable(hardware="toy", rows=rows, **fields), move_ns=7)


def test_moves_take_what_the_next_stages_need_over_the_link() -> None:
    """Conditioning of 200 bytes, and a state between steps of 100 at 128 px and 400 at 256 px."""
    sizes = [(ENCODE, 128, 200), (DIFFUSE, 128, 100), (DIFFUSE, 256, 400)]
    rows = [row(side * side, 1.0, stage=stage, state_bytes=size) for stage, side, size in sizes]
    costs = moving(*rows, links=FULL.links)
    small, large = request("a"), request("b", side=256)
    begun, encoded = at_start(small).advanced(1).advanced(3), at_start(small).advanced(1)
    assert costs.move_ns(small, encoded, (0, 1)) == 2 * NS_PER_S
    assert costs.move_ns(small, begun, (0, 1)) == 3 * NS_PER_S
    assert costs.move_ns(large, begun, (0, 1)) == 6 * NS_PER_S
    assert costs.move_ns(small, begun, (1, 1)) == int(0.8 * NS_PER_S)


def test_moves_of_unknown_size_or_link_take_the_usual_time() -> None:
    begun = at_start(request("a")).advanced(1).advanced(3)
    sized = row(128 * 128, 1.0, state_bytes=100)
    assert moving(sized).move_ns(request("a"), begun, (0, 1)) == 7
    unsized = moving(row(128 * 128, 1.0), links=FULL.links)
    assert unsized.move_ns(request("a"), begun, (0, 1)) == 7


def test_moves_between_nodes_take_what_was_measured_unless_the_table_says_it() -> None:
    """For each pair of nodes and direction; within a node the time stays the usual one."""
    begun = at_start(request("a")).advanced(1).advanced(3)
    sized = row(128 * 128, 1.0, stage=DIFFUSE, state_bytes=100)
    costs, told = moving(sized), moving(sized, links=FULL.links)
    for one in (costs, told):
        one.observe_move((0, 1), 50, 500)
        one.observe_move((2, 1), 50, 9_000)
    places = ((0, 1), (2, 1), (1, 0), (0, 0))
    assert [costs.move_ns(request("a"), begun, nodes) for nodes in places] == [1_000, 18_000, 7, 7]
    assert told.move_ns(request("a"), begun, (0, 1)) == NS_PER_S
    costs.serve(CostTable(hardware="toy", rows=(row(1, 1.0, pipeline="other"),)))
    assert costs.move_ns(request("a"), begun, (0, 1)) == 1_000, "it is kept when models come"


def test_a_measured_link_is_a_line_that_follows_what_changes() -> None:
    link = MeasuredLink()
    for size in (100, 300, 200, 1_000):
        link.observe(size, 50 + 2 * size)
    assert [link.move_ns(size) for size in (1, 100, 5_000)] == [52, 250, 10_050]
    link.observe(200, 450_000)
    assert link.move_ns(200) < 4 * 450, "one that took too long counts for little"
    for size in (100, 900) * 20:
        link.observe(size, 1_000 + size)
    assert link.move_ns(500) == pytest.approx(1_500, rel=0.02)


def test_a_measured_link_never_gives_time_back() -> None:
    link = MeasuredLink()
    for size, took in ((100, 900), (1_000, 100), (1_000, 200)):
        link.observe(size, took)
    assert 0 < link.move_ns(1) <= link.move_ns(10_000)
    link.observe(0, 5)
    link.observe(5, 0)
    assert 0 < link.move_ns(1) <= link.move_ns(10_000)
