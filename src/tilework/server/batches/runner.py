"""Makes the calls of batches, through the application, and keeps their answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from tilework.server.batches.lines import Line, answer_line, answered, read_lines
from tilework.server.batches.shelf import BatchShelf, StoredBatch
from tilework.server.http.body import JSON
from tilework.server.http.middleware import KEY, TENANT, TENANTS
from tilework.server.schema.batch_answers import BatchAnswer, BatchState, LineError, LineErrors
from tilework.server.tenants import CurrentTenants, Tenant, Tenants
from tilework.server.text import time_text

logger = logging.getLogger("tilework.server")

AT_ONCE = 16
"""Calls of a batch that wait or run at a time; more would only fill the queue."""
CLASS = "batch"
_DEADLINES = ("slo_s", "slo_ms", "deadline")
_RETRY_S = 5.0
_STOPPED_S = 15
_NO_ROOM, _NOT_READY = 429, 503


@dataclass(slots=True, kw_only=True)
class _Progress:
    """A batch that runs: its files, how far it is, and whether its client wants no more of it.

    `tenants` are the latest of which one was the batch's own.
    """

    batch: StoredBatch
    calls: Path
    output: Path
    error: Path
    tenants: Tenants | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> BatchAnswer:
        return self.batch.answer

    def update(self, **changes: object) -> None:
        self.batch = replace(self.batch, answer=self.state.model_copy(update=changes))


@dataclass(slots=True)
class BatchRunner:
    """Runs batches side by side, as calls of `app` by their tenants. Methods run on the event loop.

    Each call has an idempotency key of its own, so that a start of the server joins the calls that it has taken over,
    and makes none twice. Its class is `batch`, and its deadline the end of the batch's window, unless it says another.
    While there is no tenant of the batch's name, no call is made.
    """

    app: ASGIApp
    shelf: BatchShelf
    tenants: CurrentTenants
    _running: dict[str, _Progress] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def resume(self) -> None:
        """Go on with what the previous start has left."""
        for batch in reversed(self.shelf.batches()):
            if batch.answer.status in ("in_progress", "cancelling"):
                self.start(batch)

    def start(self, batch: StoredBatch) -> None:
        """Begin, or go on with, a batch. One whose files are gone has failed."""
        if self.tenants.value.named(batch.tenant) is None:
            logger.error("batch %s goes on when there is its tenant again: %s is gone", batch.answer.id, batch.tenant)
        calls, output, error = (self.shelf.file(batch.tenant, file_id) for file_id in _file_ids(batch.answer))
        if calls is None or output is None or error is None:
            self.shelf.keep(_without_files(batch))
            return
        progress = _Progress(batch=batch, calls=calls, output=output, error=error)
        if batch.answer.status == "cancelling":
            progress.cancelled.set()
        self._running[batch.answer.id] = progress
        task = asyncio.create_task(self._watched(progress))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def current(self, batch: StoredBatch) -> BatchAnswer:
        """How a batch stands now."""
        progress = self._running.get(batch.answer.id)
        return batch.answer if progress is None else progress.state

    def cancel(self, batch: StoredBatch) -> BatchAnswer:
        """Make no more calls of it; those that are under way are finished."""
        progress = self._running.get(batch.answer.id)
        if progress is None or progress.cancelled.is_set():
            return self.current(batch)
        progress.cancelled.set()
        progress.update(status="cancelling", cancelling_at=int(time.time()))
        self.shelf.keep(progress.batch)
        return progress.state

    def user_of(self, file_id: str) -> str | None:
        """The id of a batch that is not done and has this file, if there is one."""
        return next((name for name, one in self._running.items() if file_id in _file_ids(one.state)), None)

    async def close(self) -> None:
        """Leave batches to the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watched(self, progress: _Progress) -> None:
        """Run a batch to its end, again if something is in the way, as a full disk: what is answered stays answered."""
        while True:
            try:
                return await self._run(progress)
            except Exception:
                logger.exception("batch %s has stopped, and goes on in %d seconds", progress.state.id, _STOPPED_S)
            await asyncio.sleep(_STOPPED_S)

    async def _run(self, progress: _Progress) -> None:
        state, places = progress.state, asyncio.Semaphore(AT_ONCE)
        done = answered(progress.output)
        failed = answered(progress.error)
        progress.update(request_counts=state.request_counts.model_copy(update=_counts(done, failed)))
        async with (
            httpx.AsyncClient(
                transport=httpx.ASGITransport(self._as_its_tenant(progress)),
                base_url=progress.batch.base_url,
                timeout=None,
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for line in read_lines(progress.calls, state.endpoint):
                if isinstance(line, LineError) or line.custom_id in done | failed:
                    continue
                await places.acquire()
                if self._is_over(progress):
                    break
                task = group.create_task(self._call(client, progress, line))
                task.add_done_callback(lambda _task: places.release())
        self._end(progress)

    async def _call(self, client: httpx.AsyncClient, progress: _Progress, line: Line) -> None:
        """Make one call, again while there is no room, and keep its answer. Once the batch is over, it is not begun.

        It is not made while its tenant is gone.
        """
        state = progress.state
        headers = {"Idempotency-Key": f"{state.id}-{line.number}", "Content-Type": JSON}
        # As it was read: httpx's own JSON refuses what a route answers with 400, as half of a surrogate pair.
        while True:
            wait_s: float = _STOPPED_S
            if (tenant := self._tenant(progress)) is not None:
                body = json.dumps({**line.body, **self._defaults(progress, tenant, line)}).encode("ascii")
                answer = await client.post(state.endpoint, content=body, headers=headers)
                if not _is_to_be_repeated(answer):
                    break
                wait_s = float(answer.headers.get("retry-after", _RETRY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await progress.cancelled.wait()
            if self._is_over(progress):
                return
        is_good = answer.status_code == httpx.codes.OK
        uid, content = answer.headers.get("x-request-id", ""), json.loads(answer.content)
        written = answer_line(state.id, line, answer.status_code, uid, content)
        await asyncio.to_thread(_append, progress.output if is_good else progress.error, written)
        counts, name = progress.state.request_counts, "completed" if is_good else "failed"
        progress.update(request_counts=counts.model_copy(update={name: getattr(counts, name) + 1}))

    def _tenant(self, progress: _Progress) -> Tenant | None:
        """Whose batch it is; None while there is no such tenant."""
        if (tenant := self.tenants.value.named(progress.batch.tenant)) is not None:
            progress.tenants = self.tenants.value
        return tenant

    def _defaults(self, progress: _Progress, tenant: Tenant, line: Line) -> dict[str, Any]:
        """What a call says that does not say it itself, be it in `extra_body`; null says nothing."""
        given, found = line.given(), dict[str, Any]()
        if "priority" not in given and CLASS in self.tenants.value.allowed(tenant):
            found["priority"] = CLASS
        if not any(name in given for name in _DEADLINES):
            found["deadline"] = time_text(progress.state.expires_at)
        return found

    def _as_its_tenant(self, progress: _Progress) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            tenants = progress.tenants
            assert tenants is not None
            its = {TENANT: tenants.named(progress.batch.tenant), TENANTS: tenants, KEY: b""}
            await self.app({**scope, **its}, receive, send)

        return app

    def _is_over(self, progress: _Progress) -> bool:
        return progress.cancelled.is_set() or time.time() >= progress.state.expires_at

    def _end(self, progress: _Progress) -> None:
        state, now_s = progress.state, int(time.time())
        status: BatchState = "completed"
        if state.request_counts.completed + state.request_counts.failed < state.request_counts.total:
            status = "cancelled" if progress.cancelled.is_set() else "expired"
        progress.update(**{"status": status, f"{status}_at": now_s})
        self.shelf.keep(progress.batch)
        del self._running[state.id]


def _file_ids(answer: BatchAnswer) -> tuple[str, str, str]:
    """Of the calls, the answers, and the errors."""
    return answer.input_file_id, answer.output_file_id or "", answer.error_file_id or ""


def _without_files(batch: StoredBatch) -> StoredBatch:
    message = "A file of the batch is gone. Send what is left of its calls as another batch."
    errors = LineErrors(data=[LineError(code="file_not_found", line=None, message=message)])
    changes = {"status": "failed", "failed_at": int(time.time()), "errors": errors}
    return replace(batch, answer=batch.answer.model_copy(update=changes))


def _is_to_be_repeated(answer: httpx.Response) -> bool:
    """Whether there was no room for a call. One that is refused since its own deadline cannot be met is answered: who
    sends it asked for that, and to wait for a deadline that is never met would hold up the others."""
    is_final = answer.status_code == _NO_ROOM and answer.headers.get("x-should-retry") == "false"
    return answer.status_code in (_NO_ROOM, _NOT_READY) and not is_final


def _counts(done: set[str], failed: set[str]) -> dict[str, int]:
    return {"completed": len(done), "failed": len(failed)}


def _append(place: Path, line: bytes) -> None:
    with place.open("ab") as file:
        file.write(line)
