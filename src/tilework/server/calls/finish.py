"""The end of a call: waits for its images, encodes and keeps them, and writes its record.

A call is all or nothing: if one image fails or is cancelled, the others are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from PIL import Image as Pillow

from tilework.core.request import Refusal, Status
from tilework.core.time import s_from_ns
from tilework.core.wire.spec import Image
from tilework.pipelines.video.stills import some_frames
from tilework.runtime.engine import Engine
from tilework.runtime.ticket import Outcome
from tilework.server.calls.call import Call, Finished
from tilework.server.calls.encode import Threads, encode, picture_of
from tilework.server.calls.errors import (
    CallCancelled,
    CallError,
    CallFailed,
    ContentRefused,
    Expired,
    InvalidValue,
    ModelNotServed,
    NotReady,
    internal_error,
    not_ready,
)
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.calls.provenance import provenance_of, text_chunks
from tilework.server.calls.records import CallRecord
from tilework.server.calls.registry import CallRegistry
from tilework.server.calls.status import call_decisions, call_status
from tilework.server.calls.timeline import is_exact, request_timeline
from tilework.server.safety_filter import SafetyFilter
from tilework.server.schema.answers import Decisions, RequestTimeline
from tilework.server.schema.provenance import Provenance
from tilework.store.journal import NotWritten
from tilework.store.results import ResultStore, Stored, TooLarge, Unwritten

logger = logging.getLogger("tilework.server")
PATIENCE_S = 60.0
"""Seconds for which the server tries to keep an image that cannot be written."""
_RETRY_S = 0.5
_REFUSALS: dict[Refusal, tuple[type[CallError], str | None]] = {
    Refusal.CONTENT: (ContentRefused, None),
    Refusal.VALUE: (InvalidValue, "unsupported_value"),
    Refusal.MODEL: (ModelNotServed, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finisher:
    """Brings calls to their end; `store` keeps the images that a client may fetch later.

    If it `has_metadata`, PNG files say how they were made. `observers` are called with the record of each ended call.
    """

    engine: Engine
    store: ResultStore
    threads: Threads
    call_registry: CallRegistry
    has_metadata: bool = True
    observers: tuple[Callable[[CallRecord], None], ...] = ()
    safety_filter: SafetyFilter | None = None

    async def finish(self, call: Call) -> None:
        """Resolve `call.end`, whatever happens, after the call registry has let go of the open call.

        A bug while the record is written costs the record, not the images: a client that waits gets them. A call that
        is left to the next start of the server stays open.
        """
        end, expires_ns = await self._end(call)
        if isinstance(end, CallError):
            end.details.setdefault("uid", call.uid)
        if self.call_registry.is_left and isinstance(end, CallError) and call.cancel_reason is None:
            call.end.set_result(_left(call))
            return
        ask = call.ask.without_texts()
        try:
            if isinstance(end, CallError):
                self.cancel(call, f"another image of the call ended it ({end.code})")
            now_ns = self.engine.now_ns()
            record = self._record(call, ask, end, expires_ns, now_ns)
        except Exception:
            logger.exception("call %s has ended, but no record of it could be written", call.uid)
            self.call_registry.forget(call)
        else:
            self.call_registry.end(record, now_ns, frees_key=isinstance(end, CallError))
            await self._sync(call)
            for observe in self.observers:
                observe(record)
        finally:
            for ticket in call.tickets:
                self.engine.release(ticket.request.uid)
            if call.abandoned is not None:
                call.abandoned.cancel()
            call.ask = ask
            call.end.set_result(end)

    async def _sync(self, call: Call) -> None:
        """Wait until the machine's next start would not repeat a call that has ended."""
        try:
            await self.call_registry.journal.sync()
        except NotWritten as error:
            logger.error("call %s has ended, but if the machine is lost the next start repeats it: %s", call.uid, error)

    def cancel(self, call: Call, reason: str) -> None:
        """Cancel the images of a call that have not ended."""
        for ticket in call.tickets:
            if not ticket.outcome.done():
                self.engine.cancel(ticket.request.uid, reason)

    async def _end(self, call: Call) -> tuple[Finished | CallError, int | None]:
        """Wait for the end of a call; return its result, and the expiry of its images if they are in the store."""
        try:
            outcomes = await _outcomes(call)
            if isinstance(outcomes, CallError):
                return outcomes, None
            finished = await self._finished(call, outcomes)
            kept = await self._keep(call, finished) if call.is_kept else None
        except ContentRefused as refusal:
            return refusal, None
        except Exception:
            logger.exception("call %s failed", call.uid)
            return internal_error(), None
        if isinstance(kept, CallError):
            # Without the store an image can only go to a connection that waits for it.
            return (kept if call.ask.as_url or call.is_detached else finished), None
        return finished, kept

    async def _finished(self, call: Call, outcomes: list[Outcome]) -> Finished:
        ask = call.ask.without_texts()  # A slow client may hold the answer for long.
        files: list[bytes] = []
        timelines: list[RequestTimeline] = []
        for index, (ticket, outcome) in enumerate(zip(call.tickets, outcomes, strict=True)):
            await self._check(outcome)
            provenance = await self._provenance(call, index, outcome)
            files += await self._files(call.ask, index, outcome, provenance)
            timelines.append(request_timeline(ask, index, ticket, outcome, provenance))
        return Finished(uid=call.uid, arrived_s=call.arrived_s, ask=ask, timelines=tuple(timelines), files=tuple(files))

    async def _check(self, outcome: Outcome) -> None:
        """Raise ContentRefused if the safety filter objects to an image, or to one of some frames of a video."""
        if self.safety_filter is None:
            return
        if outcome.file is not None:
            pictures: Iterable[Pillow.Image] = await self.threads.run(some_frames, outcome.file.content)
        else:
            image = _pixels(outcome)
            pictures = (picture_of(image, frame) for frame in range(image.frames))
        for picture in pictures:
            reason = await self.threads.run(self.safety_filter.refuse_picture, picture)
            if reason is not None:
                raise ContentRefused(f"Image {outcome.uid} is withheld: {reason}.", resend=False)

    async def _provenance(self, call: Call, index: int, outcome: Outcome) -> Provenance | None:
        """Return how an image was made; None for a video, whose pixels stay with its workers, and without a model."""
        info = self.engine.models.get(call.ask.model)
        exact = is_exact(call.tickets[index], outcome)
        if outcome.image is None or info is None or not info.hardware:
            return None
        if not (exact or (self.has_metadata and call.ask.output_format == "png")):
            return None
        return await self.threads.run(provenance_of, call.ask.specs[index], info, outcome.image, is_exact=exact)

    async def _files(self, ask: ImageCall, index: int, outcome: Outcome, provenance: Provenance | None) -> list[bytes]:
        """Return the files of an image; that of a video has come as one."""
        if outcome.file is not None:
            return [outcome.file.content]
        pixels = _pixels(outcome)
        spec = ask.specs[index]
        parts = []
        for frame in range(ask.num_parts):
            texts = text_chunks(spec, provenance, frame) if self.has_metadata and provenance is not None else None
            parts.append(self.threads.run(encode, pixels, ask.output_format, ask.quality, frame, texts))
        return await asyncio.gather(*parts)

    async def _keep(self, call: Call, finished: Finished) -> int | CallError:
        """Put the images into the store; return when the first expires, or the error if one has no place."""
        expire_ns = []
        for number, file in enumerate(finished.files):
            name = stored_name(call.tenant, call.uid, *divmod(number, finished.ask.num_parts))
            match await self._put(call, name, file):
                case TooLarge() as answer:
                    return _too_large(answer)
                case Unwritten() as answer:
                    logger.error("the images of call %s cannot be kept: %s", call.uid, answer.reason)
                    return _unwritten(call, answer)
                case Stored(expires_ns=expires_ns):
                    expire_ns.append(expires_ns)
        return min(expire_ns)

    async def _put(self, call: Call, name: str, file: bytes) -> Stored | TooLarge | Unwritten:
        """Put an image into the store; try again for some time if it cannot be written.

        The disk may be full, too many files may be open, or other machines may be unreachable. A client that waits for
        the image itself does not wait for that.
        """
        waited_s = 0.0
        while True:
            stored = await self.store.put(name, file, call.ask.media_type, self.engine.now_ns())
            is_needed = call.ask.as_url or call.is_detached
            if not isinstance(stored, Unwritten) or not is_needed or waited_s >= PATIENCE_S:
                return stored
            if self.call_registry.is_left:  # The next start goes on with it.
                return stored
            await asyncio.sleep(_RETRY_S)
            waited_s += _RETRY_S

    def _record(
        self, call: Call, ask: ImageCall, end: Finished | CallError, expires_ns: int | None, now_ns: int
    ) -> CallRecord:
        """Make the record of a call; `ask` is the call's without texts."""
        is_kept = expires_ns is not None
        expires_s = None if expires_ns is None else call.arrived_s + s_from_ns(expires_ns - call.arrival_ns)
        status = call_status(call, None, end, expires_s)
        decisions = Decisions(uid=call.uid, status=status.status, decisions=call_decisions(call))
        return CallRecord(
            uid=call.uid,
            key=call.key,
            ask=ask,
            arrived_s=call.arrived_s,
            fresh_until_ns=now_ns + self.call_registry.ttl_ns if expires_ns is None else expires_ns,
            status_json=status.model_dump_json().encode(),
            decisions_json=decisions.model_dump_json().encode(),
            unfetched=self._unfetched(call) if is_kept else set(),
            webhook=call.ask.webhook,
            latency_s=s_from_ns(now_ns - call.arrival_ns),
        )

    def _unfetched(self, call: Call) -> set[tuple[int, int]]:
        """Return the images that would be lost if the server stopped before they are fetched."""
        if not call.is_detached or self.call_registry.journal.is_durable:
            return set()
        return {(index, frame) for index in range(len(call.tickets)) for frame in range(call.ask.num_parts)}


