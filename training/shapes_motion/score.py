"""Score the `shapes-motion` model: do clips show what captions say that it never saw?

    python -m training.shapes_motion.score

For each trained number of frames it draws held-out captions with the stock pipeline and asks the judge for colour,
shape, background and motion. The judge itself is checked first: on real drawings it must be right, on shuffled captions
at chance. Writes `score.json` and `contact_sheet.png` beside this file.
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
from diffusers import WanPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from tilework.report.contact_sheet import Frame, draw_frames
from training.shapes_motion.drawing import Scene, all_scenes, caption, draw, split_scenes
from training.shapes_motion.judge import Verdict, judge
from training.shapes_motion.model import DEFAULTS
from training.shapes_motion.train import LENGTHS

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "src/tilework/models/shapes-motion"
_SHOWN = 6  # Clips of each number of frames on the contact sheet.


def rates(scenes: Sequence[Scene], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of verdicts that agree with their scenes, by property, and in all of them."""
    names = Verdict._fields
    right = [[getattr(s, name) == getattr(v, name) for name in names] for s, v in zip(scenes, verdicts, strict=True)]
    return dict(zip((*names, "all"), np.mean([[*row, all(row)] for row in right], axis=0).tolist(), strict=True))


def judge_drawings(rng: Random) -> tuple[dict[str, float], dict[str, float]]:
    """The judge on 300 real clips: with their own captions, and with captions shuffled."""
    scenes, side = rng.choices(all_scenes(), k=300), DEFAULTS["height"]
    verdicts = [judge(draw(scene, rng.choice(list(LENGTHS)), side, side, rng)) for scene in scenes]
    return rates(scenes, verdicts), rates(rng.sample(scenes, len(scenes)), verdicts)


def load(directory: Path) -> WanPipeline:
    pipeline = WanPipeline.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: WanPipeline, captions: list[str], frames: int, seed: int) -> np.ndarray:
    """Clips (N, 3, frames, H, W) in [0, 1], with the defaults of the model."""
    clips = pipeline(
        captions,
        height=DEFAULTS["height"],
        width=DEFAULTS["width"],
        num_frames=frames,
        num_inference_steps=DEFAULTS["steps"],
        guidance_scale=DEFAULTS["guidance_scale"],
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(captions))],
        output_type="np",
    ).frames
    return clips.transpose(0, 4, 1, 2, 3)


def encoded(clip: np.ndarray) -> list[bytes]:
    """The frames of a clip (3, frames, H, W) as PNGs."""
    found = []
    for frame in (clip.transpose(1, 2, 3, 0) * 255).round().astype("uint8"):
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--clips", type=int, default=100, help="for each number of frames")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    diffusers_logging.set_verbosity_error()
    own, shuffled = judge_drawings(Random(11))
    print("judge on drawings ", own, "\njudge on shuffled ", shuffled, flush=True)
    pipeline = load(arguments.model)
    _, held_out = split_scenes()
    score: dict[str, Any] = {}
    shown: list[Frame] = []
    frames_of: dict[int, list[bytes]] = {}
    for number, frames in enumerate(LENGTHS):
        started_s = time.monotonic()
        scenes = [held_out[(number + index * 7) % len(held_out)] for index in range(arguments.clips)]
        captions = [caption(scene, index % 2) for index, scene in enumerate(scenes)]
        clips = np.concatenate(
            [generate(pipeline, captions[k : k + 10], frames, 1000 * number + k) for k in range(0, len(captions), 10)]
        )
        score[str(frames)] = rates(scenes, [judge(clip) for clip in clips])
        for clip, text in zip(clips[:_SHOWN], captions, strict=False):
            frames_of[len(shown)] = encoded(clip)
            shown.append(Frame(image=None, caption=text, size=f"{clip.shape[3]}x{clip.shape[2]}, {frames} frames"))
        print(f"{frames:3} frames  {score[str(frames)]}  {time.monotonic() - started_s:.0f} s", flush=True)
    document = {
        "captions": f"{arguments.clips} per number of frames, combinations of colour, shape and motion not trained on",
        "settings": DEFAULTS,
        "judge_on_drawings": own,
        "judge_on_shuffled_captions": shuffled,
        "frames": score,
    }
    (arguments.out / "score.json").write_text(json.dumps(document, indent=2) + "\n")
    title = "shapes-motion: held-out captions"
    draw_frames(arguments.out / "contact_sheet.png", shown, frames_of, title=title, columns=6, side=128)


if __name__ == "__main__":
    main()
