"""The process with the stock pipeline (`suite.stock`), from this side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from suite.case import CaseFailed

_BENCH = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class StockProcess:
    process: subprocess.Popen[str]

    def draw(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Call the pipeline with these arguments and `seed`: `call_s`, `file_s`, and the `file` in base64."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Raises CaseFailed if the process ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CaseFailed("the process with the stock pipeline ended; its message stands above")
        values: dict[str, Any] = json.loads(line)
        return values


@contextmanager
def stock_process(
    threads: int, model: str = "shapes", device: str = "cpu", dtype: str = "float32"
) -> Iterator[StockProcess]:
    """A shipped model, or one in a directory, in the stock pipeline, with so many threads of torch."""
    shipped = Path(str(resources.files("tilework"))) / "models" / model
    directory = shipped if shipped.is_dir() else Path(model).resolve()
    run = [sys.executable, "-m", "suite.stock", str(directory), str(threads), device, dtype]
    process = subprocess.Popen(run, cwd=_BENCH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        stock = StockProcess(process)
        ready = stock.read()
        assert ready["threads"] == threads, f"torch took {ready['threads']} threads, not {threads}"
        yield stock
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
