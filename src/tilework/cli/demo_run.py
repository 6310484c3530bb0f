"""The servers of a demo, on this machine or over nodes of it, and what is sent to them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tilework.cli.agents.local_agents import LocalAgents, free_port, local_agents
from tilework.cli.console import UserError, console, progress
from tilework.cli.options.nodes import TOKEN
from tilework.client.demo_workload import demo_clips, demo_prompt, demo_workload, linear_service, short_prompt
from tilework.client.drive import drive
from tilework.client.record import Record
from tilework.formats.workload import WorkloadRequest

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
        """A server with the workers of one node on this machine; yields its URL. It measures what steps cost."""
        with self._served(["--workers", str(self.workers), "--recalibrate", *options], {}) as url:
            yield url

    @contextmanager
    def server_over_nodes(self, *options: str) -> Iterator[tuple[str, LocalAgents]]:
        """A server over nodes of this machine, with costs that were measured before; yields its URL and the agents."""
        port, token = free_port(), secrets.token_hex(16)
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
        """A server of our own on a free port, whose messages go to a file; stopped gracefully."""
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
            ready = json.loads(line)
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
        """Pictures for the speed of this machine, by one small and one large on the idle server; and clips, if any."""
        pipeline = "shapes" if self.workflow is None else self.workflow.rpartition(":")[2]
        probes = [
            WorkloadRequest(arrival_s=0.0, pipeline=pipeline, height=side, width=side, steps=STEPS, prompt="red circle")
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
        task = bar.add_task("pictures and clips", total=len(workload))
        return asyncio.run(drive(url, workload, on_result=on_result, time_scale=time_scale))


def different(expected: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The records whose picture or clip is not the one that is expected, bit for bit."""
    return [one for first, one in zip(expected, records, strict=True) if _content(first) != _content(one)]


def _content(record: Record) -> bytes | None:
    """The pixels of a picture, or the file of a clip; None if there is none."""
    if record.file is None or record.request.is_clip:
        return record.file
    with Image.open(io.BytesIO(record.file)) as picture:
        return picture.convert("RGB").tobytes()
