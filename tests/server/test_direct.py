"""Routes that are called at once answer as FastAPI's own do."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from tilework.server.http.direct import DirectRoute

FASTAPIS_WAY = "fastapi_inner_astack"  # In the scope of a call that goes it.


class Answer(BaseModel):
    name: str
    class_: str = Field("ü", alias="class")
    none: None = None


def app(**options: Any) -> FastAPI:
    made = FastAPI()
    for name, value in options.items():
        setattr(made.router, name, value)

    @made.post("/texts/{one}/{two:path}", status_code=201)
    async def texts(two: str, one: Annotated[str, Path(description="first")], http: Request) -> Answer:
        return Answer(name=f"{one} {two} {http.headers['x-told']} {int(FASTAPIS_WAY in http.scope)}")

    @made.get("/nothing")
    async def nothing() -> Response:
        return Response("as it is", 202)

    @made.get("/numbers/{number}")
    async def numbers(number: int) -> Answer:
        return Answer(name=str(number + 1))

    @made.get("/short/{name}")
    async def short(name: Annotated[str, Path(max_length=3)]) -> Answer:
        return Answer(name=name)

    @made.get("/query")
    async def query(limit: Annotated[int, Query(ge=1)] = 20) -> Answer:
        return Answer(name=str(limit + 1))

    @made.get("/plain")
    async def plain(http: Request) -> dict[str, object]:
        return {"is_fastapis": FASTAPIS_WAY in http.scope}

    return made


CALLS = [
    ("POST", "/texts/a%20b/c/d", 201),
    ("GET", "/texts/a/b", 405),
    ("GET", "/nothing", 202),
    ("GET", "/numbers/7", 200),
    ("GET", "/numbers/x", 422),
    ("GET", "/short/abcd", 422),
    ("GET", "/query?limit=0", 422),
    ("GET", "/query", 200),
    ("GET", "/plain", 200),
]


@pytest.mark.parametrize(("method", "path", "status"), CALLS)
def test_answers_are_those_of_fastapi(method: str, path: str, status: int) -> None:
    mine, theirs = (
        TestClient(made).request(method, path, headers={"x-told": "x"})
        for made in (app(route_class=DirectRoute), app())
    )
    assert mine.status_code == theirs.status_code == status
    assert mine.headers == theirs.headers
    assert mine.content.replace(b"x 0", b"x 1") == theirs.content
    if path.startswith("/texts") and status == 201:
        assert b"x 0" in mine.content, "it was called at once"


def test_the_documentation_is_the_same() -> None:
    assert app(route_class=DirectRoute).openapi() == app().openapi()
