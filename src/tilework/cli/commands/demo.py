"""`tilework demo`: starts a server, sends it images and clips with deadlines, and shows the result."""

from __future__ import annotations

import asyncio
import io
import json as jsonlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from PIL import Image

from tilework.cli.console import UserError, console, out, print_json, progress, require_serve_extra
from tilework.cli.local_agents import LocalAgents, free_port, local_agents
from tilework.cli.options.common import AsJson, examples
from tilework.cli.options.nodes import TOKEN
from tilework.cli.views.charts import chart_of_history
from tilework.cli.views.node_losses import node_losses
from tilework.cli.views.schedules import schedule_of_history, stage_times
from tilework.client.demo_workload import demo_clips, demo_prompt, demo_workload, linear_service, short_prompt
from tilework.client.drive import drive
from tilework.client.record import Record
from tilework.control.history import History
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.time import s_from_ns
from tilework.formats.schedule import Schedule, write_schedule
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.policy.registry import DEFAULT_POLICY
from tilework.report.contact_sheet import Frame, draw_clip_sheet, draw_contact_sheet
from tilework.report.pages.demo_page import StageTime, stage_times_sentence, write_demo_page
from tilework.report.pages.timeline_page import write_page
from tilework.report.tables import attainment_table, summary
from tilework.report.timeline import draw_timeline

EXAMPLE = examples(
    "tilework demo --out out/demo",
    "tilework demo --nodes 2 --workers 1 --workflow examples/poster.py:poster",
)
FILES = (
    "index.html",
    "contact_sheet.png",
    "clips.png",
    "clip_1.mp4 and so on",
    "timeline.png",
    "timeline.html",
    "report.json",
    "requests.jsonl",
    "schedule.jsonl",
    "events.jsonl",
    "server.log",
)


