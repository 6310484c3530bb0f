"""Score the `shapes` model: does it draw what captions say that it never saw?

    python -m training.shapes.score

For each trained size it draws held-out captions with the stock pipeline and asks the judge for colour, shape and
background. The judge itself is checked first: on real drawings it must be right, on shuffled captions at chance.
Writes `score.json` and `contact_sheet.png` beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from tilework.report.contact_sheet import Frame, draw_contact_sheet
from training.shapes.drawing import COLOURS, SHAPES, Scene, all_scenes, caption, draw, split_scenes
from training.shapes.judge import Verdict, judge
from training.shapes.model import DEFAULTS
from training.shapes.train import BUCKETS

HERE = Path(__file__).parent


def rates(scenes: Sequence[Scene], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of verdicts that agree with their scenes, by property."""
    pairs = list(zip(scenes, verdicts, strict=True))
    names = ("colour", "shape", "background")
    return {name: sum(getattr(s, name) == getattr(v, name) for s, v in pairs) / len(pairs) for name in names}


def judge_drawings(rng: Random) -> tuple[dict[str, float], dict[str, float]]:
    """The judge on 1,100 real drawings: with their own captions, and with captions shuffled."""
    scenes = rng.choices(all_scenes(), k=1100)
    sizes = list(BUCKETS)
    verdicts = [judge(draw(scene, *sizes[index % len(sizes)], rng)) for index, scene in enumerate(scenes)]
    return rates(scenes, verdicts), rates(rng.sample(scenes, len(scenes)), verdicts)


def agreement(prompt: str, picture: np.ndarray) -> float:
    """The share of colour, shape and background that the judge sees in a picture as its caption says.

    The picture is (rows, columns, 3), of 8 bits: for `tilework quality --score training.shapes.score:agreement`.
    """
    words = prompt.replace(",", " ").split()
    colour, background = [word for word in words if word in COLOURS]
    (shape,) = [word for word in words if word in SHAPES]
    verdict = judge(picture.transpose(2, 0, 1) / 255)
    return float(np.mean([verdict.colour == colour, verdict.shape == shape, verdict.background == background]))


def load(directory: Path) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        directory, text_encoder_3=None, tokenizer_3=None, local_files_only=True, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: StableDiffusion3Pipeline, captions: list[str], size: tuple[int, int], seed: int) -> np.ndarray:
    """Pictures (N, 3, H, W) in [0, 1], with the defaults of the model."""
    images = pipeline(
        captions,
        height=size[0],
        width=size[1],
        num_inference_steps=DEFAULTS["steps"],
        guidance_scale=DEFAULTS["guidance_scale"],
        max_sequence_length=DEFAULTS["max_sequence_length"],
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(captions))],
        output_type="np",
    ).images
    return images.transpose(0, 3, 1, 2)


def frame(image: np.ndarray, text: str) -> Frame:
    buffer = BytesIO()
    Image.fromarray((image.transpose(1, 2, 0) * 255).round().astype("uint8")).save(buffer, "PNG")
    return Frame(image=buffer.getvalue(), caption=text, size=f"{image.shape[2]}x{image.shape[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / "src/tilework/models/shapes")
    parser.add_argument("--per-size", type=int, default=100)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    diffusers_logging.set_verbosity_error()
    rng = Random(11)
    own, shuffled = judge_drawings(rng)
    print("judge on drawings ", own, "\njudge on shuffled ", shuffled, flush=True)
    pipeline = load(arguments.model)
    _, held_out = split_scenes()
    score: dict[str, Any] = {}
    frames = []
    for number, size in enumerate(BUCKETS):
        started_s = time.monotonic()
        scenes = [held_out[(number + index * 7) % len(held_out)] for index in range(arguments.per_size)]
        captions = [caption(scene, index % 2) for index, scene in enumerate(scenes)]
        images = np.concatenate(
            [generate(pipeline, captions[k : k + 10], size, 1000 * number + k) for k in range(0, len(captions), 10)]
        )
        name = f"{size[1]}x{size[0]}"
        score[name] = rates(scenes, [judge(image) for image in images])
        frames += [frame(image, text) for image, text in zip(images[:4], captions[:4], strict=True)]
        print(f"{name:8} {score[name]}  {time.monotonic() - started_s:.0f} s", flush=True)
    document = {
        "captions": f"{arguments.per_size} per size, combinations of colour, shape and background not trained on",
        "settings": DEFAULTS,
        "judge_on_drawings": own,
        "judge_on_shuffled_captions": shuffled,
        "sizes": score,
    }
    (arguments.out / "score.json").write_text(json.dumps(document, indent=2) + "\n")
    draw_contact_sheet(
        arguments.out / "contact_sheet.png", frames, columns=8, side=144, title="shapes: held-out captions"
    )


if __name__ == "__main__":
    main()
