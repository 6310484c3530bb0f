"""Weights in charts, and in the three files that `tilework timeline` makes of them: loads, and reads ahead of need."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from builders import request, shipped, table
from policy.lookahead.test_preloading import wanted
from recorded import Recorded, recorded
from report.charts import pixels
from tilework.cli.views.charts import chart_of_history
from tilework.cli.views.schedules import schedule_of_trace
from tilework.control.account import account_of, cause_of
from tilework.control.log import replay
from tilework.core.component import Component, LoadSource
from tilework.core.time import NS_PER_S
from tilework.formats.schedule import read_schedule, write_schedule
from tilework.report.chart import Chart, chart_of_schedule
from tilework.report.pages.timeline_page import page
from tilework.report.perfetto import CLUSTER, trace_events
from tilework.report.timeline import _num_columns, draw_timeline
from tilework.sim.config import SimConfig


def loading(*slos_s: float, disk: float = 10.0) -> Recorded:
    """A device of 9 bytes: each request loads a denoiser of 8 that the decoder of the one before it pushed out."""
    named = {"denoiser": Component("denoiser", 8), "vae": Component("vae", 3)}
    speeds = {LoadSource.DISK: disk, LoadSource.HOST: 40.0}
    costs = replace(table(), components={"toy": named}, memory_bytes=9, load_bytes_per_s=speeds)
    asked = [request(str(index), slo_s=slo_s) for index, slo_s in enumerate(slos_s)]
    return recorded(asked, "fixed-sp1", costs=costs, sim=SimConfig(num_devices=1))


def test_loads_of_weights_are_drawn_from_logs_and_schedules(tmp_path: Path) -> None:
    run = loading(3.0, 9.0, 9.0)
    chart = chart_of_history(run.history)
    assert [(load.stage, load.source) for load in chart.loads[:3]] == [
        ("diffuse", "disk"),
        ("decode", "disk"),
        ("diffuse", "host"),
    ]
    spans = [(load.start_s, load.end_s) for load in chart.loads]
    works = [(work.start_s, work.end_s) for work in chart.works]
    assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(sorted([*spans, *works])))
    assert chart.loads[0].end_s - chart.loads[0].start_s == pytest.approx(0.8)
    schedule = schedule_of_trace(run.trace, {str(index): index for index in range(3)})
    write_schedule(tmp_path / "s.jsonl", schedule)
    read = chart_of_schedule(read_schedule(tmp_path / "s.jsonl"))
    assert [(load.stage, load.start_s, load.end_s) for load in read.loads] == [
        (load.stage, load.start_s, load.end_s) for load in chart.loads
    ]
    path = tmp_path / "t.png"
    draw_timeline(path, chart)
    with_loads = pixels(path, "#F1E4C3")
    draw_timeline(path, replace(chart, loads=()))
    assert with_loads > pixels(path, "#F1E4C3") + 1000
    events = [event for event in trace_events(chart) if event["name"] == "loads diffuse"]
    assert [(event["dur"], event["args"]) for event in events[:2]] == [
        (800_000, {"source": "disk"}),
        (200_000, {"source": "host"}),
    ]
    assert "loads the weights of decode from disk" in page(chart, "a test")


def test_a_request_is_late_because_its_device_loaded_weights() -> None:
    run = loading(2.0, disk=2.0)
    (late,) = run.history.requests
    account = account_of(run.history, late)
    assert (account.loading_ns, account.idle_ns) == (5.5 * NS_PER_S, 0)
    assert cause_of(account) == "waited 5.50 s and ran 1.06 s; its devices loaded weights for 5.50 s of the wait"


# Reads ahead of need.


@pytest.fixture(scope="module")
def reading() -> Recorded:
    """One device works for a minute and a half; the host reads the weights of the other request meanwhile."""
    requests = [replace(wanted(1, 0.0), steps=200), wanted(2, 34.0)]
    return recorded(requests, "tilework", costs=shipped("gentd26"), sim=SimConfig(num_devices=1))


@pytest.fixture(scope="module")
def chart(reading: Recorded) -> Chart:
    return chart_of_history(reading.history)


def test_reads_ahead_are_in_the_log_and_in_the_chart(reading: Recorded, chart: Chart) -> None:
    assert replay(reading.lines)[1] is None
    (past,) = reading.history.reads
    assert past.read.components == ("gentd26-02",)
    (read,) = [load for load in chart.loads if load.is_read_ahead]
    assert (read.device_id, read.start_s, read.end_s) == (0, 34.0, pytest.approx(34 + 32.8))
    assert any(work.start_s < read.start_s and read.end_s < chart.works[-1].end_s for work in chart.works)


def test_reads_ahead_are_drawn_beside_the_works(tmp_path: Path, chart: Chart) -> None:
    path = tmp_path / "t.png"
    draw_timeline(path, chart)
    drawn = pixels(path, "#F1E4C3")
    draw_timeline(path, replace(chart, loads=tuple(load for load in chart.loads if not load.is_read_ahead)))
    assert drawn > pixels(path, "#F1E4C3") + 200
    (slice_,) = [event for event in trace_events(chart) if event["name"] == "its host reads ahead infer"]
    assert (slice_["pid"], slice_["dur"]) == (CLUSTER, 32_800_000)
    assert "the host of device 0 reads the weights of infer ahead of need" in page(chart, "a test")


def test_a_legend_has_as_many_columns_as_there_is_room_for() -> None:
    assert [_num_columns(["short"] * number) for number in (1, 4, 9, 30)] == [1, 4, 9, 9]
    assert [_num_columns(["a" * 30] * number) for number in (2, 4, 9)] == [2, 4, 4]
    assert _num_columns(["a" * 500] * 3) == 1
