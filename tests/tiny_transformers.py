"""Diffusion transformers with random weights, from configurations alone, and inputs as their pipelines give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import diffusers
import torch
from torch import Tensor

# 3 x 5 tokens of an image, 7 of its text: no degree divides both. Heads: 2, 3 and 5.
ROWS, COLUMNS, IMAGE, TEXT = 3, 5, 15, 7
Inputs = dict[str, Any]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def ids(num_axes: int) -> tuple[Tensor, Tensor]:
    """Places of image and text."""
    image, text = torch.zeros(IMAGE, num_axes), torch.zeros(TEXT, num_axes)
    image[:, 1:3] = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS))
    text[:, -1] = torch.arange(TEXT)
    return image, text


def kept(*lengths: int, of: int = TEXT) -> Tensor:
    """A mask of tokens for each row: its first ones."""
    return torch.arange(of) < torch.tensor(lengths)[:, None]


TIME = torch.tensor([0.3, 0.7])
AXES = {"attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, num_attention_heads=3, joint_attention_dim=32,
        pooled_projection_dim=32, guidance_embeds=True, **AXES,
    )  # fmt: skip


def flux_inputs() -> Inputs:
    image, text = ids(3)
    return {
        "hidden_states": noise(2, IMAGE, 8), "encoder_hidden_states": noise(2, TEXT, 32), "img_ids": image,
        "txt_ids": text, "pooled_projections": noise(2, 32), "timestep": TIME, "guidance": torch.full([2], 3.5),
    }  # fmt: skip


def short_flux_inputs() -> Inputs:
    """Two tokens of an image and one of its text: fewer than ranks."""
    given = flux_inputs()
    for name, length in {"hidden_states": 2, "encoder_hidden_states": 1}.items():
        given[name] = given[name][:, :length]
    return given | {"img_ids": given["img_ids"][:2], "txt_ids": given["txt_ids"][:1]}


def flux_2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=5,
        joint_attention_dim=32, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip


def flux_2_inputs() -> Inputs:
    image, text = ids(4)
    return {
        "hidden_states": noise(2, IMAGE, 8), "encoder_hidden_states": noise(2, TEXT, 32), "timestep": TIME,
        "img_ids": image.expand(2, -1, -1), "txt_ids": text.expand(2, -1, -1),
    }  # fmt: skip


def sd3(**options: Any) -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, joint_attention_dim=32,
        pooled_projection_dim=32, pos_embed_max_size=16,
        **{"num_attention_heads": 2, "caption_projection_dim": 32} | options,
    )  # fmt: skip


def sd3_5() -> Any:
    return sd3(num_attention_heads=3, caption_projection_dim=48, dual_attention_layers=(0,), qk_norm="rms_norm")


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": noise(2, 4, 2 * ROWS, 2 * COLUMNS), "encoder_hidden_states": noise(2, TEXT, 32),
        "pooled_projections": noise(2, 32), "timestep": TIME * 1000,
    }  # fmt: skip


def qwen_image(**options: Any) -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=8, out_channels=2, num_layers=2, num_attention_heads=3, joint_attention_dim=32, **AXES, **options
    )


def qwen_image_inputs() -> Inputs:
    """Texts of different lengths, padded."""
    return {
        "hidden_states": noise(2, IMAGE, 8), "encoder_hidden_states": noise(2, TEXT, 32), "timestep": TIME,
        "encoder_hidden_states_mask": kept(7, 4), "img_shapes": [[(1, ROWS, COLUMNS)]] * 2,
    }  # fmt: skip


def short_qwen_image_inputs() -> Inputs:
    """Texts of two tokens and of one: fewer than ranks."""
    given = qwen_image_inputs()
    return given | {
        "encoder_hidden_states": given["encoder_hidden_states"][:, :2],
        "encoder_hidden_states_mask": kept(2, 1, of=2),
    }


def qwen_edit_inputs() -> Inputs:
    """A picture of 9 tokens beside one of 6 that is given."""
    return qwen_image_inputs() | {"img_shapes": [[(1, 3, 3), (1, 2, 3)]] * 2}


def z_image(**options: Any) -> Any:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=3, cap_feat_dim=32,
        axes_dims=[4, 6, 6], axes_lens=[256, 64, 64], **options,
    )  # fmt: skip
    for name in ("x_pad_token", "cap_pad_token"):  # Empty in diffusers: they come with the weights.
        torch.nn.init.normal_(getattr(model, name))
    return model


def z_image_inputs() -> Inputs:
    """Texts of different lengths, which are padded to 32 and 64 tokens."""
    pictures = [noise(4, 1, 2 * ROWS, 2 * COLUMNS) for _ in range(2)]
    return {"x": pictures, "t": TIME, "cap_feats": [noise(7, 32), noise(40, 32)]}


def z_image_omni_inputs() -> Inputs:
    """Beside the picture one that is given, with its own features; each token has one of two times."""
    pictures = [[noise(4, 1, 2 * ROWS, 2 * COLUMNS) for _ in range(2)] for _ in range(2)]
    return {
        "x": pictures, "t": TIME, "cap_feats": [[noise(7, 32), noise(5, 32)], [noise(40, 32), noise(3, 32)]],
        "siglip_feats": [[noise(2, 3, 16), noise(2, 3, 16)]] * 2, "image_noise_mask": [[0, 1]] * 2,
    }  # fmt: skip


def wan(**options: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=5, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64, **options,
    )  # fmt: skip


def wan_inputs() -> Inputs:
    """2 x 3 x 5 tokens."""
    return {
        "hidden_states": noise(2, 4, 2, 2 * ROWS, 2 * COLUMNS), "timestep": TIME * 1000,
        "encoder_hidden_states": noise(2, TEXT, 32),
    }  # fmt: skip


def wan_2_2_inputs() -> Inputs:
    """A time for each token: the first frame is given."""
    times = (TIME * 1000)[:, None].repeat(1, 2 * IMAGE)
    times[:, :IMAGE] = 0
    return wan_inputs() | {"timestep": times}


def wan_i2v_inputs() -> Inputs:
    """The model counts on a text of 512 tokens."""
    return wan_inputs() | {
        "encoder_hidden_states": noise(2, 512, 32), "encoder_hidden_states_image": noise(2, 9, 32)
    }  # fmt: skip


def ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48,
        num_layers=2, caption_channels=32,
    )  # fmt: skip


def ltx_inputs() -> Inputs:
    """2 x 3 x 5 tokens; texts of different lengths, padded."""
    return {
        "hidden_states": noise(2, 2 * IMAGE, 8), "encoder_hidden_states": noise(2, TEXT, 32), "timestep": TIME * 1000,
        "encoder_attention_mask": kept(7, 4).float(), "num_frames": 2, "height": ROWS, "width": COLUMNS,
    }  # fmt: skip


def ltx_i2v_inputs() -> Inputs:
    return ltx_inputs() | {"timestep": wan_2_2_inputs()["timestep"]}


def chroma() -> Any:
    return diffusers.ChromaTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, num_attention_heads=3, joint_attention_dim=32,
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1, **AXES,
    )  # fmt: skip


def chroma_inputs() -> Inputs:
    """The pipeline's mask is of the latents' type: it is added to the scores."""
    image, text = ids(3)
    return {
        "hidden_states": noise(2, IMAGE, 8), "encoder_hidden_states": noise(2, TEXT, 32), "timestep": TIME,
        "img_ids": image, "txt_ids": text, "attention_mask": torch.cat([kept(7, 4).float(), torch.ones(2, IMAGE)], 1),
    }  # fmt: skip


def chroma_bool_inputs() -> Inputs:
    given = chroma_inputs()
    return given | {"attention_mask": given["attention_mask"].bool()}


def ltx2(**options: Any) -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=3, audio_attention_head_dim=8,
        audio_cross_attention_dim=24, num_layers=2, caption_channels=32, **options,
    )  # fmt: skip


def ltx2_3() -> Any:
    """Gated attentions, a time of its own for the text, marks of tokens, and tables with a dimension for heads."""
    return ltx2(
        gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, rope_type="split",
        perturbed_attn=True, use_keyframes_abs_pos_embedding=True,
    )  # fmt: skip


def ltx2_inputs() -> Inputs:
    """2 x 3 x 5 tokens of the video, 11 of its sound; texts of different lengths, padded."""
    return ltx_inputs() | {
        "audio_hidden_states": noise(2, 11, 8), "audio_num_frames": 11,
        "audio_encoder_hidden_states": noise(2, TEXT, 32), "audio_encoder_attention_mask": kept(7, 4).float(),
    }  # fmt: skip


def ltx2_3_inputs() -> Inputs:
    """The first frame is given."""
    times = {"timestep": ltx_i2v_inputs()["timestep"], "audio_timestep": TIME * 1000, "sigma": TIME * 1000}
    marks = (times["timestep"] == 0)[..., None]
    return ltx2_inputs() | times | {"use_cross_timestep": True, "video_keyframes_mask": marks}


def cogvideox(**options: Any) -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=32, num_layers=2, sample_width=2 * COLUMNS, sample_height=2 * ROWS, sample_frames=5,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=TEXT, **options,
    )  # fmt: skip


def cogvideox_inputs() -> Inputs:
    return {
        "hidden_states": noise(2, 2, 4, 2 * ROWS, 2 * COLUMNS), "encoder_hidden_states": noise(2, TEXT, 32),
        "timestep": TIME * 1000,
    }  # fmt: skip


def cogvideox_rotary_inputs() -> Inputs:
    angles = noise(2 * IMAGE, 16)
    return cogvideox_inputs() | {"image_rotary_emb": (angles.cos(), angles.sin())}


def hunyuan_video_15() -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, text_embed_dim=32, text_embed_2_dim=32, image_embed_dim=32, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def hunyuan_video_15_inputs() -> Inputs:
    """Two texts of different lengths, padded, and no image."""
    return {
        "hidden_states": noise(2, 9, 2, ROWS, COLUMNS), "timestep": TIME * 1000,
        "encoder_hidden_states": noise(2, TEXT, 32), "encoder_attention_mask": kept(7, 4).long(),
        "encoder_hidden_states_2": noise(2, 5, 32), "encoder_attention_mask_2": kept(2, 3, of=5).long(),
        "image_embeds": torch.zeros(2, 3, 32),
    }  # fmt: skip


def hunyuan_video(**options: Any) -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6), **options,
    )  # fmt: skip


def hunyuan_video_inputs() -> Inputs:
    return {
        "hidden_states": noise(2, 4, 2, 2 * ROWS, 2 * COLUMNS), "timestep": TIME * 1000,
        "encoder_hidden_states": noise(2, TEXT, 32), "encoder_attention_mask": kept(7, 4).long(),
        "pooled_projections": noise(2, 32), "guidance": torch.full([2], 6000.0),
    }  # fmt: skip


CASES: Mapping[str, tuple[Callable[[], Any], Callable[[], Inputs]]] = {
    "flux": (flux, flux_inputs),
    "flux-short": (flux, short_flux_inputs),
    "flux2": (flux_2, flux_2_inputs),
    "sd3": (sd3, sd3_inputs),
    "sd3.5": (sd3_5, sd3_inputs),
    "qwen": (qwen_image, qwen_image_inputs),
    "qwen-short": (qwen_image, short_qwen_image_inputs),
    "qwen-edit": (lambda: qwen_image(zero_cond_t=True), qwen_edit_inputs),
    "z_image": (z_image, z_image_inputs),
    "z_image-omni": (lambda: z_image(siglip_feat_dim=16), z_image_omni_inputs),
    "wan": (wan, wan_inputs),
    "wan-2.2": (wan, wan_2_2_inputs),
    "wan-i2v": (lambda: wan(image_dim=32, added_kv_proj_dim=60), wan_i2v_inputs),
    "ltx": (ltx, ltx_inputs),
    "ltx-i2v": (ltx, ltx_i2v_inputs),
    "ltx2": (ltx2, ltx2_inputs),
    "ltx2-3": (ltx2_3, ltx2_3_inputs),
    "chroma": (chroma, chroma_inputs),
    "chroma-bool": (chroma, chroma_bool_inputs),
    "cogvideox": (cogvideox, cogvideox_inputs),
    "cogvideox-rotary": (lambda: cogvideox(use_rotary_positional_embeddings=True), cogvideox_rotary_inputs),
    "hunyuan_video_15": (hunyuan_video_15, hunyuan_video_15_inputs),
    "hunyuan_video": (hunyuan_video, hunyuan_video_inputs),
    "hunyuan_video-image": (lambda: hunyuan_video(image_condition_type="token_replace"), hunyuan_video_inputs),
}
"""By name: what builds a model, and what it is called with. Names with a dash are variants of one class."""


def build(name: str) -> Any:
    """A new model, always with the same weights."""
    torch.manual_seed(0)
    model = CASES[name][0]().eval()
    # Tables that are zero or one in a new model would hide what they are added to or multiplied with.
    for parameter in model.parameters():
        if parameter.ndim == 1 or not parameter.any():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@cache
def inputs(name: str) -> Inputs:
    torch.manual_seed(1)
    return CASES[name][1]()


@torch.no_grad()
def predict(model: Any, name: str) -> list[Tensor]:
    """All predictions of the model, of video and audio for example."""
    results = model(**inputs(name), return_dict=False)
    flat = [part for result in results for part in (result if isinstance(result, list) else [result])]
    return [part for part in flat if part is not None]
