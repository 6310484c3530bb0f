"""The routes of OpenAI's files and batches (docs/serving.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar
from uuid import uuid4

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from tilework.server.batches.lines import check
from tilework.server.batches.runner import BatchRunner
from tilework.server.batches.shelf import BatchShelf, ShelfFull, StoredBatch
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.config import ServerConfig
from tilework.server.http.body import FORM, BodyLimits, BodyRoom, media_type, read_form, read_json, wrong_media_type
from tilework.server.http.errors import SERVER, ApiError, invalid
from tilework.server.http.files import file_answer
from tilework.server.http.middleware import tenant_of
from tilework.server.schema.batch_answers import (
    BatchAnswer,
    BatchList,
    BatchRequest,
    FileAnswer,
    FileDeleted,
    FileList,
    LineErrors,
    RequestCounts,
)
from tilework.server.text import shown

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_PURPOSE, _FILE = "purpose", "file"
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BatchService:
    """Serves files and batches; `require_ready` raises while no call is taken."""

    config: ServerConfig
    shelf: BatchShelf | None
    runner: BatchRunner | None
    room: BodyRoom
    require_ready: Callable[[], None]

    async def upload(self, http: Request) -> FileAnswer:
        shelf = self._shelf()
        if media_type(http) != FORM:
            raise wrong_media_type(http, f'a form with "Content-Type: {FORM}"')
        with self.room.place() as place:
            limits = BodyLimits(
                max_bytes=self.config.max_input_bytes, timeout_s=self.config.read_timeout_s, place=place
            )
            fields = dict(await read_form(http, limits))
            purpose, content = fields.get(_PURPOSE), fields.get(_FILE)
            if purpose != "batch":
                raise invalid(_PURPOSE, purpose if isinstance(purpose, str) else None, 'Give "batch".')
            if not isinstance(content, bytes):
                raise invalid(_FILE, content, "Give a file of lines of JSON, as a file of the form.")
            return await _kept(shelf.add, tenant_of(http.scope).name, content)

    def file(self, file_id: str, http: Request) -> Path:
        found = self._shelf().file(tenant_of(http.scope).name, file_id)
        if found is None:
            raise ApiError(404, f"There is no file {shown(file_id)}.", param="file_id", code="file_not_found")
        return found

    def about(self, file_id: str, http: Request) -> FileAnswer:
        return self._shelf().answer(self.file(file_id, http))

    def files(self, http: Request) -> list[FileAnswer]:
        return self._shelf().files(tenant_of(http.scope).name)

    async def content(self, file_id: str, http: Request) -> Response:
        content = self._shelf().content(self.file(file_id, http))
        return await file_answer(content, f"{file_id}-{content.num_bytes}", http)

    def delete(self, file_id: str, http: Request) -> FileDeleted:
        """Raises ApiError: a batch that is not done has it."""
        found, user = self.file(file_id, http), self._runner().user_of(file_id)
        if user is not None:
            message = (
                f"The file is one of {user}, which is not done. Wait for its end, or cancel it, and delete it then."
            )
            raise ApiError(409, message, param="file_id", code="file_in_use")
        found.unlink()
        return FileDeleted(id=file_id)

    async def create(self, http: Request) -> BatchAnswer:
        self.require_ready()
        shelf, runner, tenant = self._shelf(), self._runner(), tenant_of(http.scope)
        with self.room.place() as place:
            limits = BodyLimits(max_bytes=self.config.max_body_bytes, timeout_s=self.config.read_timeout_s, place=place)
            ask = parsed(BatchRequest, await read_json(http, limits), "input_file_id", '"file-..."')
        window_s = int(ask.completion_window[:-1]) * _UNITS_S[ask.completion_window[-1]]
        if window_s > self.config.max_slo_s:
            remedy = f"Give at most {self.config.max_slo_s:g} seconds."
            raise invalid("completion_window", ask.completion_window, remedy)
        found = self.file(ask.input_file_id, http)
        num_calls, mistakes = await asyncio.to_thread(check, found, ask.endpoint)
        now_s = int(time.time())
        answer = BatchAnswer(
            id=f"batch-{uuid4().hex}",
            endpoint=ask.endpoint,
            errors=LineErrors(data=mistakes) if mistakes else None,
            input_file_id=ask.input_file_id,
            completion_window=ask.completion_window,
            status="failed" if mistakes else "in_progress",
            output_file_id=None if mistakes else await _kept(shelf.new_output, tenant.name),
            error_file_id=None if mistakes else await _kept(shelf.new_output, tenant.name),
            created_at=now_s,
            in_progress_at=None if mistakes else now_s,
            failed_at=now_s if mistakes else None,
            expires_at=now_s + window_s,
            request_counts=RequestCounts(total=num_calls),
            metadata=ask.metadata,
        )
        batch = StoredBatch(tenant.name, self.config.public_url or str(http.base_url), answer)
        await _kept(shelf.keep, batch)
        if not mistakes:
            runner.start(batch)
        return answer

    def batch(self, batch_id: str, http: Request) -> StoredBatch:
        found = self._shelf().batch(tenant_of(http.scope).name, batch_id)
        if found is None:
            raise ApiError(404, f"There is no batch {shown(batch_id)}.", param="batch_id", code="batch_not_found")
        return found

    def retrieve(self, batch_id: str, http: Request) -> BatchAnswer:
        return self._runner().current(self.batch(batch_id, http))

    def cancel(self, batch_id: str, http: Request) -> BatchAnswer:
        return self._runner().cancel(self.batch(batch_id, http))

    def latest(self, limit: int, after: str | None, http: Request) -> BatchList:
        found = [self._runner().current(one) for one in self._shelf().batches(tenant_of(http.scope).name)]
        if after is not None:
            found = found[1 + next((index for index, one in enumerate(found) if one.id == after), len(found)) :]
        data = found[:limit]
        return BatchList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )

    def resume(self) -> None:
        """Go on with what the previous start has left."""
        if self.runner is not None:
            self.runner.resume()

    async def close(self) -> None:
        """Leave what runs to the next start."""
        if self.runner is not None:
            await self.runner.close()

    def _shelf(self) -> BatchShelf:
        """Raises ApiError if files cannot be kept here."""
        if self.shelf is None:
            message = "This server keeps no files: batches need one that was started with --durable DIR."
            raise ApiError(400, message, code="unsupported_value")
        return self.shelf

    def _runner(self) -> BatchRunner:
        self._shelf()
        assert self.runner is not None
        return self.runner


async def _kept(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """On a thread, since it waits for the disk. Raises ApiError if it has no room."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except (ShelfFull, OSError) as error:
        message = f"The file cannot be kept: {error}. Delete others, or send it later."
        raise ApiError(
            503, message, error_type=SERVER, code="batch_files_full", headers={"Retry-After": "60"}
        ) from None


