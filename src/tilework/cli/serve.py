"""`tilework serve`: the HTTP server with its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tilework.cli.generate import default_dtype
from tilework.cli.output import console, out, print_json, require_serve_extra, user_errors
from tilework.control.controller import ControllerConfig
from tilework.core.wire import ModelSource
from tilework.policy.registry import UnknownPolicy, make_policy, policy_names

EXAMPLE = "Examples: tilework serve  |  tilework serve ./sd3-medium --device cuda --workers 4 --port 8000"


def command(
    model: Annotated[str, typer.Argument(help="shapes, a diffusers directory, or a hub id.")] = "shapes",
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Worker processes, one per device.")] = 2,
    policy: Annotated[str, typer.Option(help=f"Scheduling policy: {', '.join(policy_names())}.")] = "edf",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default by device.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; default 8000; 0 takes a free one.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Ask clients for this key. Better set TILEWORK_API_KEY: it shows in no list.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write the event log here, for replay and simulate.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready, instead of text.")] = False,
) -> None:
    """Serve a model behind OpenAI's images API, with deadlines.

    Further settings come from the environment: TILEWORK_MAX_STEPS, TILEWORK_RESULT_TTL_S and so on (docs/serving.md).
    """
    require_serve_extra()
    from tilework.runtime.engine import Engine, EngineConfig
    from tilework.runtime.executor import LocalConfig, LocalExecutor, WorkerStartFailed
    from tilework.server.config import ConfigError, load_config
    from tilework.server.main import AddressInUse
    from tilework.server.main import serve as serve_http

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    started_s = time.monotonic()
    source = ModelSource(path=model, device=device, dtype=dtype or default_dtype(device), threads=threads)
    with ExitStack() as stack:
        stack.enter_context(user_errors(ConfigError, UnknownPolicy, AddressInUse, WorkerStartFailed, OSError))
        make_policy(policy)
        config = load_config(os.environ, {"host": host, "port": port, "api_key": api_key})
        lines = stack.enter_context(log.open("w", encoding="utf-8")) if log else None
        executor = LocalExecutor(LocalConfig(num_workers=workers, source=source))
        engine = Engine(EngineConfig(controller=ControllerConfig(policy=policy), hardware=device), executor, lines)
        status = stack.enter_context(console.status(f"starting {workers} x {device} with {model}"))

        def on_ready(url: str) -> None:
            status.stop()
            seconds = time.monotonic() - started_s
            if json:
                print_json({"url": url, "model": engine.info.name, "workers": workers, "ready_s": round(seconds, 3)})
                return
            ready = f"{engine.info.name} on {workers} x {device}, policy {policy}: ready in {seconds:.1f} s at {url}"
            out.print(ready, soft_wrap=True)
            out.print(f"  API documentation {url}/docs, metrics {url}/metrics; stop with Ctrl-C", soft_wrap=True)

        asyncio.run(serve_http(engine, config, on_ready=on_ready))
