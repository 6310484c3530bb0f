"""Tokenizers with a token per byte or letter: they stand in for those whose vocabularies are large files."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers as tf
from tokenizers.pre_tokenizers import ByteLevel

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n"
    "{% if m.content is string %}{{m.content}}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{c.text}}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<s>",
    "[IMG]",
)


def byte_tokenizer(max_length: int = 4096) -> Any:
    """Return a tokenizer with one token per byte, and with the special tokens and a chat template of Qwen.

    It stands in for the tokenizers of Qwen, Llama, Gemma, GLM and Mistral.
    """
    letters = sorted(ByteLevel.alphabet())
    tokenizer = tf.Qwen2Tokenizer(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    tokenizer.model_max_length = max_length
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def special_ids() -> dict[str, int]:
    """Return the ids of the special tokens of `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    return {token: int(tokenizer.convert_tokens_to_ids(token)) for token in _SPECIAL}


@cache
def clip_vocabulary() -> dict[str, int]:
    """Return the id of each token of `clip_tokenizer`; the last two are the start and the end of a text."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return {token: index for index, token in enumerate(tokens)}


def clip_tokenizer(max_length: int = 77) -> Any:
    """Return a stand-in for the tokenizer of CLIP."""
    return tf.CLIPTokenizer(vocab=dict(clip_vocabulary()), merges=[], model_max_length=max_length)


def byt5_tokenizer(max_length: int = 256) -> Any:
    """Return the real tokenizer of ByT5, which has a token per byte itself, and needs no files."""
    return tf.ByT5Tokenizer(model_max_length=max_length)


def t5_tokenizer(max_length: int = 512) -> Any:
    """Return a stand-in for the tokenizers of T5 and UMT5."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'-:;()\""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary = [*pieces, *((letter, -3.0) for letter in letters)]
    return tf.T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=max_length)
