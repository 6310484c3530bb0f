"""How long a start takes, by part."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tilework.cli.serving import StartTimes, process_age_s
from tilework.core.model import ModelInfo
from tilework.core.time import NS_PER_S
from tilework.core.wire.reports import LoadedModel
from tilework.runtime.models.start_parts import StartParts

INFO = ModelInfo(
    name="m",
    family="f",
    side_multiple=8,
    max_side=64,
    default_height=64,
    default_width=64,
    default_steps=1,
    default_guidance_scale=1.0,
    parameters=0,
    library="",
)


def test_the_parts_are_the_whole_start() -> None:
    loaded = [LoadedModel(info=INFO, load_ns=2 * NS_PER_S), LoadedModel(info=INFO, load_ns=NS_PER_S)]
    parts = StartParts.of(loaded, 7 * NS_PER_S, 5 * NS_PER_S, 4 * NS_PER_S)
    times = StartTimes(imports_s=1.5, parts=parts, picture_s=0.25)
    assert times.fields() == {
        "imports_s": 1.5,
        "processes_s": 4.0,
        "load_s": 3.0,
        "first_run_s": 4.0,
        "measure_s": 1.0,
        "picture_s": 0.25,
    }
    assert times.line() == (
        "first image after 13.8 s at the earliest: imports 1.5, processes 4.0, models 3.0, first runs 4.0, "
        "measuring 1.0, an image 0.2"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert StartTimes(imports_s=None, parts=StartParts(), picture_s=None).fields().keys() == {
        "processes_s",
        "load_s",
        "first_run_s",
        "measure_s",
    }


def test_a_process_is_as_old_as_the_kernel_says(tmp_path: Path) -> None:
    begun_s = time.clock_gettime(time.CLOCK_BOOTTIME) - 100
    stat = tmp_path / "stat"
    fields = ["S", *["0"] * 18, str(round(begun_s * os.sysconf("SC_CLK_TCK"))), "0"]
    stat.write_text(f"12 (a (name) with) {' '.join(fields)}\n")
    age_s = process_age_s(stat)
    assert age_s is not None
    assert age_s >= 99.9
    assert process_age_s(tmp_path / "absent") is None
    assert (process_age_s() or 0.0) > 0.0
