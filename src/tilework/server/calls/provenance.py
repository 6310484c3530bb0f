"""Provenance of images, and the text chunks with it that PNG files carry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import tilework
from tilework.core.model import ModelInfo
from tilework.core.wire.spec import Image, Spec
from tilework.server.calls.served_models import public_source
from tilework.server.schema.image_request import LoraUse
from tilework.server.schema.provenance import PictureMetadata, Provenance, Settings

CHUNK, PARAMETERS = "tilework", "parameters"
"""Names of text chunks: ours, and the one that Stable Diffusion web UI writes and many tools show."""


def provenance_of(spec: Spec, info: ModelInfo, image: Image, *, is_exact: bool) -> Provenance:
    """Return how an image was made, by a worker that has loaded a model; hashes the pixels of an exact image."""
    return Provenance(
        exact=is_exact,
        pixels_sha256=hashlib.sha256(image.pixels).hexdigest() if is_exact else None,
        model=info.name,
        source=public_source(info),
        pipeline=info.family,
        dtype=info.dtype,
        attention_backend=info.attention_backend,
        vae_tiling=info.vae_tiling,
        hardware=info.hardware,
        threads=info.threads,
        libraries=info.library,
        tilework=tilework.__version__,
        settings=_settings(spec),
    )


def text_chunks(spec: Spec, provenance: Provenance, frame: int) -> dict[str, str]:
    """Return the text chunks of the PNG of a frame."""
    own = PictureMetadata(texts=texts_of(spec), frame=frame, provenance=provenance)
    return {PARAMETERS: _parameters(spec, provenance), CHUNK: own.model_dump_json()}


def spec_of(metadata: PictureMetadata, pictures: Mapping[str, tuple[Image, ...]]) -> Spec:
    """Undo `text_chunks`; `pictures` are those whose digests it has."""
    settings = metadata.provenance.settings
    texts = metadata.texts
    arguments = {name: tuple(one) if isinstance(one, list) else one for name, one in settings.arguments.items()}
    others = {name: text for name, text in texts.items() if name not in ("prompt", "negative_prompt")}
    return Spec(
        prompt=texts["prompt"],
        negative_prompt=texts.get("negative_prompt"),
        height=settings.height,
        width=settings.width,
        steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        seed=settings.seed,
        exact=True,
        frames=settings.frames,
        whole_steps=settings.whole_steps,
        arguments={**arguments, **others},
        pictures=pictures,
        loras=tuple(one.used() for one in settings.loras),
    )


def digests_of(pictures: Mapping[str, tuple[Image, ...]]) -> dict[str, list[str]]:
    """Return SHA-256 digests of the RGB pixels of given pictures, by argument."""
    return {name: [hashlib.sha256(one.pixels).hexdigest() for one in given] for name, given in pictures.items()}


def _settings(spec: Spec) -> Settings:
    return Settings(
        seed=spec.seed,
        width=spec.width,
        height=spec.height,
        frames=spec.frames,
        steps=spec.steps,
        whole_steps=spec.whole_steps,
        guidance_scale=spec.guidance_scale,
        arguments={name: one for name, one in spec.arguments.items() if not isinstance(one, str)},
        loras=[LoraUse(name=one.name, scale=one.scale) for one in spec.loras],
        pictures=digests_of(spec.pictures),
    )


def texts_of(spec: Spec) -> dict[str, str]:
    given = {"prompt": spec.prompt, "negative_prompt": spec.negative_prompt, **spec.arguments}
    return {name: one for name, one in given.items() if isinstance(one, str)}


def _parameters(spec: Spec, provenance: Provenance) -> str:
    negative = f"Negative prompt: {spec.negative_prompt}\n" if spec.negative_prompt else ""
    return (
        f"{spec.prompt}\n{negative}Steps: {spec.steps}, CFG scale: {spec.guidance_scale:g}, Seed: {spec.seed}, "
        f"Size: {spec.width}x{spec.height}, Model: {provenance.model}"
    )
