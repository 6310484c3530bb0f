"""The yardstick: the stock diffusers pipeline, called in a loop in a process of its own.

Run as `python -m suite.stock MODEL THREADS DEVICE DTYPE`. Reads one JSON object per line, draws it, and answers with
one line: seconds of the pipeline call and of encoding the PNG, or the MP4 of a clip, both measured here, and the file
itself. Imports nothing of Tilework.
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
X264 = {"preset": "veryfast", "crf": "18"}
"""The server's own, so that both sides write the same file."""
FPS = 16


def main(model: str, threads: int, device: str, dtype: str) -> None:
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
        model, local_files_only=True, use_safetensors=True, dtype=getattr(torch, dtype), **absent
    )
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    _answer({"ready": True, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        _answer(_draw(pipeline, torch.Generator, json.loads(line)))


def _draw(pipeline: Any, generator: Any, ask: dict[str, Any]) -> dict[str, Any]:
    seed = ask.pop("seed")
    start_s = time.perf_counter()
    made = pipeline(**ask, generator=generator("cpu").manual_seed(seed))
    drawn_s = time.perf_counter()
    data = _png(made.images[0]) if "images" in made else _mp4(made.frames[0])
    end_s = time.perf_counter()
    file = base64.b64encode(data).decode("ascii")
    return {"call_s": drawn_s - start_s, "file_s": end_s - drawn_s, "file": file}


def _png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def _mp4(frames: Any) -> bytes:
    """Of frames of shape (frames, rows, columns, 3) in [0, 1]."""
    import av
    import torch

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=X264)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", torch.get_num_threads()
        for frame in (frames * 255).round().astype("uint8"):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
