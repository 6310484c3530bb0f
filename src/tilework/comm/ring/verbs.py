"""The four verbs over remote memory, and the execution of a protocol that is written in them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Get:
    """Returns `size` bytes from `offset`. Eight bytes at a multiple of eight are read atomically."""

    offset: int
    size: int = 8


@dataclass(frozen=True, slots=True)
class Put:
    """Writes the buffers one after another. Eight bytes at a multiple of eight are written atomically.

    Puts may take place later and in any order, until a Flush.
    """

    offset: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Cas64:
    """Replaces the word at `offset` if it is `expected`. Returns the word that was there before."""

    offset: int
    expected: int
    desired: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Returns when all earlier puts of this process have taken place."""


Verb = Get | Put | Cas64 | Flush
Result = TypeVar("Result")
Steps = Generator[Verb, Any, Result]
"""Steps of the protocol: yields verbs, is sent their answers, returns a result."""


class Memory(Protocol):
    """Memory that may be another process's or another machine's.

    All verbs take a deadline in nanoseconds of `time.monotonic_ns` and raise VerbTimeout after it. No verb needs the
    CPU of the process that owns the memory.
    """

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes: ...
    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None: ...
    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int: ...
    def flush(self, *, deadline_ns: int) -> None: ...
    def checksum(self, buffer: Buffer, value: int) -> int:
        """Continue a checksum over a buffer; it begins with 0. The result is the same in all processes of a ring."""


def carry_out(steps: Steps[Result], memory: Memory, deadline_ns: int) -> Result:
    """Run these steps to their end on `memory`, and return their result. Raises VerbTimeout."""
    answer: Any = None
    while True:
        try:
            verb = steps.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result
        match verb:
            case Get():
                answer = memory.get(verb.offset, verb.size, deadline_ns=deadline_ns)
            case Put():
                answer = None
                memory.put(verb.offset, verb.buffers, deadline_ns=deadline_ns)
            case Cas64():
                answer = memory.cas64(verb.offset, verb.expected, verb.desired, deadline_ns=deadline_ns)
            case Flush():
                answer = None
                memory.flush(deadline_ns=deadline_ns)
