"""`tilework profile --train-cache`: trains the predictor of a model's patch cache."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

from tilework.cli.console import UserError, console, out, print_json, progress
from tilework.cli.models import checked_spec, loaded_family
from tilework.core.cache import CacheKind
from tilework.core.model import ModelSource
from tilework.distribution import install_command

CACHE_FILE = "cache_forest.json"
THRESHOLDS = (0.001, 0.003, 0.01, 0.03)
_HELD_OUT = 4  # Of as many prompts one is not trained with.


def prompts_of(path: Path) -> tuple[str, ...]:
    """The lines of a file of prompts. Raises UserError."""
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
    own, held_out = Changes(), Changes()
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
