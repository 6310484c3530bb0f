"""What answers at the addresses of an etcd: etcd itself, another program, or another etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

import clock
from clock import ManualLoop
from sets.test_registry import beside, passes
from tilework.sets.address import open_registry
from tilework.sets.directory import Directory
from tilework.sets.etcd import EtcdRegistry
from tilework.sets.registry import RegistryLost

PAGE = httpx.Response(200, html="<html><title>Welcome</title></html>")
Answer = httpx.Response | Callable[[], httpx.Response]


def plain(values: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=values)


@dataclass
class Gateway:
    """Etcds by the port of their address, as far as reads need one; any of them may be another program."""

    cluster: int = 7
    revision: int = 10
    others: dict[int, httpx.Response] = field(default_factory=dict)
    clusters: dict[int, int] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    kvs: list[dict[str, Any]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        port, path = request.url.port or 0, request.url.path
        self.asked.append(port)
        if port in self.late:
            await clock.sleep(self.late[port])
        if port in self.others:
            return self.others[port]
        header = {"cluster_id": str(self.clusters.get(port, self.cluster)), "revision": str(self.revision)}
        if path == "/v3/watch":
            await clock.sleep(request.extensions["timeout"]["read"])  # Nothing has changed.
            raise httpx.ReadTimeout("", request=request)
        if path == "/v3/lease/keepalive":
            return plain({"result": {"header": header, "ID": "5", "TTL": "10"}})
        return plain({"header": header, "ID": "5", "kvs": self.kvs, "succeeded": True})


def registry(gateway: Gateway, num_members: int = 1) -> EtcdRegistry:
    """Of members at the ports 1, 2 and so on."""
    opened = open_registry("etcd://" + ",".join(f"10.0.0.1:{port}" for port in range(1, num_members + 1)))
    opened._http = httpx.AsyncClient(transport=httpx.MockTransport(gateway.answer))
    return opened


def run(scenario: Callable[[ManualLoop], Awaitable[None]]) -> None:
    clock.run(scenario)


FOREIGN = [
    PAGE,
    plain({"status": "ok"}),
    plain([1, 2]),
    plain("etcd"),
    plain({"header": {"cluster_id": "x", "revision": "1"}, "ID": "1"}),
    plain({"code": 5, "message": "Not Found"}, 404),
    plain({"detail": "Not Found"}, 404),
    httpx.Response(502, html="<h1>Bad Gateway</h1>"),
    httpx.Response(200, text='{"header": {"cluster_id": "7", "revision": "1"}, "ID": "1", "TTL": "5"}'),
    httpx.Response(200, content=b"\xff\xfe", headers={"content-type": "application/json"}),
    httpx.Response(204),
]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_is_no_etcd_is_named(foreign: httpx.Response) -> None:
    """By every call, and by the copy, which is not current then and comes back."""

    async def scenario(loop: ManualLoop) -> None:
        gateway = Gateway()
        opened = registry(gateway)
        copy = Directory(opened)
        async with beside(copy.follow()) as (following,):
            await loop.until(lambda: copy.is_current)
            gateway.others[1] = foreign
            shown = (
                rf"http://10\.0\.0\.1:1/v3/\S+ is no etcd: it answers HTTP {foreign.status_code} .*give the addresses"
            )
            for call in (opened.grant(5), opened.renew(5), opened.revoke(5), opened.create("a", b"", 5)):
                with pytest.raises(RegistryLost, match=shown):
                    await call
            await passes(loop, 5.0)
            assert not copy.is_current
            assert not following.done()
            gateway.others.clear()
            await passes(loop, 5.0)
            assert copy.is_current

    run(scenario)


def test_a_refusal_of_etcd_is_told_as_it_is() -> None:
    async def scenario(_loop: ManualLoop) -> None:
        error = {"error": "etcdserver: no leader", "message": "etcdserver: no leader", "code": 14}
        opened = registry(Gateway(others={1: plain(error, 503)}))
        with pytest.raises(RegistryLost, match=r"v3/lease/grant: HTTP 503 etcdserver: no leader"):
            await opened.grant(5)

    run(scenario)


@pytest.mark.parametrize("page", [PAGE, plain({"status": "ok"})])
def test_a_wrong_address_among_three_is_skipped(page: httpx.Response, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(_loop: ManualLoop) -> None:
        gateway = Gateway(others={1: page})
        opened = registry(gateway, 3)
        for _ in range(3):
            assert await opened.grant(5) == 5
        assert gateway.asked == [1, 2, 2, 2]

    run(scenario)
    assert [one.message.partition(": it")[0] for one in caplog.records] == [
        "an address of the registry is skipped: http://10.0.0.1:1/v3/lease/grant is no etcd"
    ]


def test_the_next_address_is_asked_where_one_is_silent() -> None:
    async def scenario(loop: ManualLoop) -> None:
        opened = registry(Gateway(late={1: 3600.0}), 3)
        granting = asyncio.ensure_future(opened.grant(5))
        await passes(loop, 1.0)
        assert not granting.done()
        await passes(loop, 1.0)
        assert await granting == 5

    run(scenario)


def test_a_call_ends_where_all_are_silent() -> None:
    async def scenario(loop: ManualLoop) -> None:
        opened = registry(Gateway(late={1: 3600.0, 2: 3600.0}), 2)
        granting = asyncio.ensure_future(opened.grant(5))
        await passes(loop, 4.5)
        assert not granting.done()
        await passes(loop, 1.0)
        with pytest.raises(
            RegistryLost, match=r"etcd does not answer: http://10\.0\.0\.1:1/v3/lease/grant: nothing for 5 s"
        ):
            await granting

    run(scenario)


@pytest.mark.parametrize("changes", [{"cluster": 8}, {"cluster": 8, "revision": 500}, {"revision": 3}])
def test_another_cluster_or_an_older_revision_is_another_era(changes: dict[str, int]) -> None:
    """The copy counts as new from then: it was current without a gap since then only."""

    async def scenario(loop: ManualLoop) -> None:
        gateway = Gateway()
        opened = registry(gateway)
        copy = Directory(opened)
        async with beside(copy.follow()):
            await passes(loop, 20.0)
            gateway.revision += 5
            await passes(loop, 20.0)
            assert opened.era == 0
            assert copy.current_for_s > 30.0
            for name, value in changes.items():
                setattr(gateway, name, value)
            await passes(loop, 10.0)
            assert opened.era == 1
            assert copy.is_current
            assert copy.current_for_s <= 10.0

    run(scenario)


def test_entries_that_are_older_than_they_were_are_of_another_era() -> None:
    """As after a backup to which much was written before this process reached it again."""

    async def scenario(loop: ManualLoop) -> None:
        entry = {"key": "dGlsZXdvcmsvbGVhZGVy", "value": "YQ==", "create_revision": "9", "mod_revision": "9"}
        gateway = Gateway(kvs=[entry])
        opened = registry(gateway)
        copy = Directory(opened)
        async with beside(copy.follow()):
            await passes(loop, 5.0)
            gateway.kvs, gateway.revision = [entry | {"create_revision": "4", "mod_revision": "4"}], 500
            await passes(loop, 5.0)
            assert opened.era == 1
            assert copy.entries["leader"].created == 4

    run(scenario)


def test_addresses_of_two_etcds_are_no_registry(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        gateway = Gateway(clusters={2: 8})
        copy = Directory(registry(gateway, 2))
        async with beside(copy.follow()):
            await passes(loop, 10.0)
            assert not copy.is_current
            gateway.clusters.clear()
            await passes(loop, 10.0)
            assert copy.is_current

    run(scenario)
    assert [one.message.partition(": ")[2] for one in caplog.records] == [
        "http://10.0.0.1:1 and http://10.0.0.1:2 are members of different etcds; give those of one"
    ]
