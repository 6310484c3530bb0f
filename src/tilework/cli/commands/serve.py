"""`tilework serve`: the HTTP server with its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.commands.generate import default_dtype
from tilework.cli.console import UserError, console, out, print_json, require_serve_extra, user_errors
from tilework.cli.measured import ProfilesFile, open_profiles
from tilework.cli.sizes import parse_bytes
from tilework.control.controller import ControllerConfig
from tilework.control.watchdog import WatchdogConfig
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire import ModelSource, SimulatedSource, Source
from tilework.core.work import DIFFUSE
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_file import read_table
from tilework.policy.registry import DEFAULT_POLICY, UnknownPolicy, make_policy, policy_names

EXAMPLE = (
    "Examples: tilework serve  |  tilework serve ./sd3-medium --device cuda --workers 4 --port 8000  |  "
    "tilework serve --durable ./state  |  "
    "tilework serve --backend modelled --devices 8 --cost flux1dev_h100_eager --policy tetriserve"
)


class Backend(StrEnum):
    """What the workers do with a request: run a model, or pretend to and take as long as a cost table says."""

    DIFFUSERS = "diffusers"
    MODELLED = "modelled"


class LogLevel(StrEnum):
    """What the server's own log tells; `info` has a line for every call."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="shapes (the default), a diffusers directory, or a hub id; a pipeline of --cost."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "--devices", min=1, max=1024, help="Worker processes, one per device.")
    ] = 2,
    policy: Annotated[str, typer.Option(help=f"Scheduling policy: {', '.join(policy_names())}.")] = DEFAULT_POLICY,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default by device.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
    worker_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            envvar="TILEWORK_WORKER_MEMORY",
            help="What a work may take beside the model, as in 800MB or 2GiB; default: what the device has.",
        ),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="diffusers runs the model; modelled pretends to, as --cost says.")
    ] = Backend.DIFFUSERS,
    cost: Annotated[
        str | None,
        typer.Option(
            help="Cost table to plan with: a JSON file, or a name (see `tilework cost list`); default: measured."
        ),
    ] = None,
    profiles: ProfilesFile = None,
    recalibrate: Annotated[bool, typer.Option(help="Measure again what an earlier start has measured.")] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; default 8000; 0 takes a free one.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Ask clients for this key. Better set TILEWORK_API_KEY: it shows in no list.")
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML file of tenants: their keys, weights and limits (docs/serving.md).")
    ] = None,
    durable: Annotated[
        Path | None,
        typer.Option(
            help="Keep in this directory what is accepted, so that the next start finishes what this one could not."
        ),
    ] = None,
    max_backlog: Annotated[
        float | None,
        typer.Option(help="Seconds that the devices may need for what is in when another comes in; default 3600."),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Pictures that share a forward pass at most; default 12; 1: each as it would be alone, to the bit."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write the event log here, for replay, explain, timeline and simulate; default: none, with --durable"
            " DIR a new DIR/events-N.jsonl at every start."
        ),
    ] = None,
    stuck_after: Annotated[
        float,
        typer.Option(min=1, help="Seconds without a step after which a work has stopped, unless its steps take long."),
    ] = s_from_ns(WatchdogConfig().least_ns),
    log_level: Annotated[
        LogLevel,
        typer.Option(
            envvar="TILEWORK_LOG_LEVEL",
            case_sensitive=False,
            help="Least level of what is logged to stderr; info has a line per call.",
        ),
    ] = LogLevel.WARNING,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready, instead of text.")] = False,
) -> None:
    """Serve a model behind OpenAI's images API, with deadlines.

    Further settings come from the environment: TILEWORK_MAX_STEPS, TILEWORK_RESULT_TTL_S and so on (docs/serving.md).
    """
    require_serve_extra()
    from tilework.runtime.costs import CostCache
    from tilework.runtime.engine import Engine, EngineConfig
    from tilework.runtime.executor import LocalConfig, LocalExecutor, WorkerStartFailed
    from tilework.server.config import ConfigError, load_config
    from tilework.server.main import AddressInUse
    from tilework.server.main import serve as serve_http
    from tilework.store.durable import DurableDirectory
    from tilework.store.journal import JournalUnusable

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tilework").setLevel(log_level.upper())  # Libraries stay as they are.
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(
            user_errors(
                ConfigError, UnknownPolicy, AddressInUse, WorkerStartFailed, BadCostTable, JournalUnusable, OSError
            )
        )
        make_policy(policy)
        table = None if cost is None else read_table(cost)
        source: Source
        if backend is Backend.MODELLED:
            source, kind = _modelled(table, model, worker_memory), backend.value
        else:
            dtype, kind = dtype or default_dtype(device), device
            source = ModelSource(
                path=model or "shapes", device=device, dtype=dtype, threads=threads, memory_bytes=worker_memory
            )
        file = None if tenants is None else str(tenants)
        directory = None if durable is None else str(durable)
        overrides: dict[str, object] = {"host": host, "port": port, "api_key": api_key, "tenants": file}
        overrides |= {"durable": directory, "max_backlog_s": max_backlog, "max_batch": max_batch}
        config = load_config(os.environ, overrides, others=("profiles", "log_level", "worker_memory"))
        state = stack.enter_context(closing(DurableDirectory(Path(config.durable)))) if config.durable else None
        log = state.new_log() if log is None and state is not None else log
        lines = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        owner, keeper, begin_ns = (state.path, state.journal, state.now_ns()) if state else (None, None, 0)
        executor = LocalExecutor(LocalConfig(num_workers=workers, source=source, owner=owner))
        cache = CostCache(open_profiles(profiles), refresh=recalibrate)
        controller = ControllerConfig(
            policy=policy,
            max_jobs=config.max_jobs,
            max_backlog_ns=ns_from_s(config.max_backlog_s),
            max_batch=config.max_batch,
        )
        engine_config = EngineConfig(
            controller=controller,
            watchdog=WatchdogConfig(least_ns=ns_from_s(stuck_after)),
            table=table,
            cache=cache,
            begin_ns=begin_ns,
        )
        status = stack.enter_context(console.status(f"starting {workers} x {kind}"))

        def on_measured(num_done: int, num_all: int) -> None:
            status.update(f"measuring what steps cost here: {num_done} of {num_all}")

        engine = Engine(engine_config, executor, lines, on_measured, keeper=keeper)

        def on_ready(url: str) -> None:
            status.stop()
            seconds = round(time.monotonic() - started_s, 3)
            told: dict[str, object] = {"url": url, "model": engine.info.name, "workers": workers, "ready_s": seconds}
            told |= {"restored": engine.health().num_jobs} if state is not None else {}
            print_json(told) if json else _greet(told, kind, policy, config.durable)

        asyncio.run(serve_http(engine, config, on_ready=on_ready, durable=state))


