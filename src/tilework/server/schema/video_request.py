"""`POST /v1/videos` as clients of OpenAI, vLLM-Omni and SGLang send it: the fields of an image, and those of a video.

The body is JSON or a form. Answers are in `video_answers`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tilework.server.schema.foreign_fields import OTHER_NAMES
from tilework.server.schema.image_request import ImageRequest, request_schema
from tilework.server.schema.picture_fields import INPUT_REFERENCE

EXAMPLE: dict[str, Any] = {
    "prompt": "a lighthouse in a storm",
    "size": "480x320",
    "seconds": "5",
    "seed": 7,
    "slo_s": 90,
}
SECONDS = 'a number of seconds above 0, also as a text such as "4"'
MIN_FPS = 1
MAX_FPS = 240
NOT_IN_VIDEOS = {
    *("output_compression", "output_format", "partial_images", "response_format", "stream", "tilework_events"),
}
ONE_IN_VIDEOS = {"n", *(name for name, own in OTHER_NAMES.items() if own == "n")}
"""Numbers of results: a call makes one video."""
AS_IN_IMAGES = tuple(name for name in ImageRequest.model_fields if name not in NOT_IN_VIDEOS | ONE_IN_VIDEOS)
_PICTURE = "the image to begin with, for models that take one: a file of a form, base64, a data URL, or an object"
_FILE = {"type": "string", "format": "binary"}


class VideoRequest(BaseModel):
    """The fields of a video beside those of an image."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)  # Further fields are those of an image.

    seconds: str | float | None = Field(
        None, description=f"{SECONDS}: the nearest number of frames that the model makes (instead of num_frames)"
    )
    fps: float | None = Field(
        None,
        ge=MIN_FPS,
        le=MAX_FPS,
        allow_inf_nan=False,
        description=f"a number from {MIN_FPS} to {MAX_FPS}, the number of frames a second (default: the model's)",
    )


def video_schema() -> dict[str, Any]:
    """Return the schema of a JSON body, for OpenAPI; null means absent for every field but `prompt`."""
    images = request_schema()
    own = VideoRequest.model_json_schema()["properties"]
    reference = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "description": _PICTURE}
    fields = {"prompt": images["properties"]["prompt"], INPUT_REFERENCE: reference, **own}
    fields |= {name: images["properties"][name] for name in AS_IN_IMAGES if name != "prompt"}
    return {**images, "title": "VideoRequest", "properties": fields, "examples": [EXAMPLE]}


def video_form_schema(*, has_files: bool) -> dict[str, Any]:
    """Return the schema of a form: the same fields, with a picture as a file or, in a form without files, as a text."""
    schema = video_schema()
    fields = {name: {**rules, "anyOf": _without_null(rules)} for name, rules in schema["properties"].items()}
    fields[INPUT_REFERENCE]["anyOf"] = [_FILE if has_files else {"type": "string"}]
    return {"type": "object", "required": schema["required"], "properties": fields}


def _without_null(rules: dict[str, Any]) -> list[Any]:
    """Return the types of a field without null, which a form cannot have: a field that is not there is absent."""
    given = [one for one in rules.get("anyOf", ()) if one != {"type": "null"}]
    return given or [{"type": rules.get("type", "string")}]
