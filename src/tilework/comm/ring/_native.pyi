from array import array
from mmap import mmap

from tilework.comm.ring.verbs import Buffer

Seen = tuple[int, int, int, int, int, int]

def get(memory: mmap, offset: int, size: int, /) -> bytes: ...
def put(memory: mmap, offset: int, buffer: Buffer, /) -> None: ...
def cas64(memory: mmap, offset: int, expected: int, desired: int, /) -> int: ...
def crc32c(buffer: Buffer, value: int, /) -> int: ...
def send(
    memory: mmap,
    slots: int,
    units: int,
    owner: int,
    epoch: int,
    is_checked: bool,
    bell: int,
    messages: list[tuple[Buffer, ...]],
    first: int,
    /,
) -> tuple[int, int]: ...
def look(
    memory: mmap,
    slots: int,
    units: int,
    is_checked: bool,
    head_slot: int,
    scan_slot: int,
    scan_unit: int,
    waiting: list[tuple[int, int, int]],
    limit: int,
    epochs: array[int],
    /,
) -> tuple[list[Seen], int, int]: ...
def advance(memory: mmap, slots: int, units: int, head_slot: int, new_slot: int, new_unit: int, /) -> None: ...
def copies(memory: mmap, slots: int, units: int, entries: list[Seen], /) -> list[tuple[bytes, bytes]]: ...
