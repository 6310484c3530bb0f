"""The routes under `/v1/requests`: the status of calls, their events, files and decisions."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response

from tilework.server.api.examples import PROGRESS, UID
from tilework.server.api.openapi import RANGE, errors, files, good, stream
from tilework.server.api.requests import RequestService
from tilework.server.schema.answers import Decisions, RequestList, RequestStatus

MAX_LISTED = 100
Uid = Annotated[str, Path(description="a call, or one of its images as `{call}-{index}`", examples=[UID])]
Limit = Annotated[
    int, Query(ge=1, le=MAX_LISTED, description=f"an integer from 1 to {MAX_LISTED}, the most to list (default 20)")
]
After = Annotated[str | None, Query(description="the `last_id` of a page: lists the calls before it", examples=[UID])]
Index = Annotated[
    int | None,
    Query(ge=0, le=999, description="an integer from 0 to 999, the index of an image in its call (default 0)"),
]
Frame = Annotated[int, Query(ge=0, le=9999, description="an integer, the index of a frame in its clip (default 0)")]


def add_request_routes(app: FastAPI, requests: RequestService) -> None:
    @app.get(
        "/v1/requests",
        tags=["requests"],
        response_model=RequestList,
        responses={200: good("Calls, newest first"), **errors(400, 401)},
    )
    async def list_requests(http: Request, limit: Limit = 20, after: After = None) -> RequestList:
        """List the tenant's own calls, both open ones and those that ended lately, newest first."""
        return requests.latest(limit, after, http)

    @app.get(
        "/v1/requests/{uid}",
        tags=["requests"],
        response_model=RequestStatus,
        responses={200: good("Its status"), **errors(401, 404)},
    )
    async def request_status(uid: Uid, http: Request) -> RequestStatus:
        """Return the status of a call, or of one image of it."""
        return requests.status(uid, http)

    @app.delete(
        "/v1/requests/{uid}",
        tags=["requests"],
        response_model=RequestStatus,
        responses={200: good("Its final state", example="cancelled"), **errors(401, 404)},
    )
    async def delete_request(uid: Uid, http: Request) -> Response:
        """Cancel a call, all of its images; devices are free at the next step. If it has ended, delete its images."""
        return Response(await requests.delete(uid, http), media_type="application/json")

    _add_result_routes(app, requests)


def _add_result_routes(app: FastAPI, requests: RequestService) -> None:
    """Add the routes for the progress, the files and the decisions of one call."""

    @app.get(
        "/v1/requests/{uid}/events",
        tags=["requests"],
        response_class=Response,
        responses={200: stream("Events, from the present state to the end", PROGRESS), **errors(401, 404)},
    )
    async def request_events(uid: Uid, http: Request) -> Response:
        """Stream the progress of a call as server-sent events; reading can begin, and begin again, at any time."""
        return requests.events(uid, http)

    @app.get(
        "/v1/requests/{uid}/content",
        tags=["requests"],
        response_class=Response,
        responses={200: files("The file"), 206: files("A part of it"), **errors(400, 401, 404, 409, 410, 416, 504)},
        openapi_extra={"parameters": [RANGE]},
    )
    async def request_content(uid: Uid, http: Request, index: Index = None, frame: Frame = 0) -> Response:
        """Return the file of an image: that of `uid`, or number `index` of a call (default 0); of a clip one frame."""
        return await requests.content(uid, index, frame, http)

    @app.get(
        "/v1/requests/{uid}/decisions",
        tags=["requests"],
        response_model=Decisions,
        responses={200: good("Decisions in order"), **errors(401, 404)},
    )
    async def request_decisions(uid: Uid, http: Request) -> Decisions:
        """Return the scheduler's decisions about a call or an image, and why. The scope admin sees any tenant's."""
        return requests.decisions(uid, http)
