"""LoRAs in cost tables: their file, what stages need and take with them, and what is learned about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, batched, request, table
from stages import DECODE, DIFFUSE, ENCODE, STAGES
from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import BadCostTable, CostTable, merged
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, read_table, table_json
from tilework.cost.tabled import UnknownCost

NEEDS = {ENCODE: ("text",), DIFFUSE: ("denoiser",), DECODE: ("vae",)}
GRAPH = Graph(PIPELINE, tuple(replace(one, components=NEEDS[one.name]) for one in latent_diffusion(PIPELINE).specs))
DENOISER, INK = Component("d", 600), Component("i", 30)
LORAS = {
    "ink": Lora(changes=frozenset({"denoiser", "text"}), component=INK, slowdown=1.25),
    "chalk": Lora(changes=frozenset({"denoiser"})),
}


def with_loras(plain: CostTable) -> CostTable:
    return replace(
        plain,
        graphs={PIPELINE: GRAPH},
        components={PIPELINE: {"denoiser": DENOISER}},
        loras={PIPELINE: LORAS},
        load_bytes_per_s={LoadSource.DISK: 10.0},
    )


TABLE = with_loras(table())


def asking(*loras: UsedLora, **more: Any) -> Request:
    return request("a", loras=loras, **more)


def stage_of(costs: TableCosts, asked: Request, name: str = DIFFUSE) -> Stage:
    return next(stage for stage in costs.start(asked).itinerary.stages if stage.name == name)


def work_s(costs: TableCosts, *asked: Request, name: str = DIFFUSE) -> float:
    return costs.work_ns(stage_of(costs, asked[0], name), asked, 1) / NS_PER_S


def observe(costs: TableCosts, seconds: float, *asked: Request) -> None:
    costs.observe(stage_of(costs, asked[0]), asked, 1, 1, ns_from_s(seconds))


PLAIN, INKED, CHALKED = asking(), asking(UsedLora("ink", 1.0)), asking(UsedLora("chalk", 1.0))
BOTH = asking(UsedLora("ink", 0.5), UsedLora("chalk", 2.0))


# The file.


def test_the_loras_of_a_table_survive_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(TABLE)), "utf-8")
    assert read_table(path) == TABLE
    assert table_json(TABLE)["loras"][PIPELINE]["chalk"] == {"changes": ["denoiser"]}, "without what is usual"
    assert "loras" not in table_json(table())


@pytest.mark.parametrize(
    ("loras", "message"),
    [
        (3, r"loras is 3; expected an object"),
        ({PIPELINE: 3}, r"loras.toy is 3; expected an object by name"),
        ({PIPELINE: {"ink": 3}}, r"loras.toy.ink is 3; expected an object with changes"),
        ({PIPELINE: {"ink": {}}}, r"loras.toy.ink is \{\}; expected an object with changes"),
        ({PIPELINE: {"ink": {"changes": []}}}, r"loras.toy.ink is .*; expected an object with changes"),
        ({PIPELINE: {"ink": {"changes": "denoiser"}}}, r"loras.toy.ink is .*; expected an object with changes"),
        ({PIPELINE: {"a,b": {"changes": ["vae"]}}}, r"loras.toy has 'a,b'; use up to 128 letters, digits and _ \. -"),
        ({PIPELINE: {"ink": {"changes": ["vae"], "slowdown": 0.9}}}, r"ink.slowdown is 0.9; expected a factor of at"),
        ({PIPELINE: {"ink": {"changes": ["vae"], "slowdown": True}}}, r"ink.slowdown is True; expected a factor"),
        ({PIPELINE: {"ink": {"changes": ["vae"], "digest": "i"}}}, r"ink.bytes is None; expected a whole number"),
        ({PIPELINE: {"ink": {"changes": ["vae"], "bytes": 3}}}, r"ink.digest is None; expected text"),
        ({PIPELINE: {"ink": {"changes": ["vae"], "digest": "d", "bytes": 3}}}, r"ink.bytes is 3, and 600 elsewhere"),
    ],
)
def test_what_is_wrong_with_loras_in_a_file_is_named(loras: object, message: str) -> None:
    with pytest.raises(BadCostTable, match=message):
        parse_table(table_json(TABLE) | {"loras": loras})


def test_loras_that_must_be_loaded_need_a_speed() -> None:
    document = table_json(TABLE) | {"components": {}, "load_bytes_per_s": {}}
    with pytest.raises(BadCostTable, match="load_bytes_per_s has no disk"):
        parse_table(document)


def test_joined_tables_keep_their_loras() -> None:
    other = replace(table(pipeline="other"), load_bytes_per_s=TABLE.load_bytes_per_s)
    assert merged([TABLE, replace(other, loras={"other": LORAS})]).loras == {PIPELINE: LORAS, "other": LORAS}


# What stages need.


def test_stages_need_their_loras_beside_their_components() -> None:
    costs = TableCosts(TABLE)
    needed = {name: costs.weights.components(stage_of(costs, BOTH, name)) for name in STAGES}
    assert needed == {"encode": (INK,), "diffuse": (DENOISER, INK), "decode": ()}, "chalk is on all devices"
    assert costs.weights.components(stage_of(costs, PLAIN)) == (DENOISER,)
    assert costs.weights.all == (DENOISER, INK)
    assert num_bytes(costs.weights.all) == 630


def test_a_request_with_an_unknown_lora_has_no_price() -> None:
    with pytest.raises(UnknownCost, match="'toy' has no LoRA 'wax'"):
        TableCosts(TABLE).start(asking(UsedLora("ink", 1.0), UsedLora("wax", 1.0)))
    with pytest.raises(UnknownCost, match="has no LoRA 'ink'"):
        TableCosts(table()).start(INKED)


# Prices.


def test_steps_alone_are_slower_by_what_the_table_says() -> None:
    costs = TableCosts(with_loras(table()))
    assert [work_s(costs, one) for one in (PLAIN, INKED, CHALKED, BOTH)] == [0.1, 0.125, 0.1, 0.125]
    for name in (ENCODE, DECODE):
        assert work_s(costs, INKED, name=name) == work_s(costs, PLAIN, name=name)


def test_a_batch_with_loras_is_slower_by_as_much() -> None:
    costs = TableCosts(with_loras(batched()))
    assert work_s(costs, INKED, INKED) == pytest.approx(1.25 * work_s(costs, PLAIN, PLAIN))


def test_what_is_learned_with_loras_concerns_their_number_alone() -> None:
    costs = TableCosts(TABLE)
    observe(costs, 0.15, INKED)
    assert work_s(costs, INKED) == pytest.approx(0.15)
    assert work_s(costs, asking(UsedLora("ink", 0.3))) == pytest.approx(0.15), "at any scale"
    assert work_s(costs, CHALKED) == pytest.approx(0.1 * 1.2), "of any other LoRA, in proportion"
    assert (work_s(costs, PLAIN), work_s(costs, BOTH)) == (0.1, 0.125)


def test_what_is_learned_without_loras_counts_with_them() -> None:
    costs = TableCosts(TABLE)
    observe(costs, 0.2, PLAIN)
    assert [work_s(costs, one) for one in (PLAIN, INKED)] == pytest.approx([0.2, 0.25])
    observe(costs, 0.3, INKED)
    assert [work_s(costs, one) for one in (PLAIN, INKED)] == pytest.approx([0.2, 0.3])


def test_unguided_steps_with_loras_take_half_until_measured() -> None:
    costs, bare = TableCosts(TABLE), asking(UsedLora("ink", 1.0), guided=False)
    assert work_s(costs, bare) == 0.0625
    observe(costs, 0.08, bare)
    assert work_s(costs, bare) == pytest.approx(0.08)
    assert work_s(costs, INKED) == pytest.approx(0.125 * 0.08 / 0.0625), "the slowdown is that of the LoRA"


def test_the_version_of_a_request_changes_with_the_answers_about_it() -> None:
    """Measured at one size, LoRAs are expected to slow down other sizes as much."""
    costs, small = TableCosts(TABLE), asking(UsedLora("ink", 1.0), side=64)
    before = costs.version_of(small), work_s(costs, small)
    observe(costs, 0.25, INKED)
    assert work_s(costs, small) == pytest.approx(2 * before[1])
    assert costs.version_of(small) > before[0]


def test_memory_is_learned_at_any_scale() -> None:
    costs = TableCosts(TABLE)
    stage = stage_of(costs, INKED)
    assert costs.fits(stage, INKED.shape, 1)
    work: Any = type("Work", (), {"stage": stage, "devices": (0,), "sliced": False})
    costs.observe_memory(work, (INKED.shape,), fitted=False, now_ns=0)
    other = asking(UsedLora("ink", 0.2))
    assert not costs.fits(stage_of(costs, other), other.shape, 1)
    assert costs.fits(stage_of(costs, PLAIN), PLAIN.shape, 1), "what takes less may fit"
