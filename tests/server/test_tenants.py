"""Tenants: which key is which tenant's, what they may ask for and see, and messages about a wrong file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.request import OnMiss
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.tenants import load_tenants
from waiting import eventually

FILE = """
[tenants.anna]
keys = ["anna-1", "anna-2"]
weight = 2.0
classes = ["interactive", "nightly"]

[tenants.ben]
keys = ["ben-1"]
max_open = 2

[classes.nightly]
weight = 0.1

[classes.interactive]
weight = 8
"""
HELD = Plan(is_held=True)
ASYNC = {"Prefer": "respond-async"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(FILE)
    with serving(FakeEngine(), drain_s=0, tenants=str(file), api_key="old") as served:
        yield served


@pytest.fixture(autouse=True)
def _unprogrammed(server: Served) -> None:
    server.engine.plan = Plan()
    server.engine.requests.clear()


def of(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("key", "ask", "tenant", "priority", "weight", "tenant_weight"),
    [
        ("anna-1", {}, "anna", "interactive", 16, 2),
        ("anna-2", {"priority": "nightly"}, "anna", "nightly", 0.2, 2),
        ("ben-1", {}, "ben", "standard", 1, 1),
        ("ben-1", {"priority": "batch"}, "ben", "batch", 0.25, 1),
        ("old", {"priority": "interactive"}, "default", "interactive", 8, 1),
    ],
)
def test_key_gives_tenant_class_and_weight(
    server: Served, key: str, ask: dict[str, str], tenant: str, priority: str, weight: float, tenant_weight: float
) -> None:
    assert server.post({"prompt": "x", **ask}, headers=of(key)).status_code == 200
    request = server.engine.requests[-1]
    assert (request.tenant, request.priority, request.weight) == (tenant, priority, pytest.approx(weight))
    assert request.tenant_weight == tenant_weight
    assert request.promise_share == 0.25, "others may come"
    assert request.room == pytest.approx((weight / tenant_weight / 8) ** 0.25), "the heaviest class weighs 8"


def test_class_that_is_not_the_tenants_is_refused(server: Served) -> None:
    answer = server.post({"prompt": "x", "priority": "standard"}, headers=of("anna-1"))
    assert code(answer) == (400, "invalid_value")
    assert "interactive, nightly" in answer.json()["error"]["message"]


def test_unknown_keys_are_refused(server: Served) -> None:
    for key in ("anna", "anna-11", "ben-2", "anna-1,"):
        assert code(server.post({"prompt": "x"}, headers=of(key))) == (401, "invalid_api_key")
    assert server.http.get("/ready").status_code == 200


def test_tenant_sees_its_own_requests_only(server: Served) -> None:
    answer = server.post({"prompt": "x", "response_format": "url"}, headers=of("anna-1"))
    uid = answer.headers["x-request-id"]
    paths = [f"/v1/requests/{uid}{end}" for end in ("", "/content", "/events", "/decisions")]
    for path in (*paths, f"/v1/images/{uid}-0/content"):
        assert server.http.get(path, headers=of("anna-2")).status_code == 200, path
        assert code(server.http.get(path, headers=of("ben-1"))) == (404, "request_not_found"), path
    assert code(server.http.delete(paths[0], headers=of("ben-1"))) == (404, "request_not_found")
    own = server.http.get("/v1/requests", headers=of("anna-2")).json()["data"]
    assert uid in [one["uid"] for one in own]
    assert uid not in server.http.get("/v1/requests", headers=of("ben-1")).text


def test_open_call_of_another_tenant_is_neither_seen_nor_cancelled(server: Served) -> None:
    server.engine.plan = HELD
    uid = server.post({"prompt": "x"}, headers=of("anna-1", **ASYNC)).json()["uid"]
    assert code(server.http.delete(f"/v1/requests/{uid}", headers=of("ben-1"))) == (404, "request_not_found")
    assert f"{uid}-0" not in server.engine.cancelled
    assert server.http.delete(f"/v1/requests/{uid}", headers=of("anna-1")).json()["status"] == "cancelled"


def test_idempotency_keys_are_the_tenants_own(server: Served) -> None:
    uids = [
        server.post({"prompt": prompt}, headers=of(key, **{"Idempotency-Key": "k"})).headers["x-request-id"]
        for key, prompt in (("anna-1", "x"), ("ben-1", "y"), ("anna-2", "x"), ("ben-1", "y"))
    ]
    assert uids[0] == uids[2] != uids[1] == uids[3]


def test_open_images_are_limited(server: Served) -> None:
    server.engine.plan = HELD
    never = server.post({"prompt": "x", "n": 3}, headers=of("ben-1"))
    assert code(never) == (400, "invalid_value"), "no waiting would help"
    assert never.json()["error"]["param"] == "n"
    assert "n = 3 " in never.json()["error"]["message"]
    assert "from 1 to 2" in never.json()["error"]["message"]
    first = server.post({"prompt": "x"}, headers=of("ben-1", **ASYNC)).json()["uid"]
    refused = server.post({"prompt": "x", "n": 2}, headers=of("ben-1"))
    assert code(refused) == (429, "too_many_open")
    assert int(refused.headers["retry-after"]) >= 1
    assert "at most 2" in refused.json()["error"]["message"]
    second = server.post({"prompt": "x"}, headers=of("ben-1", **ASYNC)).json()["uid"]
    assert code(server.post({"prompt": "x"}, headers=of("ben-1"))) == (429, "too_many_open")
    server.on_loop(server.engine.finish, f"{first}-0")
    eventually(lambda: server.post({"prompt": "x"}, headers=of("ben-1", **ASYNC)).status_code == 202)
    for request in server.engine.requests:
        server.http.delete(f"/v1/requests/{request.uid}", headers=of("ben-1"))
    status = server.http.get(f"/v1/requests/{second}", headers=of("ben-1")).json()
    assert status["status"] == "cancelled"


def test_openai_client_with_a_tenants_key(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="anna-1", max_retries=0)
    assert client.images.generate(prompt="x").data[0].tilework["status"] == "done"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="anna").images.generate(prompt="x")


# The file.


def load(tmp_path: Path, text: str, **settings: str) -> object:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    return load_tenants(ServerConfig(tenants=str(file), **settings))


def test_no_file_and_no_key_let_every_call_in() -> None:
    tenants = load_tenants(ServerConfig())
    assert not tenants.has_keys
    tenant = tenants.find(None)
    assert tenant is not None
    assert (tenant.name, tenants.allowed(tenant)) == ("default", ("interactive", "standard", "batch"))
    assert tenants.terms(tenant, "standard", OnMiss.REJECT).promise_share == 1, "no other can come"


def test_a_tenant_that_is_the_only_one_with_keys_may_hold_all_promises(tmp_path: Path) -> None:
    alone = '[tenants.a]\nkeys = ["k"]\n[tenants.watcher]\nkeys = ["m"]\nmetrics = true'
    for text, share in ((alone, 1), (alone + '\n[tenants.b]\nkeys = ["l"]', 0.25)):
        tenants: Any = load(tmp_path, text)
        assert tenants.terms(tenants.find(b"k"), "standard", OnMiss.REJECT).promise_share == share


def test_default_tenant_may_have_settings_without_keys(tmp_path: Path) -> None:
    tenants = load(tmp_path, "[tenants.default]\nmax_open = 3\n[classes.batch]\nweight = 0.5")
    tenant = tenants.find(b"anything")  # type: ignore[attr-defined]
    assert (tenant.max_open, tenants.weight(tenant, "batch")) == (3, 0.5)  # type: ignore[attr-defined]


def test_keys_are_never_printed(tmp_path: Path) -> None:
    assert "anna-1" not in repr(load(tmp_path, FILE))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.a", ("tenants.toml", "not TOML")),
        ("[tenant.a]", ("tenant", "classes, tenants")),
        ("tenants = 3", ("tenants = 3", "[tenants.NAME]")),
        ("[tenants]\na = 3", ("tenants.a = 3", "[tenants.a]")),
        ('[tenants."a b"]\nkeys = ["x"]', ("'a b'", "letters, digits")),
        ('[tenants.a]\nkeys = "secret"', ("tenants.a.keys", "list")),
        ("[tenants.a]\nkeys = [1]", ("tenants.a.keys[0]", "printable ASCII")),
        ('[tenants.a]\nkeys = ["x", "schlüssel"]', ("tenants.a.keys[1]", "printable ASCII")),
        ("[tenants.a]\nweight = 2", ("no keys", "list of keys")),
        ('[tenants.a]\nkeys = ["x"]\nweight = 0', ("tenants.a.weight = 0", "0.001 to 1000")),
        ('[tenants.a]\nkeys = ["x"]\nweight = nan', ("tenants.a.weight = nan", "0.001 to 1000")),
        ('[tenants.a]\nkeys = ["x"]\nweight = true', ("tenants.a.weight = True", "number")),
        ('[tenants.a]\nkeys = ["x"]\nwieght = 2', ("tenants.a.wieght", "weight")),
        ('[tenants.a]\nkeys = ["x"]\nclasses = ["fast"]', ("tenants.a.classes", "'fast'", "interactive")),
        ('[tenants.a]\nkeys = ["x"]\nclasses = []', ("tenants.a.classes", "[]")),
        ('[tenants.a]\nkeys = ["x"]\nmax_open = 0', ("tenants.a.max_open = 0", "1 to")),
        ('[tenants.a]\nkeys = ["x"]\nweight = 500', ("2000", "tenants.a.weight x classes.interactive.weight")),
        ('[tenants.a]\nkeys = ["x"]\n[tenants.b]\nkeys = ["x"]', ("tenants.b.keys", "tenants.a.keys", "share")),
        ("[classes.batch]\nwait = 1", ("classes.batch.wait", "weight")),
        ("[classes.batch]\nexact = 1", ("classes.batch.exact = 1", "true or false")),
        ('[classes.batch]\nweight = "low"', ("classes.batch.weight = 'low'", "number")),
    ],
)
def test_wrong_file_names_key_value_and_remedy(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml.* cannot be read: No such file"):
        load_tenants(ServerConfig(tenants=str(tmp_path / "nowhere.toml")))


def test_key_of_the_option_may_not_be_a_tenants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share a key"):
        load(tmp_path, FILE, api_key="ben-1")
