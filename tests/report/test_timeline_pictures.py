"""Timelines as PNG: what is late, shared or away can be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batching import batching  # noqa: F401
from report.charts import small
from tilework.report.chart import OPEN, ChartWork, Outage
from tilework.report.palette import BAD, request_colours
from tilework.report.timeline import draw_timeline


def pixels(path: Path, colour: str) -> int:
    with Image.open(path) as image:
        seen = np.asarray(image.convert("RGB"), dtype=int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(seen - wanted).max(-1) <= 2).sum())


@pytest.mark.parametrize("part", ["devices", "requests"])
def test_the_picture_marks_what_came_after_its_deadline(tmp_path: Path, part: str) -> None:
    """A strip below what ran late, on both devices together; the late end of the request's line."""
    late, _ = small().requests
    red = []
    for deadline_s in (2.0, 3.0, 4.0):
        one = replace(late, deadline_s=deadline_s, on_time=deadline_s == 4.0)
        if part == "devices":
            one = replace(one, finish_s=None, status=OPEN)
        works = tuple(work for work in small().works if work.requests == ("late",)) if part == "devices" else ()
        draw_timeline(tmp_path / "t.png", small(requests=(one,), works=works))
        red.append(pixels(tmp_path / "t.png", BAD))
    assert red[0] > 1.4 * red[1] > 400
    assert red[2] == 0


def test_a_work_that_several_share_has_a_stripe_of_each(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    requests = tuple(replace(one, deadline_s=None, finish_s=None, status=OPEN) for one in small().requests)
    colours = request_colours([one.id for one in requests], {one.id: one.shape for one in requests if one.shape})
    work = ChartWork(work=0, stage="diffuse", requests=("late",), devices=(0,), start_s=0.0, end_s=4.0, steps=5)
    inks = {name: "#" + "".join(f"{round(255 * part):02x}" for part in rgb) for name, rgb in colours.items()}
    seen = {}
    for names in (("late",), ("late", "free")):
        draw_timeline(path, small(requests=requests, works=(replace(work, requests=names),)))
        seen[names] = [pixels(path, inks[name]) for name in ("late", "free")]
    whole, absent = seen["late",]
    first, second = seen["late", "free"]
    assert absent < whole / 50
    assert first == pytest.approx(whole / 2, rel=0.1)
    assert second == pytest.approx(first, rel=0.1)


def test_the_picture_shades_a_device_that_was_away(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    draw_timeline(path, small())
    plain = pixels(path, "#DADCE0")
    draw_timeline(path, small(outages=(Outage(device_id=0, start_s=1.0, end_s=2.0, reason="gone"),)))
    assert pixels(path, "#DADCE0") > plain + 5000
