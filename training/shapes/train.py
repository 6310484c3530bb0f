"""Train the `shapes` model on a CPU: autoencoder first, then text encoders and transformer together.

    python -m training.shapes.train --out src/tilework/models/shapes

Rectified flow with classifier-free guidance (10% of the captions are dropped), noise levels shifted with the number
of tokens, an exponential moving average of the weights, bfloat16 autocast. Small sizes first, then all of BUCKETS. A
checkpoint is kept in `--work` and picked up again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from torch.nn import functional

from training.shapes.drawing import TEMPLATES, Scene, caption, draw, split_scenes
from training.shapes.model import (
    BASE_SHIFT,
    BASE_TOKENS,
    MAX_SHIFT,
    MAX_TOKENS,
    MAX_TOKENS_IMAGE,
    PIXELS_PER_TOKEN,
    build_pipeline,
    save_half,
)

# (height, width) -> (batch, share of the steps once all sizes are trained)
BUCKETS: dict[tuple[int, int], tuple[int, float]] = {
    (64, 64): (48, 0.16),
    (96, 96): (24, 0.12),
    (64, 128): (24, 0.07),
    (128, 64): (24, 0.07),
    (96, 128): (20, 0.07),
    (128, 96): (20, 0.07),
    (128, 128): (16, 0.14),
    (160, 160): (12, 0.08),
    (128, 192): (10, 0.06),
    (192, 128): (10, 0.06),
    (192, 192): (10, 0.10),
}
SMALL = {(64, 64): 0.75, (96, 96): 0.25}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    autoencoder_steps: int = 2500
    steps: int = 14000
    small_share: float = 0.45
    pool: int = 20_000
    learning_rate: float = 1.5e-3
    seed: int = 0


def to_batch(scenes: list[Scene], height: int, width: int, rng: Random) -> Tensor:
    return torch.stack([torch.from_numpy(draw(s, height, width, rng)) for s in scenes]) * 2 - 1


def schedule(step: int, total: int, warmup: int, constant_share: float) -> float:
    """Learning-rate factor: linear warm-up, constant, then linear decay to 2%."""
    progress = step / total
    decay = 1.0 if progress < constant_share else max(0.02, (1 - progress) / (1 - constant_share))
    return min(1.0, (step + 1) / warmup) * decay


def train_autoencoder(vae: AutoencoderKL, scenes: list[Scene], recipe: Recipe) -> None:
    """Reconstruction (L1 + L2) with a little latent noise; latent channels are kept near zero mean, unit variance."""
    rng = Random(recipe.seed + 1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    sizes = [(64, 64), (64, 96), (96, 64), (128, 128), (64, 64), (96, 96), (192, 192)]
    for step in range(recipe.autoencoder_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * schedule(step, recipe.autoencoder_steps, 50, 0.4)
        height, width = sizes[step % len(sizes)]
        count = max(2, 24 * 4096 // (height * width))
        x = to_batch(rng.choices(scenes, k=count), height, width, rng)
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encode(x).latent_dist.mean.float()
            y = vae.decode(z + 0.05 * torch.randn_like(z)).sample.float()
        drift = z.mean((0, 2, 3)).square().mean() + (z.std((0, 2, 3)) - 1).square().mean()
        loss = functional.l1_loss(y, x) + functional.mse_loss(y, x) + 0.02 * drift
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            report("autoencoder", step, recipe.autoencoder_steps, f"loss {loss.item():.4f}")


@torch.no_grad()
def finish_autoencoder(vae: AutoencoderKL, scenes: list[Scene], rng: Random) -> float:
    """Fix the latent scaling on real drawings and return the reconstruction's PSNR in dB over three sizes."""
    sizes = [(64, 64), (128, 96), (192, 192)]
    latents = [vae.encode(to_batch(rng.choices(scenes, k=32), *size, rng)).latent_dist.mean for size in sizes]
    values = torch.cat([z.flatten() for z in latents])
    vae.register_to_config(scaling_factor=1 / values.std().item(), shift_factor=values.mean().item())
    errors = []
    for size in sizes:
        x = to_batch(rng.choices(scenes, k=16), *size, rng)
        y = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
        errors.append(functional.mse_loss(y, x).item())
    return 10 * math.log10(4 / (sum(errors) / len(errors)))


@dataclass(frozen=True)
class Pool:
    """Cached training examples of one size: scaled latents (N, C, H/4, W/4) in bfloat16, and their scenes."""

    latents: Tensor
    scenes: list[Scene]


@torch.no_grad()
def fill_pools(vae: AutoencoderKL, scenes: list[Scene], recipe: Recipe) -> dict[tuple[int, int], Pool]:
    rng = Random(recipe.seed + 2)
    pools = {}
    for (height, width), (_, share) in BUCKETS.items():
        count = max(1200, round(recipe.pool * share * (2 if (height, width) in SMALL else 1)))
        chosen = rng.choices(scenes, k=count)
        parts = []
        for start in range(0, count, 32):
            x = to_batch(chosen[start : start + 32], height, width, rng)
            with torch.autocast("cpu", torch.bfloat16):
                mean = vae.encode(x).latent_dist.mean.float()
            parts.append(((mean - vae.config.shift_factor) * vae.config.scaling_factor).bfloat16())
        pools[height, width] = Pool(torch.cat(parts), chosen)
        report("latents", height, width, f"{count} drawings")
    return pools


