"""`POST /v1/chat/completions`: pictures as the answer in a chat, as vLLM-Omni's clients ask for and read them.

The body is turned into one of `POST /v1/images/generations`, which checks it and serves it. `extra_body` may be a
member of the body, as vLLM-Omni's benchmark sends it, or be spread over it, as OpenAI's library does.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from tilework.core.wire import ModelInfo
from tilework.server.api.images import ImageService
from tilework.server.calls.call import Finished
from tilework.server.calls.parsing import ImageCall, Rules, image_call, parsed
from tilework.server.http.errors import invalid
from tilework.server.schema.answers import ChatChoice, ChatCompletion, ChatMessage, ImagePart, ImageUrl, RequestTimeline
from tilework.server.schema.image_request import ImageRequest, request_schema

EXAMPLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a red square above a blue circle"}],
    "extra_body": {"width": 256, "height": 256, "seed": 7, "slo_ms": 2500},
}
_TEXT = {"type": "string"}
_PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _TEXT}}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {"role": _TEXT, "content": _CONTENT}}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_NOT_IN_CHATS = {"prompt", "response_format", "stream", "partial_images", "tilework_events", "preview_every"}
_AS_IN_IMAGES = tuple(name for name in ImageRequest.model_fields if name not in _NOT_IN_CHATS)


class _Part(BaseModel):
    """A part of a message: a text is one of type "text"."""

    type: str
    text: str | None = None


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None


class ChatRequest(BaseModel):
    """What a chat adds to the fields of an image."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    messages: Annotated[list[_Message], WithJsonSchema(_MESSAGES)] = Field(
        description='messages; the texts of those with role "user" are the prompt, as "content": "..." or in parts'
    )
    stream: bool | None = Field(None, description="false, or nothing")
    extra_body: dict[str, Any] | None = Field(None, description="an object with any of the other fields, or nothing")
    width: int | None = Field(None, ge=1, description="an integer, the width in pixels (instead of size)")
    height: int | None = Field(None, ge=1, description="an integer, the height in pixels (instead of size)")
    num_frames: int | None = Field(None, ge=1, le=1, description="1, or nothing: there are single images only")
    num_outputs_per_prompt: int | None = Field(None, description="an integer, another name of n")
    guidance: float | None = Field(None, description="a number, another name of guidance_scale")
    slo_ms: float | None = Field(None, gt=0, allow_inf_nan=False, description="a number above 0: slo_s in milliseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """Serves `POST /v1/chat/completions`; `Prefer: respond-async` is not heeded here."""

    images: ImageService

    async def complete(self, http: Request) -> Response:
        entry = await self.images.enter(http, chat_call)
        finished = await self.images.result(entry.call, http)
        content = await self.images.threads.run(_answer_json, finished, self.images.engine.info.name)
        return Response(content, headers=entry.headers(), media_type="application/json")


def chat_call(body: Mapping[str, object], rules: Rules, rng: Random) -> ImageCall:
    """Check the body of a chat; `extra_body` goes before what is beside it.

    Raises:
        ApiError: 400 if a field that only chats have is wrong, or the wish is for more than images from text; and as
            `image_call`.
    """
    outer = _parsed(body)
    if outer.stream:
        remedy = "Pictures come whole here: leave it out, or use POST /v1/images/generations, which streams."
        raise invalid("stream", True, remedy, code="unsupported_value")
    given = {
        name: value for part in (body, outer.extra_body or {}) for name, value in part.items() if value is not None
    }
    ask = _parsed({**given, "messages": body["messages"]})
    images = {name: given[name] for name in _AS_IN_IMAGES if name in given}
    images["prompt"] = _prompt(ask, body)
    for name, instead, value in (
        ("size", "width or height", _size(ask, rules.info)),
        ("n", "num_outputs_per_prompt", ask.num_outputs_per_prompt),
        ("guidance_scale", "guidance", ask.guidance),
    ):
        if value is None:
            continue
        if name in images:
            raise invalid(name, images[name], f"{instead} is given as well: leave one of them out.")
        images[name] = value
    return image_call(images, rules, rng, slo_ms=ask.slo_ms)


def chat_schema() -> dict[str, Any]:
    """The schema of a body, for OpenAPI; null means absent for every field but `messages`."""
    schema = ChatRequest.model_json_schema()
    images = request_schema()["properties"]
    fields = schema["properties"] | {name: images[name] for name in _AS_IN_IMAGES}
    inner = {name: rules for name, rules in fields.items() if name not in ("messages", "stream", "extra_body")}
    extra = {"anyOf": [{"type": "object", "properties": inner}, {"type": "null"}]}
    fields["extra_body"] = {**fields["extra_body"], **extra}
    return {**schema, "properties": fields, "examples": [EXAMPLE]}


def _parsed(body: Mapping[str, object]) -> ChatRequest:
    return parsed(ChatRequest, body, "messages", '[{"role": "user", "content": "..."}]')


def _prompt(ask: ChatRequest, body: Mapping[str, object]) -> str:
    """The texts of the user, as vLLM-Omni takes them: what was answered, or said by a system, is not drawn."""
    texts: list[str] = []
    for message in ask.messages:
        if message.role != "user" or message.content is None:
            continue
        parts = [_Part(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        for part in parts:
            if part.type != "text" or part.text is None:
                remedy = 'There are no models for input images here: give parts {"type": "text", "text": "..."} only.'
                raise invalid("messages", body["messages"], remedy, code="unsupported_value")
            texts.append(part.text)
    prompt = "\n".join(texts)
    if not prompt.strip():
        raise invalid("messages", body["messages"], 'Give one with role "user" whose content says what to draw.')
    return prompt


def _size(ask: ChatRequest, info: ModelInfo) -> str | None:
    """A side that is not given is the model's default."""
    if ask.width is None and ask.height is None:
        return None
    return f"{ask.width or info.default_width}x{ask.height or info.default_height}"


def _answer_json(finished: Finished, model: str) -> bytes:
    media_type = finished.ask.media_type
    parts = [image_part(file, story, media_type) for file, story in zip(finished.files, finished.stories, strict=True)]
    answer = ChatCompletion(
        id=f"chatcmpl-{finished.uid}",
        created=int(finished.arrived_s),
        model=model,
        choices=[ChatChoice(message=ChatMessage(content=parts))],
    )
    return answer.model_dump_json().encode()


def image_part(file: bytes, story: RequestTimeline, media_type: str) -> ImagePart:
    """A picture in a message; a stage that was done in several pieces counts all of them."""
    durations_s: dict[str, float] = {}
    for segment in story.segments:
        before_s = durations_s.get(segment.stage, 0.0)
        durations_s[segment.stage] = round(before_s + segment.end_s - segment.start_s, 6)
    url = f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"
    return ImagePart(image_url=ImageUrl(url=url), stage_durations=durations_s, tilework=story)
