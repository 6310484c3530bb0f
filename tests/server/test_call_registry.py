"""The registry of calls: what it forgets when, and that none of its bounds is ever exceeded."""

from __future__ import annotations

import asyncio
import cProfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.request import DEFAULT_TERMS, Terms
from tilework.core.wire.spec import Spec
from tilework.runtime.ticket import Ticket
from tilework.server.calls.call import Call
from tilework.server.calls.errors import KeyReused
from tilework.server.calls.idempotency import Key
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.calls.records import CallRecord
from tilework.server.calls.registry import CallRegistry

SPEC = Spec(prompt="x", height=16, width=16, steps=2, guidance_scale=1.0, seed=1)
ASK = ImageCall(
    model="tiny",
    specs=(SPEC,),
    deadline=None,
    terms=DEFAULT_TERMS,
    as_url=False,
    output_format="png",
    quality=90,
    user=None,
)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def call(uid: str, tenant: str = "t", key: str | None = None, body: bytes = b"b") -> Call:
    """A call as far as the call_registry looks at it."""
    unused: Any = None
    tickets = (
        Ticket(request=unused, eta_ns=0, eta_p90_ns=0, outcome=unused),
        Ticket(request=unused, eta_ns=0, eta_p90_ns=0, outcome=unused),
    )
    return Call(
        uid=uid,
        ask=replace(ASK, terms=Terms(tenant=tenant)),
        key=None if key is None else Key(tenant, key, body),
        arrival_ns=0,
        arrived_s=float(sum(uid.encode())),
        tickets=tickets,
        end=unused,
    )


def record(of: Call, now_ns: int, ttl_ns: int = 100, size: int = 10, unfetched: int = 0) -> CallRecord:
    return CallRecord(
        uid=of.uid,
        key=of.key,
        ask=of.ask,
        arrived_s=of.arrived_s,
        fresh_until_ns=now_ns + ttl_ns,
        status_json=b"s" * size,
        decisions_json=b"",
        unfetched={(index, 0) for index in range(unfetched)},
    )


def ended(call_registry: CallRegistry, of: Call, now_ns: int, **more: int) -> None:
    call_registry.begin(of)
    call_registry.end(record(of, now_ns, **more), now_ns, frees_key=False)


def test_record_outlives_its_pictures_and_key() -> None:
    call_registry = CallRegistry(max_records=9, max_bytes=10**6, ttl_ns=100)
    ended(call_registry, call("a", key="k"), 0)
    key = Key("t", "k", b"b")
    assert call_registry.find_key(key, 99) is call_registry.find("a", "t", 99) is not None
    assert call_registry.find_key(key, 100) is None
    assert call_registry.find("a", "t", 199) is not None
    assert call_registry.find("a", "t", 200) is None
    assert (len(call_registry), call_registry.num_bytes, call_registry.num_keys) == (0, 0, 0)


def test_key_of_another_body_is_refused_while_it_lives() -> None:
    call_registry = CallRegistry(max_records=9, max_bytes=10**6, ttl_ns=100)
    ended(call_registry, call("a", key="k"), 0)
    with pytest.raises(KeyReused):
        call_registry.find_key(Key("t", "k", b"other"), 50)
    assert call_registry.find_key(Key("t", "k", b"other"), 100) is None
    assert call_registry.find_key(Key("other", "k", b"other"), 50) is None


def test_key_that_was_given_anew_survives_its_first_call() -> None:
    call_registry = CallRegistry(max_records=9, max_bytes=10**6, ttl_ns=100)
    ended(call_registry, call("a", key="k"), 0)
    ended(call_registry, call("b", key="k"), 150)
    assert call_registry.find("a", "t", 200) is None
    found = call_registry.find_key(Key("t", "k", b"b"), 200)
    assert found is not None
    assert found.uid == "b"


def test_open_calls_are_never_forgotten() -> None:
    call_registry = CallRegistry(max_records=1, max_bytes=2000, ttl_ns=100)
    call_registry.begin(call("open", key="k"))
    for index in range(5):
        ended(call_registry, call(f"c{index}"), index)
    assert call_registry.find("open", "t", 10**9) is not None
    assert call_registry.num_open("t") == 2
    assert call_registry.find("open", "other", 0) is None


@pytest.mark.parametrize(("max_records", "max_bytes"), [(3, 10**6), (10**6, 3 * (1024 + 128 + 10))])
def test_oldest_records_go_beyond_either_bound(max_records: int, max_bytes: int) -> None:
    call_registry = CallRegistry(max_records=max_records, max_bytes=max_bytes, ttl_ns=100)
    for index in range(9):
        ended(call_registry, call(f"c{index}", key=f"k{index}"), index)
    assert [one.uid for one in call_registry.latest("t", 9, 9)] == ["c8", "c7", "c6"]
    assert (len(call_registry), call_registry.num_keys) == (3, 3)


