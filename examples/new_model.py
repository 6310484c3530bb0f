"""A model of your own in one file: a transformer that no library has, and its pipeline. Tilework serves it as it is.

Try it, with random weights (so it draws noise):

    export PYTHONPATH=examples
    python -c "import new_model; new_model.save('pebble')"
    tilework serve ./pebble --adapter new_model:PebblePipeline

Nothing here knows of Tilework: the classes are what a model's authors write for diffusers. docs/models.md says what
a pipeline needs to be served.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ConfigMixin,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
    StableDiffusion3Pipeline,
)
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class PebbleBlock(nn.Module):
    """Attention over text and picture together; a gate that depends on the time lets the rest through."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.mlp = (
            nn.Linear(width, width),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        parts = self.qkv(self.norm(tokens)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.out(attended) * self.gate(time).sigmoid()[:, None]
        return tokens + self.mlp(tokens)


class PebbleTransformer(ModelMixin, ConfigMixin):
    """Predicts the velocity of latents (B, C, rows, columns) at times (B,), given the states of a text (B, T, D)."""

    @register_to_config
    def __init__(
        self,
        in_channels: int = 4,
        patch_size: int = 2,
        num_layers: int = 2,
        num_attention_heads: int = 4,
        attention_head_dim: int = 16,
        text_dim: int = 64,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        self.cut = nn.Conv2d(in_channels, width, patch_size, patch_size)
        self.read, self.place = nn.Linear(text_dim, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(PebbleBlock(width, num_attention_heads) for _ in range(num_layers))
        self.paste = nn.ConvTranspose2d(width, in_channels, patch_size, patch_size)

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        patches = self.cut(hidden_states)
        rows, columns = patches.shape[-2:]
        where = torch.cartesian_prod(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns)).to(patches)
        tokens = patches.flatten(2).transpose(1, 2) + self.place(where)
        time = get_timestep_embedding(timestep, tokens.shape[-1]).to(tokens)
        tokens = torch.cat([self.read(encoder_hidden_states), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens, time)
        return self.paste(tokens[:, -rows * columns :].transpose(1, 2).unflatten(2, (rows, columns)))


class PebblePipeline(DiffusionPipeline):
    """Text to image by flow matching, with guidance by a negative prompt."""

    def __init__(self, tokenizer: Any, text_encoder: Any, transformer: Any, vae: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler
        )
        self.vae_scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        height: int = 128,
        width: int = 128,
        num_inference_steps: int = 12,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> tuple[Any]:
        texts = [prompt, negative_prompt or ""]
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        states = self.text_encoder(tokens.to(self.device)).last_hidden_state
        sides = (height // self.vae_scale_factor, width // self.vae_scale_factor)
        shape = (1, self.transformer.config.in_channels, *sides)
        latents = randn_tensor(shape, generator=generator, device=self.device, dtype=states.dtype)
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        for time in self.progress_bar(self.scheduler.timesteps):
            wanted, unwanted = self.transformer(torch.cat([latents] * 2), time.expand(2), states).chunk(2)
            velocity = unwanted + guidance_scale * (wanted - unwanted)
            latents = self.scheduler.step(velocity, time, latents, generator=generator, return_dict=False)[0]
        config = self.vae.config
        pictures = self.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        return (self.image_processor.postprocess(pictures, output_type=output_type),)


def save(directory: str) -> None:
    """Write a model with a random transformer. Text encoder and VAE are those of `shapes`, Tilework's own model."""
    from tilework.pipelines.model_index import shipped_directory

    torch.manual_seed(0)
    shapes = StableDiffusion3Pipeline.from_pretrained(
        shipped_directory(), text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline = PebblePipeline(
        tokenizer=shapes.tokenizer,
        text_encoder=shapes.text_encoder,
        transformer=PebbleTransformer(),
        vae=shapes.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipeline.save_pretrained(directory, safe_serialization=True)
