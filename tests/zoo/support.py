"""Finds out what the server can do with each class of the zoo, and writes it into the record that ships.

    PYTHONPATH=src:tests:. python -m zoo.support            # classes that the record lacks
    PYTHONPATH=src:tests:. python -m zoo.support LTXPipeline   # these again; `all`: each one
    PYTHONPATH=src:tests:. python -m zoo.support features   # of those served: what else they can do
    PYTHONPATH=src:tests:. python -m zoo.support cells   # of those that devices can share: whether cells draw them

`tests/pipelines/test_stock.py` compares the record with what is found.
"""

from __future__ import annotations

import pkgutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import PIL.Image
import torch
from torch.utils._pytree import tree_leaves

import tiny
from tilework.core.model import ModelInfo
from tilework.pipelines.components import denoisers_of
from tilework.pipelines.model_index import ADAPTERS, STOCK
from tilework.pipelines.stock.model_info import num_heads
from tilework.pipelines.support.record import ClassRecord, Record, read_record, record_file, served_classes
from zoo import cells, requests
from zoo.model import ZooModel
from zoo.registry import ZOO, build

BEYOND = "which no request can give"
_MOST_LETTERS = 160


def models_of(class_name: str) -> list[ZooModel]:
    """The models of a class."""
    return [model for model in ZOO.values() if model.class_name == class_name]


def measure(model: ZooModel, directory: Path) -> ClassRecord:
    """What is found of a model, saved in an empty `directory`. What raises is the reason why it is not served."""
    try:
        here, there = requests.family(model, directory), requests.family(model, directory)
        specs = [requests.spec_of(model, here, seed) for seed in (1, 2)]
        stock = [requests.stock_pixels(model, build(model), seed) for seed in (1, 2)]
        assert not np.array_equal(*stock), "the seed must matter"
        interleaved = all(map(np.array_equal, requests.side_by_side(here, *specs), stock))
        found = ClassRecord(
            kinds=(model.kind,),
            exact=interleaved or np.array_equal(requests.alone(here, specs[0]), stock[0]),
            interleaved=interleaved,
            moved=np.array_equal(requests.moved(here, there, specs[0]), stock[0]),
        )
        if not found.is_served:
            return ClassRecord(kinds=found.kinds, reason=_another_picture(found))
        if beyond := _beyond_requests(model, {one.name for one in here.info.pictures}):
            return ClassRecord(kinds=found.kinds, reason=f"exact, but takes {', '.join(beyond)}, {BEYOND}")
        return replace(found, **_features(model))
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        return ClassRecord(kinds=(model.kind,), reason=first_line.replace(str(directory), "DIR")[:_MOST_LETTERS])


def _beyond_requests(model: ZooModel, pictures: Collection[str]) -> list[str]:
    """The arguments of a model's call that are pictures, clips or tensors, but not among the `pictures` of requests."""
    large = [name for name, value in model.inputs.items() if any(map(_is_large, tree_leaves(value)))]
    return sorted(set(large) - set(pictures))


def _is_large(value: object) -> bool:
    return isinstance(value, PIL.Image.Image | torch.Tensor | np.ndarray)


def _another_picture(found: ClassRecord) -> str:
    ways = {"alone": found.exact, "with requests that take turns": found.interleaved, "moved": found.moved}
    return (
        f"another picture than the stock pipeline's: {', '.join(way for way, is_equal in ways.items() if not is_equal)}"
    )


def _features(model: ZooModel) -> dict[str, object]:
    """What the adapter says that serves the class, without a run."""
    adapter = pkgutil.resolve_name(ADAPTERS.get(model.class_name, STOCK))
    info: ModelInfo = adapter(build(model), model.name, {}, "").info
    return {
        "batches": any(stage.batchable for stage in info.stages),
        "previews": any(stage.previews for stage in info.stages),
        "degrees": _degrees(model, info),
        "stages": tuple(stage.name for stage in info.stages),
        "inputs": tuple(_inputs(info)),
    }


def _inputs(info: ModelInfo) -> list[str]:
    pictures = [one.name if one.required else f"[{one.name}]" for one in info.pictures]
    return pictures + [f"[{one.name}]" for one in info.arguments if one.strength is not None]


def _degrees(model: ZooModel, info: ModelInfo) -> str:
    heads = min(map(num_heads, denoisers_of(build(model)).values()))
    in_words = {heads: "heads", 2 * heads: "2 x heads"} if heads > 1 and info.max_degree > 1 else {}
    return in_words.get(info.max_degree, str(info.max_degree))


def together(found: Sequence[ClassRecord]) -> ClassRecord:
    """The record of a class of which several models were measured: all that requests can ask for must be served."""
    asked = [one for one in found if not one.reason.endswith(BEYOND)] or found
    first, *_ = sorted(asked, key=lambda one: one.is_served)
    return replace(first, kinds=tuple(dict.fromkeys(kind for one in asked for kind in one.kinds)))


def main(names: Sequence[str]) -> None:
    tiny.prepare()
    record = read_record()
    classes = dict(record.classes)
    if names == ["features"]:
        for name in served_classes():
            classes[name] = replace(classes[name], **_features(models_of(name)[0]))
        _write(replace(record, classes=classes))
        return
    if names == ["cells"]:
        cells.check_all([one for one in ZOO.values() if _may_be_split(classes[one.class_name]) and one.loads])
        return
    in_zoo = dict.fromkeys(model.class_name for model in ZOO.values())
    for name in [name for name in in_zoo if name in names or names == ["all"] or (not names and name not in classes)]:
        found = []
        for model in models_of(name):
            with tempfile.TemporaryDirectory() as directory:
                found.append(measure(model, Path(directory)))
        classes[name] = together(found)
        print(name, classes[name].reason or "served", flush=True)
        _write(replace(record, diffusers=diffusers.__version__, classes=classes))


def _may_be_split(record: ClassRecord) -> bool:
    """Whether a cell can have models of this class."""
    return record.is_served and record.degrees != "1"


def _write(record: Record) -> None:
    record_file().write_text(record.dump(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
