"""Caches in `tilework profile`: `--cache` measures them, `--train-cache` trains the predictor of a patch cache."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

from tilework.cli.console import UserError, console, out, print_json, progress
from tilework.cli.models import checked_spec, loaded_family
from tilework.core.cache import DEFAULT_THRESHOLD, MAX_THRESHOLD, CacheChoice, CacheKind
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.wire.spec import Spec
from tilework.distribution import install_command

PROMPTS = (
    "a large red circle on a blue background",
    "a small yellow triangle on a purple background",
    "a large white cross on a green background",
    "a small black square on an orange background",
)


def parse_caches(text: str) -> tuple[CacheChoice, ...]:
    """Return the choices of KIND[=THRESHOLD],... Raises UserError."""
    found = dict.fromkeys(_parse(part.strip()) for part in text.split(","))
    return tuple(found)


def _parse(text: str) -> CacheChoice:
    try:
        choice = CacheChoice.parse(text if "=" in text else f"{text}={DEFAULT_THRESHOLD}")
    except ValueError:
        choice = None
    if choice is None or choice.kind.is_of_steps or not 0 <= choice.value <= MAX_THRESHOLD:
        kinds = ", ".join(kind.value for kind in CacheKind if not kind.is_of_steps)
        raise UserError(f"cache has {text!r}; give kinds ({kinds}) and thresholds from 0 to 1, as in patch=0.003")
    return choice


def check_caches(choices: Sequence[CacheChoice], info: ModelInfo) -> None:
    """Raise UserError if a model cannot have one of these caches."""
    for one in choices:
        if one.kind not in info.caches:
            can = " or ".join(kind.value for kind in info.caches)
            raise UserError(
                f"cache has {one.kind.value}, which {info.name} cannot do; give {can}"
                if can
                else f"cache is given, and {info.name} can have none; leave it out"
            )


def cached_rows(
    source: ModelSource,
    graph: Graph,
    rows: Sequence[CostRow],
    choices: Sequence[CacheChoice],
    prompts: Sequence[str],
    *,
    quiet: bool,
) -> list[CostRow]:
    """Return a row with each of the choices for each of the `rows` that is of steps on one device.

    Requests with these prompts are drawn in this process, whole: what is skipped depends on the step. Single outputs
    have each prompt, batches as many as they have members.
    """
    from tilework.worker.caching.measuring import cached_row

    stage = graph.stepped[0].name
    asked = [row for row in rows if (row.stage, row.degree, row.cache) == (stage, 1, None)]
    family = loaded_family(source)
    found = list[CostRow]()
    with progress(quiet) as bar:
        task = bar.add_task("drawing with caches", total=len(asked) * len(choices))
        for row in asked:
            specs = _specs(row, prompts, family.info)
            for choice in choices:
                found.append(cached_row(family, row, specs, choice))
                bar.advance(task)
    return found


def _specs(row: CostRow, prompts: Sequence[str], info: ModelInfo) -> list[list[Spec]]:
    """Return the requests of each batch that is drawn for a row."""
    times = len(prompts) if row.batch == 1 else 1
    return [
        [
            checked_spec(
                {"prompt": prompts[index % len(prompts)], "size": f"{one.width}x{one.height}", "seed": index},
                info,
            )
            for index, one in enumerate(row.shapes, first)
        ]
        for first in range(times)
    ]


CACHE_FILE = "cache_forest.json"
THRESHOLDS = (0.001, 0.003, 0.01, 0.03)
_HELD_OUT = 4  # One prompt of this many is left out of training.


def prompts_of(path: Path) -> tuple[str, ...]:
    """Return the lines of a file of prompts. Raises UserError."""
    try:
        lines = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts is {path}, which cannot be read: {error}") from error
    if not lines:
        raise UserError(f"prompts is {path}, which has no lines; write a prompt on each")
    return lines


def train_cache(source: ModelSource, prompts: Path, target: Path, sizes: str | None, *, as_json: bool) -> None:
    """Draw each prompt at each of the `sizes`, train with three of four, and write the forest to `target`.

    Raises UserError.
    """
    from tilework.worker.caching.training import Changes, can_train, observe_changes, train

    texts = prompts_of(prompts)
    if len(texts) < _HELD_OUT:
        raise UserError(f"prompts is {prompts}, which has {len(texts)} lines; write {_HELD_OUT} or more")
    if not can_train():
        raise UserError(f"cache needs scikit-learn; run: {install_command('learn')}")
    family = loaded_family(source)
    if CacheKind.PATCH not in family.info.caches:
        raise UserError(f"cache is for models with a patch cache, and {family.info.name} has none; leave it out")
    specs = [
        checked_spec({"prompt": text, "size": size, "seed": index}, family.info)
        for index, text in enumerate(texts)
        for size in _sizes(sizes)
    ]
    own = Changes()
    held_out = Changes()
    with progress(as_json) as bar:
        task = bar.add_task("drawing", total=len(specs))
        for spec in specs:
            observe_changes(family, spec, held_out if spec.seed % _HELD_OUT == 0 else own)
            bar.advance(task)
    document = train(own, held_out, THRESHOLDS)
    target.write_text(jsonlib.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    said = {name: document[name] for name in ("samples", "accuracy", "by_input")}
    if as_json:
        print_json({"path": str(target), **said})
        return
    out.print(f"{target}: {said['samples']} changes of patches", highlight=False)
    for name in THRESHOLDS:
        right, plain = said["accuracy"][f"{name:g}"], said["by_input"][f"{name:g}"]
        out.print(f"  changes below {name:g}: {right:.1%} right; {plain:.1%} by the input alone", highlight=False)
    console.print("put it beside the model's model_index.json as cache_forest.json", style="dim")


def _sizes(sizes: str | None) -> Sequence[str | None]:
    return [None] if sizes is None else [size if "x" in size else f"{size}x{size}" for size in sizes.split(",")]
