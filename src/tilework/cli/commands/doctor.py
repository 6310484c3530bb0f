"""`tilework doctor`: whether this machine can serve, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from tilework.cli.console import missing_serve_packages, out, print_json
from tilework.cli.doctor import libraries, machine
from tilework.cli.doctor.finding import Finding, Level
from tilework.cli.options.common import AsJson, Device, examples

EXAMPLE = examples("tilework doctor", "tilework doctor ./sdxl --device cuda --port 80 --json")
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Models that are to be served, as for serve.")
    ] = None,
    device: Device = "auto",
    host: Annotated[str, typer.Option(help="Address that is to be listened on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that is to be listened on.")] = 8000,
    json: AsJson = False,
) -> None:
    """Look at Python, packages, torch and its devices, memory, ports and models: say what is wrong, and what to do.

    Starts nothing. The exit status is 1 if anything is an error, and 0 with warnings.
    """
    findings = []
    for one in _findings(models or (), device, host, port):
        findings.append(one)
        if not json:
            _print(one)
    worst = Level.ERROR if any(one.level is Level.ERROR for one in findings) else Level.OK
    if json:
        checks = [{"level": one.level, "what": one.what, "found": one.found, "remedy": one.remedy} for one in findings]
        print_json({"serves": worst is Level.OK, "checks": checks})
    if worst is Level.ERROR:
        raise typer.Exit(1)


def _findings(models: Sequence[str], device: str, host: str, port: int) -> Iterator[Finding]:
    yield from libraries.library_findings()
    weights_bytes = 0
    if not missing_serve_packages():
        from tilework.cli.doctor import served
        from tilework.pipelines.cuda.look import cuda_state
        from tilework.server.config import ServerConfig

        yield from machine.cuda_findings(device, cuda_state())
        yield served.videos_finding()
        for model in models:
            finding, num_bytes = served.model_finding(model)
            weights_bytes += num_bytes
            yield finding
        yield machine.open_files_finding(ServerConfig().max_connections)
    yield machine.memory_finding(weights_bytes)
    yield machine.shared_memory_finding()
    yield machine.port_finding(host, port)


def _print(one: Finding) -> None:
    colour = _COLOURS[one.level]
    out.print(f"[{colour}]{one.level:<7}[/{colour}]", end=" ")
    out.print(f"{one.what}: {one.found}", markup=False, highlight=False, soft_wrap=True)
    if one.remedy:
        out.print(f"        to do: {one.remedy}", markup=False, highlight=False, soft_wrap=True)
