"""Charts of logs and schedules, and the three files that `tilework timeline` makes of them."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from batching import batching  # noqa: F401
from builders import poisson, request, table
from recorded import SOON_NS, Recorded, lost_and_broken, recorded
from report.charts import small
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.cli.views.charts import chart_of_history
from tilework.cli.views.schedules import schedule_of_trace
from tilework.control.history_recorder import read_history
from tilework.control.log import read_log, replay
from tilework.core.events import LeftOut
from tilework.core.request import OnMiss, Status
from tilework.core.time import NS_PER_S, s_from_ns
from tilework.cost.table_file import table_json
from tilework.formats.schedule import RequestLine, Schedule, WorkLine, write_schedule
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.report.chart import OPEN, Chart, ChartRequest, chart_of_schedule
from tilework.report.pages.timeline_page import page
from tilework.report.perfetto import trace_events
from tilework.sim.config import SimConfig
from tilework.sim.runs import RunEnd

MOVE_S = 0.003  # A stopped work may have waited so long for its state, which a log does not tell.


EVIL = "</script ></script><img src=x onerror=alert(1)>&amp;'\"`${1}"


@pytest.fixture(scope="module")
def mixed() -> Recorded:
    """Requests that are done, late, refused and cancelled; some run on several of four devices, and move."""
    costs = table(degrees=(1, 2, 4))
    requests = poisson(50, 2.4, seed=9, slo_s=1.6)
    requests += [request(f"strict{i}", 3 + i, slo_s=0.4, on_miss=OnMiss.REJECT) for i in range(6)]
    cancels = tuple((requests[i].arrival_ns + SOON_NS, requests[i].uid) for i in (3, 4, 12))
    return recorded(requests, "tetriserve", costs=costs, cancels=cancels, sim=SimConfig(num_devices=4, jitter=0.1))


@pytest.fixture(scope="module")
def chart(mixed: Recorded) -> Chart:
    return chart_of_history(mixed.history)


# Charts.


def test_a_chart_of_a_log_matches_the_simulation(mixed: Recorded, chart: Chart) -> None:
    uids = {ending.job_id: ending.request.uid for ending in mixed.trace.endings if ending.job_id is not None}
    ran = {run.work.work_id: run for run in mixed.trace.runs if run.end_ns > run.start_ns}
    assert len({len(run.work.devices) for run in ran.values()}) > 1
    assert {work.work for work in chart.works} == ran.keys()
    for work in chart.works:
        run = ran[work.work]
        assert work.end_s == s_from_ns(run.end_ns)
        assert work.start_s == (
            pytest.approx(s_from_ns(run.start_ns), abs=MOVE_S) if run.end is RunEnd.STOPPED else run.start_ns / 1e9
        )
        num_steps = run.steps if run.work.stage.has_steps else 0
        assert (work.devices, work.steps, work.why) == (run.work.devices, num_steps, run.work.why)
        assert work.requests == tuple(uids[job_id] for job_id in run.work.job_ids)
        assert (work.first_step is None) == (work.stage != "diffuse")
        assert (work.predicted_s is None) == (run.end is RunEnd.STOPPED)
    assert [work.start_s for work in chart.works] == sorted(work.start_s for work in chart.works)
    drawn = {request.id: request for request in chart.requests}
    for ending in mixed.trace.endings:
        one = drawn[ending.request.uid]
        status = "dropped" if ending.status is Status.REJECTED else ending.status.value
        assert (one.status, one.finish_s) == (status, s_from_ns(ending.finish_ns))
        assert one.is_late == (ending.status is Status.DONE and not ending.on_time)
        assert one.decisions
    assert len({request.status for request in chart.requests}) == 3
    assert any(request.is_late for request in chart.requests)


def test_a_log_and_a_schedule_of_the_same_run_agree(mixed: Recorded, chart: Chart) -> None:
    plan = schedule_of_trace(mixed.trace, {one.request.uid: one.request.uid for one in mixed.trace.endings})
    other = chart_of_schedule(plan, num_devices=4)
    facts = sorted((work.work, work.end_s, work.devices, work.requests) for work in chart.works)
    assert facts == sorted((w.work, w.end_s, w.devices, w.requests) for w in other.works if w.end_s > w.start_s)
    assert {(r.id, r.status, r.on_time) for r in chart.requests} == {
        (r.id, r.status, r.on_time) for r in other.requests
    }
    assert other.nodes == chart.nodes


def test_what_is_numbered_beyond_the_devices_is_a_cpu_slot() -> None:
    lines = [
        WorkLine(work=at, stage=stage, requests=(0,), devices=(device_id,), start_s=at, end_s=at + 1.0, steps=0)
        for at, (stage, device_id) in enumerate([("decode", 1), ("export", 2)])
    ]
    chart = chart_of_schedule(Schedule(works=tuple(lines)), num_devices=2)
    assert [chart.name_of(device_id) for device_id in chart.nodes] == ["device 0", "device 1", "CPU slot 2"]
    assert "CPU slot 2" in page(chart, "")


def test_a_chart_of_some_requests_has_them_alone_by_their_other_names(mixed: Recorded) -> None:
    ids = {past.request.uid: 100 + place for place, past in enumerate(mixed.history.requests[2:5])}
    some = chart_of_history(mixed.history, ids)
    assert [one.id for one in some.requests] == [100, 101, 102]
    assert {name for work in some.works for name in work.requests} == {100, 101, 102}
    assert some.nodes == chart_of_history(mixed.history).nodes


def test_a_request_left_out_of_a_shared_work_is_not_in_its_bar() -> None:
    """Nobody's steps are named there: each began at another one."""
    requests = [request(str(index), 0.01 * index, steps=8) for index in range(6)]
    cancels = ((NS_PER_S, "2"), (2 * NS_PER_S, "3"))
    run = recorded(requests, "entangled", cancels=cancels, sim=SimConfig(num_devices=2))
    _, entries = read_log(run.lines)
    left_out = {(entry.event.work_id, entry.event.job_id) for entry in entries if isinstance(entry.event, LeftOut)}
    chart = chart_of_history(run.history)
    shared = [work for work in chart.works if len(work.requests) > 1]
    assert left_out
    assert shared
    assert all(work.first_step is None for work in shared)
    assert not {(work.work, int(request)) for work in chart.works for request in work.requests} & left_out


