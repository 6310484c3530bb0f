"""`POST /v1/chat/completions`: images as the answer in a chat, whole or as a stream.

In a whole answer, images are parts of the message, as vLLM-Omni's clients read them. In a stream, progress comes as
reasoning, which chat user interfaces show while they wait and fold up afterwards (`reasoning_content`, as of vLLM and
DeepSeek). The image comes as content, in Markdown, since content of a stream is text.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tilework.core.time import s_from_ns
from tilework.server.api.bodies import CHATS
from tilework.server.api.images import CallEntry, ImageService
from tilework.server.calls.call import Call, Finished
from tilework.server.calls.events import StreamEvent
from tilework.server.calls.timeline import stage_durations
from tilework.server.http.sse import chunk
from tilework.server.schema.answers import ChatChoice, ChatCompletion, ChatMessage, ImagePart, ImageUrl, RequestTimeline
from tilework.server.text import counted

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatService:
    """Serves `POST /v1/chat/completions`; it ignores `Prefer: respond-async`."""

    images: ImageService

    async def complete(self, http: Request) -> Response:
        entry = await self.images.enter(http, CHATS)
        if entry.call.ask.is_stream:
            return self._stream(entry)
        finished = await self.images.result(entry.call, http)
        content = await self.images.threads.run(_answer_json, finished, self._model(entry.call))
        return Response(content, headers=entry.headers(), media_type="application/json")

    def _stream(self, entry: CallEntry) -> Response:
        chunks = ChatChunks(call=entry.call, model=self._model(entry.call), now_ns=self.images.engine.now_ns)
        return self.images.stream(entry.call, entry.headers(), chunks.on_wire, has_progress=True)

    def _model(self, call: Call) -> str:
        return self.images.models.called(call.ask.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChunks:
    """The events of a call as chunks of a chat; `now_ns` is the clock of its arrival."""

    call: Call
    model: str
    now_ns: Callable[[], int]

    async def on_wire(self, events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
        """Yield chunks; closing this closes `events`. A failure is an `error`, which OpenAI's clients raise."""
        timelines: list[Any] = []
        async with aclosing(events):
            async for one in events:
                if one.name == "error":
                    yield chunk(one.data)
                    return
                if one.name == "tilework.done":
                    timelines.append(one.data["timeline"])
                elif (delta := self._delta(one)) is not None:
                    yield chunk(self._chunk(delta))
        yield chunk({**self._chunk({}, "stop"), "tilework": timelines})
        yield DONE

    def _delta(self, one: StreamEvent) -> Mapping[str, object] | None:
        """Return what an event adds to the message; None for events that add nothing."""
        match one.name.partition(".")[2]:
            case "accepted":
                images = counted(len(self.call.ask.specs), "image")
                return {"role": "assistant", "content": "", "reasoning_content": f"{images}{self._left(one)}\n"}
            case "progress":
                which = f"image {one.data['index']!s}, " if len(self.call.ask.specs) > 1 else ""
                state = one.data["state"]
                at = f"step {one.data['step']} of {one.data['steps']}" if state in ("running", "done") else state
                return {"reasoning_content": f"{which}{at}{self._left(one)}\n"}
            case "completed":
                text = f"data:{self.call.ask.media_type};base64,{one.data['b64_json']}"
                return {"content": f"![picture]({text})\n"}
            case _:
                return None

    def _left(self, one: StreamEvent) -> str:
        """Return the time that the call is expected to take from now on, in words; empty without an estimate."""
        eta_s = one.data["eta_s"]
        if not isinstance(eta_s, float):
            return ""
        passed_s = s_from_ns(self.now_ns() - self.call.arrival_ns)
        return f", about {max(0.0, eta_s - passed_s):.1f} s left"

    def _chunk(self, delta: Mapping[str, object], finish_reason: str | None = None) -> dict[str, object]:
        return {
            "id": f"chatcmpl-{self.call.uid}",
            "object": "chat.completion.chunk",
            "created": int(self.call.arrived_s),
            "model": self.model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        }


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
    """Make the part of a message that holds an image."""
    durations_s = stage_durations(timeline)
    url = f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"
    return ImagePart(image_url=ImageUrl(url=url), frame=frame, stage_durations=durations_s, tilework=timeline)
