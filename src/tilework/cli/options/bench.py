"""The options of `tilework bench`. The help of each ends with an example of its use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tilework.cli.console import UserError
from tilework.client.bench import NUM_REQUESTS, OTHERS_SIZE, OTHERS_STEPS
from tilework.client.mix import AUTO_FACTOR, SIZES_EXAMPLE
from tilework.core.request import OnMiss


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
    int | None, _option("--num-requests", f"How many; default {NUM_REQUESTS}, or the file's.", "300", min=1)
]
Duration = Annotated[
    float | None,
    _option("--duration", "Seconds to send for; with --num-requests, whichever ends first.", "60", callback=_positive),
]
Seed = Annotated[int, _option("--seed", "Of arrivals, sizes, prompts and pictures; default 0.", "3")]
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
    float | None, _option("--guidance-scale", "Sent with each request; default the server's.", "3.5")
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
    OnMiss | None, _option("--on-miss", "What a Tilework server does if a deadline cannot be met.", "reject")
]
Model = Annotated[str | None, _option("--model", "Default: the first of /v1/models.", "flux.1-dev")]
Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--tilework",
        help="Keep deadlines from the server, or send them; default by what /v1/models says. Example: --plain",
        show_default=False,
    ),
]
ResponseFormat = Annotated[Format, _option("--response-format", "b64_json (default), url, or none: not sent.", "url")]
ExtraBody = Annotated[
    str, _option("--extra-body", "JSON laid over each request; null takes a field out.", "'{\"seed\": null}'")
]
ApiKey = Annotated[str | None, _option("--api-key", "Default: OPENAI_API_KEY.", "sk-...", envvar="OPENAI_API_KEY")]
Timeout = Annotated[
    float,
    _option("--timeout", "Seconds from arrival until a request is given up; default 600.", "60", callback=_positive),
]
Warmup = Annotated[int, _option("--warmup", "Unmeasured requests per size before the run; default 1.", "0", min=0)]
Hops = Annotated[
    int,
    _option("--hops", "Most other servers to send a request to, when a refusal names one; default 3.", "0", min=0),
]
Directory = Annotated[
    Path | None, _option("--out", "Write result, records, requests, schedule and pictures there.", "out/bench")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    _option("--compare", "Set two results side by side instead of measuring.", "a/result.json b/result.json"),
]