def test_lost_works_and_devices_are_in_the_chart() -> None:
    lines, lost = lost_and_broken()
    chart = chart_of_history(read_history(lines))
    (outage,) = chart.outages
    assert (outage.device_id, outage.reason, outage.end_s - outage.start_s) == (
        3,
        "killed by signal 9",
        pytest.approx(1.01),
    )
    (work,) = [work for work in chart.works if work.lost]
    assert (work.work, work.steps, work.lost) == (lost.work_id, 1, "a device of its group was lost")
    assert [request.status for request in chart.requests] == [OPEN]
    forever = chart_of_history(read_history(lines[:-1]))
    assert forever.outages[0].end_s == pytest.approx(outage.start_s + 0.01)


# Perfetto.


def test_the_trace_is_well_formed(mixed: Recorded, chart: Chart) -> None:
    events = trace_events(chart)
    assert all(type(event["ts"]) is int and event["ts"] >= 0 for event in events)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == sum(len(work.devices) for work in chart.works)
    assert kinds["b"] == kinds["e"] == len(chart.requests)
    assert kinds["s"] == kinds["f"] > 0
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in events} <= tracks
    open_spans: set[int] = set()
    for event in events:
        if event["ph"] == "b":
            open_spans.add(event["id"])
        elif event["ph"] == "e":
            open_spans.remove(event["id"])
    assert not open_spans
    spans = [event for event in events if event["ph"] == "b"]
    assert Counter(e["args"]["outcome"] for e in spans) == Counter(request.status for request in chart.requests)
    not_served = sum(request.status != "done" for request in chart.requests)
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert sum(name.endswith((" dropped", " cancelled")) for name in names) == not_served > 0
    assert any(name.endswith(" moved") for name in names)


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(begin, end) of the works of each thread, in order."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return {track: sorted(spans) for track, spans in found.items()}


