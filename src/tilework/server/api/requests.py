"""Accepted calls: their status, results and decisions, and how to cancel them.

A `uid` names a call, or one of its images as `{call}-{index}`. Calls of another tenant do not exist for a client,
except that the scope admin shows the decisions about all calls.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response

from tilework.core.time import s_from_ns
from tilework.runtime.engine import Engine
from tilework.server.api.images import on_wire
from tilework.server.calls.call import Call
from tilework.server.calls.encode import Threads
from tilework.server.calls.errors import CallError, NotDone, PicturesGone, UnknownCall, gone, invalid
from tilework.server.calls.events import CallEvents, StreamEvent, View, ended_events
from tilework.server.calls.finish import stored_name
from tilework.server.calls.records import CallRecord
from tilework.server.calls.registry import CallRegistry
from tilework.server.calls.status import call_decisions, call_status
from tilework.server.calls.submitter import CallSubmitter
from tilework.server.config import ServerConfig
from tilework.server.http.files import file_answer
from tilework.server.http.middleware import is_head, tenant_of
from tilework.server.http.sse import EventStream
from tilework.server.schema.answers import Decisions, RequestList, RequestStatus
from tilework.server.text import counted, shown
from tilework.store.results import Result, ResultStore

_UID = re.compile(r"([0-9a-f]{32})(?:-([0-9]{1,3}))?", re.ASCII)
MAX_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class _NamedCall:
    """The call that a uid names, open or ended, and the index of one of its images, or None for all of them."""

    entry: Call | CallRecord
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestService:
    """Serves everything under `/v1/requests`, and the files of images."""

    engine: Engine
    config: ServerConfig
    store: ResultStore
    call_registry: CallRegistry
    submitter: CallSubmitter
    threads: Threads

    def status(self, uid: str, http: Request) -> RequestStatus:
        found = self._find(uid, tenant_of(http.scope).name)
        return _only(self._status(found.entry), found.index)

    def latest(self, limit: int, after: str | None, http: Request) -> RequestList:
        """Return a page of calls with the ETAs of their admission: predicting them again would take too long.

        Raises:
            InvalidValue: there is no call `after`.
        """
        tenant = tenant_of(http.scope).name
        now_ns = self.engine.now_ns()
        if after is not None and self.call_registry.find(after, tenant, now_ns) is None:
            raise invalid(
                "after",
                after,
                "Give the uid of a call that is still known, or leave it out to list from the beginning.",
            )
        entries = self.call_registry.latest(tenant, limit + 1, now_ns, after)
        data = [
            entry.status() if isinstance(entry, CallRecord) else call_status(entry, None) for entry in entries[:limit]
        ]
        return RequestList(
            data=data,
            first_id=data[0].uid if data else None,
            last_id=data[-1].uid if data else None,
            has_more=len(entries) > limit,
        )

    async def delete(self, uid: str, http: Request) -> bytes:
        """Cancel a call, also by one of its images, or delete the images of a call that has ended.

        Returns its final state, as the JSON of a `RequestStatus`.
        """
        found = self._find(uid, tenant_of(http.scope).name)
        if isinstance(found.entry, Call):
            self.submitter.cancel(found.entry, "the client has cancelled it")
            end = await asyncio.shield(found.entry.end)
            found = self._find(uid, tenant_of(http.scope).name)
            if isinstance(found.entry, Call) and isinstance(end, CallError):  # The next start goes on with it.
                raise end
        record = found.entry
        assert isinstance(record, CallRecord)
        for index in range(record.num_images):
            for frame in range(record.ask.num_parts):
                await self.store.delete(stored_name(record.tenant, record.uid, index, frame))
        self.call_registry.release(record)
        if found.index is None:
            return record.status_json
        return _only(record.status(), found.index).model_dump_json().encode()

    def decisions(self, uid: str, http: Request) -> Decisions:
        """Return decisions about a call of the tenant; of any for the scope admin, which sees all on the page."""
        tenant = tenant_of(http.scope)
        found = self._find(uid, None if tenant.is_admin else tenant.name)
        if isinstance(found.entry, Call):
            status = call_status(found.entry, None).status
            decisions = Decisions(uid=uid, status=status, decisions=call_decisions(found.entry))
        else:
            decisions = found.entry.decisions()
        own = f"{found.entry.uid}-{found.index}"
        kept = [one for one in decisions.decisions if found.index is None or one.uid == own]
        return decisions.model_copy(update={"uid": uid, "decisions": kept})

    def events(self, uid: str, http: Request) -> Response:
        found = self._find(uid, tenant_of(http.scope).name)
        if isinstance(found.entry, CallRecord):
            return self._stream(ended_events(_only(found.entry.status(), found.index)))
        num_images = len(found.entry.tickets)
        events = CallEvents(
            engine=self.engine,
            threads=self.threads,
            uid=uid,
            call=found.entry,
            view=View(has_progress=True, has_files=False),
            images=range(num_images) if found.index is None else range(found.index, found.index + 1),
        )
        return self._stream(events.events())

    def _stream(self, events: AsyncGenerator[StreamEvent, None]) -> Response:
        return EventStream(on_wire(events), keep_alive_s=self.config.keep_alive_s)

    async def content(self, uid: str, index: int | None, frame: int, http: Request) -> Response:
        """Answer with the file of an image, of a frame of a clip, or of a video; or with a part of it.

        Raises:
            ApiError: 416, no byte of it is in the part.
            UnknownCall: there is no such image.
            NotDone: it is not done yet.
            PicturesGone: it will not come, or is not kept any more.
        """
        uid, index = _image(uid, index)
        entry = self.call_registry.find(uid, tenant_of(http.scope).name, self.engine.now_ns())
        if isinstance(entry, CallRecord) and not is_head(http.scope):
            self.call_registry.mark_fetched(entry, index, frame)
        result = await self.result(uid, index, frame, http)
        return await file_answer(result, f"{uid}-{index}.{frame}", http)

    async def result(self, uid: str, index: int, frame: int, http: Request) -> Result:
        """Return the file of an image, of a frame of a clip, or of a video, which the caller closes.

        Raises:
            UnknownCall, NotDone, PicturesGone: see `content`.
        """
        tenant = tenant_of(http.scope).name
        result = await self.store.get(stored_name(tenant, uid, index, frame), self.engine.now_ns())
        entry = self.call_registry.find(uid, tenant, self.engine.now_ns())
        if result is None:
            raise self._no_content(uid, index, frame, entry)
        if isinstance(entry, Call):
            result.close()
            raise self._no_content(uid, index, frame, entry)
        return result

    def _no_content(self, uid: str, index: int, frame: int, entry: Call | CallRecord | None) -> CallError:
        status = None if entry is None else self._status(entry)
        if status is None or index >= len(status.images):
            return self._unknown(f"{uid}-{index}")
        if frame >= status.num_parts:
            return invalid("frame", frame, f"Give an integer from 0 to {status.num_parts - 1}.")
        if isinstance(entry, Call):
            return _not_done(entry, status, self.engine.now_ns())
        if status.error is not None:
            message = f"Request {uid} has no images: {status.error.message}"
            return PicturesGone(message, field="uid", code=status.error.code)
        if status.expires is None:
            return gone(uid, "they were in the answer to it, and the request did not ask to keep them")
        return gone(
            uid,
            f"they were deleted or lost, made room for newer ones, or were {self.config.result_ttl_s:g} seconds old",
        )

    def _find(self, uid: str, tenant: str | None) -> _NamedCall:
        """Find what a uid names.

        Raises:
            UnknownCall: the tenant, or any (None), has no such call.
        """
        match = _UID.fullmatch(uid)
        entry = match and self.call_registry.find(match[1], tenant, self.engine.now_ns())
        if not match or not entry:
            raise self._unknown(uid)
        index = None if match[2] is None else int(match[2])
        num_images = len(entry.tickets) if isinstance(entry, Call) else entry.num_images
        if index is not None and index >= num_images:
            raise self._unknown(uid)
        return _NamedCall(entry, index)

    def _unknown(self, uid: str) -> CallError:
        """Return the error for an unknown call."""
        most_s = s_from_ns(self.call_registry.record_ttl_ns)
        message = (
            f"There is no request {shown(uid)}; requests that have ended are known for at most {most_s:g} seconds."
        )
        return UnknownCall(message, field="uid")

    def _status(self, entry: Call | CallRecord) -> RequestStatus:
        return entry.status() if isinstance(entry, CallRecord) else call_status(entry, self.engine)


def _only(status: RequestStatus, index: int | None) -> RequestStatus:
    """Return the status of one image in the form of a call's."""
    if index is None:
        return status
    image = status.images[index]
    update = {
        "uid": image.uid,
        "images": [image],
        "eta_s": image.eta_s,
        "eta": image.eta,
        "eta_p90_s": image.eta_p90_s,
        "eta_p90": image.eta_p90,
    }
    if status.error is None and status.status != "done":
        update["status"] = "running" if image.state == "done" else image.state
    return status.model_copy(update=update)


def _image(uid: str, index: int | None) -> tuple[str, int]:
    """Split a uid into a call and the index of an image: that of the uid, else `index`, else 0."""
    match = _UID.fullmatch(uid)
    if match is None:
        return uid, index or 0
    return match[1], int(match[2]) if match[2] is not None else index or 0


def _not_done(call: Call, status: RequestStatus, now_ns: int) -> NotDone:
    left_s = (status.eta_s or 0.0) - s_from_ns(now_ns - call.arrival_ns)
    retry_s = min(max(1, math.ceil(left_s)), MAX_RETRY_S)
    message = f"Request {status.uid} is {status.status}, not done yet. Retry in {counted(retry_s, 'second')}."
    return NotDone(message, field="uid", retry_s=retry_s)
