"""`POST /v1/images/edits`: the fields of an image, and the pictures that it is drawn from, as JSON or as a form."""

from __future__ import annotations

from typing import Any

from tilework.server.schema.image_request import request_schema
from tilework.server.schema.picture_fields import IMAGE

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mP8z0AaYGIY1TCqYdhqAABALgEfFO4+"
    "AgAAAABJRU5ErkJggg=="
)
EXAMPLE: dict[str, Any] = {"image": PICTURE, "prompt": "a red square above a blue circle", "seed": 7}
_IMAGE = "the image to draw from, or a list: files of a form (also as `image[]`), base64 or data URLs of such files"
_MASK = (
    "an image, for models that take one: draw where it is transparent, or white if none of it is; without it, where "
    "`image` is transparent. Stretched to the size that is drawn"
)
_FILE = {"type": "string", "format": "binary"}


def edit_schema() -> dict[str, Any]:
    """Return the schema of a JSON body, for OpenAPI."""
    schema = request_schema()
    schema["properties"][IMAGE] |= {"description": _IMAGE}
    schema["properties"]["mask"] = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": _MASK}
    return {**schema, "title": "EditRequest", "required": [*schema["required"], IMAGE], "examples": [EXAMPLE]}


def edit_form_schema() -> dict[str, Any]:
    """Return the schema of a form: the same fields, with pictures as files."""
    schema = edit_schema()
    files: dict[str, dict[str, Any]] = {
        IMAGE: {"anyOf": [_FILE, {"type": "array", "items": _FILE}]},
        "mask": {"anyOf": [_FILE]},
    }
    texts = {name: {**rules, "anyOf": _without_null(rules)} for name, rules in schema["properties"].items()}
    fields = {name: {**texts.get(name, {}), **rules} for name, rules in files.items()}
    return {"type": "object", "required": schema["required"], "properties": {**texts, **fields}}


def _without_null(rules: dict[str, Any]) -> list[Any]:
    """Return the types of a field without null, which a form cannot have: a field that is not there is absent."""
    given = [one for one in rules.get("anyOf", ()) if one != {"type": "null"}]
    return given or [{"type": rules.get("type", "string")}]
