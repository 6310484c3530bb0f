"""The memory of a node's CPU workers, with one copy of the weights for all and with one for each."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.stats import exact
from tilework.core.model import ModelSource
from tilework.pipelines.model_index import shipped_directory
from tilework.runtime.worker_process import forkserver_context

_MB = 1_000_000
_WIDTH_HEADS, _HEAD_DIM = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A pipeline whose denoiser has `layers` of about 100 MB in float32, on `few` and on `many` workers, in turns."""

    layers: int = 5
    few: int = 1
    many: int = 4
    repeats: int = 2

    @classmethod
    def make(cls, quick: bool) -> Weights:
        return cls(layers=1, repeats=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            model = Path(room) / "model"
            size = save_model(model, self.layers)
            found: dict[tuple[bool, int], list[tuple[float, float]]] = {}
            for _ in range(self.repeats):
                for shared in (False, True):
                    for workers in (self.few, self.many):
                        measured = _measure(model, workers, shared)
                        note(f"{workers} workers, {'shared' if shared else 'own'}: {measured[0] / _MB:.0f} MB")
                        found.setdefault((shared, workers), []).append(measured)
        copies = {shared: self._further_copies(found, shared, size) for shared in (False, True)}
        rows = tuple(
            (
                f"{workers} {'worker' if workers == 1 else 'workers'}, {'one copy' if shared else 'a copy each'}",
                " / ".join(f"{memory / _MB:,.0f}" for memory, _ in values),
                " / ".join(f"{ready_s:.1f}" for _, ready_s in values),
            )
            for (shared, workers), values in found.items()
        )
        return Finding(
            checks=(
                Check(
                    what="memory of each further worker, in copies of the weights",
                    measured=exact(copies[True]),
                    high=0.5,
                ),
            ),
            tables=(
                Table(
                    title="PSS of all workers in MB, and seconds until all have loaded",
                    columns=("", "MB", "s"),
                    rows=rows,
                ),
            ),
            method=(
                f"A pipeline with {size / _MB:,.0f} MB of random weights in float32. Worker processes load it, from "
                "the forkserver, all at once; PSS is read from smaps_rollup when all have loaded.",
                f"With a copy each, every further worker takes {copies[False]:.2f} copies of the weights.",
            ),
        )

    def _further_copies(
        self, found: dict[tuple[bool, int], list[tuple[float, float]]], shared: bool, size: int
    ) -> float:
        few, many = (min(memory for memory, _ in found[shared, workers]) for workers in (self.few, self.many))
        return (many - few) / (self.many - self.few) / size


def save_model(directory: Path, layers: int, seed: int = 0) -> int:
    """`shapes` with a larger denoiser of random weights; returns the bytes of all weights in their files."""
    import torch
    from diffusers import SD3Transformer2DModel

    shutil.copytree(shipped_directory(), directory)
    place = directory / "transformer"
    config: dict[str, Any] = json.loads((place / "config.json").read_text("utf-8"))
    config |= {
        "num_layers": layers,
        "num_attention_heads": _WIDTH_HEADS,
        "attention_head_dim": _HEAD_DIM,
        "caption_projection_dim": _WIDTH_HEADS * _HEAD_DIM,
    }
    shutil.rmtree(place)
    torch.manual_seed(seed)
    options = {name: value for name, value in config.items() if not name.startswith("_")}
    SD3Transformer2DModel(**options).save_pretrained(place)
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def _measure(model: Path, workers: int, shared: bool) -> tuple[float, float]:
    """Bytes of memory of all workers, and seconds until all have loaded."""
    with TemporaryDirectory(prefix="tilework-bench-", dir="/dev/shm") as weights, ExitStack() as stack:
        start_s = time.perf_counter()
        started = [stack.enter_context(_worker(model, weights if shared else "")) for _ in range(workers)]
        pids = [connection.recv() for connection in started]
        ready_s = time.perf_counter() - start_s
        return sum(map(_pss_bytes, pids)), ready_s


@contextmanager
def _worker(model: Path, weights: str) -> Iterator[Connection]:
    ours, theirs = forkserver_context().Pipe()
    process = forkserver_context().Process(target=_load, args=(str(model), weights, theirs))
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def _load(model: str, weights: str, connection: Connection) -> None:
    """The process of a worker, as far as it loads."""
    import os

    from tilework.pipelines.loading import load
    from tilework.worker.models.shared_weights import SharedWeights

    family = load(ModelSource(path=model), SharedWeights(Path(weights)).share if weights else None)
    connection.send(os.getpid())
    connection.recv()
    del family


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no PSS")
