"""`tilework cost memory` and the plan of a server: from configurations alone, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from cards import GB, card
from cli.command_line import invoke
from tilework.cli.app import app
from tilework.cli.cells import Devices
from tilework.cli.console import UserError
from tilework.cli.devices import FoundDevices
from tilework.cli.models import model_source, options_of
from tilework.cli.options.setup import SetupGroup
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.fits.plan import Planner
from zoo.autoencoders import kl_wan


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    kl_wan().save_config(tmp_path / "vae")
    return tmp_path


def test_it_prints_what_the_decode_of_each_size_takes(directory: Path) -> None:
    said = json.loads(
        invoke("cost", "memory", directory, "--sizes", "16x16x5,320x16x5", "--dtype", "float32", "--json").output
    )
    assert (said["autoencoder"], said["dtype"]) == ("AutoencoderKLWan", "float32")
    small, large = said["decodes"]
    assert (small["size"], large["size"]) == ("16x16x5", "320x16x5")
    assert small["bytes"] == small["tiled_bytes"] == decode_bytes(kl_wan(), 5, 16, 16), "it is one tile"
    assert large["tiled_bytes"] < large["bytes"]
    table = invoke("cost", "memory", directory, "--sizes", "16x16x5").output
    assert "--vae-tiling" in table
    assert "16x16x5" in table


def test_what_it_cannot_plan_is_named(directory: Path, mistake: Callable[..., str]) -> None:
    assert "dtype is 'int8'; choose one of float32" in mistake(
        "cost", "memory", directory, "--sizes", "16x16x5", "--dtype", "int8"
    )
    file = directory / "vae" / "config.json"
    file.write_text('{"_class_name": "AutoencoderKL"}')
    assert "names 'AutoencoderKL'; what a decode takes is known of" in mistake(
        "cost", "memory", directory, "--sizes", "16x16x5"
    )
    file.unlink()
    assert "name the directory of a diffusers model" in mistake("cost", "memory", directory, "--sizes", "16x16x5")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("flux")
    tiny.save(tiny.build_flux(), directory, "flux")
    return directory


@pytest.mark.slow
def test_a_plan_says_what_goes_where_and_what_is_left(flux: Path) -> None:
    said = json.loads(invoke("cost", "memory", flux, "--gpu-memory", "2GB", "--sizes", "128x64", "--json").output)
    (plan,) = said["plans"]
    assert (plan["size"], plan["fits"], plan["problem"]) == ("128x64", True, None)
    assert [one["name"] for one in plan["components"]] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert [one["name"] for one in plan["stages"]] == ["encode", "diffuse", "decode"]
    words = invoke("cost", "memory", flux, "--gpu-memory", "2GB", "--sizes", "128x64", "--offload", "components").output
    assert "bfloat16, on the device for their stage: text_encoder" in words
    assert "128x64: 1.0 GB of 2.0 GB, of which 1.0 GB are for CUDA and its libraries; 1.0 GB left" in words
    assert f"the largest square that fits: {plan['largest']}" in words


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_the_cheapest_change(flux: Path) -> None:
    arguments = ["cost", "memory", str(flux), "--sizes", "128x128", "--dtype", "float32", "--json"]
    needs = [
        json.loads(invoke(*arguments, *more, "--gpu-memory", "2GB").output)["plans"][0]["needed_bytes"]
        for more in ((), ("--offload", "components"))
    ]
    result = CliRunner().invoke(app, [*arguments, "--gpu-memory", f"{sum(needs) / 2e9:.6f}GB"])
    (plan,) = json.loads(result.output)["plans"]
    assert (result.exit_code, plan["fits"]) == (1, False)
    assert "are free; with --dtype bfloat16 it needs" in plan["problem"]


def served(flux: Path, free_bytes: int, **setup: Any) -> Devices:
    """The devices of a server for FLUX, on a card with so much free memory."""
    found = FoundDevices("cuda", (replace(card(), free_bytes=free_bytes),))
    source = ModelSource(path=str(flux), device="cuda", dtype="bfloat16", **setup)
    return Devices.of(1, "1", None).planned([source], found)


@pytest.mark.slow
def test_a_server_prints_its_plan_and_leaves_the_room_for_weights_to_it(
    flux: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "default_shape", Shape(128, 128))
    assert served(flux, 2 * GB).weights_bytes is None, "all stay"
    assert "the largest square that fits" in capsys.readouterr().err
    plan = Planner.of(str(flux)).plan(ModelSource(path="", dtype="bfloat16", offload="components"), 2 * GB)
    assert served(flux, 2 * GB, offload="components").weights_bytes == plan.weights_room_bytes
    with pytest.raises(UserError, match=r"needs 1.0 GB for 128x128, and 1.0 GB are free; no change of dtype"):
        served(flux, GB)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--offload", "disk"], "offload is 'disk'; choose one of none, components, layers"),
        (["--attention", "sparse"], "attention is 'sparse'; choose one of native, cudnn, efficient, flash, math"),
        (["--attention", "cudnn"], "attention is 'cudnn', which this CPU does not have for float32 with torch"),
        (["--quantize", "nvfp4"], "not installed; run: pip install 'tilework[quantize]'"),
        (["--quantize", "x=absent.gguf"], "quantize names absent.gguf, which cannot be read (No such file"),
        (["--offload", "layers", "--compile"], "layers that come and go are not compiled; leave out --compile"),
        (["--quantize", "int3"], "quantize is 'int3'; give one of int8, fp8, nf4"),
        (["--offload", "layers", "--weights-memory", "1GB"], "offload is layers, which brings weights by itself"),
        (["--offload", "components"], "the memory of the devices is not known; say what each has for weights"),
        (["--offload", "layers", "--cell", "2", "--weights-memory", "1GB"], "offload is layers, which brings weights"),
        (["--offload", "components", "--cell", "2", "--weights-memory", "1GB"], "--cell divides weights as they are"),
    ],
)
def test_a_setup_that_cannot_be_is_refused_before_anything_starts(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: None)
    assert said in mistake("serve", "shapes", "--device", "cpu", *options)


def test_cards_that_lack_something_are_named_before_anything_starts() -> None:
    found = FoundDevices("cuda", (replace(card(), attentions=(("bfloat16", "flash"),)),))

    def source(**setup: Any) -> ModelSource:
        return model_source("shapes", options_of(SetupGroup(**setup), found))

    assert source(attention="flash").attention == "flash"
    with pytest.raises(UserError, match=r"'cudnn', which a card does not have for bfloat16 .* one of native, flash"):
        source(attention="cudnn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: "there")
        with pytest.raises(UserError, match=r"compute capability 10\.0, and a card has 9\.0; take nf4"):
            source(quantize="nvfp4")
