"""The part of UCX that a ring uses: contexts, workers, endpoints, and operations on memory behind an endpoint.

UCX comes from the wheel of the extra `ucx`, or from the system. The layouts here are those of its header
ucp/api/ucp.h. Structures only grow at their end, and a mask says which fields are set, so what is here is enough for
all versions of libucp.so.0.

Calls keep the interpreter's lock, because none of them waits. A thread that released the lock at each call would get
it back from a busy thread only after the switch interval, 5 ms, many times for one message.

Endpoints do not use UCX's error handling: with it there is no compare-and-swap over TCP. Deadlines and the TCP
connection beside (site.py) reveal losses.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import POINTER, byref, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib import import_module
from mmap import mmap
from typing import Any, ClassVar, Final

from tilework.comm.ring.errors import RingError, VerbFailed
from tilework.distribution import install_command

_RMA, _AMO64, _WAKEUP = 1 << 1, 1 << 3, 1 << 4
_SERIALIZED = 1
_CSWAP = 2
_BUSY: Final = -15
_IN_PROGRESS: Final = 1
_UNREACHABLE: Final = -6
_FIRST_ERROR: Final = (1 << 64) - 100
_LEAST_VERSION = (1, 18)
"""Oldest version that was tested. Version 1.13 ends the process when a peer of its worker is killed."""
_WORD: Final = 8 << 3
"""The datatype of contiguous elements of eight bytes."""


class _Params(ctypes.Structure):
    _fields_: ClassVar = [("mask", c_uint64), ("features", c_uint64), ("rest", c_uint64 * 16)]


class _WorkerParams(ctypes.Structure):
    _fields_: ClassVar = [("mask", c_uint64), ("thread_mode", c_int), ("rest", c_uint64 * 160)]


class _MapParams(ctypes.Structure):
    _fields_: ClassVar = [("mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("rest", c_uint64 * 8)]


class _EndpointParams(ctypes.Structure):
    _fields_: ClassVar = [("mask", c_uint64), ("address", c_void_p), ("rest", c_uint64 * 32)]


class _Options(ctypes.Structure):
    """The structure `ucp_request_param_t`."""

    _fields_: ClassVar = [
        ("mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply", c_void_p),
        ("rest", c_uint64 * 8),
    ]


_NONE = _Options()
_REPLY, _DATATYPE = 1 << 5, 1 << 3


@cache
def library() -> Any:
    """Return libucp. Raises RingError if there is none, or an old one."""
    lib = _load()
    pointer = c_void_p
    handles = POINTER(c_void_p)
    sized = (POINTER(c_void_p), POINTER(c_size_t))
    _declare(lib, None, "ucp_get_version", POINTER(c_uint), POINTER(c_uint), POINTER(c_uint))
    if _version(lib) < _LEAST_VERSION:
        raise RingError(f"UCX is of version {_version(lib)}; a ring needs {_LEAST_VERSION} or later")
    _declare(lib, c_int8, "ucp_config_read", pointer, pointer, handles)
    _declare(lib, c_int8, "ucp_config_modify", pointer, ctypes.c_char_p, ctypes.c_char_p)
    _declare(lib, None, "ucp_config_release", pointer)
    _declare(lib, c_int8, "ucp_init_version", c_uint, c_uint, POINTER(_Params), pointer, handles)
    _declare(lib, None, "ucp_cleanup", pointer)
    _declare(lib, c_int8, "ucp_mem_map", pointer, POINTER(_MapParams), handles)
    _declare(lib, c_int8, "ucp_mem_unmap", pointer, pointer)
    _declare(lib, c_int8, "ucp_rkey_pack", pointer, pointer, *sized)
    _declare(lib, None, "ucp_rkey_buffer_release", pointer)
    _declare(lib, c_int8, "ucp_worker_create", pointer, POINTER(_WorkerParams), handles)
    _declare(lib, None, "ucp_worker_destroy", pointer)
    _declare(lib, c_int8, "ucp_worker_get_address", pointer, *sized)
    _declare(lib, None, "ucp_worker_release_address", pointer, pointer)
    _declare(lib, c_int8, "ucp_worker_get_efd", pointer, POINTER(c_int))
    _declare(lib, c_int8, "ucp_worker_arm", pointer)
    _declare(lib, c_uint, "ucp_worker_progress", pointer)
    _declare(lib, c_int8, "ucp_ep_create", pointer, POINTER(_EndpointParams), handles)
    _declare(lib, c_int8, "ucp_ep_rkey_unpack", pointer, pointer, handles)
    _declare(lib, None, "ucp_rkey_destroy", pointer)
    operation = (pointer, pointer, c_size_t, c_uint64, pointer, POINTER(_Options))
    _declare(lib, pointer, "ucp_put_nbx", *operation)
    _declare(lib, pointer, "ucp_get_nbx", *operation)
    _declare(lib, pointer, "ucp_atomic_op_nbx", pointer, c_int, *operation[1:])
    _declare(lib, pointer, "ucp_worker_flush_nbx", pointer, POINTER(_Options))
    _declare(lib, c_int8, "ucp_request_check_status", pointer)
    _declare(lib, None, "ucp_request_free", pointer)
    _declare(lib, ctypes.c_char_p, "ucs_status_string", c_int8)
    return lib


def _load() -> Any:
    with suppress(ImportError):
        return ctypes.PyDLL(import_module("libucx").load_library()[-1]._name)
    try:
        return ctypes.PyDLL("libucp.so.0")
    except OSError as error:
        raise RingError(
            f"a ring between nodes needs UCX ({error}); run: {install_command('ucx')}, or install the system's libucx"
        ) from error


def _declare(lib: Any, result: Any, name: str, *arguments: Any) -> None:
    function = getattr(lib, name)
    function.restype = result
    function.argtypes = arguments


def version() -> str:
    """Return the version of UCX, as "1.22": both ends of a ring must have the same."""
    return "{}.{}".format(*_version(library()))


def _version(lib: Any) -> tuple[int, int]:
    major, minor, release = c_uint(), c_uint(), c_uint()
    lib.ucp_get_version(byref(major), byref(minor), byref(release))
    return major.value, minor.value


def _check(status: int, what: str) -> None:
    if status < 0:
        raise RingError(f"UCX: {what} failed: {_text(status)}")


def _text(status: int) -> str:
    return f"{library().ucs_status_string(status).decode()} (status {status})"


class Context:
    """Transports that are in use, and memory that is open to others through them.

    Cannot be made in a process that was forked from one that had a context: the thread by which UCX connects is not
    there.
    """

    _first_process: ClassVar[int | None] = None

    def __init__(self, transports: str) -> None:
        """Open the transports. Raises RingError."""
        self._lib = library()
        Context._first_process = Context._first_process or os.getpid()
        if Context._first_process != os.getpid():
            raise RingError("this process was forked from one that uses UCX; start it by spawn or forkserver")
        self.handle = c_void_p()
        config = c_void_p()
        _check(self._lib.ucp_config_read(None, None, byref(config)), "reading its configuration")
        try:
            _check(self._lib.ucp_config_modify(config, b"TLS", transports.encode()), f"setting TLS to {transports}")
            params = _Params(mask=1, features=_RMA | _AMO64 | _WAKEUP)
            status = self._lib.ucp_init_version(*_LEAST_VERSION, byref(params), config, byref(self.handle))
            _check(status, f"opening the transports {transports}")
        finally:
            self._lib.ucp_config_release(config)

    def close(self) -> None:
        self._lib.ucp_cleanup(self.handle)


class Region:
    """Memory of this process that others may read and write. They need its `key` and `address` for that."""

    def __init__(self, context: Context, memory: mmap) -> None:
        self._lib = context._lib
        self._context = context
        self._handle = c_void_p()
        first = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(first)
        params = _MapParams(mask=1 << 0 | 1 << 1, address=self.address, length=len(memory))
        del first
        _check(self._lib.ucp_mem_map(context.handle, byref(params), byref(self._handle)), "opening the memory")
        buffer, size = c_void_p(), c_size_t()
        _check(self._lib.ucp_rkey_pack(context.handle, self._handle, byref(buffer), byref(size)), "packing the key")
        self.key = ctypes.string_at(buffer.value or 0, size.value)
        self._lib.ucp_rkey_buffer_release(buffer)

    def close(self) -> None:
        self._lib.ucp_mem_unmap(self._context.handle, self._handle)


class Worker:
    """Connections with others, by which they reach this process's memory and it reaches theirs. One thread at a time.

    After `close` nothing that another process has begun through this worker reads or writes memory here.
    """

    def __init__(self, context: Context) -> None:
        self._lib = context._lib
        self.handle = c_void_p()
        params = _WorkerParams(mask=1, thread_mode=_SERIALIZED)
        _check(self._lib.ucp_worker_create(context.handle, byref(params), byref(self.handle)), "making a worker")
        fd = c_int()
        status = self._lib.ucp_worker_get_efd(self.handle, byref(fd))
        if status < 0:
            self.close()
        _check(status, "making a worker that can be waited for")
        self.fd: int = fd.value
        """Descriptor that is readable when there is something to do, after `arm`."""

    @property
    def address(self) -> bytes:
        buffer, size = c_void_p(), c_size_t()
        status = self._lib.ucp_worker_get_address(self.handle, byref(buffer), byref(size))
        _check(status, "asking for a worker's address")
        try:
            return ctypes.string_at(buffer.value or 0, size.value)
        finally:
            self._lib.ucp_worker_release_address(self.handle, buffer)

    def progress(self) -> bool:
        """Do what can be done now. Return False if that was nothing."""
        return bool(self._lib.ucp_worker_progress(self.handle))

    def arm(self) -> bool:
        """Return whether there is nothing to do now; then the descriptor becomes readable when there is."""
        status = self._lib.ucp_worker_arm(self.handle)
        if status != _BUSY:
            _check(status, "arming a worker")
        return bool(status == 0)

    def close(self) -> None:
        self._lib.ucp_worker_destroy(self.handle)


class Remote:
    """Memory of another process, a Region there, reached through a worker at each end.

    Operations return requests, or None if they are done. The bytes here that an operation reads or writes must stay
    until its request `is_done`, or the worker is closed.
    """

    def __init__(self, worker: Worker, peer: bytes, base: int, key: bytes) -> None:
        self._lib = worker._lib
        self.worker = worker
        self._base = base
        self._endpoint = c_void_p()
        self._key = c_void_p()
        address = ctypes.create_string_buffer(peer, len(peer))
        params = _EndpointParams(mask=1, address=ctypes.addressof(address))
        status = self._lib.ucp_ep_create(worker.handle, byref(params), byref(self._endpoint))
        if status == _UNREACHABLE:
            raise RingError(
                "UCX: no network that both nodes had up when they began leads from one to the other; "
                "bring it up (`ip link`), or name another in UCX_NET_DEVICES, and connect again"
            )
        _check(status, "connecting")
        status = self._lib.ucp_ep_rkey_unpack(self._endpoint, key, byref(self._key))
        _check(status, "reading the key of the memory")

    def put(self, offset: int, source: int, size: int) -> int | None:
        """Copy from the address `source` here."""
        base = self._base + offset
        key = self._key
        return _request(self._lib.ucp_put_nbx(self._endpoint, source, size, base, key, byref(_NONE)), "put")

    def get(self, offset: int, target: int, size: int) -> int | None:
        """Copy to the address `target` here."""
        base = self._base + offset
        key = self._key
        return _request(self._lib.ucp_get_nbx(self._endpoint, target, size, base, key, byref(_NONE)), "get")

    def cas64(self, offset: int, expected: int, swapped: int) -> int | None:
        """Compare with the word at the address `expected`, swap with that at `swapped`; both are addresses here."""
        options = _Options(mask=_DATATYPE | _REPLY, datatype=_WORD, reply=swapped)
        base = self._base + offset
        key = self._key
        call = self._lib.ucp_atomic_op_nbx
        return _request(call(self._endpoint, _CSWAP, expected, 1, base, key, byref(options)), "compare-and-swap")

    def flush(self) -> int | None:
        return _request(self._lib.ucp_worker_flush_nbx(self.worker.handle, byref(_NONE)), "flush")

    def is_done(self, request: int) -> bool:
        """Return whether an operation is done. Raises VerbFailed. After either, the request is gone."""
        status = self._lib.ucp_request_check_status(request)
        if status == _IN_PROGRESS:
            return False
        self._lib.ucp_request_free(request)
        if status < 0:
            raise VerbFailed(f"UCX: the ring's memory cannot be reached: {_text(status)}")
        return True

    def close(self) -> None:
        """Close this before its worker."""
        self._lib.ucp_rkey_destroy(self._key)


def _request(result: int | None, verb: str) -> int | None:
    if result is not None and result >= _FIRST_ERROR:
        raise VerbFailed(f"UCX: {verb} failed: {_text(result - (1 << 64))}")
    return result
