"""CPU workers of a node share one copy of the weights, and compute the same bits as with copies of their own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines import loading
from tilework.pipelines.components import modules_of
from tilework.pipelines.draw import draw
from tilework.pipelines.loading import load, load_stock
from tilework.worker import process
from tilework.worker.models.shared_weights import SharedWeights
from worker.tied import Tied


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def mapped_files(module: nn.Module) -> set[str]:
    """The files that the weights lie in."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(edge, 16) for edge in words[0].split("-")), words[-1]) for words in lines if len(words) > 5]
    places = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    return {name for place in places for first, last, name in spans if first <= place < last and "/" in name}


def test_weights_keep_their_bits_and_ties_and_lie_aligned_in_one_file(tmp_path: Path) -> None:
    module = Tied()
    before = weights(module)
    name = SharedWeights(tmp_path).share(module)
    assert name is not None
    assert mapped_files(module) == {str(tmp_path / name)}
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert module.second.weight is module.first.weight
    assert module.turned.stride() == (1, 4), "kernels see the same layout"
    places = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    assert all(place % 64 == 0 for place in places)


def test_equal_components_share_a_file_and_others_do_not(tmp_path: Path) -> None:
    first, same, other = Tied(), Tied(), Tied(1)
    shared = SharedWeights(tmp_path)
    names = [shared.share(module) for module in (first, same, other)]
    assert names[0] == names[1] != names[2]
    inode = (tmp_path / str(names[0])).stat().st_ino
    assert shared.share(Tied()) == names[0]
    assert (tmp_path / str(names[0])).stat().st_ino == inode, "it is written once"


def test_a_change_stays_in_the_worker_that_made_it(tmp_path: Path) -> None:
    first, second = Tied(), Tied()
    for module in (first, second):
        SharedWeights(tmp_path).share(module)
    before = weights(second)
    with torch.no_grad():
        first.first.weight.add_(1)
    assert torch.equal(second.first.weight, before["first.weight"])


def test_workers_that_start_together_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write, both = SharedWeights._write, Barrier(2)

    def counted(self: SharedWeights, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        written.append(path)
        with suppress(BrokenBarrierError):
            both.wait(0.5)  # For a second one that should wait for the first.
        write(self, path, tensors)

    monkeypatch.setattr(SharedWeights, "_write", counted)
    threads = [Thread(target=SharedWeights(tmp_path).share, args=(Tied(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1


def test_an_incomplete_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed while it writes leaves a file of another name, which the next one replaces."""

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    first = Tied()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(KeyboardInterrupt):
            SharedWeights(tmp_path).share(first)
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == [".incomplete"]
    module = Tied()
    assert SharedWeights(tmp_path).share(module) is not None
    assert torch.equal(module.first.weight, Tied().first.weight)
    assert not list(tmp_path.glob("*.incomplete"))


@pytest.mark.parametrize("error", ["full", "read-only"])
def test_without_room_each_worker_has_its_own(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path
    if error == "full":
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    else:
        directory = tmp_path / "file"
        directory.write_text("not a directory")
    module, before = Tied(), weights(Tied())
    with caplog.at_level(logging.WARNING, "tilework"):
        assert SharedWeights(directory).share(module) is None
    assert "weights are not shared between workers" in caplog.text
    assert not mapped_files(module)
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_are_the_same_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    tiny.prepare()
    tiny.save_sd3(tmp_path / "model")
    source = ModelSource(path=str(tmp_path / "model"), dtype=dtype)
    shared = load(source, SharedWeights(tmp_path / "weights").share)
    modules = [part for part in shared._pipeline.components.values() if isinstance(part, nn.Module)]  # type: ignore[attr-defined]
    files = [mapped_files(module) for module in modules]
    assert all(len(of_module) == 1 for of_module in files)
    assert len(set.union(*files)) == len({part for module in files for part in module}) >= 3
    spec = tiny.spec()
    assert draw(shared, spec) == draw(load(source), spec)


def written_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    tiny.prepare()
    tiny.build_flux().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def place_of(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a worker of such a device wants the weights of a model that stays on it."""
    wanted: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(process, "load", lambda _source, place: wanted.append(place))
        process._family(ModelSource(path="m", device=device), None, SharedWeights(tmp_path / "weights"))
    return wanted[0]


def test_workers_of_cpus_share_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of("cpu", tmp_path, monkeypatch) is not None


def test_weights_go_from_their_files_to_an_accelerator_and_nowhere_else(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which the device "meta" stands: the memory of the host has each weight once, where the folder lies there."""
    came_from: list[set[str]] = []
    moved = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        came_from.append(mapped_files(module))
        return moved(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(loading, "device_of", lambda source: torch.device("meta"))
    pipeline = load_stock(ModelSource(path=str(flux), dtype="float32"), place_of("cuda", tmp_path, monkeypatch))
    assert pipeline.device.type == "meta"
    assert set.union(*came_from) == {str(file) for file in flux.rglob("*.safetensors")}
    assert all(len(files) == 1 for files in came_from)
    assert written_bytes(tmp_path / "weights") == 0


def test_layers_that_come_and_go_are_copied_from_their_files(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying: list[set[str]] = []

    def offload_layers(pipeline: Any, device: torch.device) -> None:
        lying.extend(mapped_files(module) for module in modules_of(pipeline).values())

    monkeypatch.setattr(loading, "device_of", lambda source: torch.device("cuda", 0))
    monkeypatch.setattr(loading, "offload_layers", offload_layers)
    source = ModelSource(path=str(flux), dtype="float32", offload="layers")
    load_stock(source, place_of("cuda", tmp_path, monkeypatch))
    assert set.union(*lying) == {str(file) for file in flux.rglob("*.safetensors")}
    assert written_bytes(tmp_path / "weights") == 0
