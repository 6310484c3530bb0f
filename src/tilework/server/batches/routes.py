"""The routes of OpenAI's files and batches (docs/serving.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from tilework.server.batches.disk import Purpose
from tilework.server.batches.service import BatchService
from tilework.server.schema.batch_answers import BatchAnswer, BatchList, FileAnswer, FileDeleted, FileList

_MOST_FILES = 10_000  # The limit of OpenAI's own route, for which its clients may ask.
_LIMIT = "an integer from 1 to 100, the most to list (default 20)"


def add_batch_routes(app: FastAPI, batches: BatchService) -> None:
    _add_file_routes(app, batches)

    @app.post("/v1/batches", include_in_schema=False)
    async def create_batch(http: Request) -> BatchAnswer:
        """Make the calls of a file."""
        return await batches.create(http)

    @app.get("/v1/batches", include_in_schema=False)
    async def list_batches(
        http: Request, limit: Annotated[int, Query(ge=1, le=100, description=_LIMIT)] = 20, after: str | None = None
    ) -> BatchList:
        """List the tenant's own batches, newest first."""
        return await batches.latest(limit, after, http)

    @app.get("/v1/batches/{batch_id}", include_in_schema=False)
    async def retrieve_batch(batch_id: str, http: Request) -> BatchAnswer:
        """Return the state of a batch."""
        return await batches.retrieve(batch_id, http)

    @app.post("/v1/batches/{batch_id}/cancel", include_in_schema=False)
    async def cancel_batch(batch_id: str, http: Request) -> BatchAnswer:
        """Make no more calls of a batch."""
        return await batches.cancel(batch_id, http)


def _add_file_routes(app: FastAPI, batches: BatchService) -> None:
    @app.post("/v1/files", include_in_schema=False)
    async def upload_file(http: Request) -> FileAnswer:
        """Keep a file of calls."""
        return await batches.upload(http)

    @app.get("/v1/files", include_in_schema=False)
    async def list_files(
        http: Request,
        limit: Annotated[
            int, Query(ge=1, le=_MOST_FILES, description=f"an integer from 1 to {_MOST_FILES}, the most to list")
        ] = _MOST_FILES,
        after: str | None = None,
        order: Annotated[Literal["asc", "desc"], Query(description='"asc" or "desc" (default), by time')] = "desc",
        purpose: Annotated[Purpose | None, Query(description='"batch" or "batch_output", or leave it out')] = None,
    ) -> FileList:
        """List the tenant's own files, newest first."""
        return await batches.files(limit, after, purpose, is_oldest_first=order == "asc", http=http)

    @app.get("/v1/files/{file_id}", include_in_schema=False)
    async def retrieve_file(file_id: str, http: Request) -> FileAnswer:
        """Return the properties of a file."""
        return await batches.about(file_id, http)

    @app.get("/v1/files/{file_id}/content", include_in_schema=False)
    async def file_content(file_id: str, http: Request) -> Response:
        """Return the lines of a file; while it is being written, those that are there."""
        return await batches.content(file_id, http)

    @app.delete("/v1/files/{file_id}", include_in_schema=False)
    async def delete_file(file_id: str, http: Request) -> FileDeleted:
        """Delete a file that no batch needs any more."""
        return await batches.delete(file_id, http)