def test_works_of_a_thread_do_not_overlap_even_where_the_log_s_times_do(chart: Chart) -> None:
    early = [replace(work, start_s=work.start_s - 0.004) for work in chart.works]
    for works in (chart.works, early):
        for spans in slices(trace_events(replace(chart, works=tuple(works)))).values():
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
            assert all(start <= end for start, end in spans)


def test_arrows_lead_from_within_a_work_to_the_begin_of_the_next(chart: Chart) -> None:
    events = trace_events(chart)
    spans = slices(events)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    pairs = sum(max(0, sum(r.id in w.requests for w in chart.works) - 1) for r in chart.requests)
    assert len(begins) == pairs
    moves = 0
    for number, begin in begins.items():
        end = ends[number]
        assert any(first <= begin["ts"] < last for first, last in spans[begin["pid"], begin["tid"]])
        assert any(end["ts"] == first for first, _ in spans[end["pid"], end["tid"]])
        assert begin["ts"] <= end["ts"]
        moves += begin["tid"] != end["tid"]
    assert moves > 0


def test_counters_count(chart: Chart) -> None:
    """Against a count of what holds at each time; at the end nothing is left."""
    start_s = chart.start_s
    events = [event for event in trace_events(chart) if event["ph"] == "C"]
    busy = {event["ts"]: event["args"]["busy"] for event in events if event["name"] == "busy devices"}
    jobs = {event["ts"]: event["args"] for event in events if event["name"] == "requests"}
    works = [(round((w.start_s - start_s) * 1e6), round((w.end_s - start_s) * 1e6), w) for w in chart.works]
    lives = [
        (r.id, round((r.arrival_s - start_s) * 1e6), round((r.finish_s - start_s) * 1e6))
        for r in chart.requests
        if r.status != "dropped" and r.finish_s is not None
    ]
    for at_us, count in busy.items():
        running = [work for first, last, work in works if first <= at_us < last]
        assert count == sum(len(work.devices) for work in running) <= 4
        assert jobs[at_us]["running"] == len(running)
        present = {uid for uid, first, last in lives if first <= at_us < last}
        assert jobs[at_us]["queued"] == len(present - {uid for work in running for uid in work.requests})
    assert max(args["queued"] for args in jobs.values()) > 2
    assert busy[max(busy)] == jobs[max(jobs)]["queued"] == 0