def stored_name(tenant: str, call_uid: str, index: int, frame: int = 0) -> str:
    """Return the name in the store of an image, or of a frame of a clip, with the tenant, so that no other finds it."""
    name = f"{tenant}/{call_uid}-{index}"
    return f"{name}.{frame}" if frame else name


async def _outcomes(call: Call) -> list[Outcome] | CallError:
    """Wait for the outcomes of a call: return them if all are done, else the error of the first that is not."""
    waiting = {ticket.outcome for ticket in call.tickets}
    while waiting:
        ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in ended:
            if (error := _failure(call, future.result())) is not None:
                return error
    return [ticket.outcome.result() for ticket in call.tickets]


def _failure(call: Call, outcome: Outcome) -> CallError | None:
    if outcome.status is Status.DONE:
        return None
    if outcome.refusal is not None:
        kind, code = _REFUSALS[outcome.refusal]
        return kind(f"Image {outcome.uid} was not made: {outcome.reason.removesuffix('.')}.", code=code, resend=False)
    if outcome.status is Status.EXPIRED:
        message = (
            f'Image {outcome.uid} was dropped, as on_miss "drop" asks: {outcome.reason}. Ask for a later deadline.'
        )
        return Expired(message, resend=False)
    if outcome.status is not Status.CANCELLED:
        message = f"Image {outcome.uid} failed: {outcome.reason}. You may send the request again."
        return CallFailed(message, code="generation_failed")
    if call.cancel_reason is None:  # The engine itself cancelled it: it is stopping, or has lost its devices.
        return not_ready(f"image {outcome.uid} was cancelled: {outcome.reason}")
    message = f"Request {call.uid} was cancelled: {call.cancel_reason}. Send it again if you want it."
    return CallCancelled(message, resend=False)


def _pixels(outcome: Outcome) -> Image:
    assert outcome.image is not None
    return outcome.image


def _unwritten(call: Call, answer: Unwritten) -> CallError:
    message = (
        f"The images of request {call.uid} are done, but this server cannot write them {answer.places}. Send the"
        ' request again with response_format "b64_json", and wait for the answer.'
    )
    return CallFailed(message, code="result_unwritable")


def _left(call: Call) -> CallError:
    """Make the error for clients that wait. If their library sent the call again, it would be drawn twice."""
    message = (
        f"The server is stopping. Request {call.uid} is kept: it continues at the server's next start, and its images "
        f"are then at /v1/requests/{call.uid}/content. Do not send it again."
    )
    return NotReady(message, code="kept", resend=False, details={"uid": call.uid})


def _too_large(answer: TooLarge) -> CallError:
    message = (
        f"The image has {answer.num_bytes} bytes, but this server keeps at most {answer.max_bytes} bytes of"
        ' results. Ask for response_format "b64_json", or raise result_bytes.'
    )
    return CallFailed(message, code="result_too_large")
