"""Exact requests over HTTP: the request, its class or the server asks for it; what the answers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import request
from fake_engine import INFO, FakeEngine, Served, serving
from tilework.cli.app import app
from tilework.runtime.control_loop import _inexact
from tilework.runtime.engine import EngineConfig
from tilework.runtime.ticket import WorkSegment
from tilework.server.config import ServerConfig, load_config

CLASSES = """
[classes.audit]
exact = true

[classes.nightly]
exact = false
weight = 0.1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(CLASSES)
    with serving(FakeEngine(), drain_s=0, tenants=str(file)) as served:
        yield served


def drawn(server: Served, **fields: Any) -> tuple[bool, bool]:
    """Whether the engine was asked for an exact picture, and whether the answer says so."""
    answer = server.post({"prompt": "x", **fields})
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[-1].exact == server.engine.specs[-1].exact
    said: bool = answer.json()["data"][0]["tilework"]["exact"]
    return server.engine.requests[-1].exact, said


@pytest.mark.parametrize(
    ("fields", "is_exact"),
    [
        ({}, False),
        ({"exact": False}, False),
        ({"exact": None}, False),
        ({"exact": True}, True),
        ({"priority": "audit"}, True),
        ({"priority": "audit", "exact": False}, True),
        ({"priority": "nightly"}, False),
        ({"priority": "nightly", "exact": True}, True),
    ],
)
def test_a_request_is_exact_if_it_or_its_class_says_so(server: Served, fields: dict[str, Any], is_exact: bool) -> None:
    assert drawn(server, **fields) == (is_exact, is_exact)


def test_every_image_of_a_call_and_of_a_chat_is_exact(server: Served) -> None:
    server.post({"prompt": "x", "n": 3, "exact": True})
    assert [spec.exact for spec in server.engine.specs[-3:]] == [True] * 3
    chat = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"exact": True}}
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.engine.specs[-1].exact


def test_a_model_that_is_split_among_devices_draws_none() -> None:
    with serving(FakeEngine(info=replace(INFO, cell=2)), drain_s=0) as server:
        assert server.post({"prompt": "x"}).status_code == 200
        answer = server.post({"prompt": "x", "exact": True})
        assert answer.status_code == 400
        assert "exact = true is not accepted" in answer.text
        assert "is split among 2 devices" in answer.text
        assert server.http.get("/v1/models").json()["data"][0]["tilework"]["cell"] == 2


def test_another_value_is_refused(server: Served) -> None:
    answer = server.post({"prompt": "x", "exact": "yes"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "exact"
    assert "Give true for an image" in answer.json()["error"]["message"]


def test_on_an_exact_server_every_request_is_exact() -> None:
    with serving(FakeEngine(), drain_s=0, exact=True) as server:
        assert drawn(server) == drawn(server, exact=False) == (True, True)
        assert server.http.get("/v1/models").json()["data"][0]["tilework"]["exact"] is True


def test_the_model_card_names_dtype_and_attention_back_end(server: Served) -> None:
    card = server.http.get("/v1/models").json()["data"][0]["tilework"]
    assert (card["dtype"], card["attention_backend"], card["exact"]) == ("", "", False), "of a fake model"


@pytest.mark.parametrize("tiled", [False, True])
def test_the_model_card_and_each_answer_say_whether_the_model_decodes_in_tiles(tiled: bool) -> None:
    with serving(FakeEngine(info=replace(INFO, vae_tiling=tiled)), drain_s=0) as server:
        assert server.http.get("/v1/models").json()["data"][0]["tilework"]["vae_tiling"] is tiled
        assert server.post({"prompt": "x"}).json()["data"][0]["tilework"]["vae_tiling"] is tiled


def test_the_setting_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By option or by environment: the server makes requests exact, and the engine measures no groups and batches."""
    handed: list[tuple[EngineConfig, ServerConfig]] = []

    async def serve(start: Any, config: ServerConfig, **_: object) -> None:
        handed.append((start._config, config))

    monkeypatch.setattr("tilework.cli.serving.serve_http", serve)
    flags = ["serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager"]
    for more, environ in (([], {}), (["--exact"], {}), ([], {"TILEWORK_EXACT": "true"})):
        result = CliRunner().invoke(app, [*flags, *more], env=environ)
        assert result.exit_code == 0, result.output
    assert [(engine.exact, config.exact) for engine, config in handed] == [(False, False), (True, True), (True, True)]


def test_a_wrong_setting_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_EXACT", "perhaps")
    with pytest.raises(ValueError, match="TILEWORK_EXACT = 'perhaps' cannot be used; give true or false"):
        load_config()


@pytest.mark.parametrize("changes", [{"devices": (0, 1)}, {"batch": 2}, {"sliced": True}])
def test_an_exact_picture_that_was_made_otherwise_is_a_failure(changes: dict[str, Any]) -> None:
    """What really happened counts, not what was planned."""
    alone: dict[str, Any] = {"stage": "diffuse", "devices": (0,), "num_steps": 4, "start_ns": 0, "end_ns": 1}
    segments = [WorkSegment(**alone), WorkSegment(**{**alone, **changes})]
    ticket: Any = SimpleNamespace(request=request("a", exact=True), segments=segments)
    assert "together with other requests" in _inexact(ticket)
    ticket.segments.pop()
    assert not _inexact(ticket)
