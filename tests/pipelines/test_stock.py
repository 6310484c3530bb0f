"""A stock call that is interrupted at its components gives the stock picture, bit for bit, wherever it is cut."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from torch import Tensor

import tiny
from quick import quick
from tilework.core.graph.stage import StageSpec
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.family import ANY_SEED, LIVE
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.coroutine import StockCall
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support.record import read_record, served_classes
from zoo import requests, support
from zoo.registry import ZOO, build

QUICK = ("qwen-image", "sd1-image", "modular-wan22")
NAMED_QUICKLY = ("sd1-image", "wan22")
SERVED = [name for name, model in ZOO.items() if model.class_name in served_classes()]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


def test_the_record_has_every_class_of_the_zoo_and_serves_no_other() -> None:
    in_zoo = {model.class_name for model in ZOO.values()}
    assert in_zoo == read_record().classes.keys(), "python -m zoo.support writes the record"
    assert ADAPTERS.keys() <= served_classes()
    assert {ZOO[name].class_name for name in QUICK} <= served_classes()


@pytest.mark.parametrize("name", quick(QUICK, ZOO))
def test_stages_and_steps_that_move_and_take_turns_equal_the_stock_call(name: str, tmp_path: Path) -> None:
    """Each model does what the record says of its class; a class that is not served has a model that shows why."""
    model = ZOO[name]
    found, recorded = support.measure(model, tmp_path), read_record().classes[model.class_name]
    if recorded.is_served and not found.reason.endswith(support.BEYOND):
        assert model.kind in recorded.kinds
        assert replace(found, kinds=recorded.kinds) == recorded
    elif len(support.models_of(model.class_name)) == 1:
        assert not found.is_served, "it is served now: python -m zoo.support"


@pytest.mark.parametrize("name", quick(NAMED_QUICKLY, SERVED))
def test_each_stage_names_the_components_that_it_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    stock_run = ComponentCall.run

    def run(call: ComponentCall) -> Any:
        if call.role is not Role.SAMPLER:
            called.add(call.component)
        return stock_run(call)

    monkeypatch.setattr(ComponentCall, "run", run)
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    encode, loop, decode, *_ = made.info.stages
    spec = replace(requests.spec_of(ZOO[name], made, 1), preview_every=2 if loop.previews else 0)

    def check(stage: StageSpec) -> None:
        assert called <= set(stage.components), stage.name
        called.clear()

    _, state = requests.begin(made, spec)
    check(encode)
    while state.steps_done < state.num_steps:
        made.step([state], watch=lambda _, draw: draw())
    check(loop)
    made.run(decode.name, [spec], [made.finish(state)])
    check(decode)
    own = set(loop.components) - set(decode.components if loop.previews else ())
    assert own.isdisjoint({*encode.components, *decode.components})
    if not made.info.pictures:
        assert set(encode.components).isdisjoint(decode.components)


@pytest.mark.parametrize("name", ["z-image", "sd1-ancestral", "modular-wan22"])
def test_a_request_that_is_stopped_or_moved_away_holds_no_memory(name: str) -> None:
    """Its stock call is paused for ever then. Held, on an accelerator, it would take the memory of later requests."""
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    spec = requests.spec_of(ZOO[name], made, 1)

    def calls() -> list[weakref.ref[StockCall]]:
        values, here = requests.begin(made, spec)
        made.step([here])
        there = made.restore(
            here.stage, spec, {key: value for key, value in values.items() if key != LIVE}, made.export(here)
        )
        made.step([there])
        assert there.walk.pending is not None
        return [weakref.ref(one.walk.call) for one in (here, there)]

    calls()  # What is made once and kept.
    gc.disable()
    try:
        assert [one() for one in calls()] == [None, None]
    finally:
        gc.enable()


def test_what_a_move_would_lose_is_an_error_and_no_other_picture(tmp_path: Path) -> None:
    """Frames of this model are steps apart: some samplers make none in the last iteration."""
    model = ZOO["skyreels2-forcing"]
    model = replace(model, inputs={**model.inputs, "ar_step": 1, "causal_block_size": 1})
    here, there = requests.family(model, tmp_path), requests.family(model, tmp_path)
    spec = requests.spec_of(model, here, 1)
    assert np.array_equal(requests.alone(here, spec), requests.stock_pixels(model, build(model), 1))
    with pytest.raises(UnsupportedModel, match="the pipeline keeps more than a moving request"):
        requests.moved(here, there, spec)


def test_what_the_code_between_the_calls_keeps_is_nan_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that adds half of the last but one prediction, which is no sampler's."""
    model = ZOO["sd1-ancestral"]
    made = [StockPipeline(build(model), "sd1", {}, "") for _ in range(2)]
    spec = requests.spec_of(model, made[0], 1)
    kind = diffusers.StableDiffusionPipeline
    monkeypatch.setattr(kind, "__call__", _that_remembers(kind.__call__))
    with pytest.raises(UnsupportedModel, match="the pipeline keeps more than a moving request"):
        requests.moved(*made, spec)


def _that_remembers(call: Any) -> Any:
    """The call with a callback, which is code between the steps."""

    @functools.wraps(call)
    def stock(self: Any, *args: Any, **kwargs: Any) -> Any:
        before: list[Tensor] = []

        def remember(pipe: Any, step: int, time: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
            before.append(values["latents"])
            return {"latents": values["latents"] + before[-2] / 2} if len(before) > 1 else {}

        return call(self, *args, callback_on_step_end=remember, **kwargs)

    return stock


@pytest.mark.parametrize("name", quick(QUICK, SERVED))
def test_what_is_encoded_for_any_seed_gives_the_stock_picture_of_another(name: str) -> None:
    """A request may begin behind the encode of one with another seed, as another process gets that."""
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    encode, loop, *_ = made.info.stages
    (values,) = made.run(encode.name, [requests.spec_of(ZOO[name], made, 1)], [{}])
    assert isinstance(values[ANY_SEED], bool)
    if not values[ANY_SEED]:
        assert made.info.pictures, "an encode of texts alone draws nothing"
        return
    spec = requests.spec_of(ZOO[name], made, 2)
    state = made.begin(loop.name, spec, requests.shipped(values))
    while state.steps_done < state.num_steps:
        made.step([state])
    assert np.array_equal(requests.end(made, state), requests.alone(made, spec))
