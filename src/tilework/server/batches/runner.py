"""Makes the calls of batches through the application, and keeps their answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from tilework.server.batches.answers import AnswerFile
from tilework.server.batches.disk import KeptFile, StoredBatch
from tilework.server.batches.lines import BatchLine, LinePosition, answer_line, read_calls
from tilework.server.batches.shelf import BatchShelf
from tilework.server.bounded.json_writer import json_pieces
from tilework.server.calls.errors import ModelNotServed
from tilework.server.http.body_limits import JSON
from tilework.server.http.middleware import KEY, TENANT, TENANTS
from tilework.server.schema.batch_answers import BatchAnswer, BatchState, LineError, LineErrors
from tilework.server.tenants import CurrentTenants, Tenant, Tenants
from tilework.server.text import time_text

logger = logging.getLogger("tilework.server")

AT_ONCE = 16
"""Number of calls of a batch that wait or run at a time; more would only fill the queue."""
CLASS = "batch"
_DEADLINES = ("slo_s", "slo_ms", "deadline")
_RETRY_S = 5.0
_STOPPED_S = 15
_NO_ROOM, _NOT_READY = 429, 503
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, kw_only=True, eq=False)
class _Answers:
    """A file of answers, as the runner writes it and as the shelf knows it."""

    kept: KeptFile
    file: AnswerFile


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """A batch that waits or runs: its state, and whether its client has cancelled it.

    `tenants` are the latest tenants that included the batch's own.
    """

    batch: StoredBatch
    tenants: Tenants | None = None
    is_running: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> BatchAnswer:
        return self.batch.answer

    @property
    def is_over(self) -> bool:
        """True if no more calls of the batch are to be made."""
        return self.cancelled.is_set() or time.time() >= self.state.expires_at

    def update(self, **changes: object) -> None:
        self.batch = replace(self.batch, answer=self.state.model_copy(update=changes))


@dataclass(slots=True)
class BatchRunner:
    """Runs batches, as calls of `app` by their tenants. Methods run on the event loop.

    Up to `max_running` batches of a tenant run side by side; the others wait, the oldest first. Each call has its own
    idempotency key, so that after a restart the server joins the calls that it has taken over, and makes none twice. A
    call has class `batch`, and as deadline the end of the batch's window, unless it sets another. While the batch's
    tenant is gone, no call is made. One thread reads lines and writes answers, in the order in which tasks ask for
    that, also for tasks that have been cancelled since.
    """

    app: ASGIApp
    shelf: BatchShelf
    tenants: CurrentTenants
    max_running: int
    _open: dict[str, dict[str, _Progress]] = field(default_factory=dict)  # By tenant and id, the oldest first.
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tilework-batches")
    )

    def resume(self) -> None:
        """Go on with the batches that the previous start has left; the shelf is open."""
        unfinished, self.shelf.unfinished = self.shelf.unfinished, []
        for batch in unfinished:
            if self.tenants.value.named(batch.tenant) is None:
                message = "batch %s waits until its tenant is there again: %s is gone"
                logger.error(message, batch.answer.id, batch.tenant)
            self.start(batch)

    def start(self, batch: StoredBatch) -> BatchAnswer:
        """Begin or go on with a batch, or let it wait for others of its tenant; return its state then."""
        progress = _Progress(batch=batch)
        if batch.answer.status == "cancelling":
            progress.cancelled.set()
        self._open.setdefault(batch.tenant, {})[batch.answer.id] = progress
        self._begin(batch.tenant)
        return progress.state

    def current(self, tenant: str, batch_id: str) -> BatchAnswer | None:
        """Return the present state of a batch that has not ended; None if there is none of this id."""
        progress = self._open.get(tenant, {}).get(batch_id)
        return None if progress is None else progress.state

    async def cancel(self, tenant: str, batch_id: str) -> BatchAnswer | None:
        """Make no more calls of a batch that has not ended; those that are under way are finished. Raises OSError."""
        progress = self._open.get(tenant, {}).get(batch_id)
        if progress is not None and not progress.cancelled.is_set():
            progress.cancelled.set()
            progress.update(status="cancelling", cancelling_at=int(time.time()))
            async with progress.writing:
                if progress.state.status == "cancelling":
                    await self.shelf.keep(progress.batch)
            self._begin(tenant)
        return None if progress is None else progress.state

    def end_overdue(self) -> None:
        """End batches whose window has passed while they waited."""
        for tenant in list(self._open):
            self._begin(tenant)

    async def close(self) -> None:
        """Leave batches to the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    def _begin(self, tenant: str) -> None:
        """Begin the batches that may begin. Batches that make no more calls only have to end, and need no place."""
        of_tenant = self._open.get(tenant, {}).values()
        num_free = self.max_running - sum(one.is_running and not one.is_over for one in of_tenant)
        for progress in [one for one in of_tenant if not one.is_running]:
            if not progress.is_over:
                if num_free <= 0:
                    continue
                num_free -= 1
                if progress.state.status == "validating":
                    progress.update(status="in_progress", in_progress_at=int(time.time()))
            progress.is_running = True
            task = asyncio.create_task(self._watched(progress))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _on_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def _watched(self, progress: _Progress) -> None:
        """Run a batch to its end, again after a failure such as a full disk: answers that were kept stay."""
        while True:
            try:
                return await self._run(progress)
            except Exception:
                logger.exception("batch %s has stopped, and continues in %d seconds", progress.state.id, _STOPPED_S)
            await asyncio.sleep(_STOPPED_S)

    async def _run(self, progress: _Progress) -> None:
        tenant = progress.batch.tenant
        state = progress.state
        ids = (state.input_file_id, state.output_file_id or "", state.error_file_id or "")
        calls, *kept = (self.shelf.file(tenant, file_id) for file_id in ids)
        answers = [_Answers(kept=one, file=AnswerFile(one.place)) for one in kept if one is not None]
        if calls is None or len(answers) < len(kept):
            await self._end(progress, "failed", errors=_files_gone())
            return
        for one in answers:
            await self._on_thread(one.file.begin)
            while await self._on_thread(one.file.read_on):
                pass
            self.shelf.has_grown(one.kept, one.file.end)
        counts = {"completed": len(answers[0].file.numbers), "failed": len(answers[1].file.numbers)}
        progress.update(request_counts=state.request_counts.model_copy(update=counts))
        await self._make_calls(progress, calls, answers)
        status: BatchState = "completed"
        if (counted := progress.state.request_counts).completed + counted.failed < counted.total:
            status = "cancelled" if progress.cancelled.is_set() else "expired"
        await self._end(progress, status)
        with suppress(OSError):  # The next start removes the files that are left.
            for one in answers:
                await self._on_thread(one.file.forget)

    async def _make_calls(self, progress: _Progress, calls: KeptFile, answers: list[_Answers]) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        answered = [one.file.numbers for one in answers]
        position: LinePosition | None = LinePosition()
        async with self._client(progress) as client, asyncio.TaskGroup() as group:
            while position is not None and not progress.is_over:
                endpoint = progress.state.endpoint
                lines, position = await self._on_thread(read_calls, calls.place, endpoint, position, *answered)
                for line in lines:
                    await places.acquire()
                    if progress.is_over:
                        break
                    task = group.create_task(self._call(client, progress, line, answers))
                    task.add_done_callback(lambda _task: places.release())

    async def _call(
        self, client: httpx.AsyncClient, progress: _Progress, line: BatchLine, answers: list[_Answers]
    ) -> None:
        """Make one call and keep its answer; while there is no room, try again. Once the batch is over, no try is made.

        No call is made while its tenant is gone.
        """
        state = progress.state
        headers = {"Idempotency-Key": f"{state.id}-{line.number}", "Content-Type": JSON}
        # The body is sent as it was read: httpx's own JSON refuses what a route answers with 400, as half of a
        # surrogate pair.
        while True:
            wait_s: float = _STOPPED_S
            if (tenant := self._tenant(progress)) is not None:
                body = await self._on_thread(json_pieces, {**line.body, **self._defaults(progress, tenant, line)})
                headers["Content-Length"] = str(sum(map(len, body)))
                answer = await client.post(state.endpoint, content=_each(body), headers=headers)
                if not _is_to_be_repeated(answer):
                    break
                wait_s = float(answer.headers.get("retry-after", _RETRY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await progress.cancelled.wait()
            if progress.is_over:
                return
        is_good = answer.status_code == httpx.codes.OK
        written = answers[0 if is_good else 1]
        await self._on_thread(_append, written.file, state.id, line, answer)
        self.shelf.has_grown(written.kept, written.file.end)
        counts = progress.state.request_counts
        name = "completed" if is_good else "failed"
        progress.update(request_counts=counts.model_copy(update={name: getattr(counts, name) + 1}))

    def _client(self, progress: _Progress) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self._as_its_tenant(progress))
        return httpx.AsyncClient(transport=transport, base_url=progress.batch.base_url, timeout=None)

    def _tenant(self, progress: _Progress) -> Tenant | None:
        """Return the batch's tenant; None while there is none of this name."""
        if (tenant := self.tenants.value.named(progress.batch.tenant)) is not None:
            progress.tenants = self.tenants.value
        return tenant

    def _defaults(self, progress: _Progress, tenant: Tenant, line: BatchLine) -> dict[str, Any]:
        """Return defaults for fields that a call does not set, nor its `extra_body`; null does not set a field."""
        given = line.given()
        found: dict[str, Any] = {}
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

    async def _end(self, progress: _Progress, status: BatchState, **changes: object) -> None:
        """End a batch. Raises OSError: it has not ended then."""
        async with progress.writing:
            ended = {"status": status, f"{status}_at": int(time.time()), **changes}
            batch = replace(progress.batch, answer=progress.state.model_copy(update=ended))
            await self.shelf.keep_ended(batch)
            progress.batch = batch
        del self._open[batch.tenant][batch.answer.id]
        self._begin(batch.tenant)


def _files_gone() -> LineErrors:
    message = "A file of the batch is gone. Send its remaining calls as another batch."
    return LineErrors(data=[LineError(code="file_not_found", line=None, message=message)])


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _is_to_be_repeated(answer: httpx.Response) -> bool:
    """Return whether a call has to be made again, since there was no room.

    A call whose own deadline cannot be met is answered: its client asked for that, and to wait for a deadline that is
    never met would hold up the others. So is a call for a model that cannot run here.
    """
    if answer.status_code == _NO_ROOM:
        return bool(answer.headers.get("x-should-retry") != "false")
    return answer.status_code == _NOT_READY and bool(answer.json()["error"]["code"] != ModelNotServed.code)


def _append(file: AnswerFile, batch_id: str, line: BatchLine, answer: httpx.Response) -> None:
    """Write the answer of a call. Raises OSError."""
    uid = answer.headers.get("x-request-id", "")
    file.append(line.number, answer_line(batch_id, line, answer.status_code, uid, answer.content))
