"""One measurement of `tilework bench`: its progress bar, its tables and its files."""

from __future__ import annotations

import asyncio
import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

import tilework
from tilework.cli.console import out, progress
from tilework.client.bench import Bench, BenchConfig, prepare
from tilework.client.record import CallEnd, Record
from tilework.core.request import Shape
from tilework.formats.schedule import Schedule, write_schedule
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.report.chart import chart_of_schedule
from tilework.report.latency import draw_latency
from tilework.report.served import schedule_of_timelines, served_figures
from tilework.report.tables import attainment_table, percentile, summary, throughput_table
from tilework.report.timeline import draw_timeline
from tilework.server.garbage import rare_collections


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A measurement that has ended. `workload` has its deadlines; `started` is the wall clock's, ISO 8601.

    `records` has one per request, in the order of the workload; of a run that `is_interrupted`, one per request that
    had ended by then.
    """

    bench: Bench
    workload: tuple[WorkloadRequest, ...]
    unloaded_s: Mapping[Shape, float]
    records: tuple[Record, ...]
    started: str
    is_interrupted: bool = False

    @property
    def title(self) -> str:
        config = self.bench.config
        interrupted = f" of {len(self.workload)}, interrupted," if self.is_interrupted else ""
        return f"{len(self.records)} requests{interrupted} to {config.model} at {config.url}"


def measure(config: BenchConfig, api_key: str | None, quiet: bool) -> BenchRun:
    """Send the workload of `config`. Ctrl-C while requests are sent ends it with the records that are there.

    Raises:
        ServerUnusable, ValueError, OSError: as `prepare` and `Bench.probe`.
        KeyboardInterrupt: it is interrupted before the first request is sent.
    """
    _allow_connections()
    return asyncio.run(_measure(config, api_key, quiet))


async def _measure(config: BenchConfig, api_key: str | None, quiet: bool) -> BenchRun:
    bench = await prepare(config, api_key)
    with progress(quiet) as bar:
        num_probes = len(bench.shapes) * bench.probes_per_size
        task = bar.add_task("warming up", total=num_probes, visible=num_probes > 0)
        unloaded_s = await bench.probe(lambda _shape: bar.advance(task))
        bar.update(task, visible=False)
        workload = bench.due(unloaded_s)
        started = datetime.now(UTC).isoformat("T", "seconds")
        live = _Live(bar, bar.add_task("sending", total=len(workload)))
        is_interrupted = False
        with rare_collections():
            try:
                await bench.send(workload, live.see)
            except asyncio.CancelledError:  # asyncio.run makes this of the first Ctrl-C.
                is_interrupted = True
    return BenchRun(
        bench=bench,
        workload=workload,
        unloaded_s=unloaded_s,
        records=tuple(sorted(live.records, key=lambda record: record.index)),
        started=started,
        is_interrupted=is_interrupted,
    )


@dataclass(slots=True)
class _Live:
    """The records so far, and the line that says how the run goes."""

    bar: Progress
    task: TaskID
    records: list[Record] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def see(self, record: Record) -> None:
        self.records.append(record)
        self.counts.update(
            {
                "with a deadline": record.slo_s is not None,
                "on time": record.on_time is True,
                "not done": record.status is not CallEnd.DONE,
            }
        )
        self.bar.update(self.task, advance=1, description=self._text())

    def _text(self) -> str:
        counts = self.counts
        due = counts["with a deadline"]
        parts = [f"{counts['on time'] / due:.1%} on time"] if due else ["sending"]
        parts += [f"{counts['not done']} without an image"] if counts["not done"] else []
        return ", ".join(parts)


def _allow_connections() -> None:
    """Raise the limit on open files as far as the system allows: each request that is sent is an open file."""
    if find_spec("resource") is None:  # Windows, which has no such limit.
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


LAG_WARNING_S = 0.05


def document(run: BenchRun, command: list[str]) -> dict[str, Any]:
    """Return the whole run as plain JSON: the command, the server, the versions and the figures."""
    records = run.records
    served = served_figures(records)
    by_size = {shape: [record for record in records if record.shape == shape] for shape in run.bench.shapes}
    return {
        "command": command,
        "started": run.started,
        "interrupted": run.is_interrupted,
        "versions": {
            "tilework": tilework.__version__,
            "python": platform.python_version(),
            "httpx": version("httpx"),
        },
        "config": asdict(run.bench.config),
        "server": asdict(run.bench.server),
        "unloaded_s": {str(shape): seconds for shape, seconds in run.unloaded_s.items()},
        "client": _client(run),
        "result": summary(records),
        "hops": dict(sorted(Counter(record.num_hops for record in records if record.num_hops).items())),
        "causes": dict(Counter(record.cause for record in records if record.cause).most_common()),
        "served": None
        if served is None
        else served | {"by_size": {str(shape): served_figures(members) for shape, members in by_size.items()}},
    }


def write_files(directory: Path, run: BenchRun, result: Mapping[str, Any]) -> None:
    """Write result.json, requests.jsonl (to run again), records.jsonl, latency.png, timeline.png, maybe schedule.jsonl.

    Raises:
        OSError: a file cannot be written.
    """
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (directory / "result.json").write_text(text + "\n", encoding="utf-8")
    write_workload(directory / "requests.jsonl", run.workload)
    lines = [json.dumps(_line(record), ensure_ascii=False) + "\n" for record in run.records]
    (directory / "records.jsonl").write_text("".join(lines), encoding="utf-8")
    schedule = _schedule(run)
    if schedule.works:
        write_schedule(directory / "schedule.jsonl", schedule)
    chart = chart_of_schedule(schedule, run.workload, run.bench.server.num_devices if schedule.works else None)
    draw_timeline(directory / "timeline.png", chart, title=run.title)
    draw_latency(directory / "latency.png", run.records, title=run.title)


def print_report(run: BenchRun, result: Mapping[str, Any], directory: Path | None) -> None:
    """Print tables, a line for each cause of failure, the server's own figures, and the client's lag."""
    out.print(attainment_table(run.records, title=run.title))
    out.print(throughput_table(run.records))
    for cause, number in result["causes"].items():
        first = next(record.detail for record in run.records if record.cause == cause)
        out.print(f"{number} x {cause}: {first}", markup=False, soft_wrap=True)
    for hops, number in result["hops"].items():
        out.print(
            f"{number} x sent on to {hops} other server{'' if hops == 1 else 's'}, after a refusal that named one"
        )
    if result["served"] is not None:
        out.print(_served_text(result["served"]))
    lag = result["client"]["lag_s"]
    out.print(f"client's own lag: p50 {1e3 * lag['p50']:.1f} ms, p99 {1e3 * lag['p99']:.1f} ms, in the latencies")
    if lag["p99"] > LAG_WARNING_S:
        out.print("the client was too slow for this rate; give it a faster or a less busy machine", style="red")
    if directory is not None:
        out.print(f"in {directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}", soft_wrap=True)


def _client(run: BenchRun) -> dict[str, Any]:
    """Show whether the client kept pace: lag of sending behind the plan, and the rates planned and sent."""
    lags_s = [record.lag_s for record in run.records]
    planned_s = [record.arrival_s for record in run.records]
    sent_s = [record.arrival_s + record.lag_s for record in run.records]
    return {
        "lag_s": {f"p{p}": percentile(lags_s, p) for p in (50, 99)} | {"max": max(lags_s)},
        "planned_per_s": _per_s(planned_s),
        "sent_per_s": _per_s(sent_s),
    }


def _per_s(times_s: list[float]) -> float | None:
    length_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / length_s if length_s > 0 else None


def _line(record: Record) -> dict[str, Any]:
    """Return one request of records.jsonl; `timeline` is the server's own."""
    return {
        "request": record.index if record.request.id is None else record.request.id,
        "size": str(record.shape),
        "arrival_s": record.arrival_s,
        "lag_s": round(record.lag_s, 6),
        "latency_s": round(record.latency_s, 6),
        "slo_s": record.slo_s,
        "status": str(record.status),
        "on_time": record.on_time,
        "cause": record.cause,
        "detail": record.detail,
        "hops": record.num_hops,
        "timeline": record.timeline,
    }


def _schedule(run: BenchRun) -> Schedule:
    return schedule_of_timelines((r.index if r.request.id is None else r.request.id, r) for r in run.records)


def _served_text(served: Mapping[str, Any]) -> str:
    queue = served["queue_s"]
    degree = served["mean_degree"]
    parts = [] if queue is None else [f"queue mean {queue['mean']:.2f} s, p99 {queue['p99']:.2f} s"]
    parts += [] if degree is None else [f"{degree:.2f} devices per step"]
    return "; ".join([*parts, f"{served['device_s']['mean']:.2f} device seconds per image"])
