"""`tilework fake` on the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cli.command_line import invoke
from tilework.cli.commands import fake
from tilework.cli.console import UserError
from tilework.pipelines.fake.models import MODELS
from tilework.pipelines.model_index import read_model_index


class Usage(NamedTuple):
    free: int


def test_a_model_in_memory_is_a_folder_that_the_command_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_MEMORY", tmp_path)
    told = json.loads(invoke("fake", "SD3-medium", "--in-memory", "--empty", "--json").stdout)
    assert told["directory"] == str(tmp_path / "tilework-SD3-medium")
    assert told["weights_bytes"] == pytest.approx(15.5e9, rel=0.01)
    assert read_model_index(told["directory"]).components["_class_name"] == MODELS["SD3-medium"].pipeline


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(int(3e9)))
    said = mistake("fake", "SDXL", tmp_path / "new" / "sdxl")
    assert "where 3.0 GB are free, and the weights take 6.9 GB; name a directory with more room" in said
    assert not (tmp_path / "new").exists()


def test_the_folder_is_named_once(tmp_path: Path, mistake: Callable[..., str]) -> None:
    assert "DIR is missing" in mistake("fake", "SDXL")
    assert "leave one of them out" in mistake("fake", "SDXL", tmp_path, "--in-memory")


def test_what_there_is_not_is_named(tmp_path: Path, mistake: Callable[..., str]) -> None:
    assert "choose one of SDXL, SD3-medium" in mistake("fake", "SDXXL", tmp_path)
    assert "dtype is 'fp8'" in mistake("fake", "SDXL", tmp_path, "--dtype", "fp8")
    assert "choose one of auto, cpu, cuda" in mistake("fake", "SDXL", tmp_path, "--device", "tpu")


def test_weights_are_made_on_a_card_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [fake._device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fake._device("auto").type == "cpu"
    with pytest.raises(UserError, match="torch sees no such device; choose cpu"):
        fake._device("cuda")
