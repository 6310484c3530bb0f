"""Timeline and contact sheet: what they must show is read back from their pixels or from the parts that place it."""

import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFont

from tilework.core.request import Shape
from tilework.formats.schedule import RequestLine, Schedule, WorkLine
from tilework.formats.workload import WorkloadRequest
from tilework.report.chart import busy_shares, chart_of_schedule
from tilework.report.contact_sheet import BAD, GAP, GOOD, MAT, Frame, draw_contact_sheet, wrap
from tilework.report.palette import class_hues, ink_on, request_colours, size_classes
from tilework.report.timeline import draw_timeline


def work(number, devices, start_s, end_s, *, stage="diffuse", request=0):
    return WorkLine(
        work=number, stage=stage, requests=(request,), devices=devices, start_s=start_s, end_s=end_s, steps=10
    )


def rgb(colour):
    return np.array([round(part * 255) for part in colour])


def count(image, colour):
    """Pixels of (nearly) this colour."""
    return int((np.abs(np.asarray(image.convert("RGB"), dtype=int) - rgb(colour)).max(-1) <= 2).sum())


def png(width, height, colour="blue"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def hex_rgb(colour):
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_busy_shares_count_overlap_once_and_clip():
    works = [work(0, (0, 1), 0.0, 2.0), work(1, (0,), 1.0, 3.0), work(2, (1,), 9.0, 12.0), work(3, (0,), 1.5, 1.6)]
    assert busy_shares(works, 0.0, 10.0) == pytest.approx({0: 0.3, 1: 0.3})
    assert busy_shares(works, 1.0, 1.0) == {0: 0.0, 1: 0.0}


def test_sizes_share_a_class_with_their_transpose_and_stay_few():
    assert size_classes([Shape(64, 96), Shape(96, 64), Shape(64, 64)]) == {
        Shape(64, 64): "64x64",
        Shape(64, 96): "96x64",
        Shape(96, 64): "96x64",
    }
    many = size_classes([Shape(8 * i, 8 * i) for i in range(1, 30)])
    assert len(set(many.values())) == 7
    assert list(dict.fromkeys(many.values())) == list(class_hues(many))
    assert many[Shape(8, 8)] == "8x8 to 32x32"


def test_neighbours_have_different_colours_and_a_colour_does_not_depend_on_later_requests():
    shapes = dict.fromkeys(range(6), Shape(64, 64))
    colours = request_colours(range(6), shapes)
    assert all(colours[i] != colours[i + 1] for i in range(5))
    assert request_colours(range(3), shapes) == {i: colours[i] for i in range(3)}
    plain = request_colours(range(20), {})
    assert len(set(plain.values())) == 20


def test_ink_reads_on_every_colour():
    assert ink_on((1.0, 1.0, 0.6)) == "black"
    assert ink_on((0.0, 0.2, 0.5)) == "white"


def test_timeline_shows_bars_where_they_ran(tmp_path):
    """Request 1 (second colour) runs three times as long as request 0, and on two devices."""
    path = tmp_path / "timeline.png"
    draw_timeline(path, chart_of_schedule(Schedule((work(0, (0,), 0.0, 1.0), work(1, (0, 1), 1.0, 4.0, request=1)))))
    colours = request_colours((0, 1), {})
    with Image.open(path) as image:
        narrow, wide = count(image, colours[0]), count(image, colours[1])
    assert 5.5 < wide / narrow < 8


@pytest.mark.parametrize("chunks", [1, 40])
def test_timeline_marks_ends_and_survives_density(tmp_path, chunks):
    works, ends, requests = [], [], []
    for i in range(12):
        requests.append(WorkloadRequest(arrival_s=0.5 * i, pipeline="p", height=64, width=64 + i, steps=9, slo_s=1.0))
        for c in range(chunks):
            start_s = i + c / chunks
            works.append(work(len(works), (i % 4,), start_s, start_s + 1 / chunks, request=i))
        status = "failed" if i == 3 else "done"
        ends.append(RequestLine(request=i, finish_s=i + 1.0, status=status, on_time=i < 2))
    path = tmp_path / "timeline.png"
    draw_timeline(path, chart_of_schedule(Schedule(tuple(works), tuple(ends)), requests, 6), title="Twelve")
    with Image.open(path) as image:
        assert image.size[0] == 1650
        good = count(image, hex_rgb(GOOD))
        assert good > 50
        assert count(image, hex_rgb(BAD)) > 50
    better = [replace(line, on_time=True) for line in ends]
    draw_timeline(path, chart_of_schedule(Schedule(tuple(works), tuple(better)), requests, 6), title="Twelve")
    with Image.open(path) as image:
        assert count(image, hex_rgb(GOOD)) > 3 * good
    draw_timeline(path, chart_of_schedule(Schedule(tuple(works)), requests))
    with Image.open(path) as image:
        assert count(image, hex_rgb(GOOD)) < 10


def test_timeline_is_the_same_each_time_and_refuses_nothing_to_draw(tmp_path):
    schedule = Schedule((work(0, (0,), 0.0, 0.0), work(1, (0, 2), 0.0, 1.0, stage="decode", request="uid-1")))
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        draw_timeline(path, chart_of_schedule(schedule))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(ValueError, match="no work"):
        draw_timeline(tmp_path / "c.png", chart_of_schedule(Schedule()))


def test_contact_sheet_keeps_aspect_and_marks_outcomes(tmp_path):
    path = tmp_path / "sheet.png"
    frames = [
        Frame(image=png(128, 64), caption="a wide one", size="128x64", latency_s=1.0, on_time=True),
        Frame(image=png(30, 300, "yellow"), caption="a tall one", size="30x300", latency_s=1.0),
    ]
    draw_contact_sheet(path, frames, columns=2, side=100)
    with Image.open(path) as image:
        assert count(image.crop((GAP, GAP, GAP + 100, GAP + 100)), (0, 0, 1)) == pytest.approx(100 * 50, rel=0.03)
        assert count(image, (1, 1, 0)) == pytest.approx(10 * 100, rel=0.03)
        assert count(image, hex_rgb(MAT)) > 100 * 40
        assert count(image, hex_rgb(GOOD)) > 50
        assert count(image, hex_rgb(BAD)) == 0
    draw_contact_sheet(path, [Frame(image=None, caption="c", size="64x64", on_time=False, note="failed")], title="T")
    with Image.open(path) as image:
        assert count(image, hex_rgb(BAD)) > 50


def test_contact_sheet_fills_its_rows(tmp_path):
    path = tmp_path / "sheet.png"
    draw_contact_sheet(path, [Frame(image=png(8, 8), caption="x", size="8x8")] * 24, side=192)
    with Image.open(path) as image:
        columns = image.size[0] // (192 + GAP)
        assert 24 % columns == 0
        assert 0.9 < image.size[0] / image.size[1] < 2.2


def test_contact_sheet_names_the_picture_that_it_cannot_read(tmp_path):
    frames = [Frame(image=png(8, 8), caption="", size=""), Frame(image=b"GIF?", caption="", size="")]
    with pytest.raises(ValueError, match=r"image 1 .* cannot be read"):
        draw_contact_sheet(tmp_path / "sheet.png", frames)
    with pytest.raises(ValueError, match="no images"):
        draw_contact_sheet(tmp_path / "sheet.png", [])


@pytest.mark.parametrize("width", [40, 90, 200])
def test_captions_wrap_within_their_width(width):
    font = ImageFont.load_default(13)
    caption = "a large red circle on a blue background beside an incomprehensibilities"
    lines = wrap(caption, width, font, 3)
    assert len(lines) <= 3
    assert all(font.getlength(line) <= width for line in lines)
    full = wrap(caption, 1000, font, 3)
    assert full == [caption]
    assert lines[-1].endswith("...") or " ".join(lines) == caption


def test_reports_and_client_load_neither_torch_nor_matplotlib():
    modules = "tilework.report.timeline, tilework.report.tables, tilework.client.drive, tilework.client.demo_workload"
    script = f"import sys, {modules}; sys.exit(bool({{'torch', 'matplotlib', 'fastapi'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
