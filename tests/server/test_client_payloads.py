"""Requests of clients that call OpenAI's routes for images, as their packages send them: each gets an image.

The files in `client_payloads` name the package and version that sent them. `is_recorded` says whether a server
recorded the requests, or whether they were read in the client's source and sent by the libraries that it uses. `reads`
is there if the client reads the URL of an image without having asked for URLs, which OpenAI gives for dall-e-2 and -3.
LiteLLM passes on what there is. LangChain's wrapper for Python reads URLs for other names as well, which nothing in its
request says: docs/serving.md tells its users to name one of these two.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from fake_engine import EDITOR, FakeEngine, Served, serving
from server.picture_files import plain

RECORDED = sorted((Path(__file__).parent / "client_payloads").glob("*.json"))
SHIPPED = replace(EDITOR, name="shapes", side_multiple=8, max_side=256, default_height=128, default_width=128)
"""The name and the sizes of the model that `tilework serve` has by default; it edits, too."""


@dataclass(frozen=True)
class Payload:
    """A request: `body` is JSON, `form` has the parts of a form in their order."""

    path: str
    content_type: str
    reads: str
    body: Mapping[str, Any] | None = None
    form: tuple[Mapping[str, str], ...] = ()

    @property
    def num_images(self) -> int:
        """How many it asks for."""
        fields = self.body or {part["name"]: part.get("value") for part in self.form}
        return int(fields.get("n") or 1)

    @property
    def asks_for_transparency(self) -> bool:
        """Whether it asks for a picture that no model here makes."""
        fields = self.body or {part["name"]: part.get("value") for part in self.form}
        return fields.get("background") == "transparent"

    @property
    def num_files(self) -> int:
        return sum("file" in part for part in self.form)

    def send(self, http: httpx.Client) -> httpx.Response:
        headers = {"Authorization": "Bearer EMPTY"}
        if self.body is not None:
            return http.post(self.path, json=self.body, headers=headers)
        assert self.content_type == "multipart/form-data"
        parts = [(part["name"], _content(part)) for part in self.form]
        return http.post(self.path, files=parts, headers=headers)


def _content(part: Mapping[str, str]) -> tuple[Any, ...]:
    """A part as httpx takes it. A mask has transparency, as OpenAI asks for."""
    if "file" in part:
        picture = plain(32, 32, (255, 0, 0, 0)) if part["name"] == "mask" else plain(32, 32)
        return (part["file"], picture, part["content_type"])
    kind = part.get("content_type")
    return (None, part["value"].encode(), *([kind] if kind else []))


def payloads() -> Iterator[Any]:
    for path in RECORDED:
        recorded = json.loads(path.read_text())
        for one in recorded["requests"]:
            fields = one.get("body") or {part["name"]: part.get("value") for part in one["form"]}
            payload = Payload(
                path=one["path"],
                content_type=one["content_type"],
                reads=one.get("reads") or fields.get("response_format") or "b64_json",
                body=one.get("body"),
                form=tuple(one.get("form", ())),
            )
            yield pytest.param(payload, id=f"{path.stem}: {one['what']}")


def test_every_client_has_requests_and_a_source() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in RECORDED}
    frameworks = {"langchain", "langchain_js", "llamaindex", "litellm", "aisdk_openai", "aisdk_compatible"}
    assert found.keys() == frameworks | {"openwebui", "librechat", "n8n"}
    for recorded in found.values():
        assert recorded["requests"]
        assert recorded["version"] in recorded["source"]
        assert isinstance(recorded["is_recorded"], bool)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=SHIPPED), default_slo="3x", drain_s=0) as served:
        yield served


@pytest.mark.parametrize("payload", payloads())
def test_a_client_gets_the_image_that_it_reads(server: Served, payload: Payload) -> None:
    answer = payload.send(server.http)
    if payload.asks_for_transparency:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
        return
    assert answer.status_code == 200, answer.json()["error"]["message"]
    images = [one[payload.reads] for one in answer.json()["data"]]
    assert len(images) == payload.num_images
    for image in images:
        assert image, f"the client reads {payload.reads}"
        file = server.http.get(image).content if payload.reads == "url" else base64.b64decode(image)
        Image.open(io.BytesIO(file)).verify()
    spec, request = server.engine.specs[-1], server.engine.requests[-1]
    assert request.deadline_ns is not None
    assert sum(len(given) for given in spec.pictures.values()) == payload.num_files