def add_batch_routes(app: FastAPI, batches: BatchService) -> None:
    _add_file_routes(app, batches)

    @app.post("/v1/batches", include_in_schema=False)
    async def create_batch(http: Request) -> BatchAnswer:
        """Make the calls of a file."""
        return await batches.create(http)

    @app.get("/v1/batches", include_in_schema=False)
    async def list_batches(
        http: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> BatchList:
        """The tenant's own batches."""
        return batches.latest(limit, after, http)

    @app.get("/v1/batches/{batch_id}", include_in_schema=False)
    async def retrieve_batch(batch_id: str, http: Request) -> BatchAnswer:
        """How a batch stands."""
        return batches.retrieve(batch_id, http)

    @app.post("/v1/batches/{batch_id}/cancel", include_in_schema=False)
    async def cancel_batch(batch_id: str, http: Request) -> BatchAnswer:
        """Make no more calls of a batch."""
        return batches.cancel(batch_id, http)


def _add_file_routes(app: FastAPI, batches: BatchService) -> None:
    @app.post("/v1/files", include_in_schema=False)
    async def upload_file(http: Request) -> FileAnswer:
        """Keep a file of calls."""
        return await batches.upload(http)

    @app.get("/v1/files", include_in_schema=False)
    async def list_files(http: Request) -> FileList:
        """The tenant's own files, newest first."""
        return FileList(data=batches.files(http))

    @app.get("/v1/files/{file_id}", include_in_schema=False)
    async def retrieve_file(file_id: str, http: Request) -> FileAnswer:
        """About a file."""
        return batches.about(file_id, http)

    @app.get("/v1/files/{file_id}/content", include_in_schema=False)
    async def file_content(file_id: str, http: Request) -> Response:
        """The lines of a file; of one that is being written, those that are there."""
        return await batches.content(file_id, http)

    @app.delete("/v1/files/{file_id}", include_in_schema=False)
    async def delete_file(file_id: str, http: Request) -> FileDeleted:
        """Delete a file that no batch needs any more."""
        return batches.delete(file_id, http)
