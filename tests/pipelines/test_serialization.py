"""Serialized states: every value comes back bit for bit, and a malformed state is refused without running anything."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilework
import tiny
from emulated_card import CARD, EmulatedCard
from pipelines.serialized import CPU, encoded, patient
from pipelines.test_samplers import CASES, sampler
from tilework.pipelines.cuda.copies import DirectCopies
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.sampler import memory_of
from tilework.pipelines.serialization import (
    BadState,
    NotSerializable,
    SerializedState,
    deserialize,
    room,
    serialize,
)

SRC = Path(tilework.__file__).parent
DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


NUMPY_DTYPES = ("?", "i1", "u1", "<i2", "<u4", "<i8", ">i4", "<f2", "<f4", ">f8", "<f8", "<c8", "<c16", "<M8[ns]")
SHAPES = st.lists(st.integers(0, 5), max_size=3) | st.sampled_from([[1500], [40, 41], [3000], [70, 0, 70]])


def bits(value: Any) -> Any:
    """What must be equal for two values to be: types, dtypes, shapes and bits, recursively."""
    match value:
        case torch.Tensor():
            flat = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
            raw = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
            return ("tensor", value.dtype, tuple(value.shape), value.device, raw)
        case np.ndarray() | np.generic():
            return (type(value), value.dtype, value.dtype.byteorder, value.shape, value.tobytes())
        case dict():
            return (dict, [(type(key), key, bits(item)) for key, item in value.items()])
        case list() | tuple():
            return (type(value), [bits(item) for item in value])
        case float() | complex():
            return (type(value), np.asarray(value).tobytes())
        case _:
            return (type(value), value)


def carry(values: dict[str, Any]) -> dict[str, Any]:
    """The values after a way through a blob; buffers are copied as a worker that reads a file does."""
    serialized = serialize(values)
    return deserialize(SerializedState(serialized.head, [copied(buffer) for buffer in serialized.buffers]), CPU)


def copied(buffer: memoryview) -> memoryview:
    memory = room(len(buffer))
    memory[:] = buffer
    return memory


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype, shape, seed = draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, [*shape, dtype.itemsize], generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)[..., 0] if raw.numel() else torch.empty(shape, dtype=dtype)
    return tensor.mT if draw(st.booleans()) and tensor.dim() > 1 else tensor


@st.composite
def arrays(draw: Any) -> Any:
    dtype, shape, seed = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))), draw(SHAPES), draw(st.integers(0, 2**32))
    num_bytes = int(np.prod([*shape, dtype.itemsize]))
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, num_bytes, dtype=np.uint8)
    array = np.frombuffer(numbers.tobytes(), dtype).reshape(shape)
    return array[()] if draw(st.booleans()) else np.asarray(array.T)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None)),
    tensors(),
    arrays(),
    st.sampled_from(DTYPES),
    st.just(CPU),
    st.builds(torch.Size, st.lists(st.integers(-1, 2**62))),
)


KEYS = st.text(st.characters(codec=None), max_size=5) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda trees: st.lists(trees) | st.lists(trees).map(tuple) | st.dictionaries(KEYS, trees),
    max_leaves=12,
)


VALUES = st.dictionaries(st.text(max_size=5), TREES, max_size=5)


@patient
@given(VALUES)
def test_any_values_come_back_bit_for_bit(values: dict[str, Any]) -> None:
    assert bits(carry(values)) == bits(values)


def test_numbers_that_json_lacks_come_back_bit_for_bit() -> None:
    nan = float(np.array([0xFFF8_0000_0000_BEEF], "<u8").view("<f8")[0])
    values = {
        "floats": [float("inf"), -float("inf"), nan, -0.0, 5e-324, 0.1],
        "complex": complex(-0.0, float("nan")),
        "halves": torch.tensor([float("inf"), float("nan"), -0.0]).bfloat16(),
        "text": "\ud83d\ude00 is not \U0001f600, nor is \udfff",
        "names": {1: "one", "1": "text", -3: (), "": []},
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "strided": [torch.arange(6.0)[3::5], np.arange(6.0)[3::5], torch.arange(9000.0)[5::2]],
    }
    assert bits(carry(values)) == bits(values)


def test_large_memory_is_not_copied_and_small_memory_is_owned() -> None:
    large, array = torch.randn(5000), np.arange(5000.0)
    small, little = torch.tensor([1, 2]), np.arange(3)
    serialized = serialize({"large": large, "array": array, "small": small, "little": little})
    assert len(serialized.buffers) == 3
    taken = deserialize(serialized, CPU)
    assert taken["large"].data_ptr() == large.data_ptr()
    assert taken["array"].ctypes.data == array.ctypes.data
    taken["small"].zero_()
    taken["little"][:] = 0
    assert (small.tolist(), little.tolist()) == ([1, 2], [0, 1, 2])
    assert taken["small"].data_ptr() % 64 == 0
    again = deserialize(serialized, CPU)
    assert (again["small"].tolist(), again["little"].tolist()) == ([1, 2], [0, 1, 2])


def test_a_tensor_that_occurs_twice_is_written_once_and_stays_one() -> None:
    tensor = torch.randn(5000)
    serialized = serialize({"first": tensor, "rest": [tensor]})
    assert len(serialized.buffers) == 1
    taken = deserialize(serialized, CPU)
    assert taken["first"] is taken["rest"][0]


def test_tensors_of_an_accelerator_are_placed_on_the_device_and_those_of_the_cpu_stay() -> None:
    serialized = serialize({"one": torch.ones(2), "two": torch.ones(2), "where": CPU})
    head = json.loads(serialized.head)
    head["tensors"][1]["place"] = "device"
    head["values"]["dict"].append(["there", {"device": "device"}])
    taken = deserialize(encoded(head, serialized.buffers), torch.device("meta"))
    assert [taken[name].device.type for name in ("one", "two")] == ["cpu", "meta"]
    assert (taken["where"], taken["there"]) == (CPU, torch.device("meta"))


def test_tensors_of_a_card_come_back_to_a_card_by_no_copy_on_the_host() -> None:
    """A small one of the CPU is copied, or it would keep the memory of all."""
    read: list[torch.Tensor] = []

    class Noting(DirectCopies):
        def to_device(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
            read.extend(tensors)
            return super().to_device(tensors, device)

    with EmulatedCard(10**6):
        values = {"there": torch.arange(3, device=CARD), "here": torch.arange(5)}
        serialized = serialize(values)
        taken = deserialize(serialized, CARD, Noting())
        assert (taken["there"].device, taken["here"].device) == (CARD, CPU)
    assert (taken["there"].tolist(), taken["here"].tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    memory = torch.frombuffer(serialized.buffers[0], dtype=torch.uint8)
    assert [one.data_ptr() for one in read] == [memory.data_ptr()]


Pair = namedtuple("Pair", ["first", "second"])
CYCLE: list[Any] = []


CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        {1, 2},
        b"bytes",
        Pair(1, 2),
        OrderedDict(),
        {1.5: 1},
        {True: 1},
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, [("x", "f4")]),
        np.matrix([[1]]),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.qint8,
        torch.uint1,
        CYCLE,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_state_can_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(NotSerializable, match=r"^noise: .*(cannot be serialized|neither str nor int|nested deeper)"):
        serialize({"noise": [value]})


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}-{name}" for kind, name in CASES])
def test_what_a_sampler_remembers_comes_back(kind: str, name: str) -> None:
    original = sampler(kind, name)
    shifting = {"mu": 0.7} if getattr(original.config, "use_dynamic_shifting", False) else {}
    prepared = copy.deepcopy(original)
    prepared.set_timesteps(6, **shifting)
    torch.manual_seed(0)
    latents = torch.randn(1, 4, 8, 8)
    for timestep in [*prepared.timesteps[:4], None]:
        carried = memory_of(prepared)
        restored = copy.deepcopy(original)
        vars(restored).update(carry(carried))
        # All attributes, so that none was left out that the steps change; the config is read by `set_timesteps`.
        assert bits(state_of(restored)) == bits(state_of(prepared))
        if timestep is not None:
            if hasattr(prepared, "scale_model_input"):
                prepared.scale_model_input(latents, timestep)
            latents = prepared.step(torch.randn(1, 4, 8, 8), timestep, latents, return_dict=False)[0]


def state_of(prepared: Any) -> dict[str, Any]:
    return {name: value for name, value in sorted(vars(prepared).items()) if name != "_internal_dict"}


def test_a_sampler_with_a_state_that_cannot_be_carried_is_refused_when_the_model_is_loaded() -> None:
    stock = tiny.build_sdxl()
    cast(Any, stock.scheduler)._noise_tree = SimpleNamespace(seed=1)
    with pytest.raises(UnsupportedModel, match=r"EulerDiscreteScheduler .*_noise_tree: a types\.SimpleNamespace"):
        StableDiffusionXL(stock, "tiny", {}, "")


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3), (1, 0, 3, 2)])
@pytest.mark.parametrize("side", [3, 40])
def test_the_order_of_dimensions_in_memory_comes_back(order: tuple[int, ...], side: int) -> None:
    inverse = [order.index(index) for index in range(4)]
    tensor = torch.arange(2 * 4 * 5 * side).reshape(2, 4, 5, side).permute(order).contiguous().permute(inverse)
    (back,) = deserialize(serialize({"tensor": tensor}), CPU).values()
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride(), "kernels are chosen by it"


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], ["0", 1], [0, True], {}])
def test_an_impossible_order_of_dimensions_is_refused(order: object) -> None:
    state = serialize({"tensor": torch.zeros(3, 2).T})
    head = json.loads(state.head)
    assert head["tensors"][0]["order"] == [1, 0]
    head["tensors"][0]["order"] = order
    with pytest.raises(BadState):
        deserialize(SerializedState(json.dumps(head).encode(), state.buffers), CPU)


def test_nothing_that_was_moved_waits_for_the_garbage_collector() -> None:
    """On an accelerator it would hold memory that the next request needs."""
    here = {"latents": torch.ones(3000), "times": [torch.ones(2)]}
    gc.disable()
    try:
        serialized = serialize(here)
        there = deserialize(serialized, CPU)
        alive = [weakref.ref(values["latents"]) for values in (here, there)]
        del here, serialized, there
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()