def test_a_refused_request_does_not_wait_and_nodes_are_processes() -> None:
    """A schedule may know of a refusal only some time after the arrival."""
    refused = ChartRequest(id="r", arrival_s=0.1, finish_s=0.9, status="dropped")
    events = trace_events(small(requests=(*small().requests, refused), nodes={0: 0, 1: 1, 2: 1}))
    queued = {event["ts"]: event["args"]["queued"] for event in events if event["name"] == "requests"}
    assert queued == {0: 0, 500_000: 1, 1_000_000: 1, 2_000_000: 0, 4_000_000: 0}
    named = {(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    processes = {(0, 0, "cluster"), (1, 0, "node 0"), (2, 0, "node 1")}
    assert named == processes | {(1, 0, "device 0"), (2, 1, "device 1"), (2, 2, "device 2")}


def test_works_have_reasons_and_lost_devices_have_times() -> None:
    lines, _ = lost_and_broken()
    events = trace_events(chart_of_history(read_history(lines)))
    lost = [event for event in events if event["ph"] == "X" and event["cat"] == "lost"]
    assert {event["tid"] for event in lost} == {0, 1, 2, 3}
    assert lost[0]["args"]["degree"] == 4
    assert lost[0]["args"]["why"]
    (outage,) = [event for event in events if event["name"] == "device 3 lost"]
    assert (outage["ph"], outage["s"], outage["args"]) == ("i", "t", {"reason": "killed by signal 9"})


# HTML.


class Page(HTMLParser):
    """The elements and the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._within] = self.texts.get(self._within, "") + data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["data"])


def test_the_page_holds_the_whole_chart(chart: Chart) -> None:
    data = Page(page(chart, "A run")).data
    assert [work["id"] for work in data["works"]] == [work.work for work in chart.works]
    assert [request["id"] for request in data["requests"]] == [str(request.id) for request in chart.requests]
    for told, work in zip(data["works"], chart.works, strict=True):
        assert [data["requests"][place]["id"] for place in told["requests"]] == list(work.requests)
        assert (told["why"], told["devices"]) == (work.why, list(work.devices))
    for told, one in zip(data["requests"], chart.requests, strict=True):
        assert [decision["text"] for decision in told["decisions"]] == [d.text for d in one.decisions]
    assert [device_id["device_id"] for device_id in data["devices"]] == [0, 1, 2, 3]
    assert f"{len(chart.requests)} requests" in data["summary"]


def test_the_page_s_share_on_time_is_that_of_the_metrics() -> None:
    """To fail is to miss; who was refused or has gone away is not counted."""
    late, _ = small().requests
    ends = ("done", "failed", "cancelled", "dropped")
    lines = [RequestLine(request=name, finish_s=1.0, status=name, on_time=False) for name in ends]
    lines.append(RequestLine(request="kept", finish_s=1.0, status="done", on_time=True))
    known = chart_of_schedule(Schedule(works=(), requests=tuple(lines)))
    assert "33% on time" in Page(page(known, "")).data["summary"]
    gone = replace(late, status="cancelled", on_time=None)
    assert "on time" not in Page(page(small(requests=(gone,), works=()), "")).data["summary"]


def test_text_of_clients_is_escaped_on_the_page() -> None:
    evil = replace(small().requests[0], id=EVIL, tenant=EVIL)
    works = tuple(replace(work, requests=(EVIL,), why=EVIL) for work in small().works)
    text = page(small(works=works, requests=(evil,)), EVIL)
    assert EVIL not in text
    assert text.count("</script") == page(small(), "fine").count("</script")
    hostile, harmless = Page(text), Page(page(small(), "fine"))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert hostile.data["requests"][0]["id"] == hostile.data["works"][0]["why"] == hostile.data["title"] == EVIL


def test_the_page_loads_nothing_and_writes_no_markup() -> None:
    text = files("tilework.report.pages").joinpath("timeline.html").read_text("utf-8")
    elements = Page(text).elements
    assert not {tag for tag, _ in elements} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [name for _, attributes in elements for name in attributes if name in ("src", "href", "onclick")]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    policy = next(attributes["content"] for _, attributes in elements if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy


# The command.


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def summary(*arguments: object) -> Any:
    result = run("timeline", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, UserError)
    return str(result.exception)


def test_a_log_becomes_all_three_files(mixed: Recorded, chart: Chart, tmp_path: Path) -> None:
    log = mixed.write(tmp_path / "a.jsonl")
    targets = [tmp_path / f"t{suffix}" for suffix in (".html", ".json", ".PNG")]
    told = summary(log, *(part for target in targets for part in ("--out", target)))
    assert told["files"] == [str(target) for target in targets]
    assert (told["works"], told["requests"]) == (len(chart.works), len(chart.requests))
    assert told["late"] == sum(request.is_late for request in chart.requests)
    busy_s = {
        device_id: sum(w.end_s - w.start_s for w in chart.works if device_id in w.devices) for device_id in range(4)
    }
    length_s = chart.end_s - chart.start_s
    assert told["seconds"] == pytest.approx(length_s)
    assert told["busy_by_device"] == {
        str(device_id): pytest.approx(s / length_s, abs=1e-5) for device_id, s in busy_s.items()
    }
    assert Page(targets[0].read_text("utf-8")).data["title"] == "tetriserve on 4 devices"
    assert json.loads(targets[1].read_text("utf-8"))["traceEvents"] == json.loads(json.dumps(trace_events(chart)))
    with Image.open(targets[2]) as image:
        assert image.size[0] == 1650


def test_a_schedule_is_recognized_and_takes_its_requests_from_a_file(mixed: Recorded, tmp_path: Path) -> None:
    plan = schedule_of_trace(mixed.trace, {one.request.uid: one.request.uid for one in mixed.trace.endings})
    write_schedule(tmp_path / "schedule.jsonl", plan)
    lines = [
        WorkloadRequest(
            id=one.request.uid,
            arrival_s=s_from_ns(one.request.arrival_ns),
            pipeline="toy",
            height=one.request.shape.height,
            width=one.request.shape.width,
            steps=10,
            slo_s=1.6,
        )
        for one in mixed.trace.endings
    ]
    write_workload(tmp_path / "requests.jsonl", lines)
    given = (tmp_path / "schedule.jsonl", "--out", tmp_path / "t.html")
    assert summary(*given)["works"] == len(plan.works)
    data = Page((tmp_path / "t.html").read_text("utf-8")).data
    assert {request["size"] for request in data["requests"]} == {""}
    summary(*given, "--requests", tmp_path / "requests.jsonl", "--title", "With sizes")
    data = Page((tmp_path / "t.html").read_text("utf-8")).data
    assert {request["size"] for request in data["requests"]} == {"64x64", "128x128", "192x192"}
    assert data["title"] == "With sizes"


def test_mistakes_are_named(mixed: Recorded, tmp_path: Path) -> None:
    log = mixed.write(tmp_path / "a.jsonl")
    assert "t.pdf ends in '.pdf'; a timeline is one of .html, .png, .json" in refusal(
        "timeline", tmp_path / "absent", "--out", tmp_path / "t.pdf"
    )
    assert "give --out FILE.html" in refusal("timeline", log)
    assert "No such file" in refusal("timeline", tmp_path / "absent", "--out", tmp_path / "t.html")
    assert "leave out --requests" in refusal("timeline", log, "--requests", log, "--out", tmp_path / "t.html")
    empty = recorded([]).write(tmp_path / "empty.jsonl")
    assert "holds no work and no request" in refusal("timeline", empty, "--out", tmp_path / "t.html")
    assert not list(tmp_path.glob("t.*"))
    (tmp_path / "b.jsonl").write_text("not json\n")
    assert "b.jsonl:1: " in refusal("timeline", tmp_path / "b.jsonl", "--out", tmp_path / "t.html")
    (tmp_path / "c.jsonl").write_text("\n".join([*mixed.lines[:8], mixed.lines[8][:-5], *mixed.lines[9:]]))
    assert "line 9 is not JSON" in refusal("timeline", tmp_path / "c.jsonl", "--out", tmp_path / "t.html")


def test_a_simulation_writes_the_log_that_a_server_would(tmp_path: Path) -> None:
    """It replays, and its timeline is the one that the simulation draws itself."""
    requests = poisson(20, 1.5, seed=3)
    lines = [
        WorkloadRequest(
            id=int(one.uid),
            arrival_s=s_from_ns(one.arrival_ns),
            pipeline="toy",
            height=one.shape.height,
            width=one.shape.width,
            steps=one.steps,
            slo_s=2.0,
        )
        for one in requests
    ]
    write_workload(tmp_path / "requests.jsonl", lines)
    (tmp_path / "costs.json").write_text(json.dumps(table_json(table())))
    events, drawn = tmp_path / "events.jsonl", tmp_path / "drawn.json"
    given = (tmp_path / "requests.jsonl", "--cost", tmp_path / "costs.json", "--devices", 2, "--jitter", 0.1, "--json")
    outputs = ("--events", events, "--timeline", drawn, "--timeline", tmp_path / "drawn.html")
    alone, observed = run("simulate", *given), run("simulate", *given, *outputs)
    assert alone.exit_code == observed.exit_code == 0
    assert alone.output == observed.output
    with events.open(encoding="utf-8") as log:
        num_events, difference = replay(log)
    assert num_events > 100
    assert difference is None
    summary(events, "--out", tmp_path / "again.json")
    first, second = (json.loads(path.read_text("utf-8")) for path in (drawn, tmp_path / "again.json"))
    assert first["traceEvents"] == second["traceEvents"]
    assert len(Page((tmp_path / "drawn.html").read_text("utf-8")).data["requests"]) == 20
