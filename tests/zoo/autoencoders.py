"""Autoencoders and samplers of the zoo."""

from __future__ import annotations

from typing import Any

import diffusers

FLUX_LATENTS: dict[str, Any] = {
    "shift_factor": 0.1,
    "scaling_factor": 0.36,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""What the autoencoder of FLUX and its successors has besides its sizes."""


def kl(channels: int = 4, levels: int = 4, **options: Any) -> Any:
    """The usual autoencoder of pictures: a latent per square of 2 ** (levels - 1) px."""
    widths = (8, *(16,) * (levels - 1))
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=64,
        **options,
    )


def kl_flux(levels: int = 4) -> Any:
    return kl(16, levels, **FLUX_LATENTS)


def kl_flux2() -> Any:
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16), layers_per_block=1, latent_channels=8, norm_num_groups=4, sample_size=64
    )


def kl_wan(**options: Any) -> Any:
    """The autoencoder of Wan: a latent per 8 px and four frames."""
    sizes = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(**sizes | options)


def kl_qwen() -> Any:
    return diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def dc(channels: int = 4) -> Any:
    """The deep compression autoencoder of Sana, here with two levels: a latent per 2 px."""
    return diffusers.AutoencoderDC(
        latent_channels=channels,
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        encoder_block_types=("ResBlock",) * 2,
        decoder_block_types=("ResBlock",) * 2,
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        attention_head_dim=8,
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )


def ddim(**options: Any) -> Any:
    return diffusers.DDIMScheduler(**_scaled_linear() | {"clip_sample": False, "set_alpha_to_one": False} | options)


def ancestral() -> Any:
    """Euler's method with noise of its own in each step."""
    return diffusers.EulerAncestralDiscreteScheduler(**_scaled_linear())


def pndm() -> Any:
    return diffusers.PNDMScheduler(**_scaled_linear() | {"skip_prk_steps": True})


def euler() -> Any:
    return diffusers.EulerDiscreteScheduler(**_scaled_linear())


def lcm() -> Any:
    options = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return diffusers.LCMScheduler(**options, original_inference_steps=50, clip_sample=False, set_alpha_to_one=True)


def flow(**options: Any) -> Any:
    """Flow matching with a fixed shift."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0} | options)


def shifting_flow(**options: Any) -> Any:
    """Flow matching whose shift depends on the picture's size, as FLUX has it."""
    shift = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, "use_dynamic_shifting": True} | shift | options)


def flow_unipc() -> Any:
    """The sampler of Wan, which remembers earlier predictions."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def dpm(**options: Any) -> Any:
    return diffusers.DPMSolverMultistepScheduler(**options)


def _scaled_linear() -> dict[str, Any]:
    options = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return options | {"steps_offset": 1, "timestep_spacing": "leading"}
