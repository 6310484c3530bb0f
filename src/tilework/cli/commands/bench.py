"""`tilework bench`: a workload against a server, and what its users would have seen."""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from tilework.cli.console import UserError, console, out, print_json, progress, user_errors
from tilework.cli.views.bench import Run, document, print_report, write_files
from tilework.client.about import ServerUnusable
from tilework.client.bench import NUM_REQUESTS, OTHERS_SIZE, OTHERS_STEPS, BenchConfig, prepare
from tilework.client.mix import AUTO_FACTOR
from tilework.client.record import Ending, Record
from tilework.core.request import OnMiss
from tilework.report.compare import comparison, comparison_table, differences, read_result
from tilework.server.garbage import rare_collections

EXAMPLE = (
    "Examples: tilework bench http://127.0.0.1:8000 --rate 2 --sizes 256,512 --slo auto --out out/bench  |  "
    "tilework bench --compare out/a/result.json out/b/result.json"
)


class Arrivals(StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"


class Mix(StrEnum):
    UNIFORM = "uniform"
    SKEWED = "skewed"


class Format(StrEnum):
    NONE = "none"
    URL = "url"
    B64_JSON = "b64_json"


def _option(name: str, text: str, example: str = "", **more: Any) -> Any:
    """An option whose help ends with an example of its use."""
    help_text = escape(f"{text} Example: {name} {example}".rstrip() if example else text)
    return typer.Option(name, help=help_text, show_default=False, **more)


def command(
    url: Annotated[
        str | None, typer.Argument(help="The server's address, with or without /v1.", show_default=False)
    ] = None,
    rate: Annotated[float | None, _option("--rate", "Requests per second.", "2.5")] = None,
    rpm: Annotated[float | None, _option("--rpm", "Requests per minute, instead of --rate.", "12")] = None,
    arrivals: Annotated[
        Arrivals, _option("--arrivals", "Poisson (default) or evenly spaced.", "constant")
    ] = Arrivals.POISSON,
    requests: Annotated[
        Path | None,
        _option("--requests", "Take requests from a JSON-lines or CSV file; a rate stretches it.", "trace.csv"),
    ] = None,
    num_requests: Annotated[
        int | None, _option("--num-requests", f"How many; default {NUM_REQUESTS}, or the file's.", "300", min=1)
    ] = None,
    duration: Annotated[
        float | None, _option("--duration", "Send for so many seconds; with --num-requests what ends first.", "60")
    ] = None,
    seed: Annotated[int, _option("--seed", "Of arrivals, sizes, prompts and pictures; default 0.", "3")] = 0,
    sizes: Annotated[
        str | None,
        _option(
            "--sizes",
            f"Sides or WIDTHxHEIGHT, each with a weight if you like; default the server's, or {OTHERS_SIZE}.",
            "256,512x768:2,1024",
        ),
    ] = None,
    mix: Annotated[
        Mix, _option("--mix", "Sizes by weight (uniform, the default) or large ones more often.", "skewed")
    ] = Mix.UNIFORM,
    steps: Annotated[
        int | None,
        _option("--steps", f"Denoising steps; default the file's, the server's, or {OTHERS_STEPS}.", "20", min=1),
    ] = None,
    guidance_scale: Annotated[
        float | None, _option("--guidance-scale", "Sent with each request; default the server's.", "3.5")
    ] = None,
    prompts: Annotated[
        Path | None, _option("--prompts", "A text file, one prompt per line; default a built-in list.", "prompts.txt")
    ] = None,
    slo: Annotated[
        str | None,
        _option(
            "--slo",
            "Seconds to the deadline by size, a bare number for other sizes; or auto: "
            f"{AUTO_FACTOR} (or auto:FACTOR) times the latency on the idle server. Default: the file's, or none.",
            "256=1.5,512=2,3",
        ),
    ] = None,
    slo_scale: Annotated[float, _option("--slo-scale", "Multiplies all deadlines; default 1.", "1.5")] = 1.0,
    on_miss: Annotated[
        OnMiss | None, _option("--on-miss", "What a Tilework server does if a deadline is out of reach.", "reject")
    ] = None,
    model: Annotated[str | None, _option("--model", "Default: the first of /v1/models.", "flux.1-dev")] = None,
    plain: Annotated[
        bool | None,
        typer.Option(
            "--plain/--tilework",
            help="Keep deadlines from the server, or send them; default by what /v1/models says. Example: --plain",
            show_default=False,
        ),
    ] = None,
    response_format: Annotated[
        Format, _option("--response-format", "b64_json (default), url, or none: not sent.", "url")
    ] = Format.B64_JSON,
    extra_body: Annotated[
        str, _option("--extra-body", "JSON laid over each request; null takes a field out.", "'{\"seed\": null}'")
    ] = "{}",
    api_key: Annotated[
        str | None, _option("--api-key", "Default: OPENAI_API_KEY.", "sk-...", envvar="OPENAI_API_KEY")
    ] = None,
    timeout: Annotated[
        float, _option("--timeout", "Give a request up so many seconds after its arrival; default 600.", "60")
    ] = 600.0,
    warmup: Annotated[
        int, _option("--warmup", "Unmeasured requests per size before the run; default 1.", "0", min=0)
    ] = 1,
    directory: Annotated[
        Path | None, _option("--out", "Write result, records, requests, schedule and pictures there.", "out/bench")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        _option("--compare", "Set two results side by side instead of measuring.", "a/result.json b/result.json"),
    ] = None,
) -> None:
    """Send requests to any server of OpenAI's images API, each at its planned time, and tell how many were on time.

    Latency counts from the planned arrival, so a slow server shows in it, and a slow client too. What fails is late.
    """
    if compare is not None:
        _compare(*compare, json=json)
        return
    if url is None:
        raise UserError("there is no URL; give one such as http://127.0.0.1:8000, or --compare")
    for name, value in (
        ("--rate", rate),
        ("--rpm", rpm),
        ("--duration", duration),
        ("--slo-scale", slo_scale),
        ("--timeout", timeout),
    ):
        _check_positive(name, value)
    if rate is not None and rpm is not None:
        raise UserError("--rate and --rpm are both given; leave one out")
    config = BenchConfig(
        url=url,
        requests=None if requests is None else str(requests),
        arrivals=arrivals.value,
        rate_per_s=rate if rpm is None else rpm / 60,
        num_requests=num_requests,
        duration_s=duration,
        seed=seed,
        sizes=sizes,
        mix=mix.value,
        steps=steps,
        guidance_scale=guidance_scale,
        prompts=None if prompts is None else str(prompts),
        slo=slo,
        slo_scale=slo_scale,
        on_miss=on_miss,
        model=model,
        plain=plain,
        response_format=response_format.value,
        extra_body=_extra_body(extra_body),
        timeout_s=timeout,
        warmup=warmup,
    )
    _allow_connections()
    with user_errors(ServerUnusable, ValueError, OSError):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        run = asyncio.run(_measure(config, api_key, quiet=json))
    result = document(run, _command_line())
    if directory is not None:
        with console.status("drawing"), user_errors(OSError):
            write_files(directory, run, result)
    if json:
        print_json(result)
    else:
        print_report(run, result, directory)


async def _measure(config: BenchConfig, api_key: str | None, quiet: bool) -> Run:
    bench = await prepare(config, api_key)
    with progress(quiet) as bar:
        num_probes = len(bench.shapes) * bench.probes_per_size
        task = bar.add_task("warming up", total=num_probes, visible=num_probes > 0)
        unloaded_s = await bench.probe(lambda _shape: bar.advance(task))
        bar.update(task, visible=False)
        workload = bench.due(unloaded_s)
        started = datetime.now(UTC).isoformat("T", "seconds")
        with rare_collections():
            records = await bench.send(workload, _Live(bar, bar.add_task("sending", total=len(workload))).see)
    return Run(bench=bench, workload=workload, unloaded_s=unloaded_s, records=tuple(records), started=started)


@dataclass(slots=True)
class _Live:
    """The line that says how the run goes."""

    bar: Progress
    task: TaskID
    counts: Counter[str] = field(default_factory=Counter)

    def see(self, record: Record) -> None:
        self.counts.update(
            {
                "promised": record.slo_s is not None,
                "on time": record.on_time is True,
                "not done": record.status is not Ending.DONE,
            }
        )
        self.bar.update(self.task, advance=1, description=self._text())

    def _text(self) -> str:
        counts = self.counts
        parts = [f"{counts['on time'] / counts['promised']:.1%} on time"] if counts["promised"] else ["sending"]
        parts += [f"{counts['not done']} without a picture"] if counts["not done"] else []
        return ", ".join(parts)


def _compare(first: Path, second: Path, json: bool) -> None:
    with user_errors(ValueError, OSError):
        a, b = read_result(first), read_result(second)
    entries, changed = comparison(a, b), differences(a, b)
    if json:
        print_json({"a": str(first), "b": str(second), "figures": entries, "options": changed})
        return
    out.print(comparison_table(entries, (str(first), str(second))))
    for name, (left, right) in changed.items():
        out.print(f"{name}: {left} in A, {right} in B", markup=False, soft_wrap=True)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{name} is {value:g}; use a number above 0")


def _extra_body(text: str) -> dict[str, Any]:
    try:
        values = jsonlib.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"--extra-body is {text!r}; write a JSON object such as '{{\"guidance_scale\": 3.5}}'")
    return values


def _command_line() -> list[str]:
    """What was typed, without the key."""
    words = ["tilework", *sys.argv[1:]]
    return [
        "***" if before == "--api-key" else "--api-key=***" if word.startswith("--api-key=") else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _allow_connections() -> None:
    """Each request in flight is an open file; take as many as the system lets us."""
    if find_spec("resource") is None:  # Windows, which has no such limit.
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
