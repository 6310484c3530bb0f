"""The files and batches of OpenAI's batch API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

BatchState = Literal["validating", "in_progress", "completed", "failed", "expired", "cancelling", "cancelled"]
Name = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=512)]
Endpoint = Literal["/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"]


SHORTEST_S, LONGEST_S = 3600, 2_592_000
"""Limits of the seconds for which a client may have files kept."""


class ExpiresAfter(BaseModel):
    """Time for which a file is kept, from `anchor` on."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=SHORTEST_S, le=LONGEST_S)


class FileAnswer(BaseModel):
    """A file of lines: of calls (`batch`), or of answers (`batch_output`)."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    """Files. If there are more, `after` = `last_id` asks for them."""

    object: Literal["list"] = "list"
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class LineError(BaseModel):
    """A mistake in a line of the file of calls, the first being 1, or in the batch (no line)."""

    code: str = "invalid_line"
    line: int | None
    message: str
    param: str | None = None


class LineErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[LineError]


class BatchAnswer(BaseModel):
    """A batch. Its output file has answers of status 200, its error file others; at its end an empty one has no id.

    While it waits for others of its tenant to end, it is `validating`: the first state of OpenAI's batches.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    output_expires_after: ExpiresAfter | None = None
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    """Batches, newest first. If there are more, `after` = `last_id` asks for them."""

    object: Literal["list"] = "list"
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`. Descriptions are remedies in error messages."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    input_file_id: str = Field(description="the id of a file that was sent with the purpose batch")
    endpoint: Endpoint = Field(description='"/v1/images/generations", "/v1/images/edits" or "/v1/chat/completions"')
    completion_window: str = Field("24h", pattern=r"^[1-9][0-9]{0,3}[mhd]$", description='a time such as "24h" or "7d"')
    output_expires_after: ExpiresAfter | None = Field(
        None,
        description=f'{{"anchor": "created_at", "seconds": ...}} with {SHORTEST_S} to {LONGEST_S} seconds, or nothing',
    )
    metadata: dict[Name, Text] | None = Field(
        None, max_length=16, description="an object of at most 16 texts of 512 characters, or nothing"
    )
