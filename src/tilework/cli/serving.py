"""A server from its first setting to its end: engine, workers, durable directory and event log, put together.

Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.status import Status
from setproctitle import setproctitle

from tilework.cli.console import UserError, console, out, print_json, user_errors
from tilework.cli.devices import FoundDevices
from tilework.cli.measured import open_profiles
from tilework.cli.memory_plan import measured_lines
from tilework.cli.models import checked_spec
from tilework.cli.nodes import Machines
from tilework.cli.options.logs import ServerLog
from tilework.cli.options.serve import LogGroup
from tilework.control.controller import ControllerConfig
from tilework.control.watchdog import WatchdogConfig
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire.reports import DeviceReading
from tilework.cost.table import CostTable
from tilework.pipelines.fits.beside import StartPlan
from tilework.pipelines.support.record import limits_of
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.event_log.segmented_file import SegmentedFile
from tilework.runtime.executor import Executor, WorkerStartFailed
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.models.costs import CostCache
from tilework.runtime.models.start_parts import StartParts
from tilework.runtime.nodes.config import BadNodes
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.http.server import AddressInUse
from tilework.server.main import Signals
from tilework.server.main import serve as serve_http
from tilework.server.reload import Reread
from tilework.server.sets import NodePlaces
from tilework.store.durable import LOGS, DurableDirectory
from tilework.store.journal import JournalUnusable


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server as `tilework serve` is asked for it.

    `reread` opens the log anew and reads settings again. `usual` is how a model runs that is added later. A `standby`
    waits for the durable directory. `logs` says where the event log goes, `server_log` where messages go.
    """

    workers: Workers
    usual: ModelSource
    found: FoundDevices
    policy: str
    table: CostTable | None
    profiles: Path | None
    recalibrate: bool
    measure_s: float
    require_all: bool
    config: ServerConfig
    reread: Callable[[], Reread]
    standby: bool
    logs: LogGroup
    server_log: ServerLog
    stuck_after_s: float

    def run(self) -> None:
        """Serve until a signal ends it. Raises UserError."""
        setproctitle("tilework: server")
        with (
            user_errors(BadNodes, ConfigError, AddressInUse, WorkerStartFailed, JournalUnusable, OSError),
            ExitStack() as stack,
        ):
            signals = Signals()
            stack.enter_context(signals.without_loop(self.server_log.reopen))  # A standby may wait for days.
            config = self.config
            executor, nodes = self.workers.executor(Path(config.durable).resolve() if config.durable else None)
            state = self._state(stack)
            started_s = time.monotonic()
            imports_s = process_age_s()
            status = stack.enter_context(console.status(f"starting {self.workers}"))
            self.found.show()
            start = self._start(state, executor, stack, status)

            def on_ready(url: str, engine: Engine) -> None:
                status.stop()
                _show_memory(self.workers.plan, engine.status.usage().readings)
                seconds = round(time.monotonic() - started_s, 3)
                ready: dict[str, object] = {
                    "url": url,
                    "models": list(engine.models),
                    "workers": self.workers.each.num_workers,
                }
                ready |= {"cell": self.workers.each.cell_size} if self.workers.each.cell_size > 1 else {}
                ready |= {"ready_s": seconds}
                not_served = {name: one.reason for name, one in engine.not_served.items()}
                ready |= {"not_served": not_served} if not_served else {}
                ready |= {"restored": engine.status.health().num_jobs} if state is not None else {}
                times = StartTimes(imports_s=imports_s, parts=start.parts, picture_s=_picture_s(engine))
                if self.logs.json:
                    print_json(ready | {"start": times.fields()})
                else:
                    self._greet(ready, config.durable, engine, times)

            serving = serve_http(
                start,
                config,
                on_ready=on_ready,
                on_progress=partial(_show, None),
                signals=signals,
                durable=state,
                reread=self.reread,
                nodes=nodes,
            )
            if failure := asyncio.run(serving):
                remedy = "report it with the log, or mend the policy if it is yours; start the server again"
                raise UserError(f"{failure}: this is a bug; {remedy}")

    def _state(self, stack: ExitStack) -> DurableDirectory | None:
        """Return the durable directory, closed with `stack`. A standby waits for it."""
        durable = self.config.durable
        if durable is None:
            return None
        on_wait = partial(_show, None, f"standing by: another server uses {durable}") if self.standby else None
        return stack.enter_context(closing(DurableDirectory(Path(durable), on_wait)))

    def _start(
        self, state: DurableDirectory | None, executor: Executor, stack: ExitStack, status: Status
    ) -> EngineStart:
        """Return the start of the engine. The engine's log is closed with `stack`; `status` shows what it measures."""
        config = self.config
        controller = ControllerConfig(
            policy=self.policy,
            max_jobs=config.max_jobs,
            max_backlog_ns=ns_from_s(config.max_backlog_s),
            promise_price=config.promise_price,
            max_batch=config.max_batch,
        )
        engine_config = EngineConfig(
            controller=controller,
            watchdog=WatchdogConfig(least_ns=ns_from_s(self.stuck_after_s)),
            table=self.table,
            cache=CostCache(open_profiles(self.profiles), refresh=self.recalibrate),
            exact=config.exact,
            require_all=self.require_all,
            measure_s=self.measure_s,
            encode_cache_bytes=config.encode_cache_bytes,
            begin_ns=0 if state is None else state.now_ns(),
            usual=self.usual,
        )
        log = self._log(state)
        if log is not None:
            stack.callback(log.close)
        show = partial(_show, status)
        if state is None:
            return EngineStart(engine_config, executor, log, show)
        return EngineStart(engine_config, executor, log, show, keeper=state.journal, check_lease=state.lease.check)

    def _log(self, state: DurableDirectory | None) -> SegmentedFile | None:
        """Return the event log, if there is to be one. Raises OSError."""
        if self.logs.log is not None:
            return SegmentedFile(self.logs.log, self.logs.bounds())
        if state is None or self.logs.no_log:
            return None
        return SegmentedFile(state.new_log(), self.logs.bounds(), family=LOGS)

    def _greet(self, ready: Mapping[str, object], durable: str | None, engine: Engine, times: StartTimes) -> None:
        models = engine.models
        url = ready["url"]
        workers = self.workers
        head = f"{', '.join(models)} on {workers}, policy {self.policy}: ready in {ready['ready_s']:.1f} s at {url}"
        restored = f"  {ready['restored']} images taken over from {durable}" if durable else None
        lacking = {name: lacks for name, info in models.items() if (lacks := limits_of(info))}
        missing = [f"  {name} is not served: {one.reason}" for name, one in engine.not_served.items()]
        limits = [f"  {name} has no {', no '.join(lacks)} (docs/models.md)" for name, lacks in lacking.items()]
        where = f"  API documentation {url}/docs, metrics {url}/metrics; stop with Ctrl-C"
        for line in filter(None, (head, f"  {times.line()}", restored, *missing, *limits, where)):
            out.print(line, soft_wrap=True, markup=False)


