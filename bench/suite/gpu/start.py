"""Whether a server starts on a GPU in each setup, how soon it draws, and whether its pictures are those of stock."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

import tilework
from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import TOY, on_gpu
from suite.server import serving, tilework_json
from suite.stats import exact
from tilework.pipelines.loading import quiet

_TIMEOUT_S = 300.0
"""The first picture of a setup may wait for a compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The options of a server, and what `tilework.reference` is told to set up a stock pipeline in the same way."""

    options: tuple[str, ...] = ()
    reference: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(self.options) or "as it is"


_LAYERS = Setup(options=("--offload", "layers"), reference={"offload": "layers"})
_ON_GPU = (Setup(), Setup(options=("--cuda-graphs",)))
_OFFLOADS_ON_GPU = (Setup(options=("--offload", "components", "--copy-stream")), _LAYERS)
_ON_CPU = (Setup(),)
_OFFLOADS_ON_CPU = (Setup(options=("--offload", "components", "--weights-memory", "32MB")), _LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The shipped model on a server with one worker, in each setup; a picture for each seed, the first two sizes alike.

    `device` is what the server is told; `found` is the device that it is to find.
    """

    setups: tuple[Setup, ...]
    found: str
    dtype: str
    device: str = "auto"
    sides: tuple[int, ...] = (128, 128, 96)
    steps: int = 8
    guidance_scale: float = 4.0
    prompt: str = "a large red circle on a blue background"

    @classmethod
    def make(cls, quick: bool, offloads: bool = False) -> Start:
        if not on_gpu():
            return cls(setups=_OFFLOADS_ON_CPU if offloads else _ON_CPU, found="cpu", dtype="float32")
        setups = _OFFLOADS_ON_GPU if offloads else _ON_GPU
        return cls(setups=setups[: 1 if quick else None], found="cuda", dtype="bfloat16")

    def measure(self, note: Note) -> Finding:
        quiet()
        problems = self._doctor(note)
        checks = [Check(what="errors that `tilework doctor` finds", measured=exact(len(problems)), high=0)]
        rows = []
        for setup in self.setups:
            try:
                found = self._served(setup, note)
            except (CaseFailed, httpx.HTTPError) as error:
                note(f"{setup.name}: {error}")
                found = (0, (setup.name, f"failed: {error}", "", ""))
            num_equal, row = found
            checks.append(
                Check(what=f"{setup.name}: pictures equal to stock", measured=exact(num_equal), low=self._all)
            )
            rows.append(row)
        return Finding(
            checks=tuple(checks),
            method=(
                f"`tilework serve {TOY.model} --device {self.device}` with each row's options: pictures one after "
                "another, compared bit by bit with `tilework.reference` set up so, in this process. Of CUDA graphs the "
                "first step of a size is eager, and the second is recorded.",
                "Ready: from the command to the first 200 of /ready; it imports, loads, and measures costs.",
            ),
            tables=(
                Table(
                    title=f"{TOY.model}, {self.steps} steps, {self.found}, {self.dtype}",
                    columns=("options", "ready, s", "pictures, s", "equal to stock"),
                    rows=tuple(rows),
                ),
            ),
            facts={"found by doctor": "; ".join(problems) or "nothing wrong"},
        )

    @property
    def _all(self) -> int:
        return len(self.sides)

    def _doctor(self, note: Note) -> list[str]:
        """The errors that it finds with the device that is to be there; free ports are not asked for."""
        answer = tilework_json(["doctor", "--device", self.found], ends_with=(0, 1))
        for one in answer["checks"]:
            if one["level"] != "ok":
                note(f"doctor: {one['what']}: {one['found']}")
        errors = [one for one in answer["checks"] if one["level"] == "error" and not one["what"].startswith("port ")]
        return [f"{one['what']}: {one['found']}" for one in errors]

    def _served(self, setup: Setup, note: Note) -> tuple[int, tuple[str, ...]]:
        """How many pictures equal those of stock, and the row."""
        with serving(1, device=self.device, options=setup.options) as server:
            seconds, pixels = list[float](), list[np.ndarray[Any, Any]]()
            with httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, trust_env=False) as http:
                for seed, side in enumerate(self.sides):
                    start_s = time.perf_counter()
                    answer = http.post("/v1/images/generations", json=self._ask(seed) | {"size": f"{side}x{side}"})
                    if answer.status_code != 200:
                        raise CaseFailed(f"the server answered HTTP {answer.status_code}: {answer.text[:200]}")
                    seconds.append(time.perf_counter() - start_s)
                    png = base64.b64decode(answer.json()["data"][0]["b64_json"])
                    pixels.append(np.asarray(Image.open(io.BytesIO(png))))
        stock = self._stock(setup)
        num_equal = sum(map(np.array_equal, pixels, stock))
        row = (
            setup.name,
            f"{server.ready_s:.1f}",
            ", ".join(f"{one:.2f}" for one in seconds),
            f"{num_equal} of {self._all}",
        )
        note(", ".join(row))
        return num_equal, row

    def _ask(self, seed: int) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "seed": seed,
        }

    def _stock(self, setup: Setup) -> list[np.ndarray[Any, Any]]:
        pipeline: Any = tilework.reference(TOY.model, device=self.found, dtype=self.dtype, **setup.reference)
        pipeline.set_progress_bar_config(disable=True)
        pictures = []
        for seed, side in enumerate(self.sides):
            ask = {name: value for name, value in self._ask(seed).items() if name != "seed"}
            generator = torch.Generator().manual_seed(seed)
            made = pipeline(**ask, **TOY.stock, height=side, width=side, generator=generator)
            pictures.append(np.asarray(made.images[0]))
        return pictures
