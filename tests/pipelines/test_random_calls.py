"""Random calls over all fields that decide a picture: the server's equals the stock call's, in another process.

A call that the stock call does not take is refused, here or by it. `RANDOM_CALLS` is how many each class gets.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest
from typer.testing import CliRunner

import tiny
from quick import quick
from tilework.cli.app import app
from tilework.cli.commands import generate
from tilework.cli.console import UserError
from tilework.cli.models import checked_spec
from tilework.core.model import ModelSource
from tilework.pipelines.draw import draw
from tilework.pipelines.errors import RequestRefused
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.numerics import NotFinite
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support.record import served_classes
from tilework.server.calls.errors import CallError
from zoo.random_calls import RandomCall, random_call, spec_of, stock_pixels
from zoo.registry import ZOO, build

NUM_CALLS = int(os.environ.get("RANDOM_CALLS", "2"))
SEED = os.environ.get("RANDOM_SEED", "0")
QUICK = ("sdxl", "qwen-image")
_LARGE = 256
SERVED = [name for name, model in ZOO.items() if model.class_name in served_classes()]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def stock() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=tiny.prepare) as pool:
        yield pool


@pytest.mark.parametrize("name", quick(QUICK, SERVED))
def test_a_random_call_gives_the_stock_picture(
    name: str, stock: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(name, tmp_path)
    if family.info.side_multiple > _LARGE:
        pytest.skip("it draws at one size alone, which takes minutes")
    calls = [random_call(family.info, Random(f"{name} {SEED} {index}")) for index in range(NUM_CALLS)]
    pictures = [stock.submit(stock_pixels, name, call) for call in calls]
    for call, picture in zip(calls, pictures, strict=True):
        check(name, family, call, picture)
    if not any(one.required for one in family.info.pictures):
        plain = {"prompt": "a red fox", "seed": 7, "num_inference_steps": 2}
        fields = fields_of_the_command(monkeypatch, "a red fox", "--seed", "7", "--steps", "2")
        assert checked_spec(fields, family.info) == spec_of(RandomCall(plain), family.info)


def check(name: str, family: Family, call: RandomCall, stock: Future[bytes]) -> None:
    """What is accepted is drawn as by the stock call; what that does not take is refused as the client's mistake.

    A model may fail with a request, as a tiny one of few positions; then the stock call fails, too. Of pixels that are
    no numbers it makes black ones.
    """
    try:
        pixels = bytes(draw(family, spec_of(call, family.info)).pixels)
    except (CallError, RequestRefused, NotFinite):
        return
    except Exception as error:
        if stock.exception() is None:
            raise AssertionError(f"{name} draws here: {call}") from error
        return
    assert pixels == stock.result(), f"{name}: {call}"


def family_of(name: str, directory: Path) -> Family:
    """The model as a server loads it."""
    model = ZOO[name]
    if not model.loads:
        return StockPipeline(build(model), name, {}, "")
    build(model).save_pretrained(str(directory), safe_serialization=True)
    return load(ModelSource(path=str(directory)))


def fields_of_the_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, object]:
    """What `tilework generate` with these words asks for."""
    asked: list[dict[str, object]] = []

    def keep(_source: ModelSource, fields: dict[str, object], *_: object, **__: object) -> NoReturn:
        asked.append(fields)
        raise UserError("no picture")

    monkeypatch.setattr(generate, "_generate", keep)
    CliRunner().invoke(app, ["generate", *words])
    return asked[0]
