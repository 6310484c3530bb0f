"""A model that is to draw no previews makes its steps without the autoencoder."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from tilework.core.graph.stage import StageSpec
from tilework.core.model import ModelSource
from tilework.pipelines.defaults import FILE
from tilework.pipelines.errors import InvalidDefaults
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import STOCK


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return directory


def steps_of(source: ModelSource) -> StageSpec:
    return next(stage for stage in load(source).info.stages if stage.steps is not None)


@pytest.mark.parametrize("adapter", [None, STOCK], ids=["by hand", "any pipeline"])
def test_its_steps_need_the_denoiser_alone(directory: Path, adapter: str | None) -> None:
    usual = steps_of(ModelSource(path=str(directory), adapter=adapter))
    assert (usual.previews, set(usual.components)) == ("decode", {"transformer", "vae"})
    without = steps_of(ModelSource(path=str(directory), adapter=adapter, previews=False))
    assert (without.previews, without.components) == ("", ("transformer",))


def test_its_own_file_may_say_so(tmp_path: Path) -> None:
    tiny.prepare()
    tiny.save_sd3(tmp_path)
    tiny.write_defaults(tmp_path, previews=False)
    assert not steps_of(ModelSource(path=str(tmp_path))).previews
    tiny.write_defaults(tmp_path, previews="no")
    with pytest.raises(InvalidDefaults, match=f"{FILE}: previews is 'no'; write true or false"):
        load(ModelSource(path=str(tmp_path)))
