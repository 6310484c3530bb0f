"""`tilework demo`: a server, pictures with deadlines and clips, and how it went."""

from __future__ import annotations

import asyncio
import json as jsonlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from tilework.cli.console import UserError, console, out, print_json, progress, require_serve_extra
from tilework.cli.options.common import AsJson, examples
from tilework.cli.views.schedules import schedule_of_history
from tilework.client.demo_workload import demo_clips, demo_workload, linear_service
from tilework.client.drive import drive
from tilework.client.record import Record
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.time import s_from_ns
from tilework.formats.schedule import Schedule, write_schedule
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.policy.registry import DEFAULT_POLICY
from tilework.report.chart import chart_of_schedule
from tilework.report.clip_sheet import draw_clip_sheet
from tilework.report.contact_sheet import Frame, draw_contact_sheet
from tilework.report.pages.demo_page import write_demo_page
from tilework.report.pages.timeline_page import write_page
from tilework.report.tables import attainment_table, summary
from tilework.report.timeline import draw_timeline

EXAMPLE = examples(
    "tilework demo --out out/demo",
)
STEPS = 20
PROBE_SIDES = (64, 192)
FILES = (
    *("index.html", "contact_sheet.png", "clips.png", "clip_1.mp4 and so on", "timeline.png", "timeline.html"),
    *("report.json", "requests.jsonl", "schedule.jsonl", "events.jsonl"),
)


def command(
    directory: Annotated[Path, typer.Option("--out", help="Where pictures and files go.")] = Path("out/demo"),
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="How many pictures to ask for.")] = 24,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = DEFAULT_POLICY,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    json: AsJson = False,
) -> None:
    """Serve the shipped models on this machine's CPU, request pictures of many sizes with deadlines and some clips, and
    draw what happened.
    """
    require_serve_extra()
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "events.jsonl"
    with _server(workers, policy, log) as url:
        workload = (*_workload(url, seed, requests, workers), *demo_clips(seed))
        records = _send(url, workload, quiet=json)
    write_workload(directory / "requests.jsonl", workload)
    _draw(directory, workload, records, log, policy, workers)
    result = summary(records)
    (directory / "report.json").write_text(jsonlib.dumps(result, indent=2) + "\n", encoding="utf-8")
    with log.open(encoding="utf-8") as lines:
        num_events, difference = replay(lines)
    if json:
        print_json({"out": str(directory), "replayed_events": num_events, "identical": difference is None} | result)
    else:
        out.print(attainment_table(records, title=_title(records, workers, policy)))
        out.print(f"{num_events} events replayed: decisions {'the same' if difference is None else 'DIFFER'}")
        out.print(f"in {directory}: {', '.join(FILES)}", soft_wrap=True)
    failed = [record for record in records if record.file is None]
    if failed or difference is not None:
        raise UserError(f"{len(failed)} requests failed; the first: {failed[0].detail}" if failed else "see above")


@contextmanager
def _server(workers: int, policy: str, log: Path) -> Iterator[str]:
    """A server of our own on a free port; yields its URL and stops it gracefully."""
    arguments = ["serve", "shapes", "shapes-motion", "--workers", str(workers), "--policy", policy, "--port", "0"]
    arguments += ["--profiles", str(log.with_name("costs.sqlite")), "--recalibrate", "--log", str(log), "--json"]
    process = subprocess.Popen([sys.executable, "-m", "tilework", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with console.status(f"starting a server with {workers} workers"):
            line = process.stdout.readline()
        if not line:
            raise UserError("the server did not start; see its message above")
        ready = jsonlib.loads(line)
        console.print(f"server ready in {ready['ready_s']:.1f} s at {ready['url']}", style="dim")
        yield ready["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _workload(url: str, seed: int, count: int, workers: int) -> tuple[WorkloadRequest, ...]:
    """A workload whose load suits this machine: a small and a large picture are measured on the idle server first."""
    probes = [
        WorkloadRequest(arrival_s=0.0, pipeline="shapes", height=side, width=side, steps=STEPS, prompt="a red circle")
        for side in PROBE_SIDES
    ]
    with console.status("measuring how fast this machine is"):
        small, large = (asyncio.run(drive(url, [probe]))[0] for probe in probes)
    for record in (small, large):
        if record.file is None:
            raise UserError(f"the server did not draw a first picture: {record.detail}")
    pixels = [side * side for side in PROBE_SIDES]
    per_pixel_s = max(0.0, large.latency_s - small.latency_s) / (pixels[1] - pixels[0])
    base_s = max(0.01, small.latency_s - per_pixel_s * pixels[0])
    return demo_workload(
        seed, linear_service(base_s, per_pixel_s), steps=STEPS, num_requests=count, num_devices=workers
    )


def _send(url: str, workload: Sequence[WorkloadRequest], quiet: bool) -> list[Record]:
    with progress(quiet) as bar:
        task = bar.add_task("pictures and clips", total=len(workload))
        return asyncio.run(drive(url, workload, on_result=lambda _record: bar.advance(task)))


def _draw(
    directory: Path, workload: Sequence[WorkloadRequest], records: list[Record], log: Path, policy: str, workers: int
) -> None:
    with console.status("drawing"):
        pictures, clips = ([_frame(r) for r in records if r.request.is_clip is kind] for kind in (False, True))
        draw_contact_sheet(directory / "contact_sheet.png", pictures, title="What was asked for, and what came")
        draw_clip_sheet(directory / "clips.png", clips, title="Clips: their first frame, and others up to the last")
        named = [(f"clip_{number}.mp4", clip) for number, clip in enumerate(clips, 1)]
        for name, clip in named:
            (directory / name).write_bytes(clip.image or b"")
        schedule = _schedule(records, log)
        write_schedule(directory / "schedule.jsonl", schedule)
        chart = chart_of_schedule(schedule, workload, workers)
        title = _title(records, workers, policy)
        draw_timeline(directory / "timeline.png", chart, title=title)
        write_page(directory / "timeline.html", chart, title=title)
        write_demo_page(directory / "index.html", named, title=title)


def _title(records: Sequence[Record], workers: int, policy: str) -> str:
    clips = sum(record.request.is_clip for record in records)
    return f"{len(records) - clips} pictures and {clips} clips on {workers} CPU workers, policy {policy}"


def _frame(record: Record) -> Frame:
    request = record.request
    return Frame(
        image=record.file,
        caption=request.prompt or "",
        size=str(request.shape),
        latency_s=record.latency_s,
        on_time=record.on_time,
        note=record.detail,
    )


def _schedule(records: list[Record], log: Path) -> Schedule:
    """The schedule of the workload's requests in the server's log, on the clock of the workload."""
    with log.open(encoding="utf-8") as lines:
        history = read_history(lines)
    ids = {record.timeline["uid"]: record.index for record in records if record.timeline is not None}
    arrivals_s = {past.request.uid: s_from_ns(past.request.arrival_ns) for past in history.requests}
    shifts_s = [records[index].arrival_s - arrivals_s[uid] for uid, index in ids.items()]
    return schedule_of_history(history, ids, median(shifts_s) if shifts_s else 0.0)
