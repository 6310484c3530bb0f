"""The names under which clients know a model, and pages of other origins."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fake_engine import INFO, VIDEOS, FakeEngine, serving
from tilework.server.calls.served_models import ServedModels
from tilework.server.config import ConfigError, ServerConfig, load_config
from tilework.server.main import serve

CHAT = {"messages": [{"role": "user", "content": "x"}]}
OTHER = replace(INFO, name="other")


def test_the_first_model_goes_by_the_names_that_it_is_given() -> None:
    with serving(FakeEngine(others=(OTHER,)), served_model_name="dall-e-2, gpt-image-1") as server:
        cards = server.http.get("/v1/models").json()["data"]
        assert [one["id"] for one in cards] == ["dall-e-2", "gpt-image-1", "other"]
        assert [one["tilework"]["model"] for one in cards] == [INFO.name, INFO.name, "other"]
        assert server.http.get("/v1/model_info").json() == {"model_path": "dall-e-2"}
        for name in ("dall-e-2", "gpt-image-1", INFO.name, None):
            answer = server.http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert answer.json()["model"] == "dall-e-2"
            assert server.engine.requests[-1].pipeline == INFO.name
            assert server.http.get(f"/v1/models/{name or 'dall-e-2'}").json()["id"] == "dall-e-2"
        assert server.http.post("/v1/chat/completions", json={**CHAT, "model": "other"}).json()["model"] == "other"
        wrong = server.http.post("/v1/chat/completions", json={**CHAT, "model": "sdxl"})
        assert wrong.status_code == 404
        assert 'use one of "dall-e-2", "gpt-image-1", "other"' in wrong.json()["error"]["message"]


@pytest.mark.slow
def test_videos_say_the_name_too() -> None:
    with serving(FakeEngine(info=VIDEOS), served_model_name="sora-2", drain_s=0) as server:
        job = server.http.post("/v1/videos", json={"prompt": "x", "model": "sora-2"}).json()
        assert job["model"] == "sora-2"
        answer = server.http.post("/v1/videos/sync", json={"prompt": "x", "model": "sora-2"})
        assert answer.headers["x-model"] == "sora-2"


@pytest.mark.slow
def test_a_name_of_another_model_ends_the_start() -> None:
    engine = FakeEngine(others=(OTHER,))
    with pytest.raises(ConfigError, match="served_model_name has 'other', which is another model of this server"):
        asyncio.run(serve(engine, ServerConfig(port=0, served_model_name="a,other")))
    assert engine.log[-1] == "stopped"


def test_a_name_that_a_folder_gives_obeys_the_rule_too() -> None:
    served = ServedModels({"my model": replace(INFO, name="my model", path="/models/my model")})
    with pytest.raises(ConfigError, match=r"'/models/my model' is called 'my model'; start it as NAME=MODEL, with up"):
        served.check()


def test_a_name_leads_to_its_model_though_it_is_the_hub_id_of_another() -> None:
    models = [replace(INFO, name="a", path="someone/x"), replace(INFO, name="someone/x", path="/files/x")]
    served = ServedModels({one.name: one for one in models})
    assert served.named("someone/x").name == "someone/x"
    assert ServedModels({"a": models[0]}).named("someone/x").name == "a"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"served_model_name": ","}, "give one name or several by commas"),
        ({"served_model_name": "a b"}, "give one name or several by commas"),
        ({"served_model_name": "a,.."}, "give one name or several by commas"),
        ({"allow_origin": "example.org"}, "give origins such as https://example.org"),
        ({"allow_origin": "https://a.org/x"}, "give origins such as https://example.org"),
        ({"allow_origin": ","}, "give origins such as https://example.org"),
    ],
)
def test_what_cannot_be_one_is_named(settings: dict[str, str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        load_config(settings)


# Pages of other origins.


@pytest.mark.slow
def test_pages_of_an_allowed_origin_may_call() -> None:
    """What a browser asks before, needs no key; errors are readable, too."""
    asks = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type, idempotency-key"
    with serving(FakeEngine(), allow_origin="https://a.org,http://localhost:3000", api_key="k") as server:
        before = server.http.options("/v1/images/generations", headers=asks)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://a.org"
        assert "idempotency-key" in before.headers["access-control-allow-headers"]
        for key, status in (("k", 200), ("wrong", 401)):
            headers = {"Origin": "http://localhost:3000", "Authorization": f"Bearer {key}"}
            answer = server.post({"prompt": "x"}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
            assert "x-tilework-slo-s" in answer.headers["access-control-expose-headers"]
        other = {**asks, "Origin": "https://b.org"}
        assert server.http.options("/v1/images/generations", headers=other).status_code == 400
        answer = server.post({"prompt": "x"}, headers={"Origin": "https://b.org", "Authorization": "Bearer k"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.slow
def test_all_origins_or_none() -> None:
    with serving(FakeEngine(), allow_origin="*") as server:
        assert server.http.get("/v1/models", headers={"Origin": "null"}).headers["access-control-allow-origin"] == "*"
    with serving(FakeEngine()) as server:
        assert "access-control-allow-origin" not in server.http.get("/v1/models", headers={"Origin": "null"}).headers
