"""The sound of models that make it with their clips: the samples of the stock call, bit for bit, however it is run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import tiny
from quick import quick
from tilework.pipelines.family import Family
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.video.export import EXPORT, EXPORT_WITH_SOUND, SOUND
from zoo import requests
from zoo.registry import ZOO, build

SOUNDING = quick(("ltx2",), ("ltx2", "modular-ltx2"))
RATE = 16000


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@cache
def made(name: str) -> Family:
    return StockPipeline(build(ZOO[name]), name, {}, "")


def stock_samples(name: str, seed: int) -> torch.Tensor:
    model, more = ZOO[name], {} if ZOO[name].modular else {"output_type": "pil"}
    result: Any = build(model)(**model.inputs, **more, generator=torch.Generator().manual_seed(seed))
    samples: torch.Tensor = (result.get("audio") if model.modular else result.audio)[0]
    return samples.float()


@pytest.mark.parametrize("name", SOUNDING)
def test_the_samples_are_those_of_the_stock_call_also_after_a_move(name: str) -> None:
    here, there = made(name), StockPipeline(build(ZOO[name]), name, {}, "")
    spec, expected = requests.spec_of(ZOO[name], here, 3), stock_samples(name, 3)
    assert expected.std() > 0.001, "silence would prove nothing"
    values, state = requests.begin(here, spec)
    here.step([state])
    moved = there.restore(state.stage, spec, requests.shipped(values), requests.shipped(here.export(state)))
    for family, one in ((here, state), (there, moved)):
        while one.steps_done < one.num_steps:
            family.step([one])
        (outputs,) = family.run(here.info.stages[2].name, [spec], [requests.shipped(family.finish(one))])
        found = requests.shipped(outputs)[SOUND]
        assert torch.equal(found["samples"], expected)
        assert found["rate"] == RATE


def test_stages_say_who_makes_sound() -> None:
    for name, has_sound in (("ltx2", True), ("ltx", False)):
        *_, decode, export = made(name).info.stages
        assert (SOUND in decode.outputs) is has_sound
        assert export == (EXPORT_WITH_SOUND if has_sound else EXPORT)
