"""`tilework cost memory`: what a decode takes, from configurations alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command_line import invoke
from tilework.pipelines.clips.memory import decode_bytes
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