def _greet(told: Mapping[str, object], kind: str, policy: str, durable: str | None) -> None:
    url, seconds = told["url"], told["ready_s"]
    head = f"{told['model']} on {told['workers']} x {kind}, policy {policy}: ready in {seconds:.1f} s at {url}"
    taken_over = f"  {told['restored']} images taken over from {durable}" if durable else None
    where = f"  API documentation {url}/docs, metrics {url}/metrics; stop with Ctrl-C"
    for line in filter(None, (head, taken_over, where)):
        out.print(line, soft_wrap=True)


def _modelled(table: CostTable | None, pipeline: str | None, memory_bytes: int | None = None) -> SimulatedSource:
    """Raises UserError."""
    if table is None:
        raise UserError("--backend modelled needs --cost; name a file, or a table of `tilework cost list`")
    known = sorted({row.pipeline for row in table.rows if row.stage == DIFFUSE})
    if pipeline is None and len(known) == 1:
        pipeline = known[0]
    if pipeline not in known:
        raise UserError(f"MODEL is {pipeline!r}; the cost table has {', '.join(known)}")
    return SimulatedSource(
        pipeline=pipeline,
        hardware=table.hardware,
        steps=table.steps or 28,
        rows=table.rows,
        memory_bytes=memory_bytes,
    )