def command(
    directory: Annotated[Path, typer.Option("--out", help="Directory for images and files.")] = Path("out/demo"),
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, on each node with --nodes.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Number of images to ask for.")] = 24,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = DEFAULT_POLICY,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Serve over this number of nodes, each an agent on this machine, and kill one of them half way. "
            "Compare the images with those of a server without nodes.",
        ),
    ] = None,
    workflow: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="Serve this workflow instead of the models that ship; no clips."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Serve the shipped models on this machine's CPU, request images of many sizes with deadlines and some clips, and
    draw what happened.
    """
    require_serve_extra()
    directory.mkdir(parents=True, exist_ok=True)
    run = DemoRun(directory=directory, workflow=workflow, workers=workers, nodes=nodes, policy=policy)
    workload, records, wrong = _served(run, seed, requests, quiet=json)
    write_workload(directory / "requests.jsonl", workload)
    with run.log.open(encoding="utf-8") as lines:
        num_events, difference = replay(lines)
    with run.log.open(encoding="utf-8") as lines:
        history = read_history(lines)
    ids = {record.timeline["uid"]: record.index for record in records if record.timeline is not None}
    losses = node_losses(history, ids)
    notes = [note for loss in losses for note in (str(loss), *map(str, loss.moves))]
    notes += [] if wrong is None else [_comparison(len(records), wrong)]
    notes += [f"{num_events} events replayed: decisions {'the same' if difference is None else 'DIFFER'}"]
    times = stage_times(history)
    notes += [stage_times_sentence(times)]
    _draw(run, records, history, ids, notes, times)
    result: dict[str, Any] = summary(records) | {"stage_times": [asdict(one) for one in times]}
    result |= {} if wrong is None else {"node_losses": [loss.to_json() for loss in losses], "different": len(wrong)}
    (directory / "report.json").write_text(jsonlib.dumps(result, indent=2) + "\n", encoding="utf-8")
    if json:
        identical = {"replayed_events": num_events, "identical": difference is None}
        print_json({"out": str(directory)} | identical | result)
    else:
        _print(run, records, notes)
    failed = [record for record in records if record.file is None]
    if failed or difference is not None or wrong:
        raise UserError(f"{len(failed)} requests failed; the first: {failed[0].detail}" if failed else "see above")


def _print(run: DemoRun, records: Sequence[Record], notes: Sequence[str]) -> None:
    out.print(attainment_table(records, title=_title(records, run)))
    out.print("\n".join(notes), soft_wrap=True, highlight=False)
    files = [name for name in FILES if run.workflow is None or not name.startswith("clip")]
    out.print(f"in {run.directory}: {', '.join(files)}", soft_wrap=True)


def _served(
    run: DemoRun, seed: int, num_pictures: int, *, quiet: bool
) -> tuple[tuple[WorkloadRequest, ...], list[Record], list[Record] | None]:
    """Return the workload and its records; and those whose images differ from those of a server without nodes, if the
    demo has nodes.
    """
    log = ("--log", str(run.log))
    if run.nodes is None:
        with run.server(*log) as url:
            workload = run.workload(url, seed, num_pictures)
            return workload, send(url, workload, quiet=quiet), None
    with run.server("--exact") as url:
        workload = run.workload(url, seed, num_pictures)
        expected = send(url, workload, quiet=quiet, time_scale=0)
    with run.server_over_nodes("--exact", *log) as (url, agents):
        records = send(url, workload, quiet=quiet, at_half=agents.replace_last)
    return workload, records, different(expected, records)


def _comparison(count: int, wrong: Sequence[Record]) -> str:
    if not wrong:
        return f"all {count} results are those of a server without nodes, bit for bit"
    named = ", ".join(str(one.index) for one in wrong)
    return f"{len(wrong)} of {count} results DIFFER from those of a server without nodes: {named}"


def _draw(
    run: DemoRun,
    records: list[Record],
    history: History,
    ids: Mapping[str, int],
    notes: Sequence[str],
    times: Sequence[StageTime],
) -> None:
    directory = run.directory
    title = _title(records, run)
    with console.status("drawing"):
        pictures, clips = ([_frame(r) for r in records if r.request.is_clip is kind] for kind in (False, True))
        draw_contact_sheet(directory / "contact_sheet.png", pictures, title="Prompts and their images")
        named = [(f"clip_{number}.mp4", clip) for number, clip in enumerate(clips, 1)]
        for name, clip in named:
            (directory / name).write_bytes(clip.image or b"")
        if clips:
            draw_clip_sheet(directory / "clips.png", clips, title="Clips: frames from the first to the last")
        write_schedule(directory / "schedule.jsonl", _schedule(records, history, ids))
        chart = chart_of_history(history, ids)
        draw_timeline(directory / "timeline.png", chart, title=title)
        write_page(directory / "timeline.html", chart, title=title)
        write_demo_page(directory / "index.html", named, title=title, notes=notes, times=times)


def _title(records: Sequence[Record], run: DemoRun) -> str:
    clips = sum(record.request.is_clip for record in records)
    asked = f"{len(records) - clips} images" + (f" and {clips} clips" if clips else "")
    workers = f"{run.workers} CPU worker{'' if run.workers == 1 else 's'}"
    where = workers if run.nodes is None else f"{run.nodes} nodes with {workers} each"
    return f"{asked} on {where}, policy {run.policy}"


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


def _schedule(records: Sequence[Record], history: History, ids: Mapping[str, int]) -> Schedule:
    """Return the schedule of the workload's requests, on the clock of the workload."""
    arrivals_s = {past.request.uid: s_from_ns(past.request.arrival_ns) for past in history.requests}
    shifts_s = [records[index].arrival_s - arrivals_s[uid] for uid, index in ids.items()]
    return schedule_of_history(history, ids, median(shifts_s) if shifts_s else 0.0)


