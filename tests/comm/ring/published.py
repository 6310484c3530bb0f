"""OnePiece's double ring as section 6.1 publishes it, as actions that a test runs in any order.

Favourable reading: WL is a compare-and-swap on the busy bit, and GH looks past all slots that are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Cell(NamedTuple):
    """A unit of a message; its first one has the header with the checksum, which says how long the message is."""

    sender: str
    index: int
    length: int


@dataclass
class PublishedRing:
    """`lengths` are those of the senders' messages. Actions are called as in the paper; TL is `timeout`."""

    lengths: dict[str, int]
    num_cells: int = 12
    num_slots: int = 4
    lock: str = ""
    tail: tuple[int, int] = (0, 0)
    head: tuple[int, int] = (0, 0)
    written: list[str] = field(default_factory=list)
    """Senders whose WL succeeded: they take their message for sent."""

    def __post_init__(self) -> None:
        self.sizes = [0] * self.num_slots
        self.cells: list[Cell | None] = [None] * self.num_cells
        self.views: dict[str, tuple[int, int]] = {}

    def run(self, actions: str) -> None:
        """Actions such as "L(X) GH(X) TL L(Y)", one after the other."""
        for action in actions.split():
            name, _, sender = action.partition("(")
            getattr(self, name)(sender.rstrip(")"))

    def L(self, sender: str) -> None:  # noqa: N802
        assert not self.lock
        self.lock = sender

    def TL(self, _: str) -> None:  # noqa: N802
        self.lock = ""

    def U(self, _: str) -> None:  # noqa: N802
        self.lock = ""

    def GH(self, sender: str) -> None:  # noqa: N802
        at, slot = self.tail
        while self.sizes[slot]:
            at, slot = self._next(at, slot, self.sizes[slot])
        self.views[sender] = (at, slot)

    def WB(self, sender: str) -> None:  # noqa: N802
        at, _ = self.views[sender]
        for index in range(self.lengths[sender]):
            self.cells[(at + index) % self.num_cells] = Cell(sender, index, self.lengths[sender])

    def WL(self, sender: str) -> None:  # noqa: N802
        _, slot = self.views[sender]
        if not self.sizes[slot]:
            self.sizes[slot] = self.lengths[sender]
            self.written.append(sender)

    def UH(self, sender: str) -> None:  # noqa: N802
        at, slot = self.views[sender]
        self.tail = self._next(at, slot, self.sizes[slot] or self.lengths[sender])

    def read(self) -> list[str]:
        """What the consumer gets: by message the senders of its bytes, or "" where the header's checksum fails."""
        got = []
        while size := self.sizes[self.head[1]]:
            at, slot = self.head
            cells = [self.cells[(at + index) % self.num_cells] for index in range(size)]
            first = cells[0]
            is_valid = first is not None and first.index == 0 and first.length == size
            got.append("".join(sorted({cell.sender for cell in cells if cell})) if is_valid else "")
            self.sizes[slot] = 0
            self.head = self._next(at, slot, size)
        return got

    def _next(self, at: int, slot: int, size: int) -> tuple[int, int]:
        return (at + size if at + size < self.num_cells else 0), (slot + 1) % self.num_slots
