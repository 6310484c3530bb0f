"""Train the LoRA `outline` of the finished `shapes` model on a CPU: shapes become outlines, words stay what they mean.

    python -m training.shapes.lora --out examples/loras/outline.safetensors

The same rectified flow as in `train.py`, on drawings in which only the border of each shape has its colour.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import Tensor
from torch.nn import functional

import tilework
from training.shapes.drawing import Scene, draw, split_scenes
from training.shapes.model import MAX_TOKENS
from training.shapes.train import embed, random_caption, report, schedule, shift_of

RANK = 8
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
WIDTH = 0.05
"""Of the border, relative to the shorter side."""
BATCHES = {(64, 64): 32, (96, 96): 16, (128, 128): 10}
LEARNING_RATE = 3e-3
STEPS = 700


class Trainer:
    """The layers of the LoRA, beside a model that stays as it is."""

    def __init__(self, pipeline: StableDiffusion3Pipeline) -> None:
        self.pipeline = pipeline
        pipeline.transformer.requires_grad_(False)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LAYERS))
        inject_adapter_in_model(config, pipeline.transformer)
        self.parameters = [one for one in pipeline.transformer.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0)

    def train(self, steps: int, scenes: list[Scene]) -> Iterator[float]:
        """The loss of each step."""
        for step in range(steps):
            rng = Random(7_000_003 + step)
            torch.manual_seed(7_000_003 + step)
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * schedule(step, steps, 20, 0.5)
            size = rng.choice(list(BATCHES))
            chosen = rng.choices(scenes, k=BATCHES[size])
            drawings = torch.stack([torch.from_numpy(draw(one, *size, rng, WIDTH)) for one in chosen]) * 2 - 1
            captions = [random_caption(one, rng) for one in chosen]
            loss = self._loss(self._latents(drawings), captions, shift_of(*size))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            yield loss.item()

    @torch.no_grad()
    def _latents(self, drawings: Tensor) -> Tensor:
        vae: Any = self.pipeline.vae
        return (vae.encode(drawings).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor

    def _loss(self, latents: Tensor, captions: list[str], shift: float) -> Tensor:
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(torch.randn(len(latents)) + shift)
        noisy = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
        with torch.no_grad():
            texts = self.pipeline.tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, truncation=True)
            sequence, pooled = embed(self.pipeline, torch.tensor(texts.input_ids))
        velocity = self.pipeline.transformer(
            hidden_states=noisy,
            timestep=sigma * 1000,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return functional.mse_loss(velocity, noise - latents)

    def save(self, file: Path) -> None:
        """In the form in which diffusers reads LoRAs, as fp16."""
        layers = get_peft_model_state_dict(self.pipeline.transformer)
        file.parent.mkdir(parents=True, exist_ok=True)
        StableDiffusion3Pipeline.save_lora_weights(
            file.parent,
            weight_name=file.name,
            transformer_lora_layers={name: one.half().contiguous() for name, one in layers.items()},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the LoRA")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pipeline = tilework.reference("shapes")
    trainer, recent = Trainer(pipeline), list[float]()
    scenes, _ = split_scenes()
    for step, loss in enumerate(trainer.train(arguments.steps, scenes), start=1):
        recent.append(loss)
        if step % 50 == 0:
            report("lora", step, arguments.steps, f"loss {sum(recent) / len(recent):.4f}")
            recent.clear()
            trainer.save(arguments.out)
    trainer.save(arguments.out)


if __name__ == "__main__":
    main()
