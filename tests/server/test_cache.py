"""Requests with a cache over HTTP: the request or the server asks for it; what the answers and metrics say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_engine import INFO, FakeEngine, Served, serving
from tilework.cli.app import app
from tilework.core.cache import DEFAULT_THRESHOLD, CacheChoice, CacheKind, CacheUse
from tilework.runtime.ticket import WorkSegment
from tilework.server.calls.timeline import _cache

CACHES = replace(INFO, caches=tuple(CacheKind))
OF_BLOCKS = replace(INFO, caches=(CacheKind.PATCH, CacheKind.IMAGE))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(info=CACHES), drain_s=0) as served:
        yield served


@pytest.mark.parametrize(("fields", "if_late"), [({"cache": "if_late", "slo_s": 5}, True), ({"cache": "patch"}, False)])
def test_a_deadline_may_buy_it(server: Served, fields: dict[str, Any], if_late: bool) -> None:
    server.post({"prompt": "x", **fields})
    choice, spec, request = (
        CacheChoice(CacheKind.PATCH, DEFAULT_THRESHOLD),
        server.engine.specs[-1],
        server.engine.requests[-1],
    )
    assert (spec.cache, spec.spare_cache) == (request.cache, request.spare_cache)
    assert (spec.cache, spec.spare_cache) == ((None, choice) if if_late else (choice, None))


def chosen(server: Served, **fields: Any) -> CacheChoice | None:
    """What the engine was asked for; the answer says the same."""
    answer = server.post({"prompt": "x", **fields})
    assert answer.status_code == 200, answer.text
    choice = server.engine.specs[-1].cache
    said = answer.json()["data"][0]["tilework"]["cache"]
    expected = choice and (choice.kind, choice.threshold, choice.interval)
    assert (said and (said["kind"], said["threshold"], said["interval"])) == expected
    return choice


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, None),
        ({"cache": None}, None),
        ({"cache": "off"}, None),
        ({"cache": "patch"}, CacheChoice(CacheKind.PATCH, DEFAULT_THRESHOLD)),
        ({"cache": "image", "cache_threshold": 0}, CacheChoice(CacheKind.IMAGE, 0.0)),
        ({"cache": "fbcache"}, CacheChoice(CacheKind.FBCACHE, 0.05)),
        ({"cache": "fbcache", "cache_threshold": 0.2}, CacheChoice(CacheKind.FBCACHE, 0.2)),
        ({"cache": "taylorseer"}, CacheChoice(CacheKind.TAYLORSEER, 5)),
        ({"cache": "taylorseer", "cache_interval": 3}, CacheChoice(CacheKind.TAYLORSEER, 3)),
    ],
)
def test_the_default_is_none_and_a_request_may_choose(
    server: Served, fields: dict[str, Any], choice: CacheChoice | None
) -> None:
    assert chosen(server, **fields) == choice


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"cache": "yes"}, "cache", 'Give "patch" or "image"'),
        ({"cache": "patch", "cache_threshold": 1.5}, "cache_threshold", "a number from 0 to 1"),
        ({"cache_threshold": 0.1}, "cache_threshold", "It has no effect without a cache: give cache, too"),
        ({"cache": "off", "cache_threshold": 0.1}, "cache_threshold", "It has no effect without a cache"),
        ({"cache_interval": 3}, "cache_interval", "It has no effect without a cache"),
        ({"cache": "fbcache", "cache_interval": 3}, "cache_interval", "fbcache has none: give cache_threshold"),
        ({"cache": "taylorseer", "cache_threshold": 0}, "cache_threshold", "taylorseer has none: give cache_interval"),
        ({"cache": "taylorseer", "cache_interval": 0}, "cache_interval", "a number from 1 to 100"),
        ({"cache": "patch", "exact": True}, "cache", "An image with a cache is not exact"),
    ],
)
def test_other_values_are_refused_with_a_remedy(server: Served, fields: dict[str, Any], param: str, said: str) -> None:
    answer = server.post({"prompt": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


def test_a_model_that_cannot_is_named() -> None:
    with serving(FakeEngine(), drain_s=0, cache="patch") as server:
        answer = server.post({"prompt": "x", "cache": "image"})
        assert answer.status_code == 400
        assert "tiny-shapes cannot do that: leave it out" in answer.json()["error"]["message"]
        assert chosen(server) is None, "what the server prefers is for models that can"
        assert server.http.get("/v1/models").json()["data"][0]["tilework"]["caches"] == []


def test_a_server_has_a_default_which_requests_and_exactness_override() -> None:
    with serving(FakeEngine(info=OF_BLOCKS), drain_s=0, cache="image", cache_threshold=0.2) as server:
        assert chosen(server) == CacheChoice(CacheKind.IMAGE, 0.2)
        assert chosen(server, cache="patch") == CacheChoice(CacheKind.PATCH, 0.2)
        assert chosen(server, cache_threshold=0.3) == CacheChoice(CacheKind.IMAGE, 0.3)
        assert chosen(server, cache="off") is chosen(server, exact=True) is None
        about = server.http.get("/v1/models").json()["data"][0]["tilework"]
        assert about["caches"] == list(about["cache_settings"]) == ["patch", "image"]
        assert about["cache_settings"]["image"]["usual"] == [0.001, 0.003, 0.01, 0.03]


def test_a_servers_number_is_for_its_own_cache_and_those_like_it() -> None:
    with serving(FakeEngine(info=CACHES), drain_s=0, cache="taylorseer", cache_interval=3) as server:
        assert chosen(server) == CacheChoice(CacheKind.TAYLORSEER, 3)
        assert chosen(server, cache_interval=4) == CacheChoice(CacheKind.TAYLORSEER, 4)
        assert chosen(server, cache="patch") == CacheChoice(CacheKind.PATCH, DEFAULT_THRESHOLD)
    with serving(FakeEngine(info=CACHES), drain_s=0, cache="patch", cache_threshold=0.2) as server:
        assert chosen(server, cache="fbcache") == CacheChoice(CacheKind.FBCACHE, 0.05)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["patch", "--cache-interval", "3"], "cache is patch, and it has no interval; leave out --cache-interval"),
        (["taylorseer", "--cache-threshold", "0.1"], "cache is taylorseer, and it has no threshold"),
    ],
)
def test_a_number_that_the_servers_cache_has_not_is_refused(flags: list[str], said: str) -> None:
    command = ["serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager", "--cache", *flags]
    assert said in str(CliRunner().invoke(app, command).exception)


def test_an_exact_server_has_no_cache() -> None:
    flags = ["serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager", "--exact", "--cache", "patch"]
    result = CliRunner().invoke(app, flags)
    assert "cache is patch, and images with it are not exact; leave out --exact or --cache" in str(result.exception)


def segment(use: CacheUse | None) -> WorkSegment:
    return WorkSegment(stage="diffuse", devices=(0,), num_steps=1, start_ns=0, end_ns=1, cache_use=use)


def test_an_answer_adds_up_what_all_works_did() -> None:
    choice = CacheChoice(CacheKind.PATCH, 0.1)
    uses = [None, CacheUse(6, 2), CacheUse(4, 0, off="it moved"), CacheUse(2, 6)]
    said = _cache(choice, [segment(use) for use in uses])
    assert said is not None
    assert said.model_dump() == {
        "kind": "patch",
        "threshold": 0.1,
        "interval": None,
        "computed": 12,
        "skipped": 8,
        "saving": 0.4,
        "off": "it moved",
    }
    assert _cache(None, [segment(None)]) is None
