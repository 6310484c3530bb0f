"""The yardstick: the stock diffusers pipeline, called in a loop in a process of its own.

Run as `python -m suite.stock MODEL THREADS`. Reads one JSON object per line, draws it, and answers with one line:
seconds of the pipeline call and of the PNG encoding, both measured here, and the PNG itself. Imports nothing of
Tilework.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

PNG_LEVEL = 3
"""The server's own, so that both sides write the same file."""


def main(model: str, threads: int) -> None:
    import diffusers
    import torch
    import transformers

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    torch.set_num_threads(threads)
    index = json.loads((Path(model) / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name, value in index.items() if value == [None, None]}  # SD3 without T5 wants it said.
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        model, local_files_only=True, use_safetensors=True, dtype=torch.float32, **absent
    )
    pipeline.set_progress_bar_config(disable=True)
    _answer({"ready": True, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        _answer(_draw(pipeline, torch.Generator, json.loads(line)))


def _draw(pipeline: Any, generator: Any, ask: dict[str, Any]) -> dict[str, Any]:
    seed = ask.pop("seed")
    start_s = time.perf_counter()
    picture = pipeline(**ask, generator=generator("cpu").manual_seed(seed)).images[0]
    drawn_s = time.perf_counter()
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=PNG_LEVEL)
    end_s = time.perf_counter()
    png = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"call_s": drawn_s - start_s, "png_s": end_s - drawn_s, "png": png}


def _answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
