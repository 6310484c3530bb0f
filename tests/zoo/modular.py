"""Modular pipelines, which are made of blocks; most share their components with a classic pipeline.

`save_pretrained` writes `modular_model_index.json` and a folder per component. `ModularPipeline.from_pretrained` reads
it, and its `load_components` the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zoo.autoencoders import kl_flux
from zoo.flux import flux
from zoo.flux2 import flux2, klein, z_image
from zoo.hunyuan import hunyuan15
from zoo.ltx import ltx
from zoo.ltx2 import LTX2, ltx2
from zoo.model import CLIP, GUIDED, PROMPT, SQUARE, ZooModel, mask, picture
from zoo.qwen import qwen, qwen_edit
from zoo.stable_diffusion_3 import sd3
from zoo.stable_diffusion_xl import sdxl
from zoo.wan import SEEN, seeing, wan, wan22


def _wan_image() -> dict[str, Any]:
    return wan({"in_channels": 36} | SEEN) | seeing()


def _klein() -> dict[str, Any]:
    return {name: part for name, part in klein().items() if name != "is_distilled"}


def _edit() -> dict[str, Any]:
    return {name: part for name, part in qwen_edit().items() if name != "tokenizer"}


def _hunyuan15() -> dict[str, Any]:
    return {name: part for name, part in hunyuan15().items() if name != "guider"}


def modular(
    name: str,
    class_name: str,
    kind: str,
    components: Callable[[], Mapping[str, Any]],
    inputs: Mapping[str, Any],
    **options: bool,
) -> ZooModel:
    class_name += "ModularPipeline"
    return ZooModel(
        name=f"modular-{name}",
        class_name=class_name,
        kind=kind,
        components=components,
        inputs=inputs,
        modular=True,
        **options,
    )


FROM_PICTURE = {"image": picture(), "strength": 0.75}
MASKED = FROM_PICTURE | {"mask_image": mask()}
EDIT = GUIDED | SQUARE | {"num_inference_steps": 2}
KONTEXT = PROMPT | SQUARE | {"image": picture(), "_auto_resize": False, "max_area": 64 * 64, "num_inference_steps": 2}
# The picture to edit always gets a million pixels: each latent of this autoencoder stands for 32 px.
FEW = {"num_inference_steps": 3}
FRAME = GUIDED | CLIP | {"image": picture(32)}

MODELS = (
    modular("flux", "Flux", "text to image", flux, PROMPT | SQUARE),
    modular("flux-image", "Flux", "image to image", flux, PROMPT | SQUARE | FROM_PICTURE),
    modular("flux-kontext", "FluxKontext", "edit", lambda: flux(vae=kl_flux(6)), KONTEXT),
    modular("sd3", "StableDiffusion3", "text to image", sd3, GUIDED | SQUARE),
    modular("sd3-image", "StableDiffusion3", "image to image", sd3, GUIDED | SQUARE | FROM_PICTURE),
    modular("sdxl", "StableDiffusionXL", "text to image", sdxl, GUIDED | SQUARE),
    modular("sdxl-image", "StableDiffusionXL", "image to image", sdxl, GUIDED | SQUARE | FROM_PICTURE),
    modular("sdxl-inpaint", "StableDiffusionXL", "inpaint", sdxl, GUIDED | SQUARE | MASKED),
    modular("qwen-image", "QwenImage", "text to image", qwen, GUIDED | SQUARE),
    modular("qwen-image-image", "QwenImage", "image to image", qwen, GUIDED | SQUARE | FROM_PICTURE),
    modular("qwen-image-inpaint", "QwenImage", "inpaint", qwen, GUIDED | SQUARE | MASKED),
    modular(
        "qwen-image-edit",
        "QwenImageEdit",
        "edit",
        _edit,
        EDIT | {"image": picture()},
        loads=False,
    ),
    modular(
        "qwen-image-edit-plus",
        "QwenImageEditPlus",
        "edit",
        _edit,
        EDIT | {"image": [picture()]},
        loads=False,
    ),
    modular("z-image", "ZImage", "text to image", z_image, PROMPT | SQUARE),
    modular("z-image-image", "ZImage", "image to image", z_image, PROMPT | SQUARE | FROM_PICTURE),
    modular("flux2-klein", "Flux2Klein", "text to image", _klein, PROMPT | SQUARE),
    modular("flux2-klein-edit", "Flux2Klein", "edit", _klein, PROMPT | SQUARE | {"image": picture()}),
    modular("flux2-klein-base", "Flux2KleinBase", "text to image", _klein, PROMPT | SQUARE),
    modular("flux2", "Flux2", "text to image", flux2, PROMPT | SQUARE),
    modular("ltx2", "LTX2", "text to video", ltx2, LTX2),
    modular("wan21", "Wan", "text to video", wan, GUIDED | CLIP),
    modular("wan22", "Wan22", "text to video", wan22, GUIDED | CLIP),
    modular(
        "wan21-image",
        "WanImage2Video",
        "image to video",
        _wan_image,
        GUIDED | CLIP | {"image": picture(32)},
    ),
    modular(
        "wan22-image", "Wan22Image2Video", "image to video", lambda: wan22(36), GUIDED | CLIP | {"image": picture(32)}
    ),
    modular("ltx", "LTX", "text to video", ltx, GUIDED | CLIP | {"num_frames": 9}),
    modular("ltx-image", "LTX", "image to video", ltx, GUIDED | CLIP | {"num_frames": 9, "image": picture(32)}),
    modular("hunyuan-video15", "HunyuanVideo15", "text to video", _hunyuan15, GUIDED | CLIP | FEW),
)
