"""Train the `shapes-motion` model on a CPU: autoencoder first, then text encoder and transformer together.

    python -m training.shapes_motion.train --out src/tilework/models/shapes-motion

Rectified flow with classifier-free guidance (10% of the captions are dropped), noise levels shifted as the sampler's,
an exponential moving average of the weights, bfloat16 autocast. A checkpoint is kept in `--work` and picked up again;
with none there, `--start DIR` goes on from the weights of a finished model.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from torch.nn import functional

from training.shapes.train import report, schedule
from training.shapes_motion.drawing import TEMPLATES, Scene, caption, draw, split_scenes
from training.shapes_motion.model import SHIFT, build_pipeline, save_half
from training.shapes_motion.muon import Muon
from training.shapes_motion.text import Texts, attend_to_few

SIDE = 64
CROP = 32
# Frames -> share of the pool of latents
LENGTHS = {9: 0.7, 17: 0.3}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    autoencoder_steps: int = 1200
    autoencoder_rate: float = 0.03
    crop_share: float = 0.9
    steps: int = 3000
    short_share: float = 0.7
    batch_latents: int = 144  # Latent frames in a batch: 48 clips of 9 frames, or 28 of 17.
    pool: int = 5000
    rate: float = 0.02
    vector_rate: float = 2e-3
    seed: int = 0


def to_batch(scenes: list[Scene], frames: int, rng: Random) -> Tensor:
    """Clips of shape (N, 3, frames, SIDE, SIDE) in [-1, 1]."""
    return torch.stack([torch.from_numpy(draw(scene, frames, SIDE, SIDE, rng)) for scene in scenes]) * 2 - 1


def crop(clip: Tensor, rng: Random) -> Tensor:
    """A window of CROP x CROP pixels about some pixel that the shape covers at some time, the same in every frame."""
    covered = ((clip - clip[:, :1, :1, :1]).abs().sum(0) > 0.5).any(0).nonzero()
    middle = covered[rng.randrange(len(covered))].tolist()
    y, x = (min(max(place - CROP // 2, 0), SIDE - CROP) for place in middle)
    return clip[:, :, y : y + CROP, x : x + CROP]


def autoencoder_batch(step: int, scenes: list[Scene], recipe: Recipe) -> Tensor:
    """Windows about the shape first, where all that is to be learnt happens; then whole clips, also longer."""
    rng = Random(recipe.seed * 1_000_003 + step)
    if step < recipe.crop_share * recipe.autoencoder_steps:
        return torch.stack([crop(clip, rng) for clip in to_batch(rng.choices(scenes, k=8), 9, rng)])
    frames, count = rng.choice([(9, 6), (9, 6), (17, 3)])
    return to_batch(rng.choices(scenes, k=count), frames, rng)


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """What `vae.decode` makes, before it limits it to [-1, 1]: beyond a limit there is no gradient to learn from."""
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    parts = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]
        one = hidden[:, :, index : index + 1]
        parts.append(vae.decoder(one, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=index == 0))
    vae.clear_cache()
    return unpatchify(torch.cat(parts, 2), vae.config.patch_size)


def train_autoencoder(vae: AutoencoderKLWan, scenes: list[Scene], recipe: Recipe, checkpoint: Path) -> None:
    """Reconstruction (L1 + L2) with a little latent noise; latent channels are kept near zero mean, unit variance."""
    optimizer, first = Muon([vae], recipe.autoencoder_rate, 3e-3), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        vae.load_state_dict(saved["parameters"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    started, recent = time.monotonic(), []
    for step in range(first, recipe.autoencoder_steps):
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        x = autoencoder_batch(step, scenes, recipe)
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encode(x).latent_dist.mean.float()
            y = decode(vae, z + 0.05 * torch.randn_like(z)).float()
        drift = z.mean((0, 2, 3, 4)).square().mean() + (z.std((0, 2, 3, 4)) - 1).square().mean()
        error = functional.mse_loss(y, x)
        (functional.l1_loss(y, x) + error + 0.02 * drift).backward()
        optimizer.step(schedule(step, recipe.autoencoder_steps, 20, 0.4))
        recent.append(error.item())
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            quality = 10 * math.log10(4 / (sum(recent) / len(recent)))
            report("autoencoder", step + 1, recipe.autoencoder_steps, f"PSNR {quality:.1f} dB  {minutes:.1f} min")
            recent.clear()
        if (step + 1) % 100 == 0 or step + 1 == recipe.autoencoder_steps:
            state = {"parameters": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint)


@torch.no_grad()
def finish_autoencoder(vae: AutoencoderKLWan, scenes: list[Scene], rng: Random) -> float:
    """Fix mean and deviation of the latents on real clips; returns the PSNR of reconstructions in dB."""
    x = torch.cat([to_batch(rng.choices(scenes, k=8), 9, rng) for _ in range(8)])
    with torch.autocast("cpu", torch.bfloat16):
        latents = torch.cat([vae.encode(clips).latent_dist.mean for clips in x.split(8)]).float()
        y = vae.decode(latents[:8]).sample.float()
    means, deviations = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=means.tolist(), latents_std=deviations.tolist())
    return 10 * math.log10(4 / functional.mse_loss(y, x[:8]).item())


@dataclass(frozen=True)
class Pool:
    """Training examples of one number of frames: scaled latents (N, C, T, H, W) in bfloat16, and their scenes."""

    latents: Tensor
    scenes: list[Scene]


@torch.no_grad()
def fill_pools(vae: AutoencoderKLWan, scenes: list[Scene], recipe: Recipe, file: Path) -> dict[int, Pool]:
    """The pool of each number of frames; what `file` has of a run before is taken from there."""
    if file.exists():
        saved = torch.load(file)
        return {frames: Pool(latents, [Scene(*values) for values in chosen]) for frames, latents, chosen in saved}
    rng, pools = Random(recipe.seed + 2), {}
    means, deviations = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    for frames, share in LENGTHS.items():
        chosen, parts = rng.choices(scenes, k=round(recipe.pool * share)), []
        for start in range(0, len(chosen), 16):
            x = to_batch(chosen[start : start + 16], frames, rng)
            with torch.autocast("cpu", torch.bfloat16):
                latents = vae.encode(x).latent_dist.mean.float()
            parts.append(((latents - means) / deviations).bfloat16())
        pools[frames] = Pool(torch.cat(parts), chosen)
        report("latents", frames, max(LENGTHS), f"{len(chosen)} clips")
    torch.save([(frames, pool.latents, [astuple(one) for one in pool.scenes]) for frames, pool in pools.items()], file)
    return pools


class Trainer:
    """Transformer and text encoder, their moving average, and the optimizer."""

    def __init__(self, pipeline: WanPipeline, recipe: Recipe) -> None:
        self.pipeline, self.recipe = pipeline, recipe
        modules = (pipeline.transformer, pipeline.text_encoder)
        self.texts = Texts(pipeline)
        self.parameters = [p for module in modules for p in module.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = Muon(modules, recipe.rate, recipe.vector_rate)
        self.step = 0

    def train_step(self, latents: Tensor, captions: list[str]) -> float:
        """One step on scaled latents (N, C, T, H, W); returns the mean squared error of the velocity."""
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(1.1 * torch.randn(len(latents)) + math.log(SHIFT))
        mixed = torch.lerp(latents, noise, sigma[:, None, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = self.texts.embed(captions)
            velocity = self.pipeline.transformer(mixed, sigma * 1000, embeddings, return_dict=False)[0]
        loss = functional.mse_loss(velocity.float(), noise - latents)
        loss.backward()
        self.optimizer.step(schedule(self.step, self.recipe.steps, 50, 0.5))
        self.step += 1
        decay = min(0.998, self.step / (self.step + 50))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        return loss.item()

    def state(self) -> dict[str, object]:
        return {
            "parameters": [p.detach() for p in self.parameters],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.use(state["parameters"])
        self.average, self.step = state["average"], state["step"]
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def use(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def random_caption(scene: Scene, rng: Random) -> str:
    """A caption of `scene`, in a quarter of the cases as a sentence; none in one of ten."""
    if rng.random() < 0.1:
        return ""
    text = caption(scene, rng.randrange(len(TEMPLATES)))
    return text if rng.random() < 0.75 else f"{text[0].upper()}{text[1:]}."


def train_transformer(trainer: Trainer, pools: dict[int, Pool], recipe: Recipe, checkpoint: Path) -> None:
    attend_to_few(trainer.pipeline.transformer)
    started, recent = time.monotonic(), []
    while trainer.step < recipe.steps:
        rng = Random(recipe.seed * 7_000_003 + trainer.step)
        torch.manual_seed(recipe.seed * 7_000_003 + trainer.step)
        frames = rng.choice(list(LENGTHS)) if trainer.step >= recipe.short_share * recipe.steps else min(LENGTHS)
        pool = pools[frames]
        batch = recipe.batch_latents // pool.latents.shape[2]
        picked = [rng.randrange(len(pool.scenes)) for _ in range(batch)]
        captions = [random_caption(pool.scenes[index], rng) for index in picked]
        recent.append(trainer.train_step(pool.latents[picked].float(), captions))
        if trainer.step % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            text = f"loss {sum(recent) / len(recent):.4f}  {minutes:.1f} min"
            report("transformer", trainer.step, recipe.steps, text)
            recent.clear()
        if trainer.step % 200 == 0 or trainer.step == recipe.steps:
            torch.save(trainer.state(), checkpoint)


@torch.enable_grad()
def train(recipe: Recipe, work: Path, out: Path, start: Path | None = None, export: bool = False) -> None:
    """Train as `recipe` says, with checkpoints in `work`, and save the pipeline to `out`.

    `start` is a finished pipeline, whose autoencoder is kept. With `export` the newest checkpoint is saved as it is.
    """
    torch.manual_seed(recipe.seed)
    work.mkdir(parents=True, exist_ok=True)
    training_scenes, _ = split_scenes()
    if start is not None:
        pipeline = WanPipeline.from_pretrained(start, local_files_only=True, dtype=torch.float32)
    else:
        pipeline = build_pipeline()
        train_autoencoder(pipeline.vae, training_scenes, recipe, work / "autoencoder.pt")
        quality = finish_autoencoder(pipeline.vae, training_scenes, Random(recipe.seed + 3))
        report("autoencoder", recipe.autoencoder_steps, recipe.autoencoder_steps, f"PSNR {quality:.1f} dB")
    trainer = Trainer(pipeline, recipe)
    checkpoint = work / "transformer.pt"
    if checkpoint.exists():
        trainer.restore(torch.load(checkpoint))
    if not export:
        pools = fill_pools(pipeline.vae, training_scenes, recipe, work / f"latents-{recipe.autoencoder_steps}.pt")
        train_transformer(trainer, pools, recipe, checkpoint)
    trainer.use(trainer.average)
    save_half(pipeline, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the finished pipeline")
    parser.add_argument(
        "--work", type=Path, default=Path("build/shapes_motion"), help="checkpoints; continued if present"
    )
    parser.add_argument("--start", type=Path, help="a finished pipeline to go on from, if there is no checkpoint")
    parser.add_argument("--autoencoder-steps", type=int, default=Recipe.autoencoder_steps)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--export", action="store_true", help="save the newest checkpoint as it is, train no further")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    diffusers_logging.set_verbosity_error()
    recipe = Recipe(steps=arguments.steps, autoencoder_steps=arguments.autoencoder_steps)
    train(recipe, arguments.work, arguments.out, arguments.start, arguments.export)


if __name__ == "__main__":
    main()
