"""Routes whose endpoints are called as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """A route that calls its endpoint directly if it takes only the request and path texts, and returns an answer.

    It describes itself as any route of FastAPI. For such a call FastAPI (0.165) enters two exit stacks, looks for
    dependencies, and validates what the endpoint has made.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self._is_direct():
            self.app = self._called()

    def _is_direct(self) -> bool:
        takes = self.dependant
        made = get_type_hints(self.endpoint).get("return")
        others = (takes.query_params, takes.header_params, takes.cookie_params, takes.body_params, takes.dependencies)
        are_texts = all(one.field_info.annotation is str and not one.field_info.metadata for one in takes.path_params)
        return are_texts and not any(others) and isinstance(made, type) and issubclass(made, Response | BaseModel)

    def _called(self) -> ASGIApp:
        endpoint = self.endpoint
        request_name = self.dependant.request_param_name
        status = self.status_code or 200

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope["path_params"])
            if request_name is not None:
                given[request_name] = Request(scope, receive, send)
            answer = await endpoint(**given)
            if isinstance(answer, BaseModel):
                answer = Response(answer.model_dump_json(by_alias=True), status, media_type="application/json")
            await answer(scope, receive, send)

        return app
