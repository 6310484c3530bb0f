"""How fast weights come from the host's copies to a GPU, against copies from pinned memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import on_gpu
from suite.stats import extremes, median
from tilework.worker.models.shared_weights import Form, SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """`num_weights` weights of `megabytes` each, `rounds` times by each way."""

    num_weights: int = 64
    megabytes: int = 64
    rounds: int = 3
    folder: str = "/dev/shm"

    @classmethod
    def make(cls, quick: bool) -> Loads:
        if not on_gpu():
            raise CaseFailed("loads needs a CUDA device; there is none")
        return cls(num_weights=8) if quick else cls()

    def measure(self, note: Note) -> Finding:
        device, num_bytes = torch.device("cuda", 0), self.megabytes << 20
        weights = [torch.randint(0, 255, (num_bytes,), dtype=torch.uint8) for _ in range(self.num_weights)]
        forms = [replace(Form.of(weight), device=device) for weight in weights]
        there = [torch.empty(0, dtype=torch.uint8, device=device) for _ in weights]
        pinned = weights[0].pin_memory()
        with TemporaryDirectory(dir=self.folder) as folder:
            shared = SharedWeights(Path(folder))
            shared.keep("weights", weights)
            note(f"{self.num_weights * num_bytes / 1e9:.1f} GB lie in {self.folder}")

            def load() -> None:
                for _ in shared.open("weights", forms).bring(there):
                    pass

            first = self._rates(load, 1)
            ways = {
                "pinned memory": self._rates(lambda: [pinned.to(device) for _ in weights], self.rounds),
                "the host's copy, for the first time": first,
                "the host's copy, again": self._rates(load, self.rounds),
                "a mapped file that is not registered": self._rates(lambda: _copy(folder, device), self.rounds),
            }
        again, best = median(ways["the host's copy, again"]), median(ways["pinned memory"])
        check = Check(
            what="loads from the host's copy / copies of pinned memory", measured=extremes([again / best]), low=0.8
        )
        rows = tuple((way, f"{median(rates):.1f}") for way, rates in ways.items())
        return Finding(
            checks=(check,),
            method=(
                "Weights in one file in memory, as workers keep them (`worker.models.shared_weights`); the first load "
                "registers the file with the driver. Times until the device is done.",
            ),
            tables=(Table(title="Bandwidth in GB/s (median)", columns=("from", "GB/s"), rows=rows),),
            facts={"device": torch.cuda.get_device_name()},
        )

    def _rates(self, call: Callable[[], object], rounds: int) -> list[float]:
        rates = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            call()
            torch.cuda.synchronize()
            rates.append(self.num_weights * (self.megabytes << 20) / (time.perf_counter() - start_s) / 1e9)
        return rates


def _copy(folder: str, device: torch.device) -> torch.Tensor:
    with (Path(folder) / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8).to(device)
