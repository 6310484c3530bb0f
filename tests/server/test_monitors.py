"""What monitoring reads: with a key that opens metrics alone, or without one on a port of the loopback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import BaseRoute, Mount

from fake_engine import FakeEngine, app_of, serving
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.http.middleware import METRICS, PROBES
from tilework.server.http.server import AddressInUse
from tilework.server.main import serve
from tilework.server.page.routes import PAGE_FILES
from tilework.server.tenants import load_tenants

OPEN = PROBES | PAGE_FILES.keys()
FILE = '[tenants.web]\nkeys = ["w"]\n[tenants.watch]\nkeys = ["m2"]\nmetrics = true\n'
PATHS = ("/health", METRICS, "/ready")


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(found: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each route of the application; a parameter of a path is "x"."""
    for route in found:
        assert isinstance(route, Mount) or hasattr(route, "methods"), route
        path = re.sub(r"{[^}]*}", "x", route.path)
        if isinstance(route, Mount):
            yield "GET", f"{path}/x"
        else:
            yield from ((method, path) for method in route.methods)


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    (tmp_path / "tenants.toml").write_text(FILE)
    return str(tmp_path / "tenants.toml")


def test_a_key_for_metrics_opens_no_other_route(tenants: str) -> None:
    """Of all that the application has."""
    known = {*routes(app_of(FakeEngine(), ServerConfig()).routes), ("POST", "/v1/no/such/route"), ("POST", METRICS)}
    assert {("POST", "/v1/images/generations"), ("DELETE", "/v1/admin/models/x"), ("GET", METRICS)} <= known
    with serving(FakeEngine(), tenants=tenants, api_key="a", admin_key="b", metrics_key="m1") as server:
        for key in ("m1", "m2"):
            for method, path in sorted(known):
                answer = server.http.request(method, path, headers=of(key))
                if path in OPEN or (path == METRICS and method in ("GET", "HEAD")):
                    assert answer.status_code == 200, (method, path)
                    continue
                assert answer.status_code == 403, (method, path)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "permission_denied"
                    assert "api_key" in answer.json()["error"]["message"]
            assert server.http.get("/docs", auth=("any", key)).status_code == 403, "also as the password of a browser"
        assert server.http.get(METRICS, headers=of("a")).status_code == 200
        assert server.http.get(METRICS).status_code == 401
    assert not server.engine.requests


def test_a_key_for_metrics_alone_leaves_the_server_open() -> None:
    tenants = load_tenants(ServerConfig(metrics_key="m"))
    assert not tenants.has_keys
    monitor, other = tenants.find(b"m"), tenants.find(None)
    assert monitor is not None
    assert other is not None
    assert (monitor.is_monitor, other.is_monitor) == (True, False)


@pytest.mark.parametrize(
    ("settings", "text", "words"),
    [
        ({"metrics_key": "a", "api_key": "a"}, "", "a key of metrics_key is also one of api_key, of admin_key or of"),
        ({"metrics_key": "a", "admin_key": "a"}, "", "a key of metrics_key is also one of api_key, of admin_key or of"),
        ({"metrics_key": "w"}, FILE, "a key of metrics_key is also one of api_key, of admin_key or of a tenant"),
        ({}, '[tenants.a]\nkeys = ["x"]\nmetrics = true\nadmin = true', "tenants.a.metrics = true .* has admin = true"),
        ({}, "[tenants.default]\nmetrics = true", "tenants.default.metrics = true .* give the keys for metrics a ten"),
        ({}, '[tenants.a]\nkeys = ["x"]\nmetrics = 1', "tenants.a.metrics = 1 cannot be used; give true or false"),
    ],
)
def test_wrong_keys_for_metrics_are_named(tmp_path: Path, settings: dict[str, str], text: str, words: str) -> None:
    (tmp_path / "tenants.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tenants(ServerConfig(tenants=str(tmp_path / "tenants.toml"), **settings))


# The port for probes.


@pytest.mark.parametrize("frontends", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_probe_port_answers_probes_without_a_key_and_nothing_else(frontends: int) -> None:
    said: list[str] = []
    settings = {"api_key": "a", "probe_port": 0, "frontends": frontends}
    with serving(FakeEngine(), on_progress=said.append, **settings) as server:
        (url,) = re.findall(r"at (http://127\.0\.0\.1:\d+)$", said[0])
        assert server.http.get(METRICS).status_code == 401
        with httpx.Client(base_url=url) as probes:
            assert [probes.get(path).status_code for path in PATHS] == [200] * 3
            assert probes.head(METRICS).content == b""
            for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/images/generations")):
                answer = probes.request(method, path, headers=of("a"))
                assert answer.status_code == 404, "also with a key"
                assert "/health, /metrics, /ready and nothing else" in answer.json()["error"]["message"]
    assert not server.engine.requests
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_probe_port_answers_while_the_models_are_loaded_and_while_the_server_stops() -> None:
    """Readiness is what `/ready` of the server itself says."""
    said: list[str] = []
    with serving(FakeEngine(), on_progress=said.append, probe_port=0, drain_s=0) as server:
        (url,) = re.findall(r"at (http://127\.0\.0\.1:\d+)$", said[0])
        server.engine.draining = True
        answer = httpx.get(f"{url}/ready")
        assert (answer.status_code, answer.json()["error"]["status"]) == (503, "stopping")
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_probe_port_that_is_taken_is_named() -> None:
    said: list[str] = []
    with serving(FakeEngine(), on_progress=said.append, probe_port=0):
        port = int(said[0].rpartition(":")[2])
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} cannot be listened on"):
            asyncio.run(serve(FakeEngine(), ServerConfig(port=0, probe_port=port)))
