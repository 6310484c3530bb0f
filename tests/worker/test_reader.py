"""Components that another process reads ahead of need: workers map what it has read, and wait for it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from torch import nn

from tilework.core.component import Component
from tilework.core.model import ModelSource
from tilework.core.wire.commands import ComponentFiles, ReadWeights
from tilework.core.wire.reports import WeightsRead
from tilework.pipelines.components import weights_of
from tilework.pipelines.loading import load, load_component
from tilework.pipelines.model_index import shipped_directory
from tilework.worker.models import reader
from tilework.worker.models.reader import read_ahead
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import KeptWeights, Weights
from worker.test_weights import bring
from worker.tied import Tied

SOURCE = ModelSource(path="of a test")


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts of the model are `Tied` modules by their seeds; returns those that were read."""
    read: list[str] = []

    def load_tied(source: ModelSource, part: str) -> nn.Module:
        assert source is SOURCE
        read.append(part)
        return Tied(int(part))

    monkeypatch.setattr(reader, "load_component", load_tied)
    return read


def component(seed: int) -> Component:
    return KeptWeights.of(Tied(seed)).component


def command(*seeds: int, forgets: tuple[str, ...] = ()) -> ReadWeights:
    files = tuple(ComponentFiles(component(seed), SOURCE, part=str(seed)) for seed in seeds)
    return ReadWeights(7, files, forgets)


def unreadable() -> nn.Module:
    raise AssertionError("the host has it")


def equal(module: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, weights_of(module), weights_of(other)))


def test_a_worker_loads_what_was_read_from_the_host(tmp_path: Path, readable: list[str]) -> None:
    files, module = SharedWeights(tmp_path), Tied(1)
    weights = Weights(files)
    weights.add_empty(module, KeptWeights.of(module), unreadable)
    assert read_ahead(command(0, 1), files) == WeightsRead(7, is_kept=True)
    bring(weights, component(1).digest)
    assert equal(module, Tied(1))
    assert readable == ["0", "1"]
    assert read_ahead(command(1), files).is_kept
    assert readable == ["0", "1"], "the host has it already"


def test_a_worker_waits_for_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins to load while the reader is half done; it must not read the same itself."""
    files, module, half_done, go_on = SharedWeights(tmp_path), Tied(1), Event(), Event()
    weights = Weights(files)
    weights.add_empty(module, KeptWeights.of(module), unreadable)

    def load_slowly(source: ModelSource, part: str) -> nn.Module:
        half_done.set()
        assert go_on.wait(30)
        return Tied(int(part))

    monkeypatch.setattr(reader, "load_component", load_slowly)
    reading = Thread(target=read_ahead, args=(command(1), files))
    reading.start()
    assert half_done.wait(30)
    loading = Thread(target=bring, args=(weights, component(1).digest))
    loading.start()
    loading.join(0.05)
    assert loading.is_alive()
    go_on.set()
    loading.join(30)
    reading.join(30)
    assert equal(module, Tied(1))


def test_what_cannot_be_read_or_kept_is_said(
    tmp_path: Path, readable: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(source: ModelSource, part: str) -> nn.Module:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(reader, "load_component", broken)
        assert read_ahead(command(1), SharedWeights(tmp_path)) == WeightsRead(7, is_kept=False)
        assert "the disk is gone" in caplog.text
    (tmp_path / "file").touch()
    assert not read_ahead(command(1), SharedWeights(tmp_path / "file")).is_kept


def test_what_it_names_makes_room(tmp_path: Path, readable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files, usage = SharedWeights(tmp_path), shutil.disk_usage(tmp_path)

    def left(path: Path) -> object:
        used = sum(one.stat().st_size for one in tmp_path.iterdir() if not one.suffix)
        return usage._replace(free=(1 << 30) + 2 * 576 + 100 - used)

    monkeypatch.setattr(shutil, "disk_usage", left)
    assert read_ahead(command(0, 1), files).is_kept
    assert read_ahead(command(2, forgets=(component(1).digest,)), files).is_kept
    assert [files.has(component(seed).digest) for seed in range(3)] == [True, False, True]


def test_the_file_of_a_lora_is_read_through(tmp_path: Path) -> None:
    file = tmp_path / "ink.safetensors"
    file.write_bytes(b"weights")
    one = ComponentFiles(Component("ink", 7), SOURCE, lora=str(file))
    assert read_ahead(ReadWeights(1, (one,)), SharedWeights(tmp_path)).is_kept
    file.unlink()
    assert not read_ahead(ReadWeights(2, (one,)), SharedWeights(tmp_path)).is_kept


def test_parts_of_a_real_model_are_those_that_workers_know() -> None:
    """By digest: a worker must find under it what the reader kept."""
    source = ModelSource(path=str(shipped_directory()))
    for part, module in load(source).modules.items():
        assert KeptWeights.of(load_component(source, part)).component == KeptWeights.of(module).component
