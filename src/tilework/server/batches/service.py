"""Serves the routes of OpenAI's files and batches (docs/serving.md)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response

from tilework.server.batches.disk import KeptFile, Purpose, StoredBatch, new_number
from tilework.server.batches.lines import check
from tilework.server.batches.runner import BatchRunner
from tilework.server.batches.shelf import BatchShelf, ShelfFull, TooMany
from tilework.server.batches.upload import FILE, PURPOSE, expires_after, taken_file
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.config import ServerConfig
from tilework.server.http.body import read_json
from tilework.server.http.body_limits import FORM, BodyLimits, BodyRoom, media_type, wrong_media_type
from tilework.server.http.errors import SERVER, ApiError, invalid
from tilework.server.http.files import file_answer
from tilework.server.http.form import read_form
from tilework.server.http.middleware import key_of, tenant_of, tenants_of
from tilework.server.schema.batch_answers import (
    BatchAnswer,
    BatchList,
    BatchRequest,
    FileAnswer,
    FileDeleted,
    FileList,
    LineError,
    LineErrors,
    RequestCounts,
)
from tilework.server.tenants import Tenant
from tilework.server.text import shown

logger = logging.getLogger("tilework.server")

MAX_PAGE = 1000
"""Most files on a page, even if a client asks for more."""
_SWEEP_S = 60
_RETRY_S = 15
_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
T = TypeVar("T")


class BatchService:
    """Serves files and batches; `require_ready` raises while no call is taken, and `check_rate` beyond a key's rate."""

    def __init__(
        self,
        config: ServerConfig,
        shelf: BatchShelf | None,
        runner: BatchRunner | None,
        room: BodyRoom,
        require_ready: Callable[[], None],
        check_rate: Callable[[Tenant, bytes], None],
    ) -> None:
        assert (shelf is None) == (runner is None)
        self._config = config
        self._shelf = shelf
        self._runner = runner
        self._room = room
        self._require_ready = require_ready
        self._check_rate = check_rate
        self._checking = asyncio.Lock()  # Files are checked one at a time, since that takes processor time.
        self._resumed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # Files.

    async def upload(self, http: Request) -> FileAnswer:
        async with self._opened() as (shelf, _):
            tenant = tenant_of(http.scope)
            num_tenants = len(tenants_of(http.scope).members)
            self._check_rate(tenant, key_of(http.scope))
            shelf.check_room(tenant.name, 0, num_tenants)
            if media_type(http) != FORM:
                raise wrong_media_type(http, f'a form with "Content-Type: {FORM}"')
            with self._room.place() as place:
                limits = BodyLimits(
                    max_bytes=self._config.max_input_bytes, timeout_s=self._config.read_timeout_s, place=place
                )
                fields = dict(await read_form(http, limits))
                content = taken_file(fields.get(PURPOSE), fields.get(FILE))
                ttl_s = expires_after(fields)
                expires_s = None if ttl_s is None else int(time.time()) + ttl_s
                return await shelf.add(tenant.name, content, expires_s, num_tenants)

    async def about(self, file_id: str, http: Request) -> FileAnswer:
        async with self._opened() as (shelf, _):
            tenant = tenant_of(http.scope).name
            return shelf.about(tenant, _file(shelf, tenant, file_id))

    async def files(
        self, limit: int, after: str | None, purpose: Purpose | None, *, is_oldest_first: bool, http: Request
    ) -> FileList:
        async with self._opened() as (shelf, _):
            tenant = tenant_of(http.scope).name
            found = [one for one in shelf.files(tenant) if purpose in (None, one.purpose)]
            with_gone = shelf.with_deleted(tenant, found)  # A client may delete files while it goes from page to page.
            ids = with_gone[::-1] if is_oldest_first else with_gone
            there = {one.id for one in found}
            page, has_more = _page(ids, min(limit, MAX_PAGE), after, "file", there)
            known = {one.id: one for one in found}
            data = [shelf.about(tenant, known[one]) for one in page]
        return FileList(data=data, first_id=_first(page), last_id=_first(page[::-1]), has_more=has_more)

    async def content(self, file_id: str, http: Request) -> Response:
        async with self._opened() as (shelf, _):
            file = _file(shelf, tenant_of(http.scope).name, file_id)
            content = await asyncio.to_thread(shelf.content, file)
        return await file_answer(content, f"{file_id}-{content.num_bytes}", http)

    async def delete(self, file_id: str, http: Request) -> FileDeleted:
        """Delete a file. Raises ApiError if a batch that is not done has it."""
        async with self._opened() as (shelf, _), shelf.lock(tenant := tenant_of(http.scope).name):
            file = _file(shelf, tenant, file_id)
            user = shelf.user_of(tenant, file_id)
            if user is not None:
                message = (
                    f"The file belongs to {user}, which is not done. Wait for its end or cancel it, then delete the "
                    "file."
                )
                raise ApiError(409, message, param="file_id", code="file_in_use")
            await shelf.delete(tenant, file)
        return FileDeleted(id=file_id)

    # Batches.

    async def create(self, http: Request) -> BatchAnswer:
        async with self._opened() as (shelf, runner):
            self._require_ready()
            tenant = tenant_of(http.scope)
            self._check_rate(tenant, key_of(http.scope))
            with self._room.place() as place:
                limits = BodyLimits(
                    max_bytes=self._config.max_body_bytes, timeout_s=self._config.read_timeout_s, place=place
                )
                ask = parsed(BatchRequest, await read_json(http, limits), "input_file_id", '"file-..."')
            window_s = self._window_s(ask)
            await self._resumed.wait()
            async with shelf.lock(tenant.name):
                file = _file(shelf, tenant.name, ask.input_file_id)
                await shelf.make_room(tenant.name)
                num_calls, mistakes = await self._checked(file, ask.endpoint)
                answer = _new_batch(ask, window_s, num_calls, mistakes)
                if not mistakes:
                    output_id, error_id = await shelf.new_outputs(tenant.name, answer.created_at)
                    answer = answer.model_copy(update={"output_file_id": output_id, "error_file_id": error_id})
                batch = StoredBatch(tenant.name, self._config.public_url or str(http.base_url), answer)
                await shelf.keep(batch)
                return answer if mistakes else runner.start(batch)

    async def retrieve(self, batch_id: str, http: Request) -> BatchAnswer:
        async with self._opened():
            return (await self._current(tenant_of(http.scope).name, [batch_id]) or [_no_batch(batch_id)])[0]

    async def cancel(self, batch_id: str, http: Request) -> BatchAnswer:
        async with self._opened() as (_, runner):
            self._require_ready()
            await self._resumed.wait()
            await runner.cancel(tenant_of(http.scope).name, batch_id)
            return await self.retrieve(batch_id, http)

    async def latest(self, limit: int, after: str | None, http: Request) -> BatchList:
        async with self._opened() as (shelf, _):
            tenant = tenant_of(http.scope).name
            page, has_more = _page(shelf.batches(tenant), limit, after, "batch")
            data = await self._current(tenant, page)
        return BatchList(data=data, first_id=_first(page), last_id=_first(page[::-1]), has_more=has_more)

    # From the start to the end.

    def resume(self) -> None:
        """Go on with the batches that the previous start has left, and remove what expires from now on."""
        if self._shelf is not None and self._runner is not None:
            self._task = asyncio.create_task(self._keep_tidy(self._shelf, self._runner))

    async def close(self) -> None:
        """Leave running batches to the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()

    async def _keep_tidy(self, shelf: BatchShelf, runner: BatchRunner) -> None:
        while True:
            pause_s = _SWEEP_S
            try:
                await shelf.open()
                runner.resume()
                self._resumed.set()
                runner.end_overdue()
                await shelf.sweep()
            except Exception:
                logger.exception("the files of batches cannot be checked; the next attempt is in %d seconds", _RETRY_S)
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[BatchShelf, BatchRunner]]:
        """Yield shelf and runner. Raises ApiError if files cannot be kept here, or no more of them, or not now."""
        if self._shelf is None or self._runner is None:
            message = "This server keeps no files: start it with --durable DIR for batches."
            raise ApiError(400, message, code="unsupported_value")
        try:
            await self._shelf.open()
            yield self._shelf, self._runner
        except TooMany as error:
            headers = {"Retry-After": str(error.retry_s)}
            raise ApiError(429, str(error), code="too_many_kept", headers=headers) from None
        except (ShelfFull, OSError) as error:
            message = f"The file cannot be kept: {error}. Delete others, or send it later."
            raise ApiError(
                503, message, error_type=SERVER, code="batch_files_full", headers={"Retry-After": "60"}
            ) from None

    async def _current(self, tenant: str, batch_ids: Sequence[str]) -> list[BatchAnswer]:
        """Return the states of batches: of those that have not ended from memory, of the others from the disk."""
        assert self._shelf is not None
        assert self._runner is not None
        states = [(one, self._runner.current(tenant, one)) for one in batch_ids if self._shelf.has(tenant, one)]
        ended = [one for one, state in states if state is None]
        read = {one.answer.id: one.answer for one in await self._shelf.read(tenant, ended)} if ended else {}
        found = [state or read.get(batch_id) for batch_id, state in states]
        return [one for one in found if one is not None]

    def _window_s(self, ask: BatchRequest) -> int:
        window_s = int(ask.completion_window[:-1]) * _UNITS_S[ask.completion_window[-1]]
        if window_s > self._config.max_slo_s:
            remedy = f"Give at most {self._config.max_slo_s:g} seconds."
            raise invalid("completion_window", ask.completion_window, remedy)
        return window_s

    async def _checked(self, file: KeptFile, endpoint: str) -> tuple[int, list[LineError]]:
        """Return the number of calls in a file, which never changes, and mistakes in it. Raises OSError."""
        async with self._checking:
            if (known := file.num_calls.get(endpoint)) is not None:
                return known, []
            num_calls, mistakes = await asyncio.to_thread(check, file.place, endpoint)
        if not mistakes:
            file.num_calls[endpoint] = num_calls
        return num_calls, mistakes


def _file(shelf: BatchShelf, tenant: str, file_id: str) -> KeptFile:
    if (found := shelf.file(tenant, file_id)) is None:
        raise ApiError(404, f"There is no file {shown(file_id)}.", param="file_id", code="file_not_found")
    return found


def _no_batch(batch_id: str) -> BatchAnswer:
    raise ApiError(404, f"There is no batch {shown(batch_id)}.", param="batch_id", code="batch_not_found")


def _page(
    ids: Sequence[str], limit: int, after: str | None, noun: str, there: Container[str] | None = None
) -> tuple[list[str], bool]:
    """Return up to `limit` ids after `after`, and if there are more. Ids not in `there` only serve as `after`."""
    if after is not None:
        if after not in ids:
            remedy = f"Give the id of a {noun} that is still known, or leave it out to list from the beginning."
            raise invalid("after", after, remedy)
        ids = ids[ids.index(after) + 1 :]
    ids = [one for one in ids if there is None or one in there]
    return list(ids[:limit]), len(ids) > limit


def _first(page: Sequence[str]) -> str | None:
    return page[0] if page else None


def _new_batch(ask: BatchRequest, window_s: int, num_calls: int, mistakes: list[LineError]) -> BatchAnswer:
    now_s = int(time.time())
    return BatchAnswer(
        id=f"batch-{new_number()}",
        endpoint=ask.endpoint,
        errors=LineErrors(data=mistakes) if mistakes else None,
        input_file_id=ask.input_file_id,
        completion_window=ask.completion_window,
        status="failed" if mistakes else "validating",
        created_at=now_s,
        failed_at=now_s if mistakes else None,
        expires_at=now_s + window_s,
        request_counts=RequestCounts(total=num_calls),
        output_expires_after=ask.output_expires_after,
        metadata=ask.metadata,
    )
