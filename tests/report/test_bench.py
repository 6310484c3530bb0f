"""What the bench reports beyond its tables: schedules and figures out of stories, lanes, comparison, pictures."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tilework.core.request import Shape
from tilework.formats.schedule import RequestLine, Schedule
from tilework.formats.workload import WorkloadRequest
from tilework.report.chart import chart_of_schedule
from tilework.report.compare import comparison, differences
from tilework.report.latency import draw_latency
from tilework.report.served import schedule_of_timelines, served_figures
from tilework.report.tables import summary
from tilework.report.timeline import draw_timeline, pack

SMALL = Shape(64, 64)
times = st.integers(0, 30)


@dataclass(frozen=True, kw_only=True)
class Seen:
    shape: Shape = SMALL
    status: str = "done"
    arrival_s: float = 0.0
    lag_s: float = 0.0
    latency_s: float = 1.0
    slo_s: float | None = 2.0
    on_time: bool | None = True
    timeline: dict[str, Any] | None = field(default=None)


def segment(stage="diffuse", devices=(0,), steps=2, start_s=0.1, end_s=0.3):
    return {"stage": stage, "devices": list(devices), "steps": steps, "start_s": start_s, "end_s": end_s}


def test_a_segment_lies_where_the_client_sent_its_request():
    late = Seen(arrival_s=5.0, lag_s=0.5, timeline={"segments": [segment(devices=(3, 1))]})
    early = Seen(arrival_s=1.0, timeline={"segments": [segment(stage="encode", steps=1)]})
    schedule = schedule_of_timelines([("late", late), ("early", early)])
    assert [(w.work, w.requests, w.devices, w.start_s, w.end_s) for w in schedule.works] == [
        (0, ("early",), (0,), 1.1, 1.3),
        (1, ("late",), (1, 3), 5.6, 5.8),
    ]
    assert [(r.request, r.finish_s) for r in schedule.requests] == [("late", 6.0), ("early", 2.0)]


def test_requests_that_shared_a_work_show_one_work():
    """Each a little off; what another work, or a third of two, tells is another one."""
    shared = {"batch": 2}
    told = {
        "a": [segment() | shared, segment(start_s=0.3, end_s=0.5) | shared],
        "b": [segment(start_s=0.11, end_s=0.31) | shared],
        "c": [segment(start_s=0.12, end_s=0.32) | shared, segment(devices=(1,)) | shared],
        "d": [segment(start_s=0.13, end_s=0.33)],
        "e": [segment(start_s=0.31, end_s=0.51) | shared],
    }
    schedule = schedule_of_timelines([(name, Seen(timeline={"segments": segments})) for name, segments in told.items()])
    works = [(w.requests, w.devices, w.start_s) for w in schedule.works]
    assert works == [
        (("a", "b"), (0,), 0.1),
        (("c",), (1,), 0.1),
        (("c",), (0,), 0.12),
        (("d",), (0,), 0.13),
        (("a", "e"), (0,), 0.3),
    ]
    figures = served_figures([Seen(timeline={"segments": told["a"]})])
    assert figures is not None
    assert figures["device_s"]["mean"] == pytest.approx(0.2), "half of what the device worked"


def test_ends_without_timelines_keep_their_status():
    kinds = [("done", "done"), ("rejected", "dropped"), ("failed", "failed"), ("error", "failed")]
    schedule = schedule_of_timelines([(i, Seen(status=status)) for i, (status, _) in enumerate(kinds)])
    assert schedule.works == ()
    assert [line.status for line in schedule.requests] == [status for _, status in kinds]


@pytest.mark.parametrize(
    "timeline",
    [
        {},
        {"segments": None},
        {"segments": [7]},
        {"segments": [segment() | {"devices": []}]},
        {"segments": [segment() | {"start_s": 9.0}]},
        {"segments": [segment() | {"end_s": None}]},
        {"segments": [segment() | {"steps": "4"}]},
    ],
)
def test_a_timeline_that_cannot_be_read_is_left_out_and_not_counted(timeline):
    assert schedule_of_timelines([(0, Seen(timeline=timeline))]).works == ()
    good = {"queue_s": 0.2, "segments": [segment()]}
    told = served_figures([Seen(timeline=timeline), Seen(timeline=good)])
    assert told is not None
    assert (told["timelines"], told["queue_s"]["mean"]) == (1, 0.2)
    assert served_figures([Seen(timeline=timeline)]) is None


def test_degree_is_weighed_by_steps_and_device_time_by_devices():
    wide = [segment("encode", (0,), 0, 0.0, 0.1), segment(devices=(0, 1, 2, 3), steps=6, start_s=0.1, end_s=0.2)]
    told = served_figures([Seen(timeline={"segments": wide}), Seen(timeline={"segments": [segment(steps=2)]})])
    assert told is not None
    assert told["steps_by_degree"] == {"1": 2, "4": 6}
    assert told["mean_degree"] == (2 + 24) / 8
    assert told["device_s"]["mean"] == pytest.approx((0.1 + 0.4 + 0.2) / 2)
    assert told["queue_s"] is None


def test_rates_of_sizes_add_up_to_the_whole():
    seen = [Seen(), Seen(arrival_s=1.0, latency_s=3.0, on_time=False), Seen(shape=Shape(128, 64), latency_s=2.0)]
    seen += [Seen(status="failed", latency_s=50.0, on_time=False)]
    told = summary(seen)
    assert told["throughput_per_s"] == 3 / 4
    assert told["goodput_per_s"] == 2 / 4
    assert told["megapixels_per_s"] == pytest.approx((2 * 64 * 64 + 64 * 128) / 1e6 / 4)
    for name in ("throughput_per_s", "goodput_per_s", "megapixels_per_s"):
        assert sum(members[name] for members in told["by_size"].values()) == pytest.approx(told[name])
    assert summary([Seen(slo_s=None)])["goodput_per_s"] is None


@given(st.lists(st.tuples(times, times).map(lambda span: (min(span), max(span) + 1)), max_size=40))
def test_lanes_never_overlap_and_are_as_few_as_can_be(spans):
    spans.sort()
    lanes = pack(spans)
    for index, (start, end) in enumerate(spans):
        for other, (other_start, other_end) in enumerate(spans[:index]):
            assert lanes[index] != lanes[other] or end <= other_start or other_end <= start
    most = max((sum(start <= at < end for start, end in spans) for at in range(32)), default=0)
    assert len(set(lanes)) == most


def test_ratios_are_b_over_a_or_none():
    sides = [
        {"config": {"rate": r, "url": r}, "result": summary(seen)} for r, seen in ((1, [Seen()]), (2, [Seen()] * 2))
    ]
    ratios = {(e["size"], e["figure"]): e["ratio"] for e in comparison(*sides)}
    assert ratios["all", "images/s"] == ratios["all", "good/s"] == 2.0
    assert ratios["64x64", "p50 s"] == 1.0
    assert differences(*sides) == {"rate": (1, 2)}
    nothing = {"config": {}, "result": summary([Seen(status="failed", on_time=False)])}
    assert {e["ratio"] for e in comparison(nothing, sides[0])} == {None}


@pytest.mark.parametrize("count", [3, 200])
def test_requests_are_drawn_without_devices(tmp_path, count):
    asked = {"pipeline": "m", "height": 64, "width": 64, "steps": 1, "slo_s": 1.0}
    workload = [WorkloadRequest(arrival_s=i / 10, **asked) for i in range(count)]
    ends = [RequestLine(request=i, finish_s=i / 10 + 2, status="done", on_time=False) for i in range(count)]
    draw_timeline(tmp_path / "t.png", chart_of_schedule(Schedule(requests=tuple(ends)), workload))
    with Image.open(tmp_path / "t.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    assert (179, 38, 30) in colours  # The mark of a late one.


def test_latency_is_drawn_whatever_came(tmp_path):
    draw_latency(tmp_path / "a.png", [Seen(), Seen(status="failed", on_time=False), Seen(slo_s=None, on_time=None)])
    draw_latency(tmp_path / "b.png", [Seen(status="error", on_time=False)])
    with pytest.raises(ValueError, match="no requests"):
        draw_latency(tmp_path / "c.png", [])
