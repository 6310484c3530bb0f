"""Named values as bytes, bit for bit, to move requests from one worker's device to another's.

The head is JSON, so that reading it runs no code. Rejected: safetensors. Its metadata are flat texts, it copies all
tensors into one piece, and it aligns them to 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from struct import Struct
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilework.pipelines.cuda.copies import DIRECT, Copies

_SMALL_BYTES = 4096
_ALIGNMENT = 16
_MAX_DEPTH = 64
_CPU = torch.device("cpu")
_DOUBLE = Struct("<d")
_PLAIN = frozenset({type(None), bool, int, str})
_NUMPY_KINDS = "biufcmM"  # Numbers and times.
# Quantized ones are left out, and those below 8 bits, which torch cannot copy.
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
T = TypeVar("T")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Texts are not escaped, since JSON would join the two halves of an escaped surrogate pair.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class NotSerializable(TypeError):
    """A value is of a type that a serialized state cannot hold."""


class BadState(ValueError):
    """A serialized state is malformed: its head, or the number or length of its buffers."""


@dataclass(frozen=True, slots=True)
class SerializedState:
    """The result of `serialize`: JSON, and the memory of the tensors and arrays.

    The JSON has the `values`, where each object with one key stands for what JSON lacks ({"tuple": [1, 2]}), and the
    `tensors` that they refer to by index. A tensor has a dtype, a shape, a place ("cpu", or "device" for an
    accelerator) and the index of its `buffer`, which is its own memory. If its dimensions lie in memory in another
    order, that is its `order`, and the shape is that of the memory. Small tensors are copied into the last buffer and
    have an `offset` there instead. `buffers` are the lengths of all.
    """

    head: bytes
    buffers: Sequence[memoryview]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def serialize(values: Mapping[str, Any], copies: Copies = DIRECT) -> SerializedState:
    """Serialize `values`, which must not be modified while the result is in use; `copies` bring them to the host.

    They are None, numbers, texts, tensors, dtypes, devices, arrays and scalars of numpy, and lists, tuples and dicts of
    them, with keys of str or int. A tensor that occurs twice is written once.

    Raises:
        NotSerializable: there is something else among them.
    """
    writer = _Writer()
    pairs = []
    for name, value in values.items():
        try:
            pairs.append((name, writer.node(value)))
        except NotSerializable as error:
            raise NotSerializable(f"{name}: {error}") from None
    writer.write_memory(copies)
    buffers = [*writer.buffers, memoryview(writer.small)] if writer.small else writer.buffers
    lengths = [len(buffer) for buffer in buffers]
    head = {"values": {"dict": pairs}, "tensors": writer.tensors, "buffers": lengths}
    return SerializedState(_ENCODER.encode(head).encode("utf-8", "surrogatepass"), buffers)


def deserialize(serialized: SerializedState, device: torch.device, copies: Copies = DIRECT) -> dict[str, Any]:
    """Return the values of a serialized state. Tensors of an accelerator go to `device`, those of the CPU stay there.

    `copies` bring them to the device. Large tensors and arrays use the memory of `serialized.buffers`.

    Raises:
        BadState: it is malformed.
    """
    try:
        head = _DECODER.decode(serialized.head.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise BadState(f"the head of a state is not valid JSON: {error}") from error
    promised, lengths = _field(head, "buffers", list), [len(buffer) for buffer in serialized.buffers]
    if promised != lengths:
        raise BadState(f"the buffers of a state have {lengths} bytes and not {promised}")
    reader = _Reader(serialized.buffers, device)
    reader.read_tensors(_field(head, "tensors", list), copies)
    values = reader.value(_field(head, "values", dict))
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadState("the values of a state have no names")
    return values


def room(num_bytes: int, copies: Copies = DIRECT) -> memoryview:
    """Return memory to read a buffer into."""
    memory: Any = copies.room(num_bytes).numpy()
    return memoryview(memory)


class _Writer:
    """Makes the nodes of the head, and collects tensors and buffers."""

    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.buffers: list[memoryview] = []
        self.small = bytearray()
        self._index_of: dict[int, int] = {}
        self._unwritten: list[tuple[dict[str, Any], Any]] = []  # With the tensor or array of each entry.

    def node(self, value: Any, depth: int = 0) -> Any:
        # Subclasses are refused: they would come back as their base classes.
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth > _MAX_DEPTH:
            raise NotSerializable(f"values are nested deeper than {_MAX_DEPTH}")
        if write := _WRITE.get(kind):
            return write(self, value, depth + 1)
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value))}
        raise NotSerializable(f"a {kind.__module__}.{kind.__qualname__} cannot be serialized")

    def _float(self, value: float, depth: int = 0) -> Any:
        return value if isfinite(value) else {"float": _DOUBLE.pack(value).hex()}

    def _items(self, value: Sequence[Any], depth: int) -> list[Any]:
        return [self.node(item, depth) for item in value]

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise NotSerializable(f"a key {key!r} of a dict is neither str nor int")
        return {"dict": [(key, self.node(item, depth)) for key, item in value.items()]}

    def _tensor(self, value: Tensor, depth: int) -> Any:
        index = self._index_of.get(id(value))
        if index is None:
            index = self._index_of[id(value)] = len(self.tensors)
            self.tensors.append(self._tensor_entry(value))
        return {"tensor": index}

    def _tensor_entry(self, value: Tensor) -> dict[str, Any]:
        name = _name(value.dtype)
        if value.layout is not torch.strided or value.is_meta:
            raise NotSerializable("a sparse or meta tensor cannot be serialized")
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        order = _memory_order(value)
        plain = value.detach().permute(order).contiguous()
        moved = {} if order == sorted(order) else {"order": order}
        entry = {"dtype": name, "shape": list(plain.shape), "place": _place(value.device), **moved}
        self._unwritten.append((entry, plain))
        return entry

    def write_memory(self, copies: Copies) -> None:
        """Write the memory of all tensors and arrays, once all are known."""
        elsewhere = [one for entry, one in self._unwritten if entry.get("place", _place(_CPU)) != _place(_CPU)]
        on_host = dict(zip(map(id, elsewhere), copies.to_host(elsewhere), strict=True))
        for entry, one in self._unwritten:
            entry.update(self._memory(_bytes_of(on_host.get(id(one), one))))

    def _array(self, value: Any) -> dict[str, Any]:
        if value.dtype.kind not in _NUMPY_KINDS:
            raise NotSerializable(f"an array of numpy's {value.dtype} cannot be serialized")
        entry = {"dtype": value.dtype.str, "shape": value.shape}
        self._unwritten.append((entry, np.asarray(value, order="C")))
        return entry

    def _memory(self, memory: Any) -> dict[str, Any]:
        view = memoryview(memory)
        if view.nbytes <= _SMALL_BYTES:
            self.small += bytes(-len(self.small) % _ALIGNMENT)
            self.small += view
            return {"offset": len(self.small) - view.nbytes}
        self.buffers.append(view)
        return {"buffer": len(self.buffers) - 1}


# Tables of functions. Bound methods would be a cycle, which keeps what was moved until it is collected.
_WRITE: Mapping[type, Callable[[_Writer, Any, int], Any]] = {
    float: _Writer._float,
    complex: lambda writer, value, depth: {"complex": [writer._float(value.real), writer._float(value.imag)]},
    list: _Writer._items,
    tuple: lambda writer, value, depth: {"tuple": writer._items(value, depth)},
    torch.Size: lambda writer, value, depth: {"size": writer._items(value, depth)},
    dict: _Writer._dict,
    Tensor: _Writer._tensor,
    torch.dtype: lambda writer, value, depth: {"dtype": _name(value)},
    torch.device: lambda writer, value, depth: {"device": _place(value)},
    np.ndarray: lambda writer, value, depth: {"array": writer._array(value)},
}


class _Reader:
    """Makes values from the nodes of a head that may be malformed."""

    def __init__(self, buffers: Sequence[memoryview], device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self._buffers = buffers
        self._device = device

    def value(self, node: Any, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise BadState(f"values of a state are nested deeper than {_MAX_DEPTH}")
        if isinstance(node, list):
            return self._items(node, depth + 1)
        if not isinstance(node, dict):
            return node
        tag, payload = next(iter(node.items()), ("", None))
        if len(node) != 1 or tag not in _READ:
            raise BadState(f"a state has a value of the unknown form {sorted(node)}")
        return _READ[tag](self, payload, depth + 1)

    def read_tensors(self, entries: list[Any], copies: Copies) -> None:
        """Read all tensors, and bring those of an accelerator to the device."""
        found = [self._tensor(entry) for entry in entries]
        elsewhere = [index for index, (_, _, place) in enumerate(found) if place != _place(_CPU)]
        there = copies.to_device([found[index][0] for index in elsewhere], self._device)
        placed = dict(zip(elsewhere, there, strict=True))
        self.tensors = [placed.get(index, plain).permute(order) for index, (plain, order, _) in enumerate(found)]

    def _tensor(self, entry: Any) -> tuple[Tensor, list[int], str]:
        """Return a tensor of the host as it lies in its memory, the order of its dimensions, and its place."""
        dtype = _dtype(_field(entry, "dtype", str))
        shape = _shape(_field(entry, "shape", list))
        place = _field(entry, "place", str)
        device = self._device_at(place)
        memory = self._memory(entry, prod(shape) * dtype.itemsize)
        order = list(range(len(shape)))
        try:
            plain = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
            plain = plain.reshape(shape)
            if "order" in entry:
                order = _inverse(_field(entry, "order", list), len(shape))
        except (RuntimeError, TypeError, ValueError) as error:
            raise BadState(f"a state has an impossible tensor of {dtype} and shape {shape}: {error}") from error
        # A small one would keep the buffer of all small ones.
        is_kept = device.type == "cpu" and len(memory) <= _SMALL_BYTES
        return plain.clone() if is_kept else plain, order, place

    def _array(self, entry: Any) -> Any:
        name = _field(entry, "dtype", str)
        shape = _shape(_field(entry, "shape", list))
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError, SyntaxError) as error:
            raise BadState(f"a state has an array of an unknown dtype {name!r}") from error
        if dtype.str != name or dtype.kind not in _NUMPY_KINDS:
            raise BadState(f"a state has an array of the dtype {name!r}, which none is written with")
        memory = self._memory(entry, prod(shape) * dtype.itemsize)
        try:
            array = np.frombuffer(memory, dtype).reshape(shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise BadState(f"a state has an impossible array of {dtype} and shape {shape}: {error}") from error
        return array.copy() if len(memory) <= _SMALL_BYTES else array

    def _scalar(self, entry: Any, depth: int) -> Any:
        array = self._array(entry)
        if array.shape:
            raise BadState(f"a state has a number of the shape {array.shape}")
        return array[()]

    def _memory(self, entry: dict[str, Any], num_bytes: int) -> memoryview:
        offset = entry.get("offset")
        if offset is None:
            memory = _at(self._buffers, entry.get("buffer"), "buffer")
        elif num_bytes == 0:
            return memoryview(b"")
        elif type(offset) is not int or offset < 0 or not self._buffers:
            raise BadState(f"a state has no small tensor of {num_bytes} bytes at {offset!r}")
        else:
            memory = self._buffers[-1][offset : offset + num_bytes]
        if len(memory) != num_bytes:
            raise BadState(f"a tensor of a state has {len(memory)} bytes and not {num_bytes}")
        return memory

    def _float(self, payload: Any, depth: int) -> float:
        try:
            number: float = _DOUBLE.unpack(bytes.fromhex(payload))[0]
        except Exception as error:
            raise BadState(f"a state has {payload!r} for a float") from error
        return number

    def _complex(self, payload: Any, depth: int) -> complex:
        parts = self._items(payload, depth)
        if [type(part) for part in parts] != [float, float]:
            raise BadState(f"a state has {payload!r} for a complex number")
        # A sum of the parts would lose the sign of a zero.
        return complex(*parts)

    def _items(self, payload: Any, depth: int) -> list[Any]:
        if not isinstance(payload, list):
            raise BadState(f"a state has {payload!r} for a list")
        return [self.value(item, depth) for item in payload]

    def _size(self, payload: Any, depth: int) -> torch.Size:
        try:
            return torch.Size(self._items(payload, depth))
        except TypeError as error:
            raise BadState(f"a state has {payload!r} for a size") from error

    def _dict(self, payload: Any, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for pair in payload if isinstance(payload, list) else [payload]:
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in result:
                raise BadState(f"a state has {pair!r} for an item of a dict")
            result[pair[0]] = self.value(pair[1], depth)
        return result

    def _device_at(self, place: Any) -> torch.device:
        if place not in ("cpu", "device"):
            raise BadState(f"a state has a tensor at the unknown place {place!r}")
        return _CPU if place == "cpu" else self._device


_READ: Mapping[str, Callable[[_Reader, Any, int], Any]] = {
    "float": _Reader._float,
    "complex": _Reader._complex,
    "tuple": lambda reader, payload, depth: tuple(reader._items(payload, depth)),
    "size": _Reader._size,
    "dict": _Reader._dict,
    "tensor": lambda reader, payload, depth: _at(reader.tensors, payload, "tensor"),
    "dtype": lambda reader, payload, depth: _dtype(payload),
    "device": lambda reader, payload, depth: reader._device_at(payload),
    "array": lambda reader, payload, depth: reader._array(payload),
    "scalar": _Reader._scalar,
}


def _bytes_of(one: Any) -> Any:
    """Return the memory of a contiguous tensor of the host, or of an array."""
    if not isinstance(one, Tensor):
        return one.reshape(-1).view(np.uint8) if one.size else b""
    # A contiguous tensor of one element may have any strides, which `view` refuses.
    return one.as_strided((one.numel(),), (1,)).view(torch.uint8).numpy() if one.numel() else b""


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise NotSerializable(f"a {dtype} cannot be serialized")
    return _NAMES[dtype]


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions as they lie in memory, the outermost first, if it is dense; else as they are.

    Kernels are chosen by that order, and may round otherwise: so it must be restored.
    """
    usual, strides = list(range(tensor.dim())), tensor.stride()
    order = sorted(usual, key=lambda index: -strides[index])
    return usual if tensor.is_contiguous() or not tensor.permute(order).is_contiguous() else order


def _inverse(order: list[Any], num_dimensions: int) -> list[int]:
    if any(type(index) is not int for index in order) or sorted(order) != list(range(num_dimensions)):
        raise BadState(f"a state has {order!r} for an order of {num_dimensions} dimensions")
    return [order.index(index) for index in range(num_dimensions)]


def _place(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "device"


def _field(entry: Any, name: str, kind: type[T]) -> T:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        raise BadState(f"the head of a state has {value!r} for {name!r}")
    return value


def _at(sequence: Sequence[T], index: Any, what: str) -> T:
    if type(index) is not int or not 0 <= index < len(sequence):
        raise BadState(f"a state refers to the {what} {index!r}, and has {len(sequence)}")
    return sequence[index]


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise BadState(f"a state has an unknown dtype {name!r}")
    return _DTYPES[name]


def _shape(payload: list[Any]) -> tuple[int, ...]:
    reach = 1
    for side in payload:
        if type(side) is not int or side < 0:
            raise BadState(f"a state has {payload!r} for a shape")
        reach *= side or 1
    if reach >= 2**63:  # The strides must fit, also those of an empty tensor.
        raise BadState(f"a state has the shape {payload}, which is too large")
    return tuple(payload)
