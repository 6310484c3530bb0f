"""Fields of other servers' clients: those with another name here, those that change no image, and those that would.

Read from the public clients of OpenAI, vLLM-Omni, SGLang, diffusers, Together, fal, Replicate and A1111's web UI.
"""

from __future__ import annotations

import re

from pydantic import JsonValue

OTHER_NAMES: dict[str, str] = {
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "infer_steps": "num_inference_steps",
    "num_images": "n",
    "num_outputs": "n",
    "num_images_per_prompt": "n",
    "num_outputs_per_prompt": "n",
    "num_videos_per_prompt": "n",
    "guidance": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "webhook_url": "webhook",
}
"""Names of fields elsewhere, with their names here. A model's own argument of such a name comes first."""

OPENAI_MODELS = re.compile(r"(dall-e|gpt-image|chatgpt-image|sora)-[a-z0-9.-]{1,40}")
"""Names of OpenAI's models for images and videos. Many clients know no others, so they mean a model of this server."""
GIVES_URLS = "dall-e-"
"""Beginning of the names of OpenAI's models that give images as URLs, unless a call asks otherwise."""
OPENAI_SIZES = frozenset(
    {"256x256", "512x512", "1024x1024", "1024x1536", "1024x1792", "1536x1024", "1792x1024", "720x1280", "1280x720"}
)
"""The sizes of OpenAI's models. Menus of clients have no others: one that a model cannot draw is made smaller."""
WITHOUT_CHOICE: dict[str, tuple[JsonValue, ...]] = {
    "background": ("auto", "opaque"),
    "diffusers_kwargs": ({},),
    "enable_teacache": (False,),
    "extra_params": ({},),
    "vae_use_tiling": (False,),
}
"""Fields with the values that ask for what is done anyway. Any other value would change the image, and is refused."""
WITHOUT_EFFECT: dict[str, tuple[JsonValue, ...]] = {
    "input_fidelity": ("low",),
    "moderation": ("auto", "low"),
    "quality": ("auto", "standard"),
    "style": ("vivid",),
}
"""Fields that change nothing here, with the values that ask for nothing else: any other value gets a warning."""
SILENT = frozenset({"fps", "metadata", "output_quality", "safety_identifier", "vae_use_slicing"})
"""Fields that change no image, whatever their value, as their clients know."""

_WORDS = """
adapter aesthetic angle apg area aspect attention attentions attn audio augment batch blend block blocks blur camera
canny caption cfg checkpoint class clean cleaning clip color colors colour condition conditioning conditions control
controlnet crop crops cutoff decode denoise denoising depth duration edit embed embedding embeddings embeds entity eta
face flow fps frame frames freeu gligen guess guidance guider height hires hyper image images inpaint inpainting
instruction instructions karras keyframe keyframes kwargs labels latent latents layer layers lora loras mask masked
masks max_seconds min_seconds model momentum motion mu negative noise noisy normalize overlap pag palette panorama
patching pe phrases pooled pose prior prompt prompts ratio reasoning reference refine refiner rescale resize
resolution sampler samples sampling scale scaling schedule scheduler seed sequence shift sigma sigmas size sld sound
speed step steps strength style subject tau teacache temperature theta threshold tile tiling timestep timesteps
tokenizer transcription upsample upscale upscaler vae video watershed weight weights width
"""
_OF_THE_PICTURE = frozenset(_WORDS.split())
"""Words in the names of fields that decide what is drawn, and some whole names. `is_of_the_picture` looks for them."""


def is_of_the_picture(name: str) -> bool:
    """Return whether an unknown field would change the image, judged by the words of its name.

    A list of all names cannot be complete: every model has new ones.
    """
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return not _OF_THE_PICTURE.isdisjoint([name, *words])
