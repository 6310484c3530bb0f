"""The provenance of an image: what `tilework verify` needs to make it again, except for the texts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tilework.server.schema.image_request import LoraUse


class Settings(BaseModel):
    """The settings of an image, texts left out. Given pictures are SHA-256 digests of their RGB pixels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    width: int
    height: int
    frames: int
    steps: int
    whole_steps: int | None = Field(
        description="Number of steps of which `steps` were made, if a strength reduced them"
    )
    guidance_scale: float
    arguments: dict[str, Any]
    loras: list[LoraUse]
    pictures: dict[str, list[str]]


class Provenance(BaseModel):
    """The origin of an image. If it is `exact`, the stock pipeline makes the same pixels from this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exact: bool
    pixels_sha256: str | None = Field(
        description="Hash of the 8-bit RGB pixels, row by row, frame by frame; exact images only"
    )
    model: str
    source: str = Field(description="The model's hub id, or its name if it came from a directory")
    pipeline: str = Field(description="Class of its pipeline, or of the adapter that serves it")
    dtype: str
    attention_backend: str
    vae_tiling: bool
    hardware: str = Field(description="Hardware of the first device that has loaded the model")
    threads: int
    libraries: str
    tilework: str
    settings: Settings


class PictureMetadata(BaseModel):
    """The content of the text chunk `tilework` of a PNG. `frame` is the number of the frame in its clip."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: dict[str, str]
    frame: int
    provenance: Provenance
