"""The parts of the `shapes` model, untrained: stock diffusers and transformers classes built from small configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from training.shapes.drawing import COLOURS, DRAWN, SHAPES, SIZES

WORDS = ("a", "an", "on", "background", *COLOURS, *SHAPES, *SIZES)
MAX_TOKENS = 16
TEXT_WIDTH = 64
LATENT_CHANNELS = 4
# Pixels per token along one side: the autoencoder shrinks by 4, the transformer takes patches of 2.
PIXELS_PER_TOKEN = 8
# The sampler shifts towards noise with the number of tokens, as SD3 does; training draws its noise levels alike.
BASE_TOKENS, MAX_TOKENS_IMAGE, BASE_SHIFT, MAX_SHIFT = 64, 576, 0.4, 1.2


def build_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that keeps each of WORDS whole and spells any other word byte by byte."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = [*word[:-1], word[-1] + "</w>"]
        while len(letters) > 1:
            pair = (letters[0], letters[1])
            if pair not in merges:
                merges.append(pair)
                pieces.append("".join(pair))
            letters = ["".join(pair), *letters[2:]]
    vocabulary = {
        piece: index for index, piece in enumerate([*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"])
    }
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_act="gelu",
    )
    encoder = CLIPTextModelWithProjection(config)
    # CLIP's own initialisation (0.02) suits 512 dimensions and 10^8 pairs; ours must tell 20 words apart at once.
    torch.nn.init.normal_(encoder.text_model.embeddings.token_embedding.weight, std=0.5)
    torch.nn.init.normal_(encoder.text_model.embeddings.position_embedding.weight, std=0.2)
    return encoder


def build_autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,  # Both factors are fixed after training, on real drawings.
        shift_factor=0.0,
    )


def build_transformer() -> SD3Transformer2DModel:
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=7,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=48,
        qk_norm="rms_norm",
    )
    for parameter in transformer.proj_out.parameters():
        torch.nn.init.zeros_(parameter)
    return transformer


def build_sampler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=BASE_TOKENS,
        max_image_seq_len=MAX_TOKENS_IMAGE,
        base_shift=BASE_SHIFT,
        max_shift=MAX_SHIFT,
    )


def build_pipeline() -> StableDiffusion3Pipeline:
    """An untrained pipeline in the shape of Stable Diffusion 3, without the optional T5 encoder."""
    tokenizer = build_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=build_transformer(),
        scheduler=build_sampler(),
        vae=build_autoencoder(),
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


# What a request gets that asks for nothing else. Without T5 there is nothing for its 256 tokens to say.
DEFAULTS: dict[str, Any] = {
    "name": "shapes",
    "steps": 20,
    "guidance_scale": 4.0,
    "height": 128,
    "width": 128,
    "max_sequence_length": 0,
    "max_side": 256,
    "words": DRAWN,
}


def save_half(pipeline: StableDiffusion3Pipeline, directory: Path) -> None:
    """Save as fp16 safetensors in the ordinary diffusers layout, with Tilework's defaults beside them."""
    pipeline.to(torch.float16).save_pretrained(directory, safe_serialization=True)
    pipeline.to(torch.float32)
    (directory / "tilework.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