def shift_of(height: int, width: int) -> float:
    """Log-shift of the noise level for an image size; linear in tokens, as the sampler's dynamic shifting."""
    tokens = height * width // PIXELS_PER_TOKEN**2
    return BASE_SHIFT + (MAX_SHIFT - BASE_SHIFT) * (tokens - BASE_TOKENS) / (MAX_TOKENS_IMAGE - BASE_TOKENS)


def embed(pipeline: StableDiffusion3Pipeline, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the SD3 pipeline makes of token ids without T5: (sequence embeddings, pooled embedding)."""
    outputs = [encoder(ids, output_hidden_states=True) for encoder in (pipeline.text_encoder, pipeline.text_encoder_2)]
    sequence = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return sequence, torch.cat([output.text_embeds for output in outputs], dim=-1)


class Trainer:
    """Transformer and text encoders, their moving average, and the optimizer."""

    def __init__(self, pipeline: StableDiffusion3Pipeline, recipe: Recipe) -> None:
        self.pipeline, self.recipe = pipeline, recipe
        modules = (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2)
        self.parameters = [p for module in modules for p in module.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))
        self.token_ids: dict[str, list[int]] = {}
        self.step = 0

    def tokenize(self, captions: list[str]) -> Tensor:
        for text in captions:
            if text not in self.token_ids:
                encoded = self.pipeline.tokenizer(text, padding="max_length", max_length=MAX_TOKENS, truncation=True)
                self.token_ids[text] = encoded.input_ids
        return torch.tensor([self.token_ids[text] for text in captions])

    def train_step(self, latents: Tensor, captions: list[str], shift: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * schedule(self.step, self.recipe.steps, 300, 0.55)
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(torch.randn(len(latents)) + shift)
        noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
        with torch.autocast("cpu", torch.bfloat16):
            sequence, pooled = embed(self.pipeline, self.tokenize(captions))
            velocity = self.pipeline.transformer(
                hidden_states=noisy,
                timestep=sigma * 1000,
                encoder_hidden_states=sequence,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        loss = functional.mse_loss(velocity.float(), noise - latents)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(0.999, self.step / (self.step + 50))
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

    def restore(self, state: dict[str, object]) -> None:
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(saved)
        self.average, self.step = state["average"], state["step"]
        self.optimizer.load_state_dict(state["optimizer"])

    def use_average(self) -> None:
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.copy_(average)


def sizes(recipe: Recipe, first: int) -> Iterator[tuple[int, int]]:
    """The image size of every step from `first` on."""
    everything = {size: share for size, (_, share) in BUCKETS.items()}
    for step in range(first, recipe.steps):
        shares = SMALL if step < recipe.small_share * recipe.steps else everything
        yield Random(recipe.seed * 1_000_003 + step).choices(list(shares), weights=list(shares.values()))[0]


def random_caption(scene: Scene, rng: Random) -> str:
    return "" if rng.random() < 0.1 else caption(scene, rng.randrange(len(TEMPLATES)))


def train_transformer(trainer: Trainer, pools: dict[tuple[int, int], Pool], recipe: Recipe, checkpoint: Path) -> None:
    started, recent = time.monotonic(), []
    for size in sizes(recipe, trainer.step):
        rng = Random(recipe.seed * 7_000_003 + trainer.step)
        torch.manual_seed(recipe.seed * 7_000_003 + trainer.step)
        pool = pools[size]
        picked = [rng.randrange(len(pool.scenes)) for _ in range(BUCKETS[size][0])]
        captions = [random_caption(pool.scenes[index], rng) for index in picked]
        recent.append(trainer.train_step(pool.latents[picked].float(), captions, shift_of(*size)))
        if trainer.step % 100 == 0:
            minutes = (time.monotonic() - started) / 60
            report(
                "transformer", trainer.step, recipe.steps, f"loss {sum(recent) / len(recent):.4f}  {minutes:.1f} min"
            )
            recent.clear()
        if trainer.step % 500 == 0:
            torch.save(trainer.state(), checkpoint)


def report(phase: str, done: int, total: int, text: str) -> None:
    print(f"{phase:12} {done:6}/{total}  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the finished pipeline")
    parser.add_argument("--work", type=Path, default=Path("build/shapes"), help="checkpoints; continued if present")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--export", action="store_true", help="save the newest checkpoint as it is, train no further")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    diffusers_logging.set_verbosity_error()
    recipe = Recipe(steps=arguments.steps)
    torch.manual_seed(recipe.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    pipeline = build_pipeline()
    training_scenes, _ = split_scenes()

    autoencoder_file = arguments.work / "autoencoder.pt"
    if autoencoder_file.exists():
        pipeline.vae.load_state_dict(torch.load(autoencoder_file))
    else:
        train_autoencoder(pipeline.vae, training_scenes, recipe)
        torch.save(pipeline.vae.state_dict(), autoencoder_file)
    quality = finish_autoencoder(pipeline.vae, training_scenes, Random(recipe.seed + 3))
    report("autoencoder", recipe.autoencoder_steps, recipe.autoencoder_steps, f"PSNR {quality:.1f} dB")

    trainer = Trainer(pipeline, recipe)
    checkpoint = arguments.work / "transformer.pt"
    if checkpoint.exists():
        trainer.restore(torch.load(checkpoint))
    if not arguments.export:
        train_transformer(trainer, fill_pools(pipeline.vae, training_scenes, recipe), recipe, checkpoint)
    trainer.use_average()
    save_half(pipeline, arguments.out)


if __name__ == "__main__":
    main()
