"""`tilework cost memory` and the plan of a server: from configurations alone, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from typer.testing import CliRunner

import tiny
from cards import GB, card
from cli.command_line import invoke
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.cli.devices import Devices, FoundDevices
from tilework.cli.models import model_source, options_of
from tilework.cli.options.common import SetupGroup
from tilework.cli.serving import _show_memory
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.wire.reports import DeviceReading, StartMemory
from tilework.distribution import install_command
from tilework.pipelines.clips.memory import decode_bytes
from tilework.pipelines.fits.beside import CONTEXT_BYTES, SERVER, Beside
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
    shipped = json.loads(invoke("cost", "memory", "shapes-motion", "--sizes", "64x64x17", "--json").output)
    assert shipped["decodes"][0]["bytes"] > 0


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
    kept = ("--states-memory", "300MB", "--cache-memory", "1GB")
    command = ("cost", "memory", flux, "--gpu-memory", "8GB", "--sizes", "128x64", *kept)
    said = json.loads(invoke(*command, "--json").output)
    (plan,) = said["plans"]
    assert (plan["size"], plan["fits"], plan["problem"]) == ("128x64", True, None)
    assert [one["name"] for one in plan["components"]] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert [one["name"] for one in plan["stages"]] == ["encode", "diffuse", "decode"]
    assert plan["beside"] == dict(Beside(states_bytes=3 * GB // 10, cache_bytes=GB).parts)
    words = invoke(*command, "--offload", "components").output
    assert "bfloat16, on the device for their stage: text_encoder" in words
    assert "beside them 2.4 GB: CUDA's context 0.5 GB, cuBLAS 0.1 GB, waiting requests 0.3 GB, step caches 1.0" in words
    assert "128x64: 2.4 GB of 8.0 GB; 5.6 GB left" in words
    assert f"the largest square that fits: {plan['largest']}" in words


def test_a_plan_is_that_of_a_card(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[ModelSource] = []
    monkeypatch.setattr("tilework.cli.commands.cost_memory._show_plans", lambda source, *_: not planned.append(source))
    invoke("cost", "memory", directory, "--gpu-memory", "8GB")
    assert [one.device for one in planned] == ["cuda"]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_the_cheapest_change(flux: Path) -> None:
    arguments = ["cost", "memory", str(flux), "--sizes", "128x128", "--dtype", "float32", "--json"]
    arguments += ["--states-memory", "1MiB", "--cache-memory", "1MiB"]
    needs = [
        json.loads(invoke(*arguments, *more, "--gpu-memory", "2GB").output)["plans"][0]["needed_bytes"]
        for more in ((), ("--offload", "components"))
    ]
    result = CliRunner().invoke(app, [*arguments, "--gpu-memory", f"{sum(needs) / 2e9:.6f}GB"])
    (plan,) = json.loads(result.output)["plans"]
    assert (result.exit_code, plan["fits"]) == (1, False)
    assert "are free; with --dtype bfloat16 it needs" in plan["problem"]


def served(directory: Path | str, free_bytes: int, beside: Beside = SERVER, cards: int = 1, **setup: Any) -> Devices:
    """The devices of a server for a model, on cards with so much free memory."""
    found = FoundDevices("cuda", (replace(card(), free_bytes=free_bytes),) * cards)
    source = ModelSource(path=str(directory), device="cuda", dtype="bfloat16", **setup)
    return Devices.of(cards, "1", None, beside=beside).planned([source], found)


@pytest.mark.slow
def test_a_server_prints_its_plan_and_leaves_the_room_for_weights_to_it(
    flux: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "default_shape", Shape(128, 128))
    assert served(flux, 8 * GB).weights_bytes is None, "all stay"
    assert "the largest square that fits" in capsys.readouterr().err
    plan = Planner.of(str(flux)).plan(ModelSource(path="", dtype="bfloat16", offload="components"), 8 * GB)
    assert served(flux, 8 * GB, offload="components").weights_bytes == plan.weights_room_bytes
    with pytest.raises(UserError, match=r"needs 7.1 GB for 128x128, and 1.0 GB are free; no change of dtype"):
        served(flux, GB)
    with pytest.raises(UserError, match=r"5.0 GB are free; it fits if --states-memory and --cache-memory are 3.9 GB"):
        served(flux, 5 * GB)
    assert served(flux, 5 * GB, Beside(states_bytes=GB, cache_bytes=2 * GB)).plan is not None
    capsys.readouterr()
    lower = served(flux, 5 * GB, Beside.of(None, None)).beside
    assert (lower.states_bytes, round(lower.cache_bytes / GB, 1)) == (2 * GB, 1.9), "caches give way first"
    assert "so that all fits, --cache-memory is 1.9 GB here, and --states-memory 2.0 GB" in capsys.readouterr().err
    assert served(flux, 13 * GB // 10, Beside.of(None, None)).beside.states_bytes < GB
    with pytest.raises(UserError, match=r"and 1\.0 GB are free; no change"):
        served(flux, GB, Beside.of(None, None))
    with pytest.raises(UserError, match="if --states-memory and --cache-memory are"):
        served(flux, 4 * GB, Beside.of(None, 4 * GB))
    with pytest.raises(UserError, match=r"needs 4.3 GB for 128x128"):
        served(flux, 2 * GB, Beside(states_bytes=GB, cache_bytes=2 * GB), cards=2)


@pytest.mark.slow
def test_what_a_start_took_is_said_as_it_was_planned(
    flux: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "default_shape", Shape(128, 128))
    plan = served(flux, 8 * GB).plan
    whole = Planner.of(str(flux)).plan(ModelSource(path="", dtype="bfloat16"), 8 * GB)
    assert plan is not None
    assert plan.weights_bytes == sum(one.num_bytes for one in whole.components)
    assert plan.later_bytes == whole.needed_bytes - plan.weights_bytes - CONTEXT_BYTES
    coming = served(flux, 8 * GB, offload="components").plan
    assert coming is not None
    assert (coming.weights_bytes, coming.later_bytes) == (0, 8 * GB - CONTEXT_BYTES), "the room is all that is left"
    capsys.readouterr()
    starts = {
        "0": StartMemory(context_bytes=6 * GB // 10, weights_bytes=2 * GB, free_bytes=5 * GB),
        "1": StartMemory(context_bytes=GB, weights_bytes=2 * GB, free_bytes=8 * GB),
    }
    readings = {name: DeviceReading(card=None, allocator=None, start=one) for name, one in starts.items()}
    silent = {"2": DeviceReading(card=None, allocator=None)}
    _show_memory(replace(plan, weights_bytes=19 * GB // 10), readings | silent)
    assert capsys.readouterr().err.splitlines() == [
        "  device 0: CUDA's context takes 0.6 GB (planned 0.5 GB), weights 2.0 GB (planned 1.9 GB); 5.0 GB are free "
        "for 6.6 GB to come, 1.6 GB too little",
        "  device 1: CUDA's context takes 1.0 GB (planned 0.5 GB), weights 2.0 GB (planned 1.9 GB); 8.0 GB are free "
        "for 6.6 GB to come",
    ]
    _show_memory(None, readings)
    assert capsys.readouterr().err == "", "there was no plan"


def two_controlnets(directory: Path) -> Path:
    pipeline = tiny.build_sd()
    nets = [ControlNetModel.from_unet(pipeline.unet) for _ in range(2)]
    StableDiffusionControlNetPipeline(**pipeline.components, controlnet=nets).save_pretrained(directory)
    return directory


def test_a_model_that_cannot_be_planned_starts_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ControlNets are a component whose class is made of no configuration."""
    directory = two_controlnets(tmp_path / "nets")
    capsys.readouterr()  # What diffusers says while it saves.
    devices = served(directory, 8 * GB)
    said = capsys.readouterr().err
    assert said.startswith(
        f"{directory}: its memory is not planned; AttributeError: type object 'MultiControlNetModel'"
    )
    assert len(said.splitlines()) == 1
    assert devices.weights_bytes is None
    assert devices.plan is not None
    assert devices.plan.weights_bytes is None
    start = StartMemory(context_bytes=GB, weights_bytes=GB, free_bytes=8 * GB)
    _show_memory(devices.plan, {"0": DeviceReading(card=None, allocator=None, start=start)})
    assert "weights 1.0 GB (not planned)" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not planned; say what each device has for weights, as in --weights-memory"):
        served(directory, 8 * GB, offload="components")


def test_a_mistake_that_the_workers_name_ends_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    served("shapes", 8 * GB, quantize=(("absent", "int8"),))
    assert "shapes: its memory is not planned; quantize names 'absent'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--offload", "disk"], "offload is 'disk'; choose one of none, components, layers"),
        (["--attention", "sparse"], "attention is 'sparse'; choose one of native, cudnn, efficient, flash, math"),
        (["--attention", "cudnn"], "attention is 'cudnn', which this CPU does not have for float32 with torch"),
        (["--quantize", "nvfp4"], f"not installed; run: {install_command('quantize')}"),
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
