"""The in-memory store: time to live, byte cap, and that neither is ever exceeded."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tilework.store.memory import MemoryStore
from tilework.store.results import Result, Stored, TooLarge


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The memory store never waits, so its coroutines end at once."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the store waited")


def test_result_lives_exactly_its_time() -> None:
    store = MemoryStore(max_bytes=10, ttl_ns=100)
    assert now(store.put("a", b"xyz", "image/png", 50)) == Stored(expires_ns=150)
    assert now(store.get("a", 149)) == Result(content=b"xyz", media_type="image/png")
    assert now(store.get("a", 150)) is None
    assert store.num_bytes == 0


def test_oldest_goes_first_beyond_the_cap() -> None:
    store = MemoryStore(max_bytes=10, ttl_ns=100)
    for index, uid in enumerate("abc"):
        now(store.put(uid, b"1234", "image/png", index))
    assert now(store.get("a", 5)) is None
    assert now(store.get("b", 5)) is not None
    assert now(store.get("c", 5)) is not None


def test_larger_than_the_cap_is_refused_and_evicts_nothing() -> None:
    store = MemoryStore(max_bytes=10, ttl_ns=100)
    now(store.put("a", b"1234", "image/png", 0))
    assert now(store.put("b", b"x" * 11, "image/png", 1)) == TooLarge(num_bytes=11, max_bytes=10)
    assert now(store.get("a", 2)) is not None
    assert store.num_bytes == 4


def test_same_uid_replaces_and_lives_anew() -> None:
    store = MemoryStore(max_bytes=10, ttl_ns=100)
    now(store.put("a", b"123456", "image/png", 0))
    now(store.put("b", b"1", "image/png", 1))
    now(store.put("a", b"12345678", "image/webp", 50))
    assert store.num_bytes == 9
    assert now(store.get("a", 149)) == Result(content=b"12345678", media_type="image/webp")
    assert now(store.get("b", 101)) is None


operations = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.integers(0, 14), st.integers(0, 40), st.sampled_from(["put", "delete", "get"])
    ),
    max_size=60,
)


@given(operations)
def test_agrees_with_a_list_of_what_was_put(steps: list[tuple[str, int, int, str]]) -> None:
    """Against a plain list: newest last, scanned whole on every step."""
    store = MemoryStore(max_bytes=12, ttl_ns=50)
    model: list[tuple[str, int, int]] = []  # uid, size, expiry
    time_ns = 0
    for uid, size, pause_ns, kind in steps:
        time_ns += pause_ns
        model = [entry for entry in model if entry[2] > time_ns]
        if kind == "delete":
            now(store.delete(uid))
            model = [entry for entry in model if entry[0] != uid]
        elif kind == "put":
            answer = now(store.put(uid, b"x" * size, "image/png", time_ns))
            assert isinstance(answer, TooLarge) == (size > 12)
            if size <= 12:
                model = [entry for entry in model if entry[0] != uid]
                while sum(entry[1] for entry in model) + size > 12:
                    model.pop(0)
                model.append((uid, size, time_ns + 50))
        found = now(store.get(uid, time_ns))
        assert (found is not None) == any(entry[0] == uid for entry in model) == now(store.holds(uid, time_ns))
        assert store.num_bytes == sum(entry[1] for entry in model)
        assert len(store) == len(model)
