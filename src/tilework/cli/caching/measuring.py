"""`tilework profile --cache`: what caches save of steps, as rows of a cost table."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.cli.console import UserError, progress
from tilework.cli.models import checked_spec, loaded_family
from tilework.core.cache import DEFAULT_THRESHOLD, MAX_THRESHOLD, CacheChoice, CacheKind
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.wire.spec import Spec

PROMPTS = (
    "a large red circle on a blue background",
    "a small yellow triangle on a purple background",
    "a large white cross on a green background",
    "a small black square on an orange background",
)


def parse_caches(text: str) -> tuple[CacheChoice, ...]:
    """The choices of KIND[=THRESHOLD],... Raises UserError."""
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
    """Raises UserError if a model cannot have one of these."""
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
    """A row with each of the choices for each of the `rows` that is of steps on one device.

    Requests with these prompts are drawn in this process, whole: what is skipped depends on the step. Single outputs
    have each prompt, batches as many as they have members.
    """
    from tilework.worker.caching.measuring import cached_row

    stage = graph.stepped[0].name
    asked = [row for row in rows if (row.stage, row.degree, row.cache) == (stage, 1, None)]
    family, found = loaded_family(source), list[CostRow]()
    with progress(quiet) as bar:
        task = bar.add_task("drawing with caches", total=len(asked) * len(choices))
        for row in asked:
            specs = _specs(row, prompts, family.info)
            for choice in choices:
                found.append(cached_row(family, row, specs, choice))
                bar.advance(task)
    return found


def _specs(row: CostRow, prompts: Sequence[str], info: ModelInfo) -> list[list[Spec]]:
    """The requests of each batch that is drawn for a row."""
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
