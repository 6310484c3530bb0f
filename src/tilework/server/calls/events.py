"""The events of a call: OpenAI's for images, our own for its progress.

A reader gets the latest state whenever it can take more, never the states that it missed. So a slow reader costs no
memory.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tilework.core.request import Status
from tilework.runtime.engine import Engine
from tilework.runtime.ticket import Ticket, TicketPreview
from tilework.server.calls.call import Call, Finished, changes
from tilework.server.calls.encode import Threads, encode_base64, encode_preview
from tilework.server.calls.errors import CallCancelled, CallError
from tilework.server.calls.parsing.sizes import size_text
from tilework.server.calls.status import CallEta, eta
from tilework.server.schema.answers import RequestStatus

_LOOK_S = 2.0  # A stream looks this often at the prediction of a waiting image.
_MOVED = 0.1  # A prediction is sent again once it has changed by this share of the latency.
_NO_TOKENS = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream."""

    name: str
    data: Mapping[str, object]


@dataclass(slots=True)
class _Sent:
    """The state of one image as sent to a reader; the step of its last preview, and its number of partial images."""

    state: tuple[str, int] | None = None
    eta_s: float = 0.0
    preview_step: int = 0
    num_partial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The events that a reader wants: our own (`has_progress`), files (`has_files`), and unfinished images."""

    has_progress: bool
    has_files: bool
    num_partial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvents:
    """The events of one call for one reader, or of the one image of it that `uid` names; `images` are their indices."""

    engine: Engine
    threads: Threads
    uid: str
    call: Call
    view: View
    images: range
    sent: dict[int, _Sent] = field(default_factory=dict)

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Yield events from the present state on until the call has ended."""
        with changes(self.call) as changed:
            if self.view.has_progress:
                yield self._accepted()
            while True:
                changed.clear()
                is_ended = self.call.end.done()
                async for news in self._news():
                    yield news
                if is_ended:
                    break
                await self._until_changed(changed)
        async for news in self._end(self.call.end.result()):
            yield news

    def _accepted(self) -> StreamEvent:
        call = self.call
        expected = [eta(call, self.engine, call.tickets[index]) for index in self._open_images()]
        ask = call.ask
        judged = {"slo_s": ask.slo_s, "slo_source": ask.slo_source, "is_promised": ask.is_promised}
        last_s = max((one.seconds for one in expected if one is not None), default=None)
        last_p90_s = max((one.p90_s for one in expected if one is not None), default=None)
        about = {"uid": self.uid, "images": len(self.images), "eta_s": last_s, "eta_p90_s": last_p90_s}
        return StreamEvent("tilework.accepted", {**about, **judged, "warnings": [*ask.warnings]})

    async def _until_changed(self, changed: asyncio.Event) -> None:
        """Wait for a change; while an image waits, no longer than until its prediction is looked at again."""
        waits = self.view.has_progress and any(map(self._waits, self._open_images()))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S if waits else None):
                await changed.wait()

    def _waits(self, index: int) -> bool:
        return self.call.tickets[index].status in (Status.QUEUED, Status.PAUSED)

    async def _news(self) -> AsyncIterator[StreamEvent]:
        for index in self._open_images():
            ticket = self.call.tickets[index]
            sent = self.sent.setdefault(index, _Sent())
            preview = ticket.preview
            if preview is not None and preview.steps_done > sent.preview_step and not ticket.outcome.done():
                sent.preview_step = preview.steps_done
                async for news in self._preview(index, preview, sent):
                    yield news
            if not self.view.has_progress:
                continue
            state = ticket.status.value, ticket.steps_done
            if state != sent.state or self._waits(index):
                expected = eta(self.call, self.engine, ticket)
                if state != sent.state or (expected and abs(expected.seconds - sent.eta_s) > _MOVED * sent.eta_s):
                    sent.state = state
                    sent.eta_s = expected.seconds if expected else 0.0
                    yield StreamEvent("tilework.progress", _progress(index, ticket, expected))

    def _open_images(self) -> list[int]:
        """Return the images with a ticket: a call that was replayed from the store has none any more."""
        return [index for index in self.images if index < len(self.call.tickets)]

    async def _preview(self, index: int, preview: TicketPreview, sent: _Sent) -> AsyncIterator[StreamEvent]:
        is_partial = self.view.has_files and self._is_due(preview, sent.num_partial)
        if not (is_partial or self.view.has_progress):
            return
        ask = self.call.ask
        about = {"uid": f"{self.call.uid}-{index}", "index": index, "step": preview.steps_done}
        if is_partial:
            text = await self.threads.run(encode_base64, preview.image, ask.output_format, ask.quality)
            partial = {**self._picture(text), "partial_image_index": sent.num_partial, "tilework": about}
            sent.num_partial += 1
            yield StreamEvent(f"{ask.stream_of}.partial_image", partial)
        if self.view.has_progress:
            form, content = await self.threads.run(encode_preview, preview.image, ask.output_format, ask.quality)
            coded = {"output_format": form, "b64_json": base64.b64encode(content).decode("ascii")}
            yield StreamEvent("tilework.preview", {**about, **coded})

    def _is_due(self, preview: TicketPreview, num_shown: int) -> bool:
        """Return whether the next unfinished image is due: they divide the steps into equal parts."""
        k = self.view.num_partial
        steps = self.call.ask.specs[0].steps
        return preview.steps_done >= steps * (num_shown + 1) // (k + 1)

    def _picture(self, text: str) -> dict[str, object]:
        ask = self.call.ask
        return {
            "b64_json": text,
            "background": "opaque",
            "created_at": int(time.time()),
            "output_format": ask.output_format,
            "quality": "auto",
            "size": size_text(ask.specs[0].shape),
        }

    async def _end(self, end: Finished | CallError) -> AsyncIterator[StreamEvent]:
        if isinstance(end, Finished):
            for index in self.images:
                async for news in self._done(end, index):
                    yield news
            return
        if self.view.has_progress:
            name = "tilework.cancelled" if isinstance(end, CallCancelled) else "tilework.failed"
            yield StreamEvent(name, {"uid": self.uid, "reason": end.message, "code": end.code})
        if self.view.has_files:
            yield StreamEvent("error", {"error": end.detail().model_dump(mode="json")})

    async def _done(self, end: Finished, index: int) -> AsyncIterator[StreamEvent]:
        """Yield the events of a finished image; each frame of a clip is an event."""
        timeline = end.timelines[index]
        served = timeline.model_dump(mode="json")
        for frame, file in end.parts(index) if self.view.has_files else ():
            text = (await self.threads.run(base64.b64encode, file)).decode("ascii")
            completed = {**self._picture(text), "frame": frame, "usage": _NO_TOKENS, "tilework": served}
            yield StreamEvent(f"{end.ask.stream_of}.completed", completed)
        if self.view.has_progress:
            yield StreamEvent("tilework.done", {"uid": timeline.uid, "timeline": served})


def _progress(index: int, ticket: Ticket, expected: CallEta | None) -> dict[str, object]:
    return {
        "uid": ticket.request.uid,
        "index": index,
        "state": ticket.status.value,
        "step": ticket.steps_done,
        "steps": ticket.request.steps,
        "eta_s": expected and expected.seconds,
        "eta_p90_s": expected and expected.p90_s,
    }


async def ended_events(status: RequestStatus) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of a call that has ended, for a reader that comes later."""
    yield StreamEvent(
        "tilework.accepted", {"uid": status.uid, "images": len(status.images), "eta_s": None, "eta_p90_s": None}
    )
    if status.error is not None:
        about = {"uid": status.uid, "reason": status.error.message, "code": status.error.code}
        yield StreamEvent(f"tilework.{status.status}", about)
        return
    for image in status.images:
        timeline = None if image.timeline is None else image.timeline.model_dump(mode="json")
        yield StreamEvent("tilework.done", {"uid": image.uid, "timeline": timeline})
