"""The answers of the routes of videos, except for files. OpenAI's fields, and our own under `tilework`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from tilework.server.schema.answers import PROMISED, WARNINGS, RequestTimeline, State


class VideoError(BaseModel):
    """The reason why there is no video."""

    code: str
    message: str


class VideoProgress(BaseModel):
    """The progress of a video; durations in seconds from arrival. `timeline` is there once it is done."""

    state: State
    step: int
    steps: int
    eta_s: float | None = Field(description="Predicted finish: as of now, in lists as of its admission")
    eta: str | None = Field(description="The same as a time (RFC 3339)")
    eta_p90_s: float | None = Field(description="Time by which nine of ten such videos finish; never before `eta_s`")
    eta_p90: str | None = Field(description="The same as a time (RFC 3339)")
    slo_s: float | None
    slo_source: str | None = Field(description="Source of the deadline; null if there is none")
    warnings: list[str] = Field(description=WARNINGS)
    is_promised: bool = Field(description=PROMISED)
    frames: int
    fps: float
    seconds: float = Field(description="Playing time: `frames` at `fps`")
    queue_s: float | None = Field(description="Time that it waited for a device; null while it waits")
    timeline: RequestTimeline | None


class VideoJob(BaseModel):
    """A video that is made, or was. Its `id` is also the uid of a call under `/v1/requests`."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(description="Part of the steps that is done, in percent; 100 once the file is there")
    created_at: int
    completed_at: int | None = Field(description="Time at which the file was there (Unix time)")
    expires_at: int | None = Field(description="Latest time until which the file is kept (Unix time)")
    size: str
    seconds: str = Field(description="Playing time in whole seconds, at least one; `tilework` has it exactly")
    prompt: str | None = Field(description="Null once it has ended: prompts are not kept")
    remixed_from_video_id: None = None
    error: VideoError | None
    stage_durations: dict[str, float] = Field(description="Seconds by stage, once it is done")
    num_outputs: int = Field(description="1 once it is done, else 0: SGLang's benchmark counts them")
    tilework: VideoProgress


class VideoList(BaseModel):
    """Videos, newest first unless asked otherwise. If there are more, `after` = `last_id` asks for them."""

    object: Literal["list"] = "list"
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    """A video that is gone."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True
