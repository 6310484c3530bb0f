"""`tilework serve`: the HTTP server with its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.generate import default_dtype
from tilework.cli.measured import ProfilesFile, open_profiles
from tilework.cli.output import UserError, console, out, print_json, require_serve_extra, user_errors
from tilework.control.controller import ControllerConfig
from tilework.core.wire import ModelledSource, ModelSource, Source
from tilework.core.work import DIFFUSE
from tilework.cost.table import BadCostTable, CostTable, read_table
from tilework.policy.registry import UnknownPolicy, make_policy, policy_names

EXAMPLE = (
    "Examples: tilework serve  |  tilework serve ./sd3-medium --device cuda --workers 4 --port 8000  |  "
    "tilework serve --backend modelled --gpus 8 --cost flux1dev_h100_eager --policy tetriserve"
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
        int, typer.Option("--workers", "--gpus", min=1, max=1024, help="Worker processes, one per device.")
    ] = 2,
    policy: Annotated[str, typer.Option(help=f"Scheduling policy: {', '.join(policy_names())}.")] = "edf",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default by device.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
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
    log: Annotated[
        Path | None, typer.Option(help="Write the event log here, for replay, explain, timeline and simulate.")
    ] = None,
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

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tilework").setLevel(log_level.upper())  # Libraries stay as they are.
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(
            user_errors(ConfigError, UnknownPolicy, AddressInUse, WorkerStartFailed, BadCostTable, OSError)
        )
        make_policy(policy)
        table = None if cost is None else read_table(cost)
        if backend is Backend.MODELLED:
            source: Source = _modelled(table, model)
        else:
            source = ModelSource(
                path=model or "shapes", device=device, dtype=dtype or default_dtype(device), threads=threads
            )
        kind = backend.value if backend is Backend.MODELLED else device
        file = None if tenants is None else str(tenants)
        overrides = {"host": host, "port": port, "api_key": api_key, "tenants": file}
        config = load_config(os.environ, overrides, others=("profiles", "log_level"))
        lines = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        executor = LocalExecutor(LocalConfig(num_workers=workers, source=source))
        cache = CostCache(open_profiles(profiles), refresh=recalibrate)
        controller = ControllerConfig(policy=policy, max_jobs=config.max_jobs)
        engine_config = EngineConfig(controller=controller, table=table, cache=cache)
        status = stack.enter_context(console.status(f"starting {workers} x {kind}"))

        def on_measured(num_done: int, num_all: int) -> None:
            status.update(f"measuring what steps cost here: {num_done} of {num_all}")

        engine = Engine(engine_config, executor, lines, on_measured)

        def on_ready(url: str) -> None:
            status.stop()
            seconds = time.monotonic() - started_s
            if json:
                print_json({"url": url, "model": engine.info.name, "workers": workers, "ready_s": round(seconds, 3)})
                return
            ready = f"{engine.info.name} on {workers} x {kind}, policy {policy}: ready in {seconds:.1f} s at {url}"
            out.print(ready, soft_wrap=True)
            out.print(f"  API documentation {url}/docs, metrics {url}/metrics; stop with Ctrl-C", soft_wrap=True)

        asyncio.run(serve_http(engine, config, on_ready=on_ready))


def _modelled(table: CostTable | None, pipeline: str | None) -> ModelledSource:
    """Raises UserError."""
    if table is None:
        raise UserError("--backend modelled needs --cost; name a file, or a table of `tilework cost list`")
    known = sorted({row.pipeline for row in table.rows if row.stage == DIFFUSE})
    if pipeline is None and len(known) == 1:
        pipeline = known[0]
    if pipeline not in known:
        raise UserError(f"MODEL is {pipeline!r}; the cost table has {', '.join(known)}")
    return ModelledSource(pipeline=pipeline, hardware=table.hardware, steps=table.steps or 28, rows=table.rows)
