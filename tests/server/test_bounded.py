"""JSON of clients is read within bounds, and means the same however it comes."""

from __future__ import annotations

import base64
import json
import tracemalloc
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.server.bounded.json_reader import (
    MAX_DEPTH,
    MAX_INNER_BYTES,
    MAX_VALUES,
    PIECE_BYTES,
    SMALL_BYTES,
    JsonReader,
    JsonRefused,
    RestTooLarge,
    inner_json,
)
from tilework.server.bounded.long_text import LONG_TEXT_BYTES, LongText
from tilework.server.calls.idempotency import idempotency_key
from tilework.server.calls.parsing.base64_pieces import decode_base64
from tilework.server.text import shown

MIB = 1 << 20
KEPT = 8 * MIB

texts = st.text(max_size=20) | st.builds(
    lambda unit, count: unit * count, st.text(min_size=1, max_size=6), st.sampled_from([200, 3000, 9000])
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=20,
)


def read(content: bytes, cuts: list[int] | None = None, rest: int = MIB, kept: int | None = KEPT) -> Any:
    reader = JsonReader(rest, kept)
    places = [0, *sorted({cut % len(content) for cut in cuts or []}), len(content)]
    for first, last in pairwise(places):
        for start in range(first, last, PIECE_BYTES):
            reader.feed(content[start : min(start + PIECE_BYTES, last)])
    return reader.value()


def plain(value: Any) -> Any:
    """The value with ordinary texts."""
    if isinstance(value, LongText):
        return value.text()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value


@settings(max_examples=300, deadline=None)
@given(value=values, is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 1 << 20), max_size=8), is_cut=st.booleans())
def test_a_body_means_the_same_in_pieces(value: object, is_ascii: bool, cuts: list[int], is_cut: bool) -> None:
    content = json.dumps(value, ensure_ascii=is_ascii).encode() + b" " * (SMALL_BYTES + 1)
    assert plain(read(content, cuts, rest=64 * MIB, kept=KEPT if is_cut else None)) == value


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=3))
def test_what_is_no_json_is_refused_in_pieces_as_well(content: bytes, cuts: list[int]) -> None:
    padded = b'{"a": "' + b"x" * SMALL_BYTES + b'", "b": ' + content + b"}"
    try:
        expected = json.loads(padded.decode())
    except (ValueError, RecursionError):
        with pytest.raises(JsonRefused):
            read(padded, cuts)
    else:
        assert plain(read(padded, cuts)) == expected


def test_long_texts_are_cut_out_and_others_are_not() -> None:
    content = json.dumps(
        {"a": "x" * LONG_TEXT_BYTES, "b": "y" * (LONG_TEXT_BYTES - 1), "c": "z" * SMALL_BYTES}
    ).encode()
    found = read(content)
    assert isinstance(found["a"], LongText)
    assert found["b"] == "y" * (LONG_TEXT_BYTES - 1)
    assert (found["c"].num_bytes, found["c"].is_whole) == (SMALL_BYTES, True)
    assert read(content, kept=None)["a"] == "x" * LONG_TEXT_BYTES


def test_a_text_that_is_not_kept_takes_no_memory() -> None:
    content = json.dumps({"a": "x" * (4 * MIB), "b": "y" * MIB}).encode()
    tracemalloc.start()
    reader = JsonReader(MIB, 100)
    for start in range(0, len(content), PIECE_BYTES):
        reader.feed(content[start : start + PIECE_BYTES])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found: Any = reader.value()
    assert reader.num_held < 4 * PIECE_BYTES
    assert peak < 10 * PIECE_BYTES
    assert (found["a"].num_bytes, found["a"].is_whole, found["b"].is_whole) == (4 * MIB, False, False)
    assert found["a"].head(5) == "xxxxx"