STEPS = 20
PROBE_SIDES = (64, 192)
_LOAD_OF_NODES = 1.2
"""Above what the devices do, so that all of them are busy when one of the nodes is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """A demo as it was asked for. `workflow` is FILE.py:NAME, or None for the models that ship. `workers` are those of
    each of `nodes`, or of this machine if that is None.
    """

    directory: Path
    workflow: str | None
    workers: int
    nodes: int | None
    policy: str

    @property
    def log(self) -> Path:
        return self.directory / "events.jsonl"

    @contextmanager
    def server(self, *options: str) -> Iterator[str]:
        """Run a server with the workers of one node; yield its URL. The server measures what steps cost."""
        with self._served(["--workers", str(self.workers), "--recalibrate", *options], {}) as url:
            yield url

    @contextmanager
    def server_over_nodes(self, *options: str) -> Iterator[tuple[str, LocalAgents]]:
        """Run a server over nodes of this machine, with costs measured before; yield its URL and the agents."""
        port = free_port()
        token = secrets.token_hex(16)
        more = ["--workers", str(self.workers), "--nodes", str(self.nodes), "--agents", f"127.0.0.1:{port}"]
        more += ["--state-copies", "2", *options]
        log = self.directory / "agents.log"
        log.unlink(missing_ok=True)
        with (
            local_agents(self.nodes or 1, port=port, token=token, log=log) as agents,
            self._served(more, {TOKEN: token}) as url,
        ):
            yield url, agents

    @contextmanager
    def _served(self, options: Sequence[str], variables: dict[str, str]) -> Iterator[str]:
        """Run a server on a free port, with its messages in a file; stop it gracefully."""
        models = ["shapes", "shapes-motion"] if self.workflow is None else [self.workflow]
        command = [sys.executable, "-m", "tilework", "serve", *models, "--policy", self.policy, "--port", "0", "--json"]
        command += ["--device", "cpu", "--profiles", str(self.directory / "costs.sqlite"), *options]
        said = self.directory / ("server.log" if "--nodes" not in options else "server_over_nodes.log")
        with said.open("w") as log:
            process = subprocess.Popen(
                command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            assert process.stdout is not None
            where = "this machine" if "--nodes" not in options else f"{self.nodes} nodes"
            with console.status(f"starting a server on {where}"):
                line = process.stdout.readline()
            if not line:
                raise UserError(f"the server did not start: {said.read_text().strip()}")
            ready = jsonlib.loads(line)
            console.print(f"server on {where} ready in {ready['ready_s']:.1f} s at {ready['url']}", style="dim")
            yield ready["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def workload(self, url: str, seed: int, count: int) -> tuple[WorkloadRequest, ...]:
        """Make images for the speed of this machine, measured by two on the idle server; and clips, if any."""
        pipeline = "shapes" if self.workflow is None else self.workflow.rpartition(":")[2]
        probes = [
            WorkloadRequest(arrival_s=0.0, pipeline=pipeline, height=side, width=side, steps=STEPS, prompt="red circle")
            for side in PROBE_SIDES
        ]
        with console.status("measuring how fast this machine is"):
            small, large = (asyncio.run(drive(url, [probe]))[0] for probe in probes)
        for record in (small, large):
            if record.file is None:
                raise UserError(f"the server did not draw a first image: {record.detail}")
        pixels = [side * side for side in PROBE_SIDES]
        per_pixel_s = max(0.0, large.latency_s - small.latency_s) / (pixels[1] - pixels[0])
        base_s = max(0.01, small.latency_s - per_pixel_s * pixels[0])
        pictures = demo_workload(
            seed,
            linear_service(base_s, per_pixel_s),
            pipeline=pipeline,
            prompt=demo_prompt if self.workflow is None else short_prompt,
            steps=STEPS,
            num_requests=count,
            num_devices=self.workers * (self.nodes or 1),
            load=0.8 if self.nodes is None else _LOAD_OF_NODES,
        )
        return pictures if self.workflow else (*pictures, *demo_clips(seed))


def send(
    url: str,
    workload: Sequence[WorkloadRequest],
    *,
    quiet: bool,
    time_scale: float = 1.0,
    at_half: Callable[[], object] = lambda: None,
) -> list[Record]:
    """Send the workload, and call `at_half` once half of it was answered; records in its order."""
    num_answers = 0

    def on_result(_: Record) -> None:
        nonlocal num_answers
        num_answers += 1
        bar.advance(task)
        if num_answers == len(workload) // 2:
            at_half()

    with progress(quiet) as bar:
        task = bar.add_task("images and clips", total=len(workload))
        return asyncio.run(drive(url, workload, on_result=on_result, time_scale=time_scale))


def different(expected: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Return the records whose image or clip is not the one that is expected, bit for bit."""
    return [one for first, one in zip(expected, records, strict=True) if _content(first) != _content(one)]


def _content(record: Record) -> bytes | None:
    """Return the pixels of an image, or the file of a clip; None if there is none."""
    if record.file is None or record.request.is_clip:
        return record.file
    with Image.open(io.BytesIO(record.file)) as picture:
        return picture.convert("RGB").tobytes()
