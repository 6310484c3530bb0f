"""Deadlines of requests that give none: of the tenant, the class, the model or the server, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, Served, serving
from tilework.core.time import s_from_ns
from tilework.server.config import ConfigError, load_config
from tilework.server.default_slo import DefaultSlo
from tilework.server.tenants import load_tenants

MODELS = '[models.tiny-shapes]\npath = "p"\ndefault_slo = "4x"\n'
TENANTS = """
[tenants.studio]
keys = ["studio"]
default_slo = "2s"
[tenants.free]
keys = ["free"]
[classes.batch]
default_slo = "none"
[classes.interactive]
default_slo = "800ms"
"""


@pytest.mark.parametrize(
    ("text", "slo", "shown"),
    [
        ("30s", DefaultSlo(seconds=30), "30s"),
        ("800ms", DefaultSlo(seconds=0.8), "0.8s"),
        ("2.5x", DefaultSlo(times=2.5), "2.5x"),
        ("none", DefaultSlo(), "none"),
    ],
)
def test_a_default_is_a_time_or_a_multiple(text: str, slo: DefaultSlo, shown: str) -> None:
    assert DefaultSlo.parse(text) == slo
    assert str(slo) == shown
    assert slo.slo_s(4.0) == {"30s": 30, "800ms": 0.8, "2.5x": 10, "none": None}[text]


def test_a_multiple_of_an_unknown_time_is_no_deadline() -> None:
    assert DefaultSlo(times=3).slo_s(None) is None


@pytest.mark.parametrize("text", ["", "3", "x", "-3x", "0s", "0x", "3 s", "3m", "nan", "infs"])
def test_anything_else_is_refused_at_the_start_with_the_remedy(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if text:
        with pytest.raises(ConfigError, match=r'default_slo = .* cannot be used; give a time such as "30s"'):
            load_config({"default_slo": text})
    monkeypatch.setenv("TILEWORK_DEFAULT_SLO", text)
    if not text:
        assert load_config().default_slo is None
    else:
        with pytest.raises(ConfigError, match="TILEWORK_DEFAULT_SLO = "):
            load_config()


def test_a_default_of_a_tenant_or_class_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    for table in ('[tenants.a]\nkeys = ["k"]', "[classes.batch]"):
        path.write_text(f"{table}\ndefault_slo = 3\n")
        with pytest.raises(ConfigError, match=r"\.default_slo = 3 cannot be used; give a time such as"):
            load_tenants(load_config({"tenants": str(path)}))


def answered(server: Served, key: str = "free", **fields: object) -> tuple[Mapping[str, Any], httpx.Headers]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.http.post("/v1/images/generations", json={"prompt": "x", **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["tilework"], answer.headers


def test_the_nearest_that_says_something_holds(tmp_path: Path) -> None:
    """A request takes a second alone; two take two in this engine."""
    (tmp_path / "models.toml").write_text(MODELS)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    files = {"models": str(tmp_path / "models.toml"), "tenants": str(tmp_path / "tenants.toml")}
    with serving(FakeEngine(), **files, default_slo="60s") as server:

        def judged(key: str = "free", **fields: object) -> tuple[float | None, str | None]:
            timeline, headers = answered(server, key, **fields)
            slo_s, source = timeline["slo_s"], timeline["slo_source"]
            assert headers.get("x-tilework-slo-s") == (None if slo_s is None else f"{slo_s:g}")
            assert headers.get("x-tilework-slo-source") == source
            deadline_ns, arrival_ns = server.engine.requests[-1].deadline_ns, server.engine.requests[-1].arrival_ns
            assert (slo_s is None) == (deadline_ns is None)
            if deadline_ns is not None:
                assert s_from_ns(deadline_ns - arrival_ns) == pytest.approx(slo_s, abs=0.1), "arrivals differ a little"
            return slo_s, source

        assert judged() == (4, "model")
        assert judged(n=2) == (8, "model")
        assert judged(priority="interactive") == (0.8, "class")
        assert judged(priority="batch") == (None, None)
        assert judged("studio", priority="interactive") == (2, "tenant")
        assert judged(slo_s=9) == (9, "request")
        headers = {"Authorization": "Bearer free"}
        (card,) = server.http.get("/v1/models", headers=headers).json()["data"]
        assert card["tilework"]["default_slo"] == "4x"


def test_the_servers_default_holds_where_no_other_says_anything() -> None:
    with serving(FakeEngine(), default_slo="30s", max_slo_s=20.0) as server:
        timeline, headers = answered(server)
        assert (timeline["slo_s"], timeline["slo_source"]) == (20, "server"), (
            "no deadline is further away than one may be"
        )
        status = server.http.get(f"/v1/requests/{headers['x-request-id']}").json()
        assert (status["slo_s"], status["slo_source"]) == (20, "server")
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card["tilework"]["default_slo"] == "30s"
