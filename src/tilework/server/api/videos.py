"""Calls for videos: jobs to ask about later, and one form that answers with the file itself."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fastapi import Request
from fastapi.responses import Response

from tilework.pipelines.video.stills import spritesheet, thumbnail
from tilework.server.api.bodies import VIDEOS
from tilework.server.api.images import ImageService
from tilework.server.api.requests import RequestService
from tilework.server.calls.call import Call
from tilework.server.calls.encode import encode_preview
from tilework.server.calls.errors import NotDone, PicturesGone, UnknownCall, invalid
from tilework.server.calls.records import CallRecord
from tilework.server.calls.status import call_status
from tilework.server.calls.timeline import stage_durations
from tilework.server.http.middleware import tenant_of
from tilework.server.schema.answers import RequestStatus
from tilework.server.schema.video_answers import VideoDeleted, VideoError, VideoJob, VideoList, VideoProgress
from tilework.server.text import shown

_ALMOST = 99
Variant = Literal["video", "thumbnail", "spritesheet", "preview"]
"""Files that a client may ask for about a video. OpenAI has the first three."""
_STILLS = {"thumbnail": thumbnail, "spritesheet": spritesheet}
Order = Literal["asc", "desc"]
_STATUSES: dict[str, Literal["queued", "in_progress", "completed", "failed"]] = {
    "queued": "queued",
    "running": "in_progress",
    "paused": "in_progress",
    "done": "completed",
    "failed": "failed",
    "cancelled": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoService:
    """Serves everything under `/v1/videos`. A video is the one image of its call."""

    images: ImageService
    requests: RequestService

    async def create(self, http: Request) -> Response:
        """Begin a video, which goes on without its client. `Prefer` is ignored: OpenAI's clients take only the job."""
        entry = await self.images.enter(http, VIDEOS, is_later=True)
        self.images.submitter.detach(entry.call)
        job = self._job(self._find(entry.call.uid, http) or entry.call, as_of_now=entry.is_replay)
        return Response(job.model_dump_json(), headers=entry.headers(), media_type="application/json")

    async def create_now(self, http: Request) -> Response:
        """Make a video and answer with the file. A client that disconnects cancels the call."""
        entry = await self.images.enter(http, VIDEOS)
        finished = await self.images.result(entry.call, http)
        self.images.submitter.call_registry.mark_all_fetched(finished.uid)
        headers = {**entry.headers(), "X-Model": self.images.models.called(finished.ask.model)}
        return Response(finished.files[0], headers=headers, media_type=finished.ask.media_type)

    def retrieve(self, video_id: str, http: Request) -> VideoJob:
        return self._job(self._found(video_id, http), as_of_now=True)

    def latest(self, limit: int, after: str | None, order: Order, http: Request) -> VideoList:
        """Return a page of the tenant's videos.

        Raises:
            InvalidValue: there is no video `after`.
        """
        if after is not None and self._find(after, http) is None:
            raise invalid(
                "after",
                after,
                "Give the id of a video that is still known, or leave it out to list from the beginning.",
            )
        registry = self.requests.call_registry
        tenant = tenant_of(http.scope).name
        more = {"newest_first": order == "desc", "only_videos": True}
        found = registry.latest(tenant, limit + 1, self.images.engine.now_ns(), after, **more)
        data = [self._job(entry, as_of_now=False) for entry in found[:limit]]
        return VideoList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > limit,
        )

    async def delete(self, video_id: str, http: Request) -> VideoDeleted:
        """Cancel a video that is not done, and forget it. Devices are free at the next step."""
        self._found(video_id, http)
        await self.requests.delete(video_id, http)
        ended = self._find(video_id, http)
        if isinstance(ended, CallRecord):
            self.requests.call_registry.remove(ended)
        return VideoDeleted(id=video_id)

    async def content(self, video_id: str, variant: Variant, http: Request) -> Response:
        """Answer with the file of a video, an image of it, or the latest preview of a video that is not done."""
        entry = self._found(video_id, http)
        if variant == "video":
            return await self.requests.content(video_id, 0, 0, http)
        if variant == "preview":
            return await self._preview(entry)
        with closing(await self.requests.result(video_id, 0, 0, http)) as kept:
            content = await kept.read()
        still = await self.images.threads.run(_STILLS[variant], content)
        return Response(still.content, media_type=still.media_type)

    async def _preview(self, entry: Call | CallRecord) -> Response:
        """Answer with the latest preview.

        Raises:
            InvalidValue: the video was asked for without previews.
            NotDone: there is none yet.
            PicturesGone: the video has ended.
        """
        if not entry.ask.specs[0].preview_every:
            remedy = (
                "The request for the video asked for no previews: give preview_every or preview_every_s with the next "
                "one."
            )
            raise invalid("variant", "preview", remedy)
        if isinstance(entry, CallRecord) or entry.end.done():
            message = f"Video {entry.uid} has ended, and its previews are gone. Ask for another variant."
            raise PicturesGone(message, field="variant")
        (ticket,) = entry.tickets
        if ticket.preview is None:
            message = f"Video {entry.uid} has no preview yet: there is one after {ticket.request.preview_every} steps."
            raise NotDone(f"{message} Retry in 1 second.", field="variant", retry_s=1)
        form, content = await self.images.threads.run(encode_preview, ticket.preview.image, "mp4", 0)
        return Response(content, headers={"Cache-Control": "no-store"}, media_type=f"image/{form}")

    def _find(self, video_id: str, http: Request) -> Call | CallRecord | None:
        """Return the tenant's video of this id, if there is one."""
        found = self.requests.call_registry.find(video_id, tenant_of(http.scope).name, self.images.engine.now_ns())
        return found if found is not None and found.ask.is_video else None

    def _found(self, video_id: str, http: Request) -> Call | CallRecord:
        """Return the tenant's video of this id.

        Raises:
            UnknownCall: there is none.
        """
        found = self._find(video_id, http)
        if found is None:
            message = f"There is no video {shown(video_id)}: it was deleted, or is too old. GET /v1/videos lists them."
            raise UnknownCall(message, field="video_id", code="video_not_found")
        return found

    def _job(self, entry: Call | CallRecord, *, as_of_now: bool) -> VideoJob:
        """Describe a video. `as_of_now` predicts its ETA again, which takes longer the more is queued."""
        model = self.images.models.called(entry.ask.model)
        if isinstance(entry, CallRecord):
            return _job(entry, entry.status(), model)
        return _job(entry, call_status(entry, self.images.engine if as_of_now else None), model)


