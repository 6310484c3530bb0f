"""The page of a demo plays its clips, and shows texts of requests as text only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilework.report.contact_sheet import Frame
from tilework.report.pages.demo_page import StageTime, write_demo_page


def frame(caption: str, image: bytes | None = b"mp4", **more: Any) -> Frame:
    return Frame(image=image, caption=caption, size="64x64x9", **more)


def test_each_clip_plays_and_says_how_it_went(tmp_path: Path) -> None:
    clips = [
        ("clip_1.mp4", frame("<b>a red circle</b>", latency_s=1.25, on_time=True)),
        ("clip_2.mp4", frame("a star", latency_s=2.0, on_time=False)),
        ("clip_3.mp4", frame("lost", image=None, note="failed: <no> device")),
    ]
    write_demo_page(tmp_path / "index.html", clips, title="2 pictures & 3 clips")
    page = (tmp_path / "index.html").read_text("utf-8")
    assert page.count("<video ") == 2
    assert '<video src="clip_1.mp4" autoplay loop muted' in page
    assert "&lt;b&gt;a red circle" in page
    assert "<b>" not in page
    assert 'class="soft">64x64x9, 1.2 s, <span class="good">on time<' in page
    assert '2.0 s, <span class="bad">late<' in page
    assert "failed: &lt;no&gt; device" in page
    assert "clip_3.mp4" not in page
    assert "2 pictures &amp; 3 clips" in page
    assert "$" not in page


def test_without_clips_and_notes_there_is_no_section_for_them(tmp_path: Path) -> None:
    write_demo_page(tmp_path / "index.html", [], title="pictures")
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "Clips" not in page
    assert "<li>" not in page


def test_notes_are_sentences_below_the_title(tmp_path: Path) -> None:
    slow = StageTime(model="shapes", stage="decode", num_runs=24, ratio=3.14, is_off=True)
    notes = ["node 1 was lost: <nothing> said", "all done"]
    write_demo_page(tmp_path / "index.html", [], title="pictures", notes=notes, times=[slow])
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "<td>shapes</td><td>decode</td><td>24</td><td>3.1</td>" in page
    assert "<li>node 1 was lost: &lt;nothing&gt; said</li>\n<li>all done</li>" in page
