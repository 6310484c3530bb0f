"""`POST /v1/chat/completions` as vLLM-Omni's clients send it: the fields of an image, and those of a chat.

`extra_body` may be a member of the body, as vLLM-Omni's benchmark sends it, or be spread over it, as OpenAI's library
does. Answers are in `answers`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema
from typing_extensions import TypeAliasType

from tilework.server.bounded.long_text import LongText
from tilework.server.schema.image_request import ImageRequest, request_schema
from tilework.server.schema.picture_fields import picture_schema

EXAMPLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a red square above a blue circle"}],
    "extra_body": {"width": 256, "height": 256, "seed": 7, "slo_ms": 2500},
}
_TEXT = {"type": "string"}
_PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _TEXT}}
_URL = {"type": "object", "required": ["url"], "properties": {"url": _TEXT}}
_PICTURE = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"const": "image_url"}, "image_url": _URL},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_PART, _PICTURE]}}]}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {"role": _TEXT, "content": _CONTENT}}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
NOT_IN_CHATS = {"prompt", "partial_images", "tilework_events", "preview_every", "preview_every_s"}
_OTHERWISE_IN_CHATS = NOT_IN_CHATS | {"response_format", "stream"}
AS_IN_IMAGES = tuple(name for name in ImageRequest.model_fields if name not in _OTHERWISE_IN_CHATS)
NO_EFFECT_IN_CHATS = {
    *("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "min_p", "modalities"),
    *("presence_penalty", "reasoning_effort", "repetition_penalty", "response_format", "service_tier", "stop"),
    *("stream_options", "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
}
"""Fields of OpenAI's and vLLM's chats that are about text: they are ignored, since no image depends on them."""


class Part(BaseModel):
    """A part of a message: a text has type "text", a picture type "image_url"."""

    type: str
    text: str | LongText | None = None
    image_url: dict[str, Any] | str | LongText | None = None


Parts = TypeAliasType(
    "Parts", Annotated[list[Part], FailFast()]
)  # A union takes no other annotated type (pydantic 2.14).


class Message(BaseModel):
    role: str
    content: str | LongText | Parts | None = None


class ChatRequest(BaseModel):
    """The fields of a chat beside those of an image."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)  # Further fields are those of an image.

    messages: Annotated[list[Message], FailFast(), WithJsonSchema(_MESSAGES)] = Field(
        description='messages; the texts of those with role "user" are the prompt, as "content": "..." or in parts, and'
        " their images (as data URLs) are `image`"
    )
    stream: bool | None = Field(
        None, description="true for chunks as they happen (progress as reasoning, then the image), or false"
    )
    extra_body: dict[str, Any] | None = Field(None, description="an object with any of the other fields, or nothing")


def chat_schema() -> dict[str, Any]:
    """Return the schema of a body, for OpenAPI; null means absent for every field but `messages`."""
    schema = ChatRequest.model_json_schema()
    images = request_schema()["properties"]
    fields = schema["properties"] | {name: images[name] for name in (*AS_IN_IMAGES, *picture_schema())}
    inner = {name: rules for name, rules in fields.items() if name not in ("messages", "stream", "extra_body")}
    extra = {"anyOf": [{"type": "object", "properties": inner}, {"type": "null"}]}
    fields["extra_body"] = {**fields["extra_body"], **extra}
    return {**schema, "properties": fields, "examples": [EXAMPLE]}