@pytest.mark.parametrize(("max_records", "max_bytes"), [(4, 10**6), (10**6, 4 * (1024 + 128 + 10))])
def test_the_records_of_one_tenant_do_not_push_out_those_of_another(max_records: int, max_bytes: int) -> None:
    call_registry = CallRegistry(max_records=max_records, max_bytes=max_bytes, ttl_ns=100)
    for index in range(9):
        ended(call_registry, call(f"o{index}", "other", key=f"k{index}"), index)
    ended(call_registry, call("mine", key="k"), 10)
    for index in range(9, 20):
        ended(call_registry, call(f"o{index}", "other", key=f"k{index}"), 11)
    assert call_registry.find("mine", "t", 12) is not None
    assert [one.uid for one in call_registry.latest("other", 9, 12)] == ["o19", "o18", "o17"]


def test_call_that_is_forgotten_leaves_nothing() -> None:
    call_registry = CallRegistry(max_records=9, max_bytes=10**6, ttl_ns=100)
    call_registry.begin(one := call("a", key="k"))
    call_registry.forget(one)
    assert (call_registry.find("a", "t", 0), call_registry.latest("t", 9, 0)) == (None, [])
    assert (call_registry.num_open("t"), len(call_registry), call_registry.num_bytes, call_registry.num_keys) == (
        0,
        0,
        0,
        0,
    )


def test_page_costs_its_own_length() -> None:
    """What is open or has ended beside it is not even looked at."""
    call_registry = CallRegistry(max_records=10**5, max_bytes=10**9, ttl_ns=10**18)
    for index in range(20_000):
        ended(call_registry, call(f"c{index}"), index)

    def num_calls(after: str) -> int:
        """Of functions, also built-in ones."""
        with cProfile.Profile() as profile:
            call_registry.latest("t", 10, 20_000, after=after)
        return sum(one.callcount for one in profile.getstats())

    assert max(num_calls(after) for after in ("c19999", "c10000", "c20")) < 100


def test_idle_means_that_nothing_is_open_or_unfetched(loop: asyncio.AbstractEventLoop) -> None:
    call_registry = CallRegistry(max_records=9, max_bytes=10**6, ttl_ns=100)

    def is_idle() -> bool:
        async def comes_at_once() -> bool:
            waiting = asyncio.ensure_future(call_registry.wait_until_idle())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return waiting.done() or not waiting.cancel()

        return loop.run_until_complete(comes_at_once())

    assert is_idle()
    first = call("a")
    call_registry.begin(first)
    assert not is_idle()
    call_registry.end(record(first, 0, unfetched=2), 0, frees_key=False)
    found = call_registry.find("a", "t", 0)
    assert isinstance(found, CallRecord)
    call_registry.mark_fetched(found, 0)
    assert not is_idle()
    call_registry.mark_fetched(found, 1)
    assert is_idle()
    ended(call_registry, call("b"), 0, unfetched=1)
    assert not is_idle()
    call_registry.sweep(200)
    assert is_idle(), "what has expired need not be fetched any more"


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "find"]), st.integers(0, 5), st.integers(0, 60), st.integers(0, 1500)),
    max_size=50,
)


@given(steps)
def test_agrees_with_a_list_of_what_ended(actions: list[tuple[str, int, int, int]]) -> None:
    """Against a plain list, newest last, which is cut to the bounds on every step."""
    call_registry = CallRegistry(max_records=3, max_bytes=6000, ttl_ns=50)
    now_ns, number = 0, 0
    opened: list[Call] = []
    model: list[tuple[str, int, int]] = []  # uid, bytes, time of its end
    for kind, choice, pause_ns, size in actions:
        now_ns += pause_ns
        if kind == "begin":
            number += 1
            opened.append(call(f"u{number}", key=f"k{choice}"))
            call_registry.begin(opened[-1])
        elif kind == "end" and opened:
            one = opened.pop(choice % len(opened))
            call_registry.end(record(one, now_ns, ttl_ns=50, size=size), now_ns, frees_key=False)
            model.append((one.uid, size + 1024 + 128, now_ns))
        call_registry.find("none", "t", now_ns)
        model = [entry for entry in model if entry[2] + 100 > now_ns]
        while len(model) > 3 or sum(entry[1] for entry in model) > 6000:
            model.pop(0)
        assert (len(call_registry), call_registry.num_bytes) == (len(model), sum(entry[1] for entry in model))
        assert all(call_registry.find(entry[0], "t", now_ns) is not None for entry in model)
        assert call_registry.num_open("t") == 2 * len(opened)
        assert call_registry.num_keys <= len(opened) + len(model)
    known = [entry.uid for entry in call_registry.latest("t", 100, now_ns)]
    present = {one.uid for one in opened} | {entry[0] for entry in model}
    assert known == sorted(present, key=lambda uid: -int(uid[1:])), "by arrival, newest first"
    for place, uid in enumerate(known):
        assert [entry.uid for entry in call_registry.latest("t", 2, now_ns, after=uid)] == known[place + 1 : place + 3]
