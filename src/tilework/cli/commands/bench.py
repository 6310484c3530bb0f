"""`tilework bench`: sends a workload to a server and measures what its users would see.

The help of each option ends with an example of its use.
"""

from __future__ import annotations

import json as jsonlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tilework.cli.bench_run import document, measure, print_report, write_files
from tilework.cli.console import UserError, console, out, print_json, user_errors
from tilework.cli.options.common import AsJson, examples
from tilework.client.bench import NUM_REQUESTS, OTHERS_SIZE, OTHERS_STEPS, BenchConfig, ServerUnusable
from tilework.client.mix import AUTO_FACTOR, SIZES_EXAMPLE
from tilework.core.request import OnMiss
from tilework.report.compare import comparison, comparison_table, differences, read_result


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
    """Return an option whose help ends with an example of its use."""
    return typer.Option(name, help=f"{text} Example: {name} {example}".rstrip(), show_default=False, **more)


def _positive(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Raises UserError."""
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{parameter.opts[0]} is {value:g}; use a number above 0")
    return value


Url = Annotated[str | None, typer.Argument(help="The server's address, with or without /v1.", show_default=False)]
Rate = Annotated[float | None, _option("--rate", "Requests per second.", "2.5", callback=_positive)]
Rpm = Annotated[float | None, _option("--rpm", "Requests per minute, instead of --rate.", "12", callback=_positive)]
ArrivalProcess = Annotated[Arrivals, _option("--arrivals", "Poisson (default) or evenly spaced.", "constant")]
Requests = Annotated[
    Path | None, _option("--requests", "Take requests from a JSON-lines or CSV file; a rate stretches it.", "trace.csv")
]
NumRequests = Annotated[
    int | None, _option("--num-requests", f"Number of requests; default {NUM_REQUESTS}, or the file's.", "300", min=1)
]
Duration = Annotated[
    float | None,
    _option("--duration", "Seconds of sending; with --num-requests, whichever ends first.", "60", callback=_positive),
]
Seed = Annotated[int, _option("--seed", "Seed of arrivals, sizes, prompts and images; default 0.", "3")]
Sizes = Annotated[
    str | None,
    _option(
        "--sizes",
        "Sides, WIDTHxHEIGHT, or WIDTHxHEIGHTxFRAMES for clips, each with a weight if you like; default the server's, "
        f"or {OTHERS_SIZE}.",
        SIZES_EXAMPLE,
    ),
]
SizeMix = Annotated[Mix, _option("--mix", "Sizes by weight (uniform, the default) or large ones more often.", "skewed")]
Steps = Annotated[
    int | None,
    _option("--steps", f"Denoising steps; default the file's, the server's, or {OTHERS_STEPS}.", "20", min=1),
]
GuidanceScale = Annotated[
    float | None, _option("--guidance-scale", "Guidance scale of each request; default the server's.", "3.5")
]
Prompts = Annotated[
    Path | None, _option("--prompts", "A text file, one prompt per line; default a built-in list.", "prompts.txt")
]
Slo = Annotated[
    str | None,
    _option(
        "--slo",
        "Seconds to the deadline by size, a bare number for other sizes; or auto: "
        f"{AUTO_FACTOR} (or auto:FACTOR) times the latency on the idle server. Default: the file's, or none.",
        "256=1.5,512=2,3",
    ),
]
SloScale = Annotated[float, _option("--slo-scale", "Multiplies all deadlines; default 1.", "1.5", callback=_positive)]
OnMissed = Annotated[
    OnMiss | None, _option("--on-miss", "Answer of a Tilework server to a deadline that it cannot meet.", "reject")
]
Model = Annotated[str | None, _option("--model", "Model to ask for; default: the first of /v1/models.", "flux.1-dev")]
Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--tilework",
        help="Hide deadlines from the server, or send them; default by what /v1/models says. Example: --plain",
        show_default=False,
    ),
]
ResponseFormat = Annotated[
    Format, _option("--response-format", "b64_json (default), url, or none: send no such field.", "url")
]
ExtraBody = Annotated[
    str, _option("--extra-body", "JSON to lay over each request; null takes a field out.", "'{\"seed\": null}'")
]
ApiKey = Annotated[
    str | None, _option("--api-key", "Key of the server; default: OPENAI_API_KEY.", "sk-...", envvar="OPENAI_API_KEY")
]
Timeout = Annotated[
    float,
    _option(
        "--timeout", "Seconds from arrival until the client gives a request up; default 600.", "60", callback=_positive
    ),
]
Warmup = Annotated[int, _option("--warmup", "Unmeasured requests per size before the run; default 1.", "0", min=0)]
Hops = Annotated[
    int,
    _option("--hops", "Most other servers to send a request to, when a refusal names one; default 3.", "0", min=0),
]
Directory = Annotated[
    Path | None, _option("--out", "Write result, records, requests, schedule and images there.", "out/bench")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    _option("--compare", "Set two results side by side instead of measuring.", "a/result.json b/result.json"),
]
EXAMPLE = examples(
    "tilework bench http://127.0.0.1:8000 --rate 2 --sizes 256,512 \\\n  --slo auto --out out/bench",
    "tilework bench --compare out/a/result.json out/b/result.json",
)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def command(
    url: Url = None,
    rate: Rate = None,
    rpm: Rpm = None,
    arrivals: ArrivalProcess = Arrivals.POISSON,
    requests: Requests = None,
    num_requests: NumRequests = None,
    duration: Duration = None,
    seed: Seed = 0,
    sizes: Sizes = None,
    mix: SizeMix = Mix.UNIFORM,
    steps: Steps = None,
    guidance_scale: GuidanceScale = None,
    prompts: Prompts = None,
    slo: Slo = None,
    slo_scale: SloScale = 1.0,
    on_miss: OnMissed = None,
    model: Model = None,
    plain: Plain = None,
    response_format: ResponseFormat = Format.B64_JSON,
    extra_body: ExtraBody = "{}",
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    warmup: Warmup = 1,
    hops: Hops = 3,
    directory: Directory = None,
    json: AsJson = False,
    compare: Compare = None,
) -> None:
    """Send requests to any server of OpenAI's images API, each at its planned time, and report how many were on time.

    Latency counts from the planned arrival; one that fails is late. Ctrl-C reports what was measured (exit 130)."""
    if compare is not None:
        _compare(*compare, json=json)
        return
    config = BenchConfig(
        url=_given(url),
        requests=None if requests is None else str(requests),
        arrivals=arrivals.value,
        rate_per_s=_rate_per_s(rate, rpm),
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
        max_hops=hops,
    )
    _bench(config, api_key, directory, json)


def _bench(config: BenchConfig, api_key: str | None, directory: Path | None, json: bool) -> None:
    """Measure, write and print. The exit status is 130 if interrupted."""
    with user_errors(ServerUnusable, ValueError, OSError):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        run = measure(config, api_key, quiet=json)
    if not run.records:
        console.print("interrupted before any request had ended; nothing is measured")
        raise typer.Exit(INTERRUPTED)
    result = document(run, _command_line())
    if directory is not None:
        with console.status("drawing"), user_errors(OSError):
            write_files(directory, run, result)
    if json:
        print_json(result)
    else:
        print_report(run, result, directory)
    if run.is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _given(url: str | None) -> str:
    """Raises UserError."""
    if url is None:
        raise UserError("there is no URL; give one such as http://127.0.0.1:8000, or --compare")
    return url


def _rate_per_s(rate: float | None, rpm: float | None) -> float | None:
    """Raises UserError."""
    if rate is not None and rpm is not None:
        raise UserError("--rate and --rpm are both given; leave one out")
    return rate if rpm is None else rpm / 60


def _compare(first: Path, second: Path, json: bool) -> None:
    with user_errors(ValueError, OSError):
        a, b = read_result(first), read_result(second)
    entries = comparison(a, b)
    changed = differences(a, b)
    if json:
        print_json({"a": str(first), "b": str(second), "figures": entries, "options": changed})
        return
    out.print(comparison_table(entries, (str(first), str(second))))
    for name, (left, right) in changed.items():
        out.print(f"{name}: {left} in A, {right} in B", markup=False, soft_wrap=True)


def _extra_body(text: str) -> dict[str, Any]:
    """Raises UserError."""
    try:
        values = jsonlib.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"--extra-body is {text!r}; write a JSON object such as '{{\"guidance_scale\": 3.5}}'")
    return values


def _command_line() -> list[str]:
    """Return the words of the command line, without the key."""
    words = ["tilework", *sys.argv[1:]]
    return [
        "***" if before == "--api-key" else "--api-key=***" if word.startswith("--api-key=") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
