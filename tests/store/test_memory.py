"""The stores of results, in memory and as files: time to live, byte cap, and that neither is ever exceeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.store.files import FileStore
from tilework.store.memory import MemoryStore
from tilework.store.results import ResultStore, Stored, TooLarge

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Make = Callable[[int, int], AbstractContextManager[ResultStore]]


def in_memory(max_bytes: int, ttl_ns: int) -> AbstractContextManager[ResultStore]:
    return nullcontext(MemoryStore(max_bytes=max_bytes, ttl_ns=ttl_ns))


async def read(store: ResultStore, uid: str, now_ns: int, part: range | None = None) -> tuple[bytes, str, int] | None:
    """The content of a result or a part of it, its type and its whole size; None if there is none."""
    result = await store.get(uid, now_ns)
    if result is None:
        return None
    with closing(result):
        return await result.read(part), result.media_type, result.num_bytes


@contextmanager
def as_files(max_bytes: int, ttl_ns: int) -> Iterator[ResultStore]:
    with TemporaryDirectory() as directory:
        store = FileStore(Path(directory), max_bytes=max_bytes, ttl_ns=ttl_ns)
        yield store
        assert len(list(Path(directory).iterdir())) == len(store), "what is let go leaves no file"


both = pytest.mark.parametrize("make", [in_memory, as_files])


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@both
def test_a_result_expires_exactly_at_its_time(make: Make, run: Run) -> None:
    with make(10, 100) as store:
        assert run(store.put("a", b"xyz", "image/png", 50)) == Stored(expires_ns=150)
        assert run(read(store, "a", 149)) == (b"xyz", "image/png", 3)
        assert run(store.get("a", 150)) is None
        assert store.num_bytes == 0


@both
def test_oldest_goes_first_beyond_the_cap(make: Make, run: Run) -> None:
    with make(10, 100) as store:
        for index, uid in enumerate("abc"):
            run(store.put(uid, b"1234", "image/png", index))
        assert run(store.get("a", 5)) is None
        assert run(read(store, "b", 5)) is not None
        assert run(read(store, "c", 5)) is not None


@both
def test_the_results_of_one_owner_do_not_push_out_those_of_another(make: Make, run: Run) -> None:
    with make(13, 100) as store:
        for uid in ("a/1", "b/1", "b/2", "b/3", "b/4", "a/2"):
            run(store.put(uid, b"123", "image/png", 0))
        there = [uid for uid in ("a/1", "a/2", "b/1", "b/2", "b/3", "b/4") if run(read(store, uid, 5)) is not None]
        assert there == ["a/1", "a/2", "b/3", "b/4"]
        run(store.put("c/1", b"1" * 13, "image/png", 6))
        assert store.num_bytes == 13


@both
def test_larger_than_the_cap_is_refused_and_evicts_nothing(make: Make, run: Run) -> None:
    with make(10, 100) as store:
        run(store.put("a", b"1234", "image/png", 0))
        assert run(store.put("b", b"x" * 11, "image/png", 1)) == TooLarge(num_bytes=11, max_bytes=10)
        assert run(read(store, "a", 2)) is not None
        assert store.num_bytes == 4


@both
def test_parts_of_a_result(make: Make, run: Run) -> None:
    with make(100, 100) as store:
        run(store.put("a", b"0123456789", "video/mp4", 0))
        for part in (range(10), range(1), range(3, 7), range(9, 10)):
            assert run(read(store, "a", 1, part)) == (b"0123456789"[part.start : part.stop], "video/mp4", 10)


@both
def test_a_result_that_is_being_read_can_be_deleted(make: Make, run: Run) -> None:
    with make(100, 100) as store:
        run(store.put("a", b"0123456789", "video/mp4", 0))
        with closing(run(store.get("a", 1))) as result:
            run(store.delete("a"))
            assert run(result.read(range(5, 10))) == b"56789"
        assert run(store.get("a", 1)) is None


@both
def test_the_same_uid_replaces_a_result_and_restarts_its_time(make: Make, run: Run) -> None:
    with make(10, 100) as store:
        run(store.put("a", b"123456", "image/png", 0))
        run(store.put("b", b"1", "image/png", 1))
        run(store.put("a", b"12345678", "image/webp", 50))
        assert store.num_bytes == 9
        assert run(read(store, "a", 149)) == (b"12345678", "image/webp", 8)
        assert run(store.get("b", 101)) is None


operations = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.integers(0, 14), st.integers(0, 40), st.sampled_from(["put", "delete", "get"])
    ),
    max_size=60,
)


@both
@settings(deadline=None)
@given(steps=operations)
def test_agrees_with_a_list_of_what_was_put(make: Make, run: Run, steps: list[tuple[str, int, int, str]]) -> None:
    """Against a plain list: newest last, scanned whole on every step."""
    with make(12, 50) as store:
        agree(store, run, steps)


def agree(store: ResultStore, run: Run, steps: list[tuple[str, int, int, str]]) -> None:
    model: list[tuple[str, int, int]] = []  # uid, size, expiry
    time_ns = 0
    for uid, size, pause_ns, kind in steps:
        time_ns += pause_ns
        model = [entry for entry in model if entry[2] > time_ns]
        if kind == "delete":
            run(store.delete(uid))
            model = [entry for entry in model if entry[0] != uid]
        elif kind == "put":
            answer = run(store.put(uid, b"x" * size, "image/png", time_ns))
            assert isinstance(answer, TooLarge) == (size > 12)
            if size <= 12:
                model = [entry for entry in model if entry[0] != uid]
                while sum(entry[1] for entry in model) + size > 12:
                    model.pop(0)
                model.append((uid, size, time_ns + 50))
        found = run(read(store, uid, time_ns))
        assert (found is not None) == any(entry[0] == uid for entry in model) == run(store.holds(uid, time_ns))
        assert store.num_bytes == sum(entry[1] for entry in model)
        assert len(store) == len(model)
