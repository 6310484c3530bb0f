"""Fields of a body that hold pictures, and the names that clients give them."""

from __future__ import annotations

from typing import Any

IMAGE, IMAGES, MASK = "image", "images", "mask"
INPUT_REFERENCE = "input_reference"
PICTURE_FIELDS = frozenset({IMAGE, IMAGES, INPUT_REFERENCE, MASK, "mask_image", "control_image", "image_reference"})
"""Names that mean a picture to every client. A model may have further ones of its own."""

_TEXT = {"type": "string"}
_ONE_OR_MORE = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}


def picture_schema() -> dict[str, Any]:
    """Return the fields of a JSON body, for OpenAPI."""
    return {
        IMAGE: {
            **_ONE_OR_MORE,
            "title": "Image",
            "description": "an image as base64 or data URL, or a list of them, for models that take one"
            " (`pictures` in `GET /v1/models`)",
        },
        "mask_image": {
            "anyOf": [_TEXT, {"type": "null"}],
            "title": "Mask",
            "description": "an image that says where to draw, for models that take one (also as `mask`)",
        },
    }
