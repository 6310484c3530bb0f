"""Turns the body of a chat into the fields of a call for images, which `image_call` checks."""

from __future__ import annotations

from collections.abc import Mapping

from tilework.server.bounded.long_text import LongText
from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.fields import Fields, short_text, spread
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.schema.chat_request import NO_EFFECT_IN_CHATS, NOT_IN_CHATS, ChatRequest, Part
from tilework.server.schema.picture_fields import IMAGE, IMAGES


def chat_fields(body: Mapping[str, object], max_prompt_chars: int) -> Fields:
    """Return the fields of a chat's images. The user's pictures are `image`.

    Raises:
        InvalidValue: a field that only chats have is wrong, or the chat asks for more than images.
    """
    given = {name: value for name, value in spread(body).items() if value is not None}
    ask = _parsed(given)
    for name in NOT_IN_CHATS & given.keys():
        raise invalid(name, given[name], "Chats have no such field: use POST /v1/images/generations, or leave it out.")
    images = {
        name: value
        for name, value in given.items()
        if name == "stream" or name not in ChatRequest.model_fields.keys() | NO_EFFECT_IN_CHATS
    }
    images["prompt"], pictures = _prompt(ask, given, max_prompt_chars)
    if pictures:
        for name in {IMAGE, IMAGES} & images.keys():
            raise invalid(name, "...", "A message has an image as well: leave one of them out.")
        images[IMAGE] = pictures
    return Fields(fields=images)


def _parsed(body: Mapping[str, object]) -> ChatRequest:
    return parsed(ChatRequest, body, "messages", '[{"role": "user", "content": "..."}]')


def _prompt(ask: ChatRequest, given: Mapping[str, object], max_chars: int) -> tuple[str, list[object]]:
    """Return the texts and the pictures of the user, as vLLM-Omni takes them: other messages are not drawn."""
    texts: list[str] = []
    pictures: list[object] = []
    for message in ask.messages:
        if message.role != "user" or message.content is None:
            continue
        content = message.content
        parts = [Part(type="text", text=content)] if isinstance(content, str | LongText) else content
        for part in parts:
            if part.type == "text" and part.text is not None:
                texts.append(short_text("messages", part.text, max_chars))
            elif part.type == "image_url" and part.image_url is not None:
                pictures.append(part.image_url)
            else:
                remedy = (
                    'Give parts {"type": "text", "text": "..."} or {"type": "image_url", "image_url": {"url":'
                    ' "data:image/png;base64,..."}} only.'
                )
                raise invalid("messages", given["messages"], remedy, code="unsupported_value")
    prompt = "\n".join(texts)
    if not texts and not pictures:
        raise invalid("messages", given["messages"], 'Give one with role "user" whose content says what to draw.')
    if len(prompt) > max_chars:
        remedy = (
            f"The texts of the user make one prompt: it has {len(prompt)} characters, and may have {max_chars}. Leave "
            "earlier messages out."
        )
        raise invalid("messages", given["messages"], remedy)
    return prompt, pictures
