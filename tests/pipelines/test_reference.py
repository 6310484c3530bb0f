"""What makes the stock pipeline equal to a server's, and how far it is away without it."""

from __future__ import annotations

from logging import INFO
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import StableDiffusion3Pipeline

import tilework
import tiny
from tilework.pipelines.errors import ModelNotFound
from tilework.pipelines.loading import quiet

_CACHE_LINE_BYTES = 64
_BOUND = 1e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are stored in float32; those of `shapes` are converted, which copies them."""
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return directory


@pytest.fixture(scope="module")
def plain(directory: Path) -> Any:
    """What a user of diffusers has."""
    return StableDiffusion3Pipeline.from_pretrained(directory, local_files_only=True, dtype=torch.float32)


def unaligned(pipeline: Any) -> int:
    """How many weights of the denoiser do not begin at a cache line."""
    return sum(weight.data_ptr() % _CACHE_LINE_BYTES != 0 for weight in pipeline.transformer.parameters())


def test_weights_lie_aligned_which_those_of_a_plain_pipeline_do_not(plain: Any, directory: Path) -> None:
    assert unaligned(plain) > 0, "the first condition of docs/exactness.md is gone"
    assert unaligned(tilework.reference(str(directory))) == 0


def test_a_plain_pipeline_is_away_by_rounding_only(plain: Any, directory: Path) -> None:
    expected, drawn = (tiny.run_stock(each, tiny.spec()) for each in (tilework.reference(str(directory)), plain))
    for mine, theirs in zip(expected.latents, drawn.latents, strict=True):
        assert (mine - theirs).abs().max() <= _BOUND * mine.abs().max()
    assert np.abs(expected.pixels.astype(int) - drawn.pixels).max() <= 1


def test_the_number_of_threads_and_the_precision_of_float32_are_set() -> None:
    torch.set_num_threads(2)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    tilework.reference("shapes", threads=1)
    assert torch.get_num_threads() == 1
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        tilework.reference(str(tmp_path))


def test_advice_and_progress_bars_of_libraries_are_not_shown_and_come_back(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    for logging in libraries:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
    try:
        tilework.reference(str(directory))
        assert capfd.readouterr() == ("", "")
        assert [logging.get_verbosity() for logging in libraries] == [INFO] * 2
        assert all(logging.is_progress_bar_enabled() for logging in libraries)
    finally:
        quiet()