def _job(entry: Call | CallRecord, status: RequestStatus, model: str) -> VideoJob:
    ask = entry.ask
    (image,) = status.images
    (spec,) = ask.specs
    assert spec.video is not None
    seconds = spec.frames / spec.video.fps
    timeline = image.timeline if status.status == "done" else None
    error = status.error
    return VideoJob(
        id=entry.uid,
        model=model,
        status=_STATUSES[status.status],
        progress=100 if status.status == "done" else min(_ALMOST, 100 * image.step // image.steps),
        created_at=status.created,
        completed_at=None if timeline is None else int(entry.arrived_s + timeline.latency_s),
        expires_at=None if status.expires is None else int(datetime.fromisoformat(status.expires).timestamp()),
        size=status.size,
        seconds=str(max(1, math.floor(seconds + 0.5))),
        prompt=spec.prompt if isinstance(entry, Call) and spec.prompt else None,
        error=None if error is None else VideoError(code=error.code or error.type, message=error.message),
        stage_durations={} if timeline is None else stage_durations(timeline),
        num_outputs=int(timeline is not None),
        tilework=VideoProgress(
            state=status.status,
            step=image.step,
            steps=image.steps,
            eta_s=status.eta_s,
            eta=status.eta,
            eta_p90_s=status.eta_p90_s,
            eta_p90=status.eta_p90,
            slo_s=ask.slo_s,
            slo_source=ask.slo_source,
            warnings=list(ask.warnings),
            is_promised=ask.is_promised,
            frames=spec.frames,
            fps=spec.video.fps,
            seconds=seconds,
            queue_s=image.queue_s,
            timeline=timeline,
        ),
    )
