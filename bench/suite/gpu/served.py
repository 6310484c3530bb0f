"""Pictures through the whole stack, against the stock pipeline on the same GPU."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import TOY, Drawn, folder_of, on_gpu
from suite.server import serving
from suite.stats import exact, extremes, median
from suite.stock_process import StockProcess, stock_process

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request at a time to a server with one worker, and to the stock pipeline, in turns; then `queued` at once."""

    device: str
    dtype: str
    drawn: Drawn
    guidance_scale: float = 5.0
    queued: int = 4
    most: float = 1.02
    least_busy: float = 0.98
    prompt: str = "a large red circle on a blue background"

    @classmethod
    def make(cls, quick: bool, model: str, steps: int, rounds: int) -> Served:
        if not on_gpu():
            return cls(device="cpu", dtype="float32", drawn=TOY, queued=2)
        drawn = Drawn(model=model, side=1024, steps=steps, rounds=1 if quick else rounds)
        return cls(device="cuda", dtype="bfloat16", drawn=drawn)

    def measure(self, note: Note) -> Finding:
        checks, row = self._model(self.drawn, note)
        return Finding(
            checks=tuple(checks),
            method=(
                "Tilework: from before the HTTP request is sent until its PNG is decoded from base64; one worker, with "
                "the costs that the start measured. Stock: the pipeline call and Pillow's PNG encoding in a separate "
                "process. Both on the same GPU, in turns, one picture each, loading excluded and warmed up; the same "
                "seeds, sizes, steps and guidance. The ratio is the median over pairs; the interval is all of them. "
                "Each picture encodes its prompt: the server keeps no encoded ones.",
                "Queued: several requests at once; their time through the server, over as many stock pictures. Busy: "
                "from the start of the first run to the end of the last, the share of time in which the device had a "
                "run, its synchronisation included.",
                "Weights are random, of real size (`tilework fake`): the pictures are noise, and are compared bit by "
                "bit.",
            ),
            tables=(
                Table(
                    title="Pictures",
                    columns=(
                        "model",
                        "size, steps",
                        "stock, s",
                        "tilework, s",
                        "of it on the device, s (share)",
                        "queued / stock",
                        "busy",
                        "equal to stock",
                        "start, s",
                    ),
                    rows=(row,),
                ),
            ),
        )

    def _model(self, one: Drawn, note: Note) -> tuple[list[Check], tuple[str, ...]]:
        folder = folder_of(one.model, note)
        with (
            serving(1, settings={"encode_cache_bytes": 0}, model=folder, device=self.device) as server,
            stock_process(1, folder, self.device, self.dtype) as stock,
            httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False) as http,
        ):
            note(f"{one.model}: ready after {server.ready_s:.1f} s")
            self._ours(http, one, 0)
            self._stock(stock, one, 0)
            pairs = []
            for index in range(one.rounds):
                if index % 2 == 0:
                    ours, theirs = self._ours(http, one, index), self._stock(stock, one, index)
                else:
                    theirs, ours = self._stock(stock, one, index), self._ours(http, one, index)
                pairs.append((ours, theirs))
                note(f"{one.model}: {pairs[-1][0].seconds:.3f} s, stock {pairs[-1][1].seconds:.3f} s")
            queued_s, busy = asyncio.run(self._queue(server.url, one))
        stock_s = median(stock.seconds for _, stock in pairs)
        ours_s, device_s = (median(getattr(ours, name) for ours, _ in pairs) for name in ("seconds", "device_s"))
        equal = sum(np.array_equal(ours.pixels, stock.pixels) for ours, stock in pairs)
        checks = [
            Check(
                what=f"{one.model}, {one.side} px: tilework / stock, latency",
                measured=extremes([ours.seconds / stock.seconds for ours, stock in pairs]),
                high=self.most,
            )
        ]
        if self.device == "cuda":
            busy_share = Check(what=f"{one.model}: busy while requests wait", measured=exact(busy), low=self.least_busy)
            same = Check(what=f"{one.model}: pictures equal to stock", measured=exact(equal), low=len(pairs))
            checks += [busy_share, same]
        return checks, (
            one.model,
            f"{one.side} px, {one.steps}",
            f"{stock_s:.3f}",
            f"{ours_s:.3f}",
            f"{device_s:.3f} ({device_s / ours_s:.2f})",
            f"{queued_s / (self.queued * stock_s):.3f}",
            f"{busy:.3f}",
            f"{equal} of {len(pairs)}",
            f"{server.ready_s:.0f}",
        )

    def _ask(self, one: Drawn, seed: int) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "num_inference_steps": one.steps,
            "guidance_scale": self.guidance_scale,
            "seed": seed,
        }

    def _body(self, one: Drawn, seed: int) -> dict[str, Any]:
        return self._ask(one, seed) | {"size": f"{one.side}x{one.side}"}

    def _ours(self, http: httpx.Client, one: Drawn, seed: int) -> _Picture:
        start_s = time.perf_counter()
        answer = http.post("/v1/images/generations", json=self._body(one, seed))
        image = _image(answer)
        png = base64.b64decode(image["b64_json"])
        seconds = time.perf_counter() - start_s
        device_s = sum(each["end_s"] - each["start_s"] for each in image["tilework"]["segments"])
        return _Picture(seconds, _pixels(png), device_s)

    def _stock(self, stock: StockProcess, one: Drawn, seed: int) -> _Picture:
        answer = stock.draw(self._ask(one, seed) | dict(one.stock) | {"height": one.side, "width": one.side})
        return _Picture(answer["call_s"] + answer["file_s"], _pixels(base64.b64decode(answer["file"])))

    async def _queue(self, url: str, one: Drawn) -> tuple[float, float]:
        """Seconds until requests that come at once are all done, and the share in which the device had a run."""
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
            start_s = time.perf_counter()
            calls = [http.post("/v1/images/generations", json=self._body(one, seed)) for seed in range(self.queued)]
            images = [_image(answer) for answer in await asyncio.gather(*calls)]
            seconds = time.perf_counter() - start_s
        segments = [each for image in images for each in image["tilework"]["segments"]]
        # Times are from each arrival; these are milliseconds apart.
        first_s, last_s = min(each["start_s"] for each in segments), max(each["end_s"] for each in segments)
        busy_s = sum((each["end_s"] - each["start_s"]) / each["batch"] for each in segments)
        return seconds, busy_s / (last_s - first_s)


@dataclass(frozen=True, slots=True)
class _Picture:
    seconds: float
    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    device_s: float = 0.0


def _image(answer: httpx.Response) -> Mapping[str, Any]:
    if answer.status_code != 200:
        raise CaseFailed(f"the server answered HTTP {answer.status_code}: {answer.text[:200]}")
    image: Mapping[str, Any] = answer.json()["data"][0]
    return image


def _pixels(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(png)))
