"""`tilework quality`: what it refuses, and a small run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command_line import invoke


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--caches", "patch all=1"], "caches has 'all'; give some of patch, image, fbcache, taylorseer"),
        (["--caches", "patch=0.1,x"], "caches has 'x' for patch; give numbers from 0 to 1"),
        (["--caches", "fbcache=2"], "caches has '2' for fbcache; give numbers from 0 to 1"),
        (["--caches", "taylorseer=2.5"], "caches has '2.5' for taylorseer; give whole numbers from 1 to 100"),
        (["--steps", "8,-1"], "steps is '8,-1'; give whole numbers above 0"),
        (["--prompts", "no/such/file"], "prompts is no/such/file, which cannot be read"),
        (["--score", "no_such_module:score"], "score is 'no_such_module:score': there is no module 'no_such_module'"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    mistake: Callable[..., str], arguments: list[str], said: str
) -> None:
    assert said in mistake("quality", *arguments)


@pytest.mark.slow
def test_a_run_compares_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a large red circle on a blue background\n\n")
    options = ["--prompts", prompts, "--caches", "patch=0,0.1 taylorseer=1,2", "--steps", "6", "--size", "64x64"]
    result = invoke("quality", *options, "--threads", "1", "--out", out, "--json")
    rows = json.loads(result.stdout)["rows"]
    tried = [("off", 0.0), ("patch", 0.0), ("patch", 0.1), ("taylorseer", 1.0), ("taylorseer", 2.0)]
    assert [(row["kind"], row["value"]) for row in rows] == tried
    plain, whole, saved, each_step, predicted = rows
    assert each_step["psnr_db"] is None
    assert each_step["saving"] == 0 < predicted["saving"] == pytest.approx(1 / 3)
    assert plain["psnr_db"] is None
    assert plain["saving"] == whole["saving"] == 0 < saved["saving"] < 1
    assert saved["saving_std"] == 0, "of one prompt"
    assert whole["psnr_db"] is None or whole["psnr_db"] > 45
    assert saved["ssim"] < 1
    assert {path.name for path in out.iterdir()} == {"sheet.png", "curve.png"}
