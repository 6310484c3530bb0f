"""LoRAs of requests: their text, and the stages that use them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import Stage, StageSpec, StepShare
from tilework.core.lora import Lora, UsedLora, slowdown
from tilework.core.request import Shape

INK, CHALK = UsedLora("ink", 1.0), UsedLora("chalk", 0.5)
GRAPH = Graph(
    "toy",
    (
        StageSpec(name="text", components=("encoder", "tokenizer"), outputs=("words",)),
        StageSpec(
            name="base",
            components=("unet",),
            inputs=("words",),
            outputs=("latents",),
            steps=StepShare(),
            batchable=True,
        ),
        StageSpec(name="show", components=("vae",), inputs=("latents",), outputs=("result",)),
    ),
)
SQUARE, WIDE = Shape(64, 64), Shape(64, 128)


@given(st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True), st.floats(-10, 10))
def test_a_used_lora_survives_its_text(name: str, scale: float) -> None:
    assert UsedLora.parse(str(UsedLora(name, scale))) == UsedLora(name, scale)


@pytest.mark.parametrize("text", ["ink", "ink=", "ink=much", ""])
def test_a_text_without_a_scale_is_no_lora(text: str) -> None:
    with pytest.raises(ValueError, match="float"):
        UsedLora.parse(text)


def test_slowdowns_of_several_loras_add_up() -> None:
    unet = frozenset({"unet"})
    assert slowdown([]) == 1
    assert slowdown([Lora(changes=unet, slowdown=1.25), Lora(changes=unet, slowdown=1.5)]) == 1.75


def stages(*loras: tuple[UsedLora, set[str]]) -> dict[str, Stage]:
    return {
        stage.name: stage for stage in GRAPH.itinerary(4, {one: frozenset(changes) for one, changes in loras}).stages
    }


def test_only_stages_with_a_component_that_a_lora_changes_use_it() -> None:
    found = stages((INK, {"unet", "encoder"}), (CHALK, {"unet"}))
    assert {name: stage.loras for name, stage in found.items()} == {"text": (INK,), "base": (INK, CHALK), "show": ()}
    assert found["show"] == GRAPH.stage("show"), "shared with requests that use none"


def test_a_lora_that_changes_nothing_of_a_pipeline_leaves_its_stages() -> None:
    assert tuple(stages((INK, {"transformer"})).values()) == GRAPH.stages


def test_stages_are_equal_if_name_scale_and_order_of_loras_are() -> None:
    plain, base = GRAPH.stage("base"), stages((INK, {"unet"}))["base"]
    assert base == stages((INK, {"unet"}))["base"] != plain
    assert base != stages((UsedLora("ink", 0.9), {"unet"}))["base"]
    assert base != stages((UsedLora("chalk", 1.0), {"unet"}))["base"]
    assert stages((INK, {"unet"}), (CHALK, {"unet"}))["base"] != stages((CHALK, {"unet"}), (INK, {"unet"}))["base"]


def test_the_text_of_a_stage_names_its_loras() -> None:
    assert str(GRAPH.stage("base")) == "toy/base"
    assert str(stages((INK, {"unet"}), (CHALK, {"unet"}))["base"]) == "toy/base[ink=1.0,chalk=0.5]"


def test_requests_with_loras_share_stages_at_one_shape_only() -> None:
    base = stages((INK, {"unet"}))["base"]
    assert base.spec.takes((SQUARE, SQUARE))
    assert not base.spec.takes((SQUARE, WIDE))
    assert GRAPH.stage("base").spec.takes((SQUARE, WIDE)), "or the LoRA is not why"


def test_ways_differ_by_loras_and_each_is_made_once() -> None:
    loras = {INK: frozenset({"unet"})}
    way = GRAPH.itinerary(4, loras)
    assert way is GRAPH.itinerary(4, loras)
    assert way is not GRAPH.itinerary(4)
    assert way is not GRAPH.itinerary(4, {UsedLora("ink", 0.5): frozenset({"unet"})})
    assert way is not GRAPH.itinerary(4, {INK: frozenset({"vae"})}), "a LoRA of this name, in another table"
    assert (way.steps, way.length) == (4, 6)
