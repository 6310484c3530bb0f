"""`tilework quality`: measures what a cache saves and how it changes images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilework.cli.caches import PROMPTS, prompts_of
from tilework.cli.console import UserError, console, out, print_json, progress, require_serve_extra
from tilework.cli.models import ModelOptions, checked_spec, loaded_family, model_source
from tilework.cli.options.common import AsJson, examples
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.entry_points import NotThere, load_named

if TYPE_CHECKING:
    from tilework.pipelines.family import Family
    from tilework.report.cache_quality import CachedPicture, CacheQuality
    from tilework.worker.caching.quality import Drawn

EXAMPLE = examples(
    "tilework quality --out out/quality",
    "tilework quality ./sd3-medium --device cuda --prompts prompts.txt \\\n"
    "  --steps 8,28 --caches 'patch=0.005,0.01 fbcache=0.05,0.1 taylorseer'",
)
Score = Callable[[str, Any], float]


def command(
    model: Annotated[str, typer.Argument(help="shapes, a diffusers directory, or a hub id.")] = "shapes",
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on each line; default: four.")] = None,
    caches: Annotated[
        str | None,
        typer.Option(
            help="Caches to try, each with thresholds (taylorseer: intervals) or with the usual ones, as in "
            "'patch=0.003,0.01 fbcache taylorseer=3,5'; default: all that the model can have."
        ),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Numbers of steps, as in 8,20; default: the model's.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; default: the model's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; prompt i gets seed + i.")] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function of a prompt and its image, an array (rows, columns, 3) of 8 bits, that returns a score.",
        ),
    ] = None,
    no_predictor: Annotated[
        bool, typer.Option("--no-predictor", help="Leave the model's cache_forest.json aside, if it has one.")
    ] = False,
    directory: Annotated[Path | None, typer.Option("--out", help="Directory for curve.png and sheet.png.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default by device.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    json: AsJson = False,
) -> None:
    """Draw prompts with and without a cache in this process, and compare: what is skipped, how long steps take, and how
    much images change (PSNR, SSIM, and a score of yours). See docs/sharing.md.
    """
    require_serve_extra()
    choices = None if caches is None else _choices(caches)
    texts = PROMPTS if prompts is None else prompts_of(prompts)
    rate = None if score is None else _score(score)
    source = model_source(
        model, ModelOptions(None, device, dtype or ("float32" if device == "cpu" else "bfloat16"), threads)
    )
    numbers = _numbers(steps)
    family = _family(source, choices or (), not no_predictor)
    choices = choices or _choices(" ".join(family.info.caches))
    specs = [
        checked_spec({"prompt": text, "size": size, "seed": seed + index, "num_inference_steps": number}, family.info)
        for number in numbers
        for index, text in enumerate(texts)
    ]
    pictures = _pictures(family, specs, choices, rate, quiet=json)
    from tilework.report.cache_quality import draw_cache_curve, draw_cache_sheet, summarise

    rows = summarise(pictures)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        draw_cache_sheet(directory / "sheet.png", pictures, title=f"{model}: without a cache, and with")
        draw_cache_curve(directory / "curve.png", rows, title=f"{model}: what a cache saves, and what it costs")
    _print(model, rows, json)


def _choices(caches: str) -> list[CacheChoice]:
    """Parse the caches of a text such as "patch=0.003,0.01 fbcache"."""
    found = []
    for text in caches.split():
        name, _, numbers = text.partition("=")
        if name not in list(CacheKind):
            raise UserError(f"caches has {name!r}; give some of {', '.join(CacheKind)}")
        kind = CacheKind(name)
        values = [_value(kind, one) for one in numbers.split(",")] if numbers else kind.setting.usual
        found += [CacheChoice(kind, value) for value in values]
    return found


def _value(kind: CacheKind, text: str) -> float:
    least = kind.setting.least
    most = kind.setting.most
    is_whole = kind.setting.name == "interval"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or (is_whole and value % 1):
        what = "whole numbers" if is_whole else "numbers"
        raise UserError(f"caches has {text!r} for {kind.value}; give {what} from {least:g} to {most:g}")
    return value


def _numbers(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UserError(f"steps is {text!r}; give whole numbers above 0, as in 8,20")
    return [int(part) for part in parts]


def _score(name: str) -> Score:
    try:
        found: Score = load_named(name)
    except NotThere as error:
        raise UserError(f"score is {name!r}: {error}") from error
    return found


def _family(source: ModelSource, choices: Sequence[CacheChoice], predictor: bool) -> Family:
    from tilework.pipelines.staged import StagedPipeline

    family = loaded_family(source)
    if isinstance(family, StagedPipeline) and not predictor:
        family.cache_forest = None
    for choice in choices:
        if choice.kind not in family.info.caches:
            raise UserError(f"caches has {choice.kind.value}, which {family.info.name} cannot do; leave it out")
    return family


def _pictures(
    family: Family, specs: Sequence[Spec], choices: Sequence[CacheChoice], rate: Score | None, *, quiet: bool
) -> list[CachedPicture]:
    from tilework.worker.caching.quality import draw_each

    found: list[CachedPicture] = []
    with progress(quiet) as bar:
        task = bar.add_task("drawing", total=len(specs) * (1 + len(choices)))
        plain: Drawn | None = None
        for drawn in draw_each(family, specs, choices):
            plain = drawn if drawn.choice is None or plain is None else plain
            found.append(_compared(specs[drawn.index], drawn, plain, rate))
            bar.update(task, completed=len(found))
    return found


def _compared(spec: Spec, drawn: Drawn, plain: Drawn, rate: Score | None) -> CachedPicture:
    from tilework.report.cache_quality import CachedPicture

    pixels, reference = (_array(one) for one in (drawn, plain))
    return CachedPicture(
        prompt=spec.prompt,
        steps=spec.steps,
        choice=drawn.choice,
        pixels=pixels,
        plain=reference,
        saving=drawn.use.saving,
        time_ratio=drawn.steps_s / plain.steps_s,
        score=None if rate is None else float(rate(spec.prompt, pixels)),
        off=drawn.use.off,
    )


def _array(drawn: Drawn) -> Any:
    import numpy as np

    image = drawn.image
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def _print(model: str, rows: Sequence[CacheQuality], json: bool) -> None:
    if json:
        print_json({"model": model, "rows": [_finite(asdict(row)) for row in rows]})
        return
    head = "steps  cache       number  skipped   time     PSNR    least    SSIM"
    out.print(head + ("  score" if any(row.score is not None for row in rows) else ""), highlight=False)
    for row in rows:
        line = (
            f"{row.steps:>5}  {row.kind:<10}  {row.value:>6g}  {row.saving:>7.1%}  {row.time_ratio:>5.2f}  "
            f"{row.psnr_db:>7.1f}  {row.least_psnr_db:>7.1f}  {row.ssim:>6.3f}"
        )
        out.print(line + ("" if row.score is None else f"  {row.score:5.3f}"), highlight=False)
    for reason in dict.fromkeys(row.off for row in rows if row.off):
        console.print(f"not throughout: {reason}", soft_wrap=True, style="dim")


def _finite(row: dict[str, object]) -> dict[str, object]:
    """Return the row as JSON, which has no infinity: equal images have no PSNR."""
    return {name: None if value == float("inf") else value for name, value in row.items()}
