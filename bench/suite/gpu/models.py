"""The models that the cases draw with, in a folder that all of them share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from suite.case import CaseFailed, Note
from suite.server import tilework_json

FOLDER = Path(os.environ.get("BENCH_MODELS", "/dev/shm/tilework-bench"))
"""Loading from memory leaves the speed of a disk out. Names that begin with TILEWORK_ are settings of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is asked of a model: pictures of `side` px, in `steps` steps. `rounds` pairs of pictures are compared.

    `stock` is what the stock call is told besides, where a `tilework.json` changes its defaults.
    """

    model: str
    side: int
    steps: int
    rounds: int
    stock: Mapping[str, int] = field(default_factory=dict)


TOY = Drawn(model="shapes", side=64, steps=4, rounds=2, stock={"max_sequence_length": 0})
"""Of a rehearsal on a CPU."""


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def folder_of(model: str, note: Note) -> str:
    """The folder of a model of `tilework fake`, which is written if it is not there; the shipped one has none.

    Models lie there one at a time: a server and the stock pipeline need the host's memory, too. One appears under its
    name when it is whole. What a run that was cut off has left of it is written anew.

    Raises:
        CaseFailed: it cannot be written.
    """
    if model == TOY.model:
        return model
    folder, part = FOLDER / model, FOLDER / f"{model}.part"
    if folder.exists():
        return str(folder)
    for other in (part, *(index.parent for index in FOLDER.glob("*/model_index.json"))):
        shutil.rmtree(other, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    note(f"writing {folder}")
    try:
        tilework_json(["fake", model, str(part)])
    except CaseFailed as error:
        free_gb = shutil.disk_usage(FOLDER).free / 1e9
        shutil.rmtree(part, ignore_errors=True)
        raise CaseFailed(
            f"{error}; {FOLDER} had {free_gb:.0f} GB left: if that is too little, name another folder with BENCH_MODELS"
        ) from error
    part.rename(folder)
    return str(folder)
