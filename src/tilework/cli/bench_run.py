"""One measurement of `tilework bench` with its progress bar, from the first question to the last answer or Ctrl-C."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec

from rich.progress import Progress, TaskID

from tilework.cli.console import progress
from tilework.client.bench import Bench, BenchConfig, prepare
from tilework.client.record import Ending, Record
from tilework.core.request import Shape
from tilework.formats.workload import WorkloadRequest
from tilework.server.garbage import rare_collections


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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


def measure(config: BenchConfig, api_key: str | None, quiet: bool) -> Run:
    """Send the workload of `config`. Ctrl-C while requests are sent ends it with the records that are there.

    Raises:
        ServerUnusable, ValueError, OSError: as `prepare` and `Bench.probe`.
        KeyboardInterrupt: it is interrupted before the first request is sent.
    """
    _allow_connections()
    return asyncio.run(_measure(config, api_key, quiet))


async def _measure(config: BenchConfig, api_key: str | None, quiet: bool) -> Run:
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
            except asyncio.CancelledError:  # What asyncio.run makes of the first Ctrl-C.
                is_interrupted = True
    return Run(
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
                "not done": record.status is not Ending.DONE,
            }
        )
        self.bar.update(self.task, advance=1, description=self._text())

    def _text(self) -> str:
        counts = self.counts
        due = counts["with a deadline"]
        parts = [f"{counts['on time'] / due:.1%} on time"] if due else ["sending"]
        parts += [f"{counts['not done']} without a picture"] if counts["not done"] else []
        return ", ".join(parts)


def _allow_connections() -> None:
    """Raise the limit on open files as far as the system allows: each request that is sent is an open file."""
    if find_spec("resource") is None:  # Windows, which has no such limit.
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
