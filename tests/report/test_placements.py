"""Changes of what devices are for, from a log: in timelines, and in what `tilework explain` says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from builders import request
from placements import staged_table
from recorded import Recorded, recorded
from report.charts import pixels
from tilework.cli.views.charts import chart_of_history
from tilework.cli.views.explanation import RequestNames, print_summary, summary_document
from tilework.core.time import s_from_ns
from tilework.report.pages.timeline_page import page
from tilework.report.perfetto import trace_events
from tilework.report.timeline import PLACED, draw_timeline
from tilework.sim.config import SimConfig


@pytest.fixture(scope="module")
def shifted() -> Recorded:
    """Small requests, and then large ones of many steps."""
    asked = [request(f"small{n}", 0.9 * n, side=64, steps=1) for n in range(40)]
    asked += [request(f"large{n}", 40 + 4.0 * n, side=128, steps=4) for n in range(50)]
    sim = SimConfig(num_devices=4, hosts_have_read=True)
    return recorded(asked, "tridentserve", costs=staged_table(), sim=sim)


def test_a_log_says_what_devices_were_for_and_why(shifted: Recorded) -> None:
    first, *others = shifted.history.placements
    assert first.placement.groups == (((0, 1), "ED"), ((2, 3), "C"))
    assert any("was asked for" in one.placement.why for one in others)
    placed = summary_document(shifted.history)["placements"]
    assert placed[0]["groups"] == {"ED": [0, 1], "C": [2, 3]}
    assert [one["why"] for one in placed] == [one.placement.why for one in shifted.history.placements]


def test_the_summary_prints_them(shifted: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    names = RequestNames(shifted.history.requests)
    print_summary(summary_document(shifted.history), Path("log.jsonl"), names)
    text = " ".join(capsys.readouterr().out.split())
    first = shifted.history.placements[0]
    start = f"placement from {s_from_ns(first.at_ns):.3f} s on: ED on devices 0-1, C on devices 2-3: "
    assert start + first.placement.why in text


def test_a_timeline_shows_them(shifted: Recorded, tmp_path: Path) -> None:
    chart = chart_of_history(shifted.history)
    assert chart.placements[0].names == {0: "ED", 1: "ED", 2: "C", 3: "C"}
    assert [one.at_s for one in chart.placements] == [s_from_ns(one.at_ns) for one in shifted.history.placements]
    path = tmp_path / "t.png"
    draw_timeline(path, chart)
    with_placements = pixels(path, PLACED["color"])
    draw_timeline(path, replace(chart, placements=()))
    assert with_placements > pixels(path, PLACED["color"]) + 50


def test_the_page_and_the_trace_hold_them(shifted: Recorded) -> None:
    chart = chart_of_history(shifted.history)
    first, second, *_ = shifted.history.placements
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page(chart, ""), re.DOTALL)[0])
    assert data["placements"][0]["uses"] == [[0, "ED"], [1, "ED"], [2, "C"], [3, "C"]]
    assert data["placements"][1]["why"] == second.placement.why
    marks = [event for event in trace_events(chart) if event["ph"] == "i" and event["name"] == "for ED"]
    assert [event["tid"] for event in marks if event["args"]["why"] == first.placement.why] == [0, 1]