def _picture_s(engine: Engine) -> float | None:
    """Return the time of one image with the first model's defaults, alone; None if its defaults draw none."""
    model, info = next(iter(engine.models.items()))
    try:
        spec = checked_spec({"prompt": "a circle"}, info)
    except UserError:  # It needs more than a prompt, such as an image.
        return None
    alone_ns = engine.status.alone_ns(model, (spec,))
    return None if alone_ns is None else s_from_ns(alone_ns)


def _show_memory(plan: StartPlan | None, readings: Mapping[str, DeviceReading]) -> None:
    """Say what the start has taken of each card, and what was planned for it."""
    for line in () if plan is None else measured_lines(plan, readings):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _show(status: Status | None, text: str) -> None:
    """Say on stderr what a start or a stop waits for: in place on a terminal, and otherwise as a line."""
    if status is not None and console.is_terminal:
        status.update(text)
    else:
        console.print(text, soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of a server: `each` are those of one of its `machines`; `plan` is that of their memory."""

    each: LocalConfig
    machines: Machines
    plan: StartPlan | None = None

    def __str__(self) -> str:
        first = self.each.sources[0]
        device = "simulated device" if isinstance(first, SimulatedSource) else first.device
        cells = f" in cells of {self.each.cell_size}" if self.each.cell_size > 1 else ""
        return f"{self.each.num_workers} x {device}{cells}{self.machines}"

    def executor(self, owner: Path | None) -> tuple[Executor, NodePlaces | None]:
        """Make the executor of the workers, for a durable server if there is an `owner`, and the nodes that may move.

        Raises BadNodes, WorkerStartFailed.
        """
        return self.machines.executor(replace(self.each, owner=owner))


_STAT = Path("/proc/self/stat")
_START_TIME = 19  # Index of the field with the process's start, in clock ticks since the boot.


def process_age_s(stat: Path = _STAT) -> float | None:
    """Return the age of this process; None without /proc."""
    try:
        fields = stat.read_text("ascii", errors="replace").rpartition(")")[2].split()
        begun_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Parts of a start.

    `imports_s` counts until this process began to start others; None if unknown. `picture_s` is the time of an image
    with the defaults of the first model; None if unknown.
    """

    imports_s: float | None
    parts: StartParts
    picture_s: float | None

    def fields(self) -> Mapping[str, float]:
        """Return the parts in seconds, by name, without unknown ones."""
        values = {
            "imports_s": self.imports_s,
            "processes_s": s_from_ns(self.parts.processes_ns),
            "load_s": s_from_ns(self.parts.load_ns),
            "first_run_s": s_from_ns(self.parts.first_ns),
            "measure_s": s_from_ns(self.parts.measure_ns),
            "picture_s": self.picture_s,
        }
        return {name: round(value, 3) for name, value in values.items() if value is not None}

    def line(self) -> str:
        """Say the parts in words, with their sum: the time from the command to the first image."""
        words = {
            "imports_s": "imports",
            "processes_s": "processes",
            "load_s": "models",
            "first_run_s": "first runs",
            "measure_s": "measuring",
            "picture_s": "an image",
        }
        found = self.fields()
        parts = ", ".join(f"{words[name]} {value:.1f}" for name, value in found.items())
        return f"first image after {sum(found.values()):.1f} s at the earliest: {parts}"
