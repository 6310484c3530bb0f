"""Answers to the exceptions that end a request before a route has answered it."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from tilework.server.http.errors import ApiError, invalid
from tilework.server.text import shown


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(RequestValidationError, _wrong_parameter)
    app.add_exception_handler(ClientDisconnect, _client_gone)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _routing_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or for an unknown method of a path."""
    assert isinstance(error, HTTPException)
    call = f"{request.method} {shown(request.scope['path'], 200)}"
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"{call} is not supported; use {allowed}."
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed}).response()
    message = f"{call} is not served; /docs lists what is."
    return ApiError(error.status_code, message, code="unknown_url", headers=error.headers).response()


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes of a path; the router's own answer names only those of the first one."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", ("GET",))}  # Mounted files have none.
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _wrong_parameter(request: Request, error: Exception) -> Response:
    """Answer a wrong parameter of the query; its description is the remedy. Bodies are checked in `calls`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    known = {field.alias: field.field_info.description for field in request.scope["route"].dependant.query_params}
    return invalid(name, first["input"], f"Give {known[name]}.").response()


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Answer a client that has gone and reads nothing. Proxies log this as 499."""
    return Response(status_code=499)
