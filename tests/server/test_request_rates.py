"""How many calls for pictures a key may make in a minute."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clock
from fake_engine import VIDEOS, FakeEngine, Plan, Served, serving
from tilework.core.time import NS_PER_S
from tilework.server.config import ConfigError, load_config
from tilework.server.request_rates import PromiseTurns, RequestRates
from tilework.server.tenants import Tenant, load_tenants

MINUTE_NS = 60 * NS_PER_S
TENANTS = """
[tenants.default]
requests_per_minute = 1
[tenants.studio]
keys = ["a", "b"]
requests_per_minute = 3
[tenants.free]
keys = ["c"]
"""


def post(server: Served, key: str, route: str = "/v1/images/generations") -> httpx.Response:
    what = {"messages": [{"role": "user", "content": "x"}]} if "chat" in route else {"prompt": "x"}
    return server.http.post(route, json=what, headers={"Authorization": f"Bearer {key}"})


def test_each_key_has_its_own_calls_of_a_minute(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    with serving(FakeEngine(info=VIDEOS), tenants=str(tmp_path / "tenants.toml"), drain_s=0) as server:
        routes = ("/v1/images/generations", "/v1/chat/completions", "/v1/videos")
        for route in routes:
            assert post(server, "a", route).status_code == 200
        for route in routes:
            refused = post(server, "a", route)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert refused.headers["retry-after"] == "20"
        assert "3 calls for images a minute" in refused.json()["error"]["message"]
        assert post(server, "b").status_code == 200
        assert all(post(server, "c").status_code == 200 for _ in range(9)), "no limit"
        headers = {"Authorization": "Bearer a"}
        assert server.http.get("/v1/requests", headers=headers).status_code == 200, "what draws nothing is not counted"
        text = server.http.get("/metrics", headers=headers).text
        assert 'tilework_refusals_total{reason="rate_limit_exceeded"} 3.0' in text
        server.skip(20)
        assert post(server, "a").status_code == 200
        assert post(server, "a").status_code == 429


def test_refused_promises_count_as_calls_of_a_minute(tmp_path: Path) -> None:
    """An answer takes time, whatever it is: who asks for what cannot be promised has no more calls than others."""
    (tmp_path / "tenants.toml").write_text(TENANTS)
    engine = FakeEngine(script=[Plan(refuse_s=9.0) for _ in range(3)])
    headers, what = {"Authorization": "Bearer a"}, {"prompt": "x", "slo_s": 1, "on_miss": "reject"}
    with serving(engine, tenants=str(tmp_path / "tenants.toml")) as server:
        answers = [server.http.post("/v1/images/generations", json=what, headers=headers) for _ in range(4)]
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert codes == ["deadline_unreachable"] * 3 + ["rate_limit_exceeded"]


@pytest.mark.slow
def test_without_keys_all_calls_share_the_default_tenants(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.default]\nrequests_per_minute = 1\n")
    with serving(FakeEngine(), tenants=str(tmp_path / "tenants.toml")) as server:
        assert post(server, "anything").status_code == 200
        assert post(server, "another").status_code == 429


@pytest.mark.slow
@given(per_minute=st.integers(1, 90), gaps_ns=st.lists(st.integers(0, 2 * MINUTE_NS), max_size=300))
def test_in_any_span_a_key_makes_no_more_than_its_rate_and_one_minute_more(per_minute: int, gaps_ns: list[int]) -> None:
    rates, tenant = RequestRates(), Tenant(requests_per_minute=per_minute)
    now_ns, taken_ns = 0, list[int]()
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        wait_ns = rates.take(tenant, b"k", now_ns)
        if not wait_ns:
            taken_ns.append(now_ns)
        elif gap_ns % 2:
            now_ns += wait_ns
            assert not rates.take(tenant, b"k", now_ns), "it says when there is one again"
            taken_ns.append(now_ns)
    for index, first_ns in enumerate(taken_ns):
        for number, last_ns in enumerate(taken_ns[index:], 1):
            assert number <= per_minute * (1 + (last_ns - first_ns) / MINUTE_NS) + 1e-6


def test_a_wrong_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[tenants.a]\nkeys = ["k"]\nrequests_per_minute = 0\n')
    with pytest.raises(ConfigError, match=r"tenants\.a\.requests_per_minute = 0 cannot be used; give a whole number"):
        load_tenants(load_config({"tenants": str(path)}))


def test_a_tenant_has_its_share_of_the_time_for_promises() -> None:
    """One after another, and with a quarter of the time at most; others do not wait for them."""

    async def scenario(loop: clock.ManualLoop) -> None:
        turns, done = PromiseTurns(), list[str]()

        async def decided(tenant: str, share: float) -> None:
            async with turns.of(tenant, share):
                done.append(tenant)

        with pytest.MonkeyPatch.context() as patch:
            taken = count()
            patch.setattr("tilework.server.request_rates.time.thread_time", lambda: float(next(taken)))  # 1 s each.
            patch.setattr("tilework.server.request_rates.time.monotonic", loop.time)
            tasks = [asyncio.create_task(decided("a", 0.25)) for _ in range(3)]
            await loop.until_idle()
            assert done == ["a"]
            tasks.append(asyncio.create_task(decided("b", 1.0)))
            await loop.until_idle()
            assert done == ["a", "b"]
            loop.advance(2.9)
            await loop.until_idle()
            assert done == ["a", "b"]
            loop.advance(0.2)
            await loop.until_idle()
            assert done == ["a", "b", "a"]
            loop.advance(4)
            await loop.until_idle()
            assert len(done) == 4
            await asyncio.gather(*tasks)

    clock.run(scenario)
