"""The table of transformers whose sequences a group can share, by the name of their class in diffusers.

A class without a row runs at degree 1. Left out on purpose: `SanaTransformer2DModel`, whose feed-forward is a 3 x 3
convolution over the image (each rank would need its neighbours' tokens in every block) and whose self-attention is
linear and does not pass through torch's attention.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilework.pipelines.sequence.plan import WHOLE, Gather, Joint, SequencePlan, Split

IMAGE, TEXT, AUDIO, ALL = "image", "text", "audio", "image and text"
# The order in which an attention joins sequences.
TEXT_FIRST, IMAGE_FIRST = Joint((TEXT, IMAGE)), Joint((IMAGE, TEXT))
_IMAGE_ONLY = Joint((IMAGE,))

_SD3 = SequencePlan(
    outputs={"pos_embed": {0: Split((IMAGE,))}, "context_embedder": {0: Split((TEXT,))}},
    gathers={"proj_out": Gather(IMAGE)},
    # Version 3.5 has a second attention in some blocks, over the image alone.
    attentions={"transformer_blocks.*.attn": IMAGE_FIRST, "transformer_blocks.*.attn2": _IMAGE_ONLY},
    whole=(
        *("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "skip_layers"),
        *("joint_attention_kwargs", "return_dict"),
    ),
)
_FLUX = SequencePlan(
    library={IMAGE: ("hidden_states", "img_ids", "proj_out"), TEXT: ("encoder_hidden_states", "txt_ids")},
    attentions={"transformer_blocks.*.attn": TEXT_FIRST, "single_transformer_blocks.*.attn": TEXT_FIRST},
    whole=("pooled_projections", "timestep", "guidance", "joint_attention_kwargs", "return_dict"),
)
_FLUX_2 = SequencePlan(
    library=_FLUX.library,
    attentions=_FLUX.attentions,
    whole=("timestep", "guidance", "joint_attention_kwargs", "return_dict"),
)
# Its mask is of queries and keys. The model makes it from that of tokens, which covers text and image.
_CHROMA = SequencePlan(
    inputs={
        "": {
            "hidden_states": Split((IMAGE,)),
            "encoder_hidden_states": Split((TEXT,)),
            "img_ids": Split((IMAGE,), -2),
            "txt_ids": Split((TEXT,), -2),
            "attention_mask": Split((TEXT, IMAGE)),
        }
    },
    gathers={"proj_out": Gather(IMAGE)},
    attentions=dict.fromkeys(
        ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"), Joint((TEXT, IMAGE), pairs=True)
    ),
    whole=("timestep", "joint_attention_kwargs", "return_dict"),
)
_QWEN_IMAGE = SequencePlan(
    library={
        IMAGE: ("hidden_states", "modulate_index", "pos_embed.0", "proj_out"),
        TEXT: ("encoder_hidden_states", "encoder_hidden_states_mask", "pos_embed.1"),
    },
    attentions={"transformer_blocks.*.attn": TEXT_FIRST},
    whole=(
        *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "img_shapes", "guidance"),
        *("additional_t_cond", "timestep", "attention_kwargs", "return_dict"),
    ),
)
# Image and text are one tensor in its main layers. Those that refine the text alone run whole on every rank.
_Z_IMAGE = SequencePlan(
    inputs={
        "noise_refiner.0": {"x": Split((IMAGE,))},
        "noise_refiner.*": dict.fromkeys(("attn_mask", "freqs_cis", "noise_mask"), Split((IMAGE,))),
        "layers.0": {"x": Split((ALL,))},
        "layers.*": dict.fromkeys(("attn_mask", "freqs_cis", "noise_mask"), Split((ALL,))),
        "all_final_layer.*": {"noise_mask": Split((ALL,))},
    },
    gathers={"noise_refiner.-1": Gather(IMAGE), "all_final_layer.*": Gather(ALL)},
    attentions={
        "noise_refiner.*.attention": _IMAGE_ONLY,
        "context_refiner.*.attention": None,
        "siglip_refiner.*.attention": None,
        "layers.*.attention": Joint((ALL,)),
    },
    whole=(
        *("x", "t", "cap_feats", "siglip_feats", "image_noise_mask", "patch_size", "f_patch_size"),
        *("joint_attention_kwargs", "return_dict"),
    ),
)
# Text only answers, and is whole on every rank. Wan 2.2 has a time for each token.
_WAN = SequencePlan(
    library={IMAGE: ("hidden_states", "timestep", "rope.0", "rope.1", "proj_out")},
    attentions={"blocks.*.attn1": _IMAGE_ONLY, "blocks.*.attn2": None},
    whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image", "attention_kwargs", "return_dict"),
)
# diffusers splits the text too, which only answers, but not the times of tokens that image-to-video has.
_LTX = SequencePlan(
    library={
        IMAGE: ("hidden_states", "rope.0", "rope.1", "proj_out"),
        WHOLE: ("encoder_hidden_states", "encoder_attention_mask"),
    },
    inputs={"": {"timestep": Split((IMAGE,), ndim=2)}},
    attentions={"transformer_blocks.*.attn1": _IMAGE_ONLY, "transformer_blocks.*.attn2": None},
    whole=(
        *("encoder_hidden_states", "encoder_attention_mask", "num_frames", "height", "width"),
        *("rope_interpolation_scale", "video_coords", "attention_kwargs", "return_dict"),
    ),
)
# Two sequences that ask each other; diffusers splits the video alone.
_LTX_2 = SequencePlan(
    inputs={
        "": {
            "hidden_states": Split((IMAGE,)),
            "audio_hidden_states": Split((AUDIO,)),
            "timestep": Split((IMAGE,), ndim=2),
            "audio_timestep": Split((AUDIO,), ndim=2),
            "video_keyframes_mask": Split((IMAGE,)),
        }
    },
    outputs={
        **dict.fromkeys(("rope", "cross_attn_rope"), dict.fromkeys((0, 1), Split((IMAGE,), -2))),
        **dict.fromkeys(("audio_rope", "cross_attn_audio_rope"), dict.fromkeys((0, 1), Split((AUDIO,), -2))),
    },
    gathers={"proj_out": Gather(IMAGE), "audio_proj_out": Gather(AUDIO)},
    attentions={
        "transformer_blocks.*.attn1": _IMAGE_ONLY,
        "transformer_blocks.*.audio_attn1": Joint((AUDIO,)),
        "transformer_blocks.*.audio_to_video_attn": Joint((IMAGE,), (AUDIO,)),
        "transformer_blocks.*.video_to_audio_attn": Joint((AUDIO,), (IMAGE,)),
        "transformer_blocks.*.attn2": None,
        "transformer_blocks.*.audio_attn2": None,
    },
    whole=(
        *("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask", "sigma", "audio_sigma"),
        *("audio_encoder_attention_mask", "num_frames", "height", "width", "fps", "audio_num_frames", "video_coords"),
        *("audio_coords", "isolate_modalities", "use_cross_timestep", "attention_kwargs", "return_dict"),
    ),
)
_COGVIDEOX = SequencePlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": Split((IMAGE,)), "encoder_hidden_states": Split((TEXT,))},
        "transformer_blocks.*": {"image_rotary_emb": Split((IMAGE,), 0)},
    },
    gathers={"proj_out": Gather(IMAGE)},
    attentions={"transformer_blocks.*.attn1": TEXT_FIRST},
    whole=(
        *("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs", "image_rotary_emb"),
        *("attention_kwargs", "return_dict"),
    ),
)
# Its mask is of queries and keys, made from that of the text's tokens. Every rank refines the whole text.
_HUNYUAN_VIDEO_1_5 = SequencePlan(
    inputs={
        "transformer_blocks.0": {"encoder_hidden_states": Split((TEXT,))},
        "transformer_blocks.*": {"attention_mask": Split((TEXT,))},
    },
    outputs={"x_embedder": {0: Split((IMAGE,))}, "rope": dict.fromkeys((0, 1), Split((IMAGE,), 0))},
    gathers={"proj_out": Gather(IMAGE)},
    attentions={
        "transformer_blocks.*.attn": Joint((IMAGE, TEXT), pairs=True),
        "context_embedder.token_refiner.refiner_blocks.*.attn": None,
    },
    filled=(TEXT,),
    whole=(
        *("hidden_states", "timestep", "timestep_r", "encoder_hidden_states", "encoder_attention_mask"),
        *("encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds", "attention_kwargs", "return_dict"),
    ),
)
_HUNYUAN_BLOCK = {"attention_mask": Split((IMAGE, TEXT), 3), "num_tokens": Split((IMAGE,), optional=True)}
# A mask of keys, over video and text. If an image replaces the first frame, its tokens have their own time.
_HUNYUAN_VIDEO = SequencePlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": Split((IMAGE,)), "encoder_hidden_states": Split((TEXT,))},
        "transformer_blocks.*": _HUNYUAN_BLOCK,
        "single_transformer_blocks.*": _HUNYUAN_BLOCK,
    },
    outputs={"rope": dict.fromkeys((0, 1), Split((IMAGE,), 0))},
    gathers={"proj_out": Gather(IMAGE)},
    attentions={
        "transformer_blocks.*.attn": IMAGE_FIRST,
        "single_transformer_blocks.*.attn": IMAGE_FIRST,
        "context_embedder.token_refiner.refiner_blocks.*.attn": None,
    },
    filled=(TEXT,),
    whole=(
        *("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections"),
        *("guidance", "attention_kwargs", "return_dict"),
    ),
)

SEQUENCES: Mapping[str, SequencePlan] = {
    "ChromaTransformer2DModel": _CHROMA,
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "Flux2Transformer2DModel": _FLUX_2,
    "FluxTransformer2DModel": _FLUX,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN_VIDEO_1_5,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "LTX2VideoTransformer3DModel": _LTX_2,
    "LTXVideoTransformer3DModel": _LTX,
    "QwenImageTransformer2DModel": _QWEN_IMAGE,
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
    "ZImageTransformer2DModel": _Z_IMAGE,
}
