"""How fast weights come from the host's copies to a GPU, against copies from pinned memory, and beside a run."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import on_gpu
from suite.stats import extremes, median
from tilework.pipelines.cuda.copies import CudaStreams, SideCopies
from tilework.worker.models.pinned import PinnedFiles
from tilework.worker.models.room import RESERVE_BYTES
from tilework.worker.models.shared_weights import Form, SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """`num_weights` weights of `megabytes` each, `rounds` times by each way; a run is `products` of matrices of `side`.

    On a CPU it is a rehearsal, in which nothing is compared.
    """

    device: str = "cuda"
    num_weights: int = 64
    megabytes: int = 64
    rounds: int = 3
    side: int = 8192
    products: int = 50
    folder: str = "/dev/shm"

    @classmethod
    def make(cls, quick: bool) -> Loads:
        if not on_gpu():
            return cls(device="cpu", num_weights=2, megabytes=1, side=64, products=2)
        return cls(num_weights=8) if quick else cls()

    def measure(self, note: Note) -> Finding:
        device, num_bytes = torch.device(self.device, 0), self.megabytes << 20
        free, needed = shutil.disk_usage(self.folder).free, self.num_weights * num_bytes + RESERVE_BYTES
        if free < needed:
            raise CaseFailed(
                f"{self.folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed; give a container "
                "more (docker run --shm-size)"
            )
        weights = [torch.randint(0, 255, (num_bytes,), dtype=torch.uint8) for _ in range(self.num_weights)]
        forms = [replace(Form.of(weight), device=device) for weight in weights]
        there = [torch.empty(0, dtype=torch.uint8, device=device) for _ in weights]
        pinned = weights[0].pin_memory() if self.device == "cuda" else weights[0]
        with TemporaryDirectory(dir=self.folder) as folder:
            pinned_files = PinnedFiles() if self.device == "cuda" else PinnedFiles(lambda *_: True, lambda _: None)
            streams = CudaStreams(device) if self.device == "cuda" else _AtOnce()
            shared = SharedWeights(Path(folder), SideCopies(streams), pinned_files)
            shared.keep("weights", weights)
            note(f"{self.num_weights * num_bytes / 1e9:.1f} GB lie in {self.folder}")

            def load() -> None:
                for _ in shared.open("weights", forms).bring(there):
                    pass

            first = self._rates(load, 1)
            ways = {
                "pinned memory": self._rates(lambda: [pinned.to(device, copy=True) for _ in weights], self.rounds),
                "the host's copy, for the first time": first,
                "the host's copy, again": self._rates(load, self.rounds),
                "a mapped file that is not registered": self._rates(lambda: _copy(folder, device), self.rounds),
            }
            pinned_files.map(Path(folder) / "weights", self.num_weights * num_bytes)  # On a CPU nothing has done it.
            beside = self._beside(shared, forms, there, note)
            if not all(torch.equal(mine.cpu(), weight) for mine, weight in zip(there, weights, strict=True)):
                raise CaseFailed("weights that came beside a run are other ones")
        rows = tuple((way, f"{median(rates):.1f}") for way, rates in ways.items())
        again, best = median(ways["the host's copy, again"]), median(ways["pinned memory"])
        return Finding(
            checks=self._checks(again / best, beside) if self.device == "cuda" else (),
            method=(
                "Weights in one file in memory, as workers keep them (`worker.models.shared_weights`); the first load "
                "registers the file with the driver. Times until the device is done.",
                "Beside a run: products of matrices in bfloat16, alone and while weights come by a stream of their own "
                "(`--copy-stream`), in turns; the weights are compared bit by bit afterwards.",
            ),
            tables=(
                Table(title="Bandwidth in GB/s (median)", columns=("from", "GB/s"), rows=rows),
                Table(
                    title="Beside a run, in ms (median)",
                    columns=tuple(beside),
                    rows=(tuple(f"{1e3 * median(seconds):.2f}" for seconds in beside.values()),),
                ),
            ),
            facts={"device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU"},
        )

    def _checks(self, again: float, beside: dict[str, list[float]]) -> tuple[Check, ...]:
        slower = [with_load / alone for with_load, alone in zip(beside[_WITH], beside[_ALONE], strict=True)]
        return (
            Check(what="loads from the host's copy / copies of pinned memory", measured=extremes([again]), low=0.8),
            Check(what="a run beside a load / alone", measured=extremes(slower), high=1.1),
        )

    def _beside(
        self, shared: SharedWeights, forms: Sequence[Form], there: Sequence[Tensor], note: Note
    ) -> dict[str, list[float]]:
        """Seconds of a run alone, of a load alone, of a run beside a load, and of both."""
        matrix = torch.randn(self.side, self.side, device=self.device, dtype=torch.bfloat16)

        def run() -> None:
            for _ in range(self.products):
                matrix @ matrix
            self._finish_run()

        def send() -> Any:
            sending = shared.send("weights", there, forms)
            if sending is None:
                raise CaseFailed("the device does not read the file by itself, so that nothing comes beside a run")
            return sending

        def load() -> None:
            send().end.synchronize()

        times: dict[str, list[float]] = {name: [] for name in (_ALONE, "a load", _WITH, "both")}
        for index in range(self.rounds + 1):
            alone_s = self._seconds(run)
            load_s = self._seconds(load)
            start_s = time.perf_counter()
            sending = send()
            run()
            with_s = time.perf_counter() - start_s
            sending.end.synchronize()
            both_s = time.perf_counter() - start_s
            if index:  # The first warms up.
                for name, seconds in zip(times, (alone_s, load_s, with_s, both_s), strict=True):
                    times[name].append(seconds)
        note(f"a run beside a load: {1e3 * median(times[_WITH]):.1f} ms, alone {1e3 * median(times[_ALONE]):.1f} ms")
        return times

    def _rates(self, call: Callable[[], object], rounds: int) -> list[float]:
        num_bytes = self.num_weights * (self.megabytes << 20)
        return [num_bytes / self._seconds(call) / 1e9 for _ in range(rounds)]

    def _seconds(self, call: Callable[[], object]) -> float:
        self._finish()
        start_s = time.perf_counter()
        call()
        self._finish()
        return time.perf_counter() - start_s

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _finish_run(self) -> None:
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


_ALONE, _WITH = "a run", "a run beside a load"


class _AtOnce:
    """Streams of a rehearsal: the device is the host, and everything is done at once."""

    def current(self) -> _AtOnce:
        return self

    def new(self) -> _AtOnce:
        return self

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Any:
        return self

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self, stream: Any) -> None:
        """As of an event."""

    def synchronize(self) -> None:
        """As of an event."""

    def wait_event(self, event: Any) -> None:
        """As of a stream."""

    def query(self) -> bool:
        return True


def _copy(folder: str, device: torch.device) -> torch.Tensor:
    with (Path(folder) / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8).to(device, copy=True)
