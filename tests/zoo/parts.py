"""Text encoders and image encoders of the zoo: real classes, a few layers deep, no network; and their tokenizers."""

from __future__ import annotations

from typing import Any

import transformers as tf

from tilework.pipelines.fake.tokenizers import (
    CHAT_TEMPLATE,
    byte_tokenizer,
    clip_vocabulary,
    special_ids,
)

WIDTH = 32
"""Channels of every text encoder, unless a model needs another number."""
NUM_BYTE_TOKENS = 300
"""Size of the vocabulary of encoders that take `byte_tokenizer`."""


def bert_tokenizer() -> Any:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    return tf.BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, model_max_length=77)


def clip_text(pooled: bool = False, width: int = WIDTH, max_length: int = 77) -> Any:
    """The text encoder of CLIP, with the projection of the pooled output or without."""
    num_tokens = len(clip_vocabulary())
    config = tf.CLIPTextConfig(
        vocab_size=num_tokens,
        hidden_size=width,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=width,
        max_position_embeddings=max_length,
        bos_token_id=num_tokens - 2,
        eos_token_id=num_tokens - 1,
        pad_token_id=1,
    )
    return (tf.CLIPTextModelWithProjection if pooled else tf.CLIPTextModel)(config)


def clip_vision(projected: bool = True, **options: Any) -> Any:
    """The image encoder of CLIP for pictures of 32 px."""
    defaults = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.CLIPVisionConfig(**defaults | {"image_size": 32, "patch_size": 8, "projection_dim": WIDTH} | options)
    return (tf.CLIPVisionModelWithProjection if projected else tf.CLIPVisionModel)(config)


def clip_pictures() -> Any:
    """What makes pictures of 32 px for `clip_vision`."""
    return tf.CLIPImageProcessorPil(crop_size=32, size={"shortest_edge": 32})


def siglip_vision(**options: Any) -> Any:
    defaults = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**defaults | {"image_size": 32, "patch_size": 8} | options))


def siglip_pictures() -> Any:
    return tf.SiglipImageProcessorPil(size={"height": 32, "width": 32})


def t5_text(width: int = WIDTH, num_tokens: int = 100) -> Any:
    return tf.T5EncoderModel(tf.T5Config(**_t5_sizes(width, num_tokens)))


def umt5_text(width: int = WIDTH, num_tokens: int = 100) -> Any:
    return tf.UMT5EncoderModel(tf.UMT5Config(**_t5_sizes(width, num_tokens)))


def bert_text(width: int = WIDTH) -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return tf.BertModel(tf.BertConfig(vocab_size=60, hidden_size=width, max_position_embeddings=77, **sizes))


def decoder_sizes(num_layers: int = 2, **options: Any) -> dict[str, Any]:
    """The configuration of a small language model; Qwen, Llama, Gemma, GLM and Mistral share these names."""
    defaults = {
        "vocab_size": NUM_BYTE_TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return defaults | options


def qwen3(with_head: bool = False, num_layers: int = 3) -> Any:
    config = tf.Qwen3Config(**decoder_sizes(num_layers))
    return (tf.Qwen3ForCausalLM if with_head else tf.Qwen3Model)(config)


def qwen25_sizes() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    sizes = decoder_sizes(rope_parameters=rope)
    sizes.pop("head_dim")
    return sizes


def qwen25_vl() -> Any:
    """Qwen 2.5 VL: pictures are cut in patches of 14 px, and four of them make a token."""
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = tf.Qwen2_5_VLConfig(text_config=qwen25_sizes(), vision_config=vision, **_picture_tokens())
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(with_head: bool = True, num_layers: int = 2) -> Any:
    """Qwen 3 VL: pictures are cut in patches of 16 px, and four of them make a token."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e6}
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    text = decoder_sizes(num_layers, rope_parameters=rope)
    config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_picture_tokens())
    return (tf.Qwen3VLForConditionalGeneration if with_head else tf.Qwen3VLModel)(config)


def vision_processor(kind: str = "Qwen2_5_VLProcessor", patch_size: int = 14) -> Any:
    """The processor of a vision language model of Qwen, for text and pictures.

    Its constructor insists on a video processor, which needs torchvision; so the parts are set by hand. That is also
    why a directory with such a processor cannot be loaded where torchvision is missing.
    """
    cls = getattr(tf, kind)
    processor = cls.__new__(cls)
    # Large pictures are made small: at most 16 tokens.
    side = 2 * patch_size
    size = {"shortest_edge": side * side, "longest_edge": 16 * side * side}
    processor.image_processor = tf.Qwen2VLImageProcessorPil(patch_size=patch_size, size=size)
    processor.tokenizer, processor.video_processor = byte_tokenizer(), None
    processor.chat_template = CHAT_TEMPLATE
    ids = special_ids()
    for name in ("image", "video"):
        setattr(processor, f"{name}_token", f"<|{name}_pad|>")
        setattr(processor, f"{name}_token_id", ids[f"<|{name}_pad|>"])
    for end in ("start", "end"):
        setattr(processor, f"vision_{end}_token", f"<|vision_{end}|>")
        setattr(processor, f"vision_{end}_token_id", ids[f"<|vision_{end}|>"])
    return processor


def _picture_tokens() -> dict[str, int]:
    ids = special_ids()
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _t5_sizes(width: int, num_tokens: int) -> dict[str, Any]:
    sizes = {"vocab_size": num_tokens, "d_model": width, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return sizes | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
