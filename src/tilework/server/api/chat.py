"""`POST /v1/chat/completions`: pictures as the answer in a chat, as vLLM-Omni's clients read them."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response

from tilework.server.api.bodies import CHATS
from tilework.server.api.images import ImageService
from tilework.server.calls.call import Finished
from tilework.server.calls.timeline import stage_durations
from tilework.server.schema.answers import ChatChoice, ChatCompletion, ChatMessage, ImagePart, ImageUrl, RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """Serves `POST /v1/chat/completions`; it ignores `Prefer: respond-async`."""

    images: ImageService

    async def complete(self, http: Request) -> Response:
        entry = await self.images.enter(http, CHATS)
        finished = await self.images.result(entry.call, http)
        content = await self.images.threads.run(_answer_json, finished, finished.ask.model)
        return Response(content, headers=entry.headers(), media_type="application/json")


def _answer_json(finished: Finished, model: str) -> bytes:
    media_type = finished.ask.media_type
    parts = [
        image_part(file, timeline, media_type, frame)
        for index, timeline in enumerate(finished.timelines)
        for frame, file in finished.parts(index)
    ]
    answer = ChatCompletion(
        id=f"chatcmpl-{finished.uid}",
        created=int(finished.arrived_s),
        model=model,
        choices=[ChatChoice(message=ChatMessage(content=parts))],
    )
    return answer.model_dump_json().encode()


def image_part(file: bytes, timeline: RequestTimeline, media_type: str, frame: int | None = None) -> ImagePart:
    """A picture in a message."""
    durations_s = stage_durations(timeline)
    url = f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"
    return ImagePart(image_url=ImageUrl(url=url), frame=frame, stage_durations=durations_s, tilework=timeline)
