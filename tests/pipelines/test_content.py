"""A model is what its files hold: not where they lie, when they were written, or what lies beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilework.core.model import ModelSource
from tilework.pipelines.content.digests import Stopped, quick_content, whole_digest
from tilework.pipelines.identity import model_identity
from tilework.pipelines.model_index import shipped_directory

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of a model, which was written now."""
    shutil.copytree(shipped_directory(), tmp_path / "one" / "shapes", copy_function=shutil.copyfile)
    return tmp_path / "one" / "shapes"


def identity(directory: Path) -> str:
    return model_identity(ModelSource(path=str(directory)))


def flip(path: Path, offset: int) -> None:
    """Change a byte of a file, which keeps its size and times."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_copy_is_the_same_model_whenever_it_was_written(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "two" / "shapes")
    for path in (tmp_path / "two").rglob("*"):
        os.utime(path, ns=(1, 1))
    assert identity(copy) == identity(tmp_path / "two" / "shapes") == model_identity(ModelSource(path="shapes"))


def add(name: str) -> Callable[[Path], object]:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"{}")

    return write


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda directory: (directory / old).rename(directory / new)


def link_component(directory: Path) -> None:
    """It lies elsewhere, as where models share one."""
    (directory / "vae").rename(directory.parent / "shared vae")
    (directory / "vae").symlink_to(directory.parent / "shared vae")


@pytest.mark.parametrize(
    "change",
    [
        add("README.md"),
        add("LICENSE.txt"),
        add("picture.png"),
        add(".gitattributes"),
        add(".git/config.json"),
        add(".cache/huggingface/download/vae/config.json"),
        add("vae/.config.json.swp.json"),
        add("vae/diffusion_pytorch_model.bin"),
        add("vae/README.md"),
        add("single_file.safetensors"),
        add("vae_decoder/config.json"),
        link_component,
    ],
)
def test_what_is_not_read_does_not_count(change: Callable[[Path], object], copy: Path) -> None:
    before = identity(copy)
    change(copy)
    assert identity(copy) == before


@pytest.mark.parametrize(
    "change",
    [
        add("scheduler/scheduler_config.json"),
        add("tilework.json"),
        add("vae/code.py"),
        add("tokenizer/merges.txt"),
        add("vae/diffusion_pytorch_model-00002-of-00002.safetensors"),
        rename("vae/config.json", "vae/other.json"),
        lambda directory: (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes() + b"0"),
    ],
)
def test_what_is_read_counts(change: Callable[[Path], object], copy: Path) -> None:
    before = identity(copy)
    change(copy)
    assert identity(copy) != before


def test_a_change_of_any_tensor_is_another_model(copy: Path) -> None:
    """Of the whole of one: training changes nearly all of it."""
    path = copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path)
    before = quick_content(path)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, path)
        assert quick_content(path) != before, name
    save_file(tensors, path)
    assert quick_content(path) == before
    assert len(tensors) > 10


def test_a_byte_beside_the_sample_shows_in_the_whole_alone(copy: Path) -> None:
    path = copy / WEIGHTS
    save_file({"large": torch.zeros(10_000)}, path)
    before, whole = identity(copy), whole_digest(path, lambda: False)
    flip(path, path.stat().st_size - 1)
    assert identity(copy) == before
    assert whole_digest(path, lambda: False) != whole


def test_other_names_of_a_model_are_named_and_its_digest_is_the_same(copy: Path) -> None:
    (copy.parent / "mine").symlink_to(copy)
    copy.rename(copy.parent / "snapshot")
    (copy.parent / "mine").unlink()
    (copy.parent / "mine").symlink_to(copy.parent / "snapshot")
    assert identity(copy.parent / "mine") == model_identity(ModelSource(path="shapes")).replace("shapes", "snapshot")


@pytest.mark.parametrize("size", [100, 256 * 4096 + 1, 5_000_001])
def test_weights_of_other_kinds_give_blocks_from_their_begin_to_their_end(size: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(bytes(size))
    source = ModelSource(path="shapes", quantize=(("", str(path)),))
    before, named = quick_content(path), model_identity(source)
    assert before.num_bytes == size
    for offset in (0, size - 1):
        flip(path, offset)
        assert quick_content(path) != before
        assert model_identity(source) != named
        flip(path, offset)
    os.utime(path, ns=(1, 1))
    assert quick_content(path) == before
    assert model_identity(source) == named


@pytest.mark.parametrize(
    "content",
    [b"", b"123", b"\xff" * 8, (5).to_bytes(8, "little") + b"[1]  ", (9).to_bytes(8, "little") + b'{"a": {}}' + b"0"],
)
def test_weights_that_cannot_be_read_have_a_digest(content: bytes, tmp_path: Path) -> None:
    """That they cannot be is said by what loads them."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert quick_content(path).num_bytes == len(content)
    path.write_bytes(content + b"1")
    assert quick_content(path) != replace(quick_content(path), num_bytes=len(content))


def test_reading_a_whole_file_can_be_stopped(copy: Path) -> None:
    with pytest.raises(Stopped):
        whole_digest(copy / WEIGHTS, lambda: True)