def test_what_is_held_is_what_is_charged() -> None:
    """At the worst: many values, and texts that are kept."""
    many = "[" + ",".join(['{"a":{}}'] * (MAX_VALUES // 4)) + "]"
    content = f'{{"many": {many}, "a": "{"x" * 4 * MIB}", "b": "{"é" * MIB}"}}'.encode()
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    tracemalloc.start()
    reader = JsonReader(MIB, KEPT)
    charged = 0
    for piece in pieces:
        reader.feed(piece)
        charged = max(charged, reader.num_held)
    value = reader.value()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value is not None
    assert peak < charged + 3 * MIB


@pytest.mark.parametrize("size", [100, SMALL_BYTES + 1, 3 * PIECE_BYTES])
def test_values_are_counted_outside_of_texts(size: int) -> None:
    within = b'["' + b",[{" * size + b'"' + b",1" * (MAX_VALUES - 2) + b"]"
    assert len(plain(read(within))) == MAX_VALUES - 1
    with pytest.raises(JsonRefused, match=f"more than {MAX_VALUES} values") as refused:
        read(within[:-1] + b",1,1]")
    assert refused.value.code == "too_many_values"


def test_too_many_values_are_refused_before_all_have_come() -> None:
    reader = JsonReader(MIB)
    reader.feed(b" " * SMALL_BYTES + b"1," * 600)
    with pytest.raises(JsonRefused):
        reader.feed(b"1," * 600 + b"[" * MAX_VALUES)


def test_what_is_left_without_texts_is_bounded() -> None:
    text = b'{"a": "' + b"x" * MIB + b'"' + b" " * SMALL_BYTES
    assert plain(read(text + b"}", rest=2 * SMALL_BYTES))
    with pytest.raises(RestTooLarge):
        read(text + b" " * SMALL_BYTES + b"}", rest=2 * SMALL_BYTES)
    with pytest.raises(RestTooLarge):
        read(text + b"}", rest=2 * SMALL_BYTES, kept=None)


def test_a_name_is_no_long_text() -> None:
    with pytest.raises(JsonRefused, match="a name in it"):
        read(b'{"%b": 1}' % (b"x" * SMALL_BYTES))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    content = "[" * depth + "]" * depth
    with pytest.raises(JsonRefused):
        read(content.encode())
    with pytest.raises(JsonRefused):
        inner_json(content)


def test_json_inside_of_a_text_has_bounds() -> None:
    assert inner_json('{"a": [1, "b"]}') == {"a": [1, "b"]}
    for text in (
        '"' + "x" * MAX_INNER_BYTES + '"',
        '"' + "é" * (MAX_INNER_BYTES // 2) + '"',
        "[" + "1," * MAX_VALUES + "1]",
    ):
        with pytest.raises(JsonRefused):
            inner_json(text)
    with pytest.raises(JsonRefused):
        inner_json("\ud800")


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=9000),
    line=st.integers(1, 200),
    brk=st.sampled_from(["", "\n", "\r\n", " "]),
    head=st.sampled_from(["", "data:image/png;base64,"]),
    is_php=st.booleans(),
)
def test_base64_is_decoded_in_pieces(content: bytes, line: int, brk: str, head: str, is_php: bool) -> None:
    encoded = base64.b64encode(content).decode()
    lines = brk.join(encoded[start : start + line] for start in range(0, len(encoded), line))
    text = head + (lines if brk else encoded)
    assert decode_base64(text, len(head)) == content
    escaped = json.dumps(text).replace("/", "\\/" if is_php else "/")
    found = read(b'{"a": %b%b}' % (escaped.encode(), b" " * SMALL_BYTES))["a"]
    if isinstance(found, LongText):
        assert decode_base64(found, len(head)) == content


@pytest.mark.parametrize("line", [75, 76, 77])
def test_base64_of_many_pieces_is_decoded(line: int) -> None:
    content = Random(line).randbytes(300_000)
    encoded = base64.b64encode(content).decode()
    text = "\n".join(encoded[start : start + line] for start in range(0, len(encoded), line))
    assert decode_base64(text, 0) == content
    assert decode_base64(read(json.dumps({"a": text}).replace("/", "\\/").encode())["a"], 0) == content


@pytest.mark.parametrize("text", ["=" + "A" * 300_000, "A" * 4097, "AA==" + "A" * 300_000, "é" * 5000])
def test_what_is_no_base64_is_refused_in_pieces_as_well(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_base64(text, 0)
    found = LongText(KEPT)
    found.add(text.encode())
    with pytest.raises(ValueError, match=r"."):
        decode_base64(found, 0)


@pytest.mark.parametrize("kept", [100, KEPT])
def test_keys_tell_long_texts_apart(kept: int) -> None:
    def digest(text: str) -> bytes:
        body = read(json.dumps({"a": text}).encode(), kept=kept)
        key = idempotency_key("key", "tenant", "/", body)
        assert key is not None
        return key.fingerprint

    one = "x" * 2 * SMALL_BYTES
    assert digest(one) == digest(one)
    assert len({digest(text) for text in (one, one + "y", "y" + one[1:], one[:-1] + "y")}) == 4


def test_a_message_shows_the_beginning_of_a_value() -> None:
    assert shown("x" * 100) == '"' + "x" * 79 + "..."
    assert shown({"a": [1, "b"]}) == '{"a": [1, "b"]}'
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert shown(deep) == "[" * 80 + "..."
    assert len(shown(list(range(10**6)))) == 83
    long = LongText(KEPT)
    long.add(b"x" * 5000)
    assert shown(long) == '"' + "x" * 79 + "..."
