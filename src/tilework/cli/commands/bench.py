"""`tilework bench`: a workload against a server, and what its users would have seen."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Any

import typer

from tilework.cli.bench_run import measure
from tilework.cli.console import UserError, console, out, print_json, user_errors
from tilework.cli.options import bench as options
from tilework.cli.options.common import AsJson, examples
from tilework.cli.views.bench import document, print_report, write_files
from tilework.client.about import ServerUnusable
from tilework.client.bench import BenchConfig
from tilework.report.compare import comparison, comparison_table, differences, read_result

EXAMPLE = examples(
    "tilework bench http://127.0.0.1:8000 --rate 2 --sizes 256,512 \\\n  --slo auto --out out/bench",
    "tilework bench --compare out/a/result.json out/b/result.json",
)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def command(
    url: options.Url = None,
    rate: options.Rate = None,
    rpm: options.Rpm = None,
    arrivals: options.ArrivalProcess = options.Arrivals.POISSON,
    requests: options.Requests = None,
    num_requests: options.NumRequests = None,
    duration: options.Duration = None,
    seed: options.Seed = 0,
    sizes: options.Sizes = None,
    mix: options.SizeMix = options.Mix.UNIFORM,
    steps: options.Steps = None,
    guidance_scale: options.GuidanceScale = None,
    prompts: options.Prompts = None,
    slo: options.Slo = None,
    slo_scale: options.SloScale = 1.0,
    on_miss: options.OnMissed = None,
    model: options.Model = None,
    plain: options.Plain = None,
    response_format: options.ResponseFormat = options.Format.B64_JSON,
    extra_body: options.ExtraBody = "{}",
    api_key: options.ApiKey = None,
    timeout: options.Timeout = 600.0,
    warmup: options.Warmup = 1,
    hops: options.Hops = 3,
    directory: options.Directory = None,
    json: AsJson = False,
    compare: options.Compare = None,
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
    """Measure, write and print. Exit status 130 if it was interrupted."""
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
    entries, changed = comparison(a, b), differences(a, b)
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
    """What was typed, without the key."""
    words = ["tilework", *sys.argv[1:]]
    return [
        "***" if before == "--api-key" else "--api-key=***" if word.startswith("--api-key=") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
