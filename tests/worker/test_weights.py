"""Weights that come to a device and go: their bits and memory, what equal components share, where they are read."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from tilework.core.model import ModelSource
from tilework.pipelines.components import weights_of
from tilework.pipelines.loading import load
from tilework.worker.models import shared_weights
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import KeptWeights, Weights
from worker.tied import Tied


class Configured(Tied):
    """Equal weights, and another number in the configuration."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.config = {"scale": scale, "_name_or_path": "a directory"}


class Large(nn.Module):
    """Five weights of half a page each: three blocks of a page, of which the last is half empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(mmap.PAGESIZE // 8)) for _ in range(5)])


def bits(module: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in weights_of(module)]


def same(module: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(weights_of(module), before, strict=True))


def bring(weights: Weights, *digests: str, forgets: Sequence[str] = ()) -> None:
    """Load components as a whole."""
    for digest in digests:
        for _ in weights.loading(digest, forgets):
            pass


def never() -> nn.Module:
    raise AssertionError("the files have it")


def num_bytes(module: nn.Module) -> int:
    return sum(one.nbytes for one in weights_of(module))


def test_weights_come_and_go_bit_for_bit(tmp_path: Path) -> None:
    module, weights = Tied(), Weights(SharedWeights(tmp_path))
    before, size = bits(module), num_bytes(module)
    component = weights.add(module, never)
    assert component.num_bytes == size
    for _ in range(2):
        assert not weights.has([component.digest])
        assert num_bytes(module) == 0
        bring(weights, component.digest)
        assert weights.has([component.digest])
        assert same(module, before)
        assert module.second.weight is module.first.weight
        assert module.turned.stride() == (1, 4), "kernels see the same layout"
        weights.drop([component.digest])


def test_equal_components_of_two_models_lie_there_once(tmp_path: Path) -> None:
    first, second, other = Tied(), Tied(), Tied(1)
    weights = Weights(SharedWeights(tmp_path))
    digests = [weights.add(module, never).digest for module in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]
    bring(weights, digests[0])
    assert first.first.weight.data_ptr() == second.first.weight.data_ptr()
    assert num_bytes(other) == 0
    weights.drop(digests[:1])
    assert num_bytes(first) == num_bytes(second) == 0


def test_the_configuration_belongs_to_the_content(tmp_path: Path) -> None:
    weights = Weights(SharedWeights(tmp_path))
    one, other = (weights.add(Configured(scale), never).digest for scale in (1, 2))
    assert one != other
    assert {path.name for path in tmp_path.iterdir() if not path.suffix} == {one, other}


def test_equal_components_of_two_directories_are_one(tmp_path: Path) -> None:
    """As of two checkpoints with the same text encoders, whose configurations say from where they were read."""
    tiny.prepare()
    families = []
    for index, name in enumerate(("one", "other", "rescaled")):
        pipeline = tiny.build_sd3()
        torch.nn.init.constant_(pipeline.transformer.proj_out.weight, index)
        if name == "rescaled":
            pipeline.vae.register_to_config(scaling_factor=7.0)
        (tmp_path / name).mkdir()
        tiny.save(pipeline, tmp_path / name, name)
        families.append(load(ModelSource(path=str(tmp_path / name))))
    weights = Weights(SharedWeights(tmp_path / "weights"))
    one, other, rescaled = (
        {part: weights.add(module, never).digest for part, module in family.modules.items()} for family in families
    )
    encoders = {part for part in one if part.startswith("text_encoder")}
    assert {part for part in one if one[part] == other[part]} == {*encoders, "vae"}
    assert {part for part in one if one[part] == rescaled[part]} == encoders


def test_what_the_host_has_no_copy_of_is_read_from_its_directory(tmp_path: Path) -> None:
    reads: list[int] = []

    def read() -> nn.Module:
        reads.append(1)
        return Tied()

    module, weights = Tied(), Weights(SharedWeights(tmp_path))
    before, component = bits(module), weights.add(module, read)
    for path in tmp_path.iterdir():
        path.unlink()
    bring(weights, component.digest)
    assert same(module, before)
    weights.drop([component.digest])
    bring(weights, component.digest)
    assert len(reads) == 1, "the host has a copy again"


def test_the_copy_that_was_needed_the_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    files = SharedWeights(tmp_path)
    room = 2 * 576 + 100  # Two of the files fit.

    def left(path: Path) -> object:
        used = sum(one.stat().st_size for one in tmp_path.iterdir() if not one.suffix)
        return usage._replace(free=(1 << 30) + room - used)

    monkeypatch.setattr(shutil, "disk_usage", left)
    parts, weights = [Tied(seed) for seed in range(3)], Weights(files)
    digests = [weights.add(parts[seed], lambda seed=seed: Tied(seed)).digest for seed in range(2)]
    for seed, digest in enumerate(digests):
        os.utime(tmp_path / digest, (seed, seed))
    bring(weights, digests[0])  # Needed later than the other.
    weights.add(parts[2], never)
    assert (tmp_path / digests[0]).exists()
    assert not (tmp_path / digests[1]).exists()
    bring(weights, digests[1])
    assert same(parts[1], bits(Tied(1)))
    assert not (tmp_path / digests[0]).exists(), "the other was just written"
    weights.drop(digests[:1])
    bring(weights, digests[0], forgets=["unknown", digests[1]])
    assert not (tmp_path / digests[1]).exists(), "it was named, although the third was written before it"


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_load_that_ends_midway_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """It is dropped after some of its blocks; the next one begins anew."""
    monkeypatch.setattr(shared_weights, "_BLOCK_BYTES", mmap.PAGESIZE)
    module, weights = Large(), Weights(SharedWeights(tmp_path))
    before, digest = bits(module), weights.add(module, never).digest
    blocks = weights.loading(digest)
    for _ in range(num_blocks):
        next(blocks)
    assert not weights.has([digest])
    blocks.close()
    assert num_bytes(module) == 0
    assert len(list(weights.loading(digest))) == 3
    assert same(module, before)


def test_a_load_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> nn.Module:
        raise OSError("gone")

    module, weights = Tied(), Weights(SharedWeights(tmp_path))
    component = weights.add(module, broken)
    (tmp_path / component.digest).unlink()
    with pytest.raises(OSError, match="gone"):
        bring(weights, component.digest)
    assert not weights.has([component.digest])
    assert num_bytes(module) == 0


def test_what_another_process_reads_is_awaited_without_blocking(tmp_path: Path) -> None:
    """Each look is a block, so that a work can go first meanwhile."""
    files, module = SharedWeights(tmp_path), Tied()
    weights, kept = Weights(files), KeptWeights.of(module)
    weights.add_empty(module, kept, never)
    digest = kept.component.digest
    with files.reading(digest):
        blocks = weights.loading(digest)
        for _ in range(3):
            next(blocks)
        files.keep(digest, weights_of(Tied()))
    for _ in blocks:
        pass
    assert same(module, bits(Tied()))
