"""What the Wan pipeline makes of captions, in few tokens: the transformer is trained as its stock call uses it.

The stock call fills texts up with empty embeddings to MAX_TOKENS, and the transformer attends to all of them. They are
equal, so one of them does for all, if it counts for as many.
"""

from __future__ import annotations

import math

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

MAX_TOKENS = 512
"""The default of the stock call."""
KEPT = 15
"""Tokens that a caption has at most; one that stands for all empty ones follows."""


class Texts:
    """Token ids of captions, and their embeddings."""

    def __init__(self, pipeline: WanPipeline) -> None:
        self._tokenizer, self._encoder = pipeline.tokenizer, pipeline.text_encoder
        self._ids: dict[str, list[int]] = {}

    def embed(self, captions: list[str]) -> Tensor:
        """Embeddings of shape (N, KEPT + 1, width); those behind a caption's end are zero, as in the stock call."""
        for text in captions:
            if text not in self._ids:
                self._ids[text] = self._tokenizer(text, padding="max_length", max_length=KEPT).input_ids
        ids = torch.tensor([self._ids[text] for text in captions])
        mask = ids != self._tokenizer.pad_token_id
        embeddings = self._encoder(ids, mask.long()).last_hidden_state * mask[:, :, None]
        return torch.nn.functional.pad(embeddings, (0, 0, 0, 1))


class _Attention:
    """The stock attention of Wan, written out; in attention to a text the last token counts for all that are empty."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(context)))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key.to(query.dtype)).float() / math.sqrt(query.shape[-1])
        if encoder_hidden_states is not None:
            weights = scores.new_zeros(scores.shape[-1])
            weights[-1] = math.log(MAX_TOKENS - KEPT)
            scores = scores + weights
        result = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(value.dtype), value)
        return attn.to_out[0](result.flatten(2))


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., 0::2].to(x.dtype), sines[..., 1::2].to(x.dtype)
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)


def attend_to_few(transformer: WanTransformer3DModel) -> None:
    """Let a transformer take texts as `Texts.embed` gives them."""
    for block in transformer.blocks:
        for attention in (block.attn1, block.attn2):
            attention.set_processor(_Attention())
