"""Turns the body of a chat into that of a call for images, which `parsing` checks."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.image_call import ImageCall, image_call, parsed
from tilework.server.calls.parsing.specs import Rules
from tilework.server.schema.chat_request import NO_EFFECT_IN_CHATS, NOT_IN_CHATS, ChatRequest, Part


def chat_call(body: Mapping[str, object], rules: Rules, rng: Random) -> ImageCall:
    """Check the body of a chat; fields in `extra_body` override those beside it.

    Raises:
        InvalidValue: a field that only chats have is wrong, or the chat asks for more than
            images from text.
        CallError: as `image_call`.
    """
    outer = _parsed(body)
    if outer.stream:
        remedy = "Pictures come whole here: leave it out, or use POST /v1/images/generations, which streams."
        raise invalid("stream", True, remedy, code="unsupported_value")
    given = {
        name: value for part in (body, outer.extra_body or {}) for name, value in part.items() if value is not None
    }
    ask = _parsed({**given, "messages": body["messages"]})
    for name in NOT_IN_CHATS & given.keys():
        raise invalid(name, given[name], "Chats have no such field: use POST /v1/images/generations, or leave it out.")
    images = {
        name: value
        for name, value in given.items()
        if name not in ChatRequest.model_fields and name not in NO_EFFECT_IN_CHATS
    }
    images["prompt"] = _prompt(ask, body)
    for name, instead, value in (
        ("n", "num_outputs_per_prompt", ask.num_outputs_per_prompt),
        ("guidance_scale", "guidance", ask.guidance),
    ):
        if value is None:
            continue
        if name in images:
            raise invalid(name, images[name], f"{instead} is given as well: leave one of them out.")
        images[name] = value
    return image_call(images, rules, rng, slo_ms=ask.slo_ms)


def _parsed(body: Mapping[str, object]) -> ChatRequest:
    return parsed(ChatRequest, body, "messages", '[{"role": "user", "content": "..."}]')


def _prompt(ask: ChatRequest, body: Mapping[str, object]) -> str:
    """The texts of the user, as vLLM-Omni takes them: what was answered, or said by a system, is not drawn."""
    texts: list[str] = []
    for message in ask.messages:
        if message.role != "user" or message.content is None:
            continue
        parts = [Part(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        for part in parts:
            if part.type != "text" or part.text is None:
                remedy = 'There are no models for input images here: give parts {"type": "text", "text": "..."} only.'
                raise invalid("messages", body["messages"], remedy, code="unsupported_value")
            texts.append(part.text)
    prompt = "\n".join(texts)
    if not prompt.strip():
        raise invalid("messages", body["messages"], 'Give one with role "user" whose content says what to draw.')
    return prompt
