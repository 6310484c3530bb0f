"""What a server says of itself to others, and where it sends clients that it has no room for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fake_engine import INFO, FakeEngine, Plan, app_of, serving
from sets.records import a_set
from tilework.core.request import RefusalCode
from tilework.core.time import NS_PER_S
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.sets import OwnSet, Sets, new_sets
from tilework.sets.records import LeaderRecord, Route
from tilework.sets.window import UseWindow

BODY = {"prompt": "x", "slo_s": 1.0, "on_miss": "reject"}
Script = Callable[[httpx.AsyncClient, Sets], Coroutine[Any, Any, None]]


def with_app(engine: FakeEngine, script: Script) -> None:
    """Run a script against the application, which knows of one other set, `b`, that is current."""

    async def main() -> None:
        app = app_of(engine, ServerConfig(set_name="a"))
        sets: Sets = app.state.sets
        sets.directory.sets = {"b": a_set(url="http://b:8000/", models=(INFO.name,))}
        sets.directory.is_current = True
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            await script(http, sets)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("plan", "path"),
    [
        (Plan(refuse_s=3.25), "/v1/images/generations"),
        (Plan(code=RefusalCode.QUEUE, retry_ns=2 * NS_PER_S), "/v1/images/generations"),
        (Plan(code=RefusalCode.TENANT, retry_ns=2 * NS_PER_S), "/v1/images/generations"),
        (Plan(code=RefusalCode.QUEUE), "/v1/chat/completions"),
    ],
)
def test_a_refusal_for_lack_of_room_names_a_set_that_has_some(plan: Plan, path: str) -> None:
    async def script(http: httpx.AsyncClient, sets: Sets) -> None:
        body = BODY if path.startswith("/v1/images") else {"messages": [{"role": "user", "content": "x"}]}
        answer = await http.post(path, json=body)
        assert answer.status_code == 429
        assert answer.links["alternate"]["url"] == f"http://b:8000{path}"
        assert answer.json()["error"]["alternate"] == "http://b:8000/"
        assert int(answer.headers["retry-after"]) > 0
        for known in ({"b": replace(sets.directory.sets["b"], start_in_s=60.0)}, {}):
            sets.directory.sets = known
            answer = await http.post(path, json=body)
            assert answer.status_code == 429
            assert "link" not in answer.headers
            assert "alternate" not in answer.json()["error"]

    with_app(FakeEngine(plan=plan), script)


@pytest.mark.parametrize(("code", "status"), [(RefusalCode.NO_DEVICE, 503), (RefusalCode.MEMORY, 400)])
def test_other_refusals_name_none(code: RefusalCode, status: int) -> None:
    """What is too large is that everywhere."""

    async def script(http: httpx.AsyncClient, _sets: Sets) -> None:
        answer = await http.post("/v1/images/generations", json=BODY)
        assert answer.status_code == status
        assert "link" not in answer.headers

    with_app(FakeEngine(plan=Plan(code=code, retry_ns=NS_PER_S)), script)


def test_the_sets_are_listed() -> None:
    async def script(http: httpx.AsyncClient, sets: Sets) -> None:
        directory = sets.directory
        directory.sets = {"b": a_set(0.5, nodes={"x": 0.5, "y": 0.4}, stages={"diffuse": 0.5}, url="http://b:8000")}
        directory.routes = {
            "x": Route(set="b", epoch=7, why="b lacks nodes"),
            "z": Route(set="b", epoch=8, why="b was busy"),
        }
        directory.leader = LeaderRecord(set="b")
        listed = (await http.get("/v1/sets")).json()
        assert (listed["own"], listed["node_manager"], listed["is_current"]) == ("a", "b", True)
        own, other = listed["data"]
        assert (own["name"], own["models"], own["devices_up"], own["start_in_s"]) == ("a", [INFO.name], 2, 0.0)
        assert (other["name"], other["url"], other["stages"]) == ("b", "http://b:8000", {"diffuse": 0.5})
        assert other["nodes"] == [
            {"name": "x", "utilisation": 0.5, "epoch": 7, "why": "b lacks nodes"},
            {"name": "y", "utilisation": 0.4, "epoch": None, "why": None},
            {"name": "z", "utilisation": None, "epoch": 8, "why": "b was busy"},
        ]

    with_app(FakeEngine(), script)


def test_a_server_that_is_alone_is_in_its_own_registry() -> None:
    with serving(FakeEngine(), set_name="only") as server:
        server.skip(2.0)
        listed = server.http.get("/v1/sets").json()
        assert [one["url"] for one in listed["data"]] == [server.url]
        assert listed["is_current"]
        assert listed["node_manager"] == "only"


class Busy(FakeEngine):
    """Four requests on two devices, which will take 12 s of these."""

    def health(self) -> Any:
        return replace(super().health(), num_jobs=4)

    def backlog_ns(self) -> int:
        return 12 * NS_PER_S


def test_what_a_server_says_of_itself() -> None:
    engine, use = Busy(), UseWindow(60 * NS_PER_S)
    now_ns = engine.now_ns()
    for device_id in (0, 1):
        use.joined(device_id, now_ns - 10 * NS_PER_S)
    use.ran("diffuse", (0,), now_ns - 10 * NS_PER_S, now_ns)
    own = OwnSet(engine=lambda: engine, config=ServerConfig(), use=use, nodes=Places(), url="http://a:1")
    record = own.record()
    assert (record.url, record.models, record.is_open) == ("http://a:1", (INFO.name,), True)
    assert (record.backlog_s, record.start_in_s) == (12.0, 6.0)
    assert record.share == pytest.approx(0.5, abs=0.01)
    assert record.stages["diffuse"] == pytest.approx(0.5, abs=0.01)
    assert record.nodes["x"] == pytest.approx(1.0, abs=0.01)
    assert (record.agents, record.most_nodes, record.least_nodes) == ("127.0.0.1:7070", 3, 1)
    engine.draining = True
    assert not own.record().is_open


class Places:
    """Three places, of which one is taken."""

    host = "127.0.0.1"
    address = "127.0.0.1:7070"
    node_names = {"x": (0,)}
    most_nodes, least_nodes = 3, 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"registry": "etcd:/x"}, "registry is 'etcd:/x'; give etcd://HOST:PORT"),
        ({"registry": "etcd://x", "host": "0.0.0.0"}, "host = '0.0.0.0' is no address that clients"),
    ],
)
def test_registries_that_cannot_be_used(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        new_sets(FakeEngine(), ServerConfig(**settings), UseWindow(NS_PER_S))


def test_agents_must_be_told_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "host", "0.0.0.0")
    with pytest.raises(ConfigError, match=r"agents = '0\.0\.0\.0' is no address that agents can reach"):
        new_sets(FakeEngine(), ServerConfig(registry="etcd://x"), UseWindow(NS_PER_S), Places())
