"""The events of a call: OpenAI's for pictures, ours for how it goes.

A reader is told the latest state whenever it can take more, never what it has missed, so a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from tilework.runtime.ticket import Preview, Ticket
from tilework.server.api.status import CANCELLED, eta
from tilework.server.calls.call import Call, Finished, changes
from tilework.server.calls.encode import Threads, encode_base64
from tilework.server.engine_protocol import Engine
from tilework.server.http.errors import ApiError
from tilework.server.http.sse import KEEP_ALIVE, event
from tilework.server.schema.answers import RequestTimeline

_NO_TOKENS = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


@dataclass(slots=True)
class _Told:
    """What a reader knows of one image. `preview_step` is that of the last preview, `num_partial` how many it saw."""

    state: tuple[str, int] | None = None
    preview_step: int = 0
    num_partial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader wants: our events (`tells`), and of each image its file and so many unfinished ones (`shows`)."""

    tells: bool
    shows: bool
    num_partial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Tells one reader of one call, or of the one image of it that `uid` names; `images` are those it hears of."""

    engine: Engine
    threads: Threads
    uid: str
    call: Call
    view: View
    keep_alive_s: float
    images: range
    told: dict[int, _Told] = field(default_factory=dict)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """From the present state on until the call has ended; a comment whenever nothing happens for a while."""
        with changes(self.call) as changed:
            if self.view.tells:
                yield self._accepted()
            while True:
                changed.clear()
                is_ended = self.call.end.done()
                async for news in self._news():
                    yield news
                if is_ended:
                    break
                try:
                    async with asyncio.timeout(self.keep_alive_s):
                        await changed.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
        async for news in self._end(self.call.end.result()):
            yield news

    def _accepted(self) -> bytes:
        call = self.call
        expected = [eta(call, self.engine, call.tickets[index]) for index in self._open_images()]
        last_s = max((one.seconds for one in expected if one is not None), default=None)
        return event("tilework.accepted", {"uid": self.uid, "images": len(self.images), "eta_s": last_s})

    async def _news(self) -> AsyncIterator[bytes]:
        for index in self._open_images():
            ticket, told = self.call.tickets[index], self.told.setdefault(index, _Told())
            preview = ticket.preview
            if preview is not None and preview.steps_done > told.preview_step and not ticket.outcome.done():
                told.preview_step = preview.steps_done
                async for news in self._preview(index, preview, told):
                    yield news
            state = ticket.status.value, ticket.steps_done
            if self.view.tells and state != told.state:
                told.state = state
                yield event("tilework.progress", self._progress(index, ticket))

    def _open_images(self) -> list[int]:
        """A call that was replayed from the store has no tickets any more."""
        return [index for index in self.images if index < len(self.call.tickets)]

    def _progress(self, index: int, ticket: Ticket) -> dict[str, object]:
        expected = eta(self.call, self.engine, ticket)
        return {
            "uid": ticket.request.uid,
            "index": index,
            "state": ticket.status.value,
            "step": ticket.steps_done,
            "steps": ticket.request.steps,
            "eta_s": expected and expected.seconds,
        }

    async def _preview(self, index: int, preview: Preview, told: _Told) -> AsyncIterator[bytes]:
        wants_partial = self.view.shows and self._is_due(preview, told.num_partial)
        if not (wants_partial or self.view.tells):
            return
        ask = self.call.ask
        text = await self.threads.run(encode_base64, preview.image, ask.output_format, ask.quality)
        about = {"uid": f"{self.call.uid}-{index}", "index": index, "step": preview.steps_done}
        if wants_partial:
            partial = {**self._picture(text), "partial_image_index": told.num_partial, "tilework": about}
            told.num_partial += 1
            yield event("image_generation.partial_image", partial)
        if self.view.tells:
            yield event("tilework.preview", {**about, "output_format": ask.output_format, "b64_json": text})

    def _is_due(self, preview: Preview, num_shown: int) -> bool:
        """Unfinished pictures are spread evenly over the steps; the one after the k-th would be the finished one."""
        k, steps = self.view.num_partial, self.call.ask.specs[0].steps
        return preview.steps_done >= steps * (num_shown + 1) // (k + 1)

    def _picture(self, text: str) -> dict[str, object]:
        ask = self.call.ask
        return {
            "b64_json": text,
            "background": "opaque",
            "created_at": int(time.time()),
            "output_format": ask.output_format,
            "quality": "auto",
            "size": str(ask.specs[0].shape),
        }

    async def _end(self, end: Finished | ApiError) -> AsyncIterator[bytes]:
        if isinstance(end, Finished):
            for index in self.images:
                async for news in self._done(end.stories[index], end.files[index]):
                    yield news
            return
        if self.view.tells:
            kind = "tilework.cancelled" if end.code == CANCELLED else "tilework.failed"
            yield event(kind, {"uid": self.uid, "reason": end.message, "code": end.code})
        if self.view.shows:
            yield event("error", end.body())

    async def _done(self, story: RequestTimeline, file: bytes) -> AsyncIterator[bytes]:
        told = story.model_dump(mode="json")
        if self.view.shows:
            text = (await self.threads.run(base64.b64encode, file)).decode("ascii")
            yield event("image_generation.completed", {**self._picture(text), "usage": _NO_TOKENS, "tilework": told})
        if self.view.tells:
            yield event("tilework.done", {"uid": story.uid, "story": told})
