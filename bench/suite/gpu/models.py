"""The models that the cases draw with, in a folder that all of them share."""

from __future__ import annotations

import os
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
    """The folder of a model of `tilework fake`, which is written if it is not there; the shipped one has none."""
    if model == TOY.model:
        return model
    folder = FOLDER / model
    if not (folder / "model_index.json").exists():
        if folder.exists():
            raise CaseFailed(f"{folder} is not complete; remove it")
        note(f"writing {folder}")
        tilework_json(["fake", model, str(folder), "--device", "cuda"])
    return str(folder)
