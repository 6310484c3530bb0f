"""The routes of videos."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response

from tilework.server.api.examples import UID
from tilework.server.api.openapi import (
    CALL_HEADERS,
    IDEMPOTENCY_KEY,
    RANGE,
    VIDEO_BODY,
    errors,
    file_part,
    good,
    video_file,
    video_variants,
)
from tilework.server.api.request_routes import MAX_LISTED
from tilework.server.api.videos import Order, Variant, VideoService
from tilework.server.schema.video_answers import VideoDeleted, VideoJob, VideoList

VideoId = Annotated[str, Path(description="a video", examples=[UID])]
Limit = Annotated[
    int, Query(ge=0, le=MAX_LISTED, description=f"an integer from 0 to {MAX_LISTED}, the most to list (default 20)")
]
After = Annotated[str | None, Query(description="the `last_id` of a page: lists the videos after it", examples=[UID])]
Sorting = Annotated[Order, Query(description='"desc" for newest first (default), or "asc"')]
Wanted = Annotated[
    Variant,
    Query(description='"video" (default), "thumbnail" or "spritesheet", or "preview" of a video that is not done'),
]
_BODY_ERRORS = (400, 401, 404, 408, 409, 410, 413, 415, 422, 429)


def add_video_routes(app: FastAPI, videos: VideoService) -> None:
    @app.post(
        "/v1/videos",
        tags=["videos"],
        response_model=VideoJob,
        responses={200: good("The job", *CALL_HEADERS), **errors(*_BODY_ERRORS)},
        openapi_extra={**VIDEO_BODY, "parameters": [IDEMPOTENCY_KEY]},
    )
    async def create_video(http: Request) -> Response:
        """Begin a video, from a text or an image; ask for it later by its id. The body may be a form."""
        return await videos.create(http)

    @app.post(
        "/v1/videos/sync",
        tags=["videos"],
        response_class=Response,
        responses={200: video_file("The file", *CALL_HEADERS), **errors(*_BODY_ERRORS, 504)},
        openapi_extra={**VIDEO_BODY, "parameters": [IDEMPOTENCY_KEY]},
    )
    async def create_video_now(http: Request) -> Response:
        """Make a video, and answer with the file. A client that disconnects cancels it at the next step."""
        return await videos.create_now(http)

    @app.get(
        "/v1/videos",
        tags=["videos"],
        response_model=VideoList,
        responses={200: good("Videos"), **errors(400, 401)},
    )
    async def list_videos(http: Request, limit: Limit = 20, after: After = None, order: Sorting = "desc") -> VideoList:
        """List the tenant's own videos, both those that are not done and those that ended lately."""
        return videos.latest(limit, after, order, http)

    _add_routes_of_one(app, videos)


def _add_routes_of_one(app: FastAPI, videos: VideoService) -> None:
    @app.get(
        "/v1/videos/{video_id}",
        tags=["videos"],
        response_model=VideoJob,
        responses={200: good("Its status"), **errors(401, 404)},
    )
    async def retrieve_video(video_id: VideoId, http: Request) -> VideoJob:
        """Return the status of a video: its progress, when it is expected, and why it failed if it did."""
        return videos.retrieve(video_id, http)

    @app.delete(
        "/v1/videos/{video_id}",
        tags=["videos"],
        response_model=VideoDeleted,
        responses={200: good("It is gone"), **errors(401, 404)},
    )
    async def delete_video(video_id: VideoId, http: Request) -> VideoDeleted:
        """Delete a video and its file. A video that is not done is cancelled; devices are free at the next step."""
        return await videos.delete(video_id, http)

    @app.get(
        "/v1/videos/{video_id}/content",
        tags=["videos"],
        response_class=Response,
        responses={200: video_variants(), 206: file_part(), **errors(400, 401, 404, 409, 410, 416, 504)},
        openapi_extra={"parameters": [RANGE]},
    )
    async def video_content(video_id: VideoId, http: Request, variant: Wanted = "video") -> Response:
        """Return the file of a video or a part of it, an image of it, or its latest preview."""
        return await videos.content(video_id, variant, http)
