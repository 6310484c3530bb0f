"""`POST /v1/images/generations` as OpenAI's clients send and read it, plus our own fields.

Descriptions double as the remedy in error messages, so each starts with what to give. Limits that depend on the model
or on the configuration are checked in `calls`. Answers are in `answers`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tilework.core.cache import LEAST_INTERVAL, MAX_INTERVAL, MAX_THRESHOLD, CacheName
from tilework.core.lora import UsedLora
from tilework.server.schema.picture_fields import picture_schema

OutputFormat = Literal["png", "jpeg", "webp"]
FileFormat = Literal["png", "jpeg", "webp", "mp4"]
"""Formats in which a result is kept: images as their clients want them, or a video."""

MAX_SEED = 2**63 - 1
RANDOM_SEED = -1
"""Seed that many clients send for a random one. Here it means the same as no seed."""
MAX_IMAGES = 10
MAX_LORAS = 8
MAX_SCALE = 10
EXAMPLE: dict[str, JsonValue] = {
    "prompt": "a red square above a blue circle",
    "size": "256x256",
    "n": 1,
    "seed": 7,
    "slo_s": 2.5,
}


class LoraUse(BaseModel):
    """A LoRA of the model, and its strength: 1 is what it was trained to do."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(description="its name in GET /v1/models")
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False, description="a number from -10 to 10")

    def used(self) -> UsedLora:
        return UsedLora(self.name, float(self.scale))


class ImageRequest(BaseModel):
    """An image: what to draw and by when. null means absent, except for `prompt`.

    Further fields are the arguments of the model, other names of these, refused, or ignored: see
    `calls.parsing.arguments` and `foreign_fields`.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    prompt: str = Field(description="a text that says what to draw, maybe empty")
    model: str | None = Field(None, description="the name of the served model, or nothing")
    n: int = Field(1, ge=1, le=MAX_IMAGES, description="an integer from 1 to 10: image i is drawn with seed + i")
    size: str | None = Field(None, description='"auto", or width and height in pixels as in "512x512"')
    width: int | None = Field(None, ge=1, description="an integer, the width in pixels (instead of size)")
    height: int | None = Field(None, ge=1, description="an integer, the height in pixels (instead of size)")
    response_format: Literal["b64_json", "url"] | None = Field(
        None,
        description='"b64_json" or "url", or nothing: "url" for names such as "dall-e-3" as at OpenAI, else "b64_json"',
    )
    output_format: OutputFormat = Field("png", description='"png", "jpeg" or "webp"')
    output_compression: int | None = Field(
        None, ge=0, le=100, description="an integer from 0 to 100, the quality of jpeg and webp (default 90)"
    )
    user: str | None = Field(
        None, description="a text that identifies your user in the server's log (at --log-level info or finer)"
    )
    stream: bool | None = Field(None, description="true for events as they happen (text/event-stream), or false")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="an integer from 0 to 3: the number of unfinished images that a stream shows"
    )
    tilework_events: bool = Field(False, description="true if a stream reports progress as well, or false")
    preview_every: int | None = Field(
        None,
        ge=0,
        description="an integer, at least 0: the number of steps from one preview to the next (0: no previews)",
    )
    preview_every_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a number above 0: about the seconds from one preview to the next (instead of preview_every)",
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="an integer from 0 to 2**63 - 1 - n, or nothing for a random one"
    )
    num_inference_steps: int | None = Field(None, ge=1, description="an integer, at least 1")
    num_frames: int | None = Field(
        None, description="an integer: the number of frames of a clip, for models that make clips"
    )
    guidance_scale: float | None = Field(None, ge=0, le=30, allow_inf_nan=False, description="a number from 0 to 30")
    negative_prompt: str | None = Field(
        None, description="a text that says what not to draw, maybe empty, or nothing: the stock call then gets none"
    )
    lora: list[LoraUse] | None = Field(
        None,
        max_length=MAX_LORAS,
        description='a list of up to 8 LoRAs of the model such as [{"name": "ink", "scale": 0.8}], or nothing',
    )
    slo_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a number of seconds above 0 from arrival to the deadline, or nothing",
    )
    slo_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="a number above 0: slo_s in milliseconds, or nothing"
    )
    deadline: str | None = Field(
        None,
        description="a time in the future as RFC 3339 with offset, such as 2030-01-01T12:00:00Z, or nothing",
    )
    priority: str | None = Field(None, description="the name of a class of requests, or nothing")
    exact: bool | None = Field(
        None, description="true for an image equal to the stock pipeline's bit for bit under any load, or false"
    )
    webhook: str | None = Field(
        None,
        description="a URL at one of the origins that this server may call: it gets a signed POST when the call has "
        "ended",
    )
    cache: CacheName | None = Field(
        None,
        description='"patch" or "image" to skip parts of steps in which little has changed, "fbcache" or "taylorseer" '
        'to skip most of a step, "if_late" to have "patch" only if the deadline would be missed otherwise, or "off"',
    )
    cache_threshold: float | None = Field(
        None,
        ge=0,
        le=MAX_THRESHOLD,
        allow_inf_nan=False,
        description="a number from 0 to 1: the change up to which a part is skipped, with any cache except taylorseer",
    )
    cache_interval: int | None = Field(
        None,
        ge=LEAST_INTERVAL,
        le=MAX_INTERVAL,
        description="a number from 1 to 100: the steps from one computed step to the next, with the cache taylorseer",
    )
    on_miss: Literal["best_effort", "reject", "drop"] = Field(
        "best_effort", description='"best_effort", "reject" or "drop": what to do if the deadline cannot be met'
    )


def request_schema() -> dict[str, Any]:
    """Return the schema of a body, for OpenAPI: null means absent for every field but `prompt`."""
    schema = ImageRequest.model_json_schema()
    for name, rules in schema["properties"].items():
        if name != "prompt" and {"type": "null"} not in rules.get("anyOf", ()):
            shown = {key: rules.pop(key) for key in ("title", "description", "default") if key in rules}
            schema["properties"][name] = {"anyOf": [rules, {"type": "null"}], **shown}
    schema["properties"] |= picture_schema()
    return {**schema, "examples": [EXAMPLE]}
