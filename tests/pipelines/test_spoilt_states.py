"""Spoilt states: a head or a blob that was tampered with, by hand or at random, is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines.serialized import CPU, encoded, patient, state
from tilework.core.wire.blobs import StateBlob
from tilework.pipelines.serialization import (
    BadState,
    SerializedState,
    deserialize,
    room,
    serialize,
)
from tilework.worker.state_blobs import StateBlobs, TruncatedStateBlob

TAMPERED: dict[str, tuple[str, Any]] = {
    "shape too large": ("tensors.0.shape.0", 2001),
    "shape too small": ("tensors.0.shape.0", 1999),
    "negative shape": ("tensors.0.shape.0", -2000),
    "shape of a text": ("tensors.0.shape", "2000"),
    "shape of a bool": ("tensors.0.shape", [True]),
    "empty, but huge": ("tensors.1", {"dtype": "int64", "shape": [0, 2**62, 2**62], "place": "cpu", "offset": 0}),
    "wider dtype": ("tensors.0.dtype", "float64"),
    "narrower dtype": ("tensors.0.dtype", "uint8"),
    "unknown dtype": ("tensors.0.dtype", "nn"),
    "quantized dtype": ("tensors.1", {"dtype": "quint8", "shape": [0], "place": "cpu", "offset": 0}),
    "unknown place": ("tensors.0.place", "cuda:0"),
    "missing buffer": ("tensors.0.buffer", 2),
    "negative buffer": ("tensors.0.buffer", -1),
    "wrong buffer": ("tensors.0.buffer", 1.0),
    "true for a buffer": ("tensors.0.buffer", True),
    "no memory": ("tensors.1", {"dtype": "int64", "shape": [3], "place": "cpu"}),
    "offset near the end": ("tensors.1.offset", 16),
    "offset after the end": ("tensors.1.offset", 4096),
    "negative offset": ("tensors.1.offset", -32),
    "offset of a text": ("tensors.1.offset", "0"),
    "large at an offset": ("tensors.0.offset", 0),
    "no tensors": ("tensors", None),
    "no values": ("values", None),
    "values without names": ("values", {"dict": [[1, 2]]}),
    "values in a tuple": ("values", {"tuple": []}),
    "missing tensor": ("values", {"dict": [["x", {"tensor": 2}]]}),
    "negative tensor": ("values", {"dict": [["x", {"tensor": -1}]]}),
    "unknown form": ("values", {"dict": [["x", {"call": "os.system"}]]}),
    "two forms": ("values", {"dict": [["x", {"tuple": [], "dict": []}]]}),
    "no form": ("values", {"dict": [["x", {}]]}),
    "key twice": ("values", {"dict": [["x", 1], ["x", 2]]}),
    "key of a list": ("values", {"dict": [[[], 1]]}),
    "dict of pairs": ("values", {"dict": [["x", {"dict": ["ab"]}]]}),
    "dict of a number": ("values", {"dict": [["x", {"dict": 5}]]}),
    "tuple of a text": ("values", {"dict": [["x", {"tuple": "ab"}]]}),
    "size of a text": ("values", {"dict": [["x", {"size": ["ab"]}]]}),
    "quantized value": ("values", {"dict": [["x", {"dtype": "quint8"}]]}),
    "short float": ("values", {"dict": [["x", {"float": "00"}]]}),
    "float of a number": ("values", {"dict": [["x", {"float": 1}]]}),
    "complex of one": ("values", {"dict": [["x", {"complex": [1.0]}]]}),
    "complex of texts": ("values", {"dict": [["x", {"complex": ["1", "2"]}]]}),
    "dtype object": ("values", {"dict": [["x", {"dtype": "Tensor"}]]}),
    "device object": ("values", {"dict": [["x", {"device": "cuda"}]]}),
    "array of objects": ("values", {"dict": [["x", {"array": {"dtype": "|O", "shape": [1], "offset": 0}}]]}),
    "array of bytes": ("values", {"dict": [["x", {"array": {"dtype": "|V8", "shape": [1], "offset": 0}}]]}),
    "array of records": ("values", {"dict": [["x", {"array": {"dtype": "f4,f4", "shape": [0], "offset": 0}}]]}),
    "array too large": ("values", {"dict": [["x", {"array": {"dtype": "<f8", "shape": [1001], "buffer": 1}}]]}),
    "array without a shape": ("values", {"dict": [["x", {"array": {"dtype": "<f8", "buffer": 1}}]]}),
    "array, but huge": (
        "values",
        {"dict": [["x", {"array": {"dtype": "<f8", "shape": [0, 2**62, 2**62], "offset": 0}}]]},
    ),
    "scalar of two": ("values", {"dict": [["x", {"scalar": {"dtype": "|u1", "shape": [3], "offset": 0}}]]}),
}


def test_the_state_that_is_tampered_with_is_valid() -> None:
    head, buffers = state()
    assert set(deserialize(encoded(head, buffers), CPU)) == {name for name, _ in head["values"]["dict"]}


def tampered(path: str, value: Any) -> SerializedState:
    head, buffers = state()
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = head
    for part in way:
        place = place[part]
    place[last] = value
    return encoded(head, buffers)


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_head_is_refused(name: str) -> None:
    with pytest.raises(BadState):
        deserialize(tampered(*TAMPERED[name]), CPU)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tensors.0.shape", [2001], "8000 bytes and not 8004"),
        ("tensors.0.shape", [True, 2000], "[True, 2000] for a shape"),
        ("tensors.0.shape", [-1, -2000], "[-1, -2000] for a shape"),
        ("tensors.0.buffer", 3, "refers to the buffer 3, and has 3"),
        ("tensors.0.place", "cuda", "unknown place 'cuda'"),
        ("buffers", [8000], "have [8000, 8000, 36] bytes and not [8000]"),
        ("values", {"dict": [["x", {"call": 1}]]}, "unknown form ['call']"),
    ],
)
def test_the_error_says_what_is_wrong(path: str, value: Any, message: str) -> None:
    with pytest.raises(BadState, match=re.escape(message)):
        deserialize(tampered(path, value), CPU)


def holding(node: bytes) -> bytes:
    return b'{"values": {"dict": [["x", ' + node + b']]}, "tensors": [], "buffers": []}'


SMALL_WITHOUT_BUFFERS = holding(b'{"array": {"dtype": "<f8", "shape": [1], "offset": 0}}')


def nested(depth: int) -> bytes:
    return holding(b"[" * depth + b"]" * depth)


def test_heads_by_hand_are_read() -> None:
    assert deserialize(SerializedState(holding(b"1"), []), CPU) == {"x": 1}
    deserialize(SerializedState(nested(60), []), CPU)


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"rubbish", b"\xff\xfe", b"[]", b"5", b"null"),
        *(holding(b"NaN"), holding(b"["), nested(70), nested(10**5), SMALL_WITHOUT_BUFFERS),
    ],
    ids=lambda head: head[-60:].decode("latin-1"),
)
def test_a_head_that_is_no_state_is_refused(head: bytes) -> None:
    with pytest.raises(BadState):
        deserialize(SerializedState(head, []), CPU)


def test_missing_surplus_and_truncated_buffers_are_refused() -> None:
    head, (first, second, small) = state()
    unreadable = (
        [],
        [first],
        [first, small],
        [first[:-1], second, small],
        [first, second[:-8], small],
        [first, second, small[:-1]],
        [first, room(len(second) + 8), small],
    )
    for spoilt in (*unreadable, [first, second], [first, second, small, room(8)]):
        with pytest.raises(BadState, match="the buffers of a state"):
            deserialize(encoded(head, spoilt), CPU)
    for spoilt in unreadable:
        fitting = head | {"buffers": [len(buffer) for buffer in spoilt]}
        with pytest.raises(BadState):
            deserialize(encoded(fitting, spoilt), CPU)


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a head, as (container, key)."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, item in list(pairs) for found in ((tree, key), *nodes(item))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda trees: st.lists(trees, max_size=3) | st.dictionaries(st.text(max_size=8), trees, max_size=2),
    max_leaves=4,
)


NEAR = st.sampled_from(
    ["float64", "quint8", "bits16", "uint1", "complex32", "O", ">f8", "V8", "M8", "<U1000", "tensor", 4096]
)


@patient
@given(st.data())
def test_a_head_with_anything_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    head, buffers = state()
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(nodes(head)))
        container[key] = data.draw(JSON | NEAR)
    try:
        values = deserialize(encoded(head, buffers), CPU)
    except BadState:
        return
    assert isinstance(values, dict)


def test_a_truncated_blob_is_refused(tmp_path: Path) -> None:
    blobs = StateBlobs(tmp_path, 0)
    blob = blobs.write(serialize({"large": torch.arange(2000.0), "small": 1}))
    whole = (tmp_path / blob.name).read_bytes()
    assert deserialize(blobs.read(blob), CPU)["large"].tolist() == list(range(2000))
    for num_bytes in (0, 3, 11, 25, len(whole) // 2, len(whole) - 1):
        (tmp_path / "short").write_bytes(whole[:num_bytes])
        with pytest.raises(TruncatedStateBlob):
            blobs.read(StateBlob("short", num_bytes))


def test_a_blob_that_promises_too_much_or_nothing_is_refused(tmp_path: Path) -> None:
    blobs = StateBlobs(tmp_path, 0)
    (tmp_path / "huge").write_bytes((1).to_bytes(4, "little") + (2**62).to_bytes(8, "little"))
    with pytest.raises(TruncatedStateBlob, match="a blob of 12 bytes"):
        blobs.read(StateBlob("huge", 12))
    (tmp_path / "many").write_bytes(b"\xff" * 12)
    with pytest.raises(TruncatedStateBlob, match="a blob of 12 bytes"):
        blobs.read(StateBlob("many", 12))
    (tmp_path / "none").write_bytes(bytes(4))
    with pytest.raises(BadState, match="none is empty"):
        blobs.read(StateBlob("none", 4))
