"""The nodes that have each state blob.

Rejected: nodes in the controller's record of a job. Which node has which blob matters to decisions only when one is
lost, and then only the position that is left. Rejected, too: states through the engine, which would carry each twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from tilework.core.wire.blobs import StateBlob

_NOWHERE: frozenset[int] = frozenset()


class BlobPlaces:
    """The nodes of each blob that is kept. A node that is to fetch a blob `gets` it until it has it."""

    def __init__(self) -> None:
        self._nodes: dict[StateBlob, set[int]] = {}
        self._coming: dict[StateBlob, set[int]] = {}
        self._names: set[str] = set()

    @property
    def num_kept(self) -> int:
        """Number of blobs that are kept."""
        return len(self._nodes)

    def knows(self, name: str) -> bool:
        """Return whether a blob of this name is kept."""
        return name in self._names

    def add(self, blob: StateBlob, node: int) -> None:
        """Record that a node has written a blob, or has fetched one that is still kept."""
        self._nodes.setdefault(blob, set()).add(node)
        self._names.add(blob.name)

    def nodes(self, blob: StateBlob) -> Set[int]:
        return self._nodes.get(blob, _NOWHERE)

    def only_on(self, node: int) -> list[StateBlob]:
        """Return the blobs that this node has, and no other has or gets."""
        return [blob for blob, nodes in self._nodes.items() if nodes == {node} and blob not in self._coming]

    def lacking(self, blobs: Iterable[StateBlob], node: int) -> dict[int, list[StateBlob]]:
        """Return those of these blobs that a node neither has nor gets, by the first node that has each."""
        found: dict[int, list[StateBlob]] = {}
        for blob in blobs:
            places = self.nodes(blob)
            if places and node not in places and node not in self._coming.get(blob, _NOWHERE):
                found.setdefault(min(places), []).append(blob)
        return found

    def fetch(self, blob: StateBlob, node: int) -> None:
        """Record that a node gets a blob, which it is told to fetch."""
        self._coming.setdefault(blob, set()).add(node)

    def fetched(self, blob: StateBlob, node: int) -> bool:
        """Record that a node has fetched a blob; returns whether it is kept, so that it may stay there."""
        self._end_fetch(blob, node)
        if blob in self._nodes:
            self.add(blob, node)
        return blob in self._nodes

    def not_fetched(self, blob: StateBlob, node: int) -> None:
        self._end_fetch(blob, node)

    def _end_fetch(self, blob: StateBlob, node: int) -> None:
        nodes = self._coming.get(blob, set())
        nodes.discard(node)
        if not nodes:
            self._coming.pop(blob, None)

    def discard(self, blob: StateBlob) -> Set[int]:
        """Stop keeping a blob; returns the nodes that have it."""
        self._names.discard(blob.name)
        return self._nodes.pop(blob, _NOWHERE)

    def lose(self, node: int) -> list[StateBlob]:
        """Forget a node that is lost; returns the blobs that only it had."""
        for blob in [blob for blob, nodes in self._coming.items() if node in nodes]:
            self._end_fetch(blob, node)
        for nodes in self._nodes.values():
            nodes.discard(node)
        gone = [blob for blob, nodes in self._nodes.items() if not nodes]
        for blob in gone:
            del self._nodes[blob]
            self._names.discard(blob.name)
        return gone
