"""Kolors: the U-Net of Stable Diffusion XL, with ChatGLM as its text encoder."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zoo.autoencoders import euler
from zoo.model import GUIDED, SQUARE, STEPS, entry, picture
from zoo.parts import WIDTH
from zoo.stable_diffusion_xl import XL, sdxl

NUM_TOKENS = 64
PROJECTED = {"encoder_hid_dim": WIDTH, "encoder_hid_dim_type": "text_proj"}


@cache
def _vocabulary() -> tempfile.TemporaryDirectory[str]:
    """A folder, removed with the process, whose file `tokenizer.model` has a token per letter."""
    import sentencepiece

    model = io.BytesIO()
    letters = "abcdefghijklmnopqrstuvwxyz"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([letters, " ".join(letters)]),
        model_writer=model,
        vocab_size=30,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def _tokenizer() -> Any:
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    return ChatGLMTokenizer(str(Path(_vocabulary().name) / "tokenizer.model"))


def _chat_glm() -> Any:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=NUM_TOKENS,
        hidden_size=WIDTH,
        ffn_hidden_size=64,
        kv_channels=8,
        num_attention_heads=4,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = ChatGLMModel(config, empty_init=False)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # Its own class leaves them uninitialised.
            torch.nn.init.ones_(parameter)
    return model


def kolors() -> dict[str, Any]:
    parts = sdxl(euler, XL | PROJECTED)
    both = {name: part for name, part in parts.items() if name not in ("text_encoder_2", "tokenizer_2")}
    return both | {"text_encoder": _chat_glm(), "tokenizer": _tokenizer()}


MODELS = (
    entry("kolors", "Kolors", "text to image", kolors, GUIDED | SQUARE),
    entry(
        "kolors-image",
        "KolorsImg2Img",
        "image to image",
        kolors,
        GUIDED | STEPS | {"image": picture(), "strength": 0.75},
    ),
    entry("kolors-pag", "KolorsPAG", "text to image", kolors, GUIDED | SQUARE | {"pag_scale": 2.0}),
)
