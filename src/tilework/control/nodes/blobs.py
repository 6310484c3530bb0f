"""The state blobs of all nodes: fetching, copying and discarding them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import count
from typing import Protocol

from tilework.control.nodes.blob_places import BlobPlaces
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.node_blobs import BlobsFetched, CopyBlob, DiscardBlob, FetchBlobs, LeaveOrigin, Origin


class BlobNode(Protocol):
    """A node in one session. `fetches` are the fetches that it was told to do, by id."""

    fetches: dict[int, FetchBlobs]

    @property
    def node(self) -> int: ...

    @property
    def has_started(self) -> bool:
        """True if its workers are up, so that its blobs can be fetched."""
        ...

    @property
    def stays(self) -> bool:
        """True if it has started, and is not about to leave."""
        ...

    @property
    def origin(self) -> Origin:
        """Address at which its blobs can be fetched, once it has started."""
        ...

    def tell(self, message: object) -> None:
        """Send a message. Messages of one session arrive in order, or the session ends."""
        ...


class NodeBlobs:
    """Tells `nodes`, which are connected, by their place, what to do with blobs. Each blob is kept on `copies` nodes.

    `prefix` begins the names of copies; no other name may begin with it.
    """

    def __init__(self, nodes: Mapping[int, BlobNode], *, fetch_s: float, copies: int, prefix: str) -> None:
        self._nodes = nodes
        self._fetch_s = fetch_s
        self._copies = copies
        self._prefix = prefix
        self._places = BlobPlaces()
        self._ids = count(1)

    @property
    def num_kept(self) -> int:
        """Number of blobs that some node keeps."""
        return self._places.num_kept

    def nodes(self, blob: StateBlob) -> Set[int]:
        """Return the nodes that have a blob."""
        return self._places.nodes(blob)

    def is_taken(self, name: str) -> bool:
        """Return whether no worker may give a blob this name: another has it, or it is that of a copy."""
        return name.startswith(self._prefix) or self._places.knows(name)

    def written(self, blobs: Iterable[StateBlob], node: BlobNode) -> None:
        """Record that a device of a node has written blobs."""
        for blob in blobs:
            self._places.add(blob, node.node)

    def bring(self, blobs: Iterable[StateBlob], node: BlobNode) -> None:
        """Let a node fetch those of these blobs that it lacks."""
        for other, lacking in self._places.lacking(blobs, node.node).items():
            fetch = FetchBlobs(next(self._ids), tuple(lacking), self._nodes[other].origin, self._fetch_s)
            node.fetches[fetch.fetch_id] = fetch
            for blob in lacking:
                self._places.fetch(blob, node.node)
            node.tell(fetch)

    def copy_to_others(self, blobs: Iterable[StateBlob], node: BlobNode) -> None:
        """Let the nodes after this one fetch those of these blobs that are still kept, as far as copies are wanted."""
        if self._copies == 1:
            return
        kept = [blob for blob in blobs if self._places.nodes(blob)]
        for other in self._after(node)[: self._copies - 1]:
            self.bring(kept, other)

    def _after(self, node: BlobNode) -> list[BlobNode]:
        """Return the other nodes that stay, in the order of their places, from the next one on."""
        places = sorted(self._nodes, key=lambda place: (place < node.node, place))
        return [one for place in places if (one := self._nodes[place]) is not node and one.stays]

    def hand_over(self, node: BlobNode) -> None:
        """Let another node fetch the blobs that only this one has. It `is_fetched_from` until that has ended."""
        for other in self._after(node)[:1]:
            self.bring(self._places.only_on(node.node), other)

    def is_fetched_from(self, node: BlobNode) -> bool:
        """Return whether another node fetches something from this one."""
        return any(fetch.origin == node.origin for one in self._nodes.values() for fetch in one.fetches.values())

    def fetched(self, answer: BlobsFetched, node: BlobNode) -> int | None:
        """Record that a node has fetched blobs, or could not; it discards those that are no longer kept.

        Returns the place of the node that had all of them; None if some did not come, or if that node is lost.
        """
        fetch = node.fetches.pop(answer.fetch_id)
        for blob in fetch.blobs:
            if blob not in answer.blobs:
                self._places.not_fetched(blob, node.node)
            elif not self._places.fetched(blob, node.node):
                node.tell(DiscardBlob(blob))
        if answer.reason:
            return None
        return next((one.node for one in self._nodes.values() if one.has_started and one.origin == fetch.origin), None)

    def copy(self, blob: StateBlob) -> StateBlob | None:
        """Give a blob a second name on all nodes that have it; None if none has.

        A node that has no room for the name lacks the copy when the copy is imported.
        """
        places = sorted(self._places.nodes(blob))
        copied = StateBlob(f"{self._prefix}-{next(self._ids)}", blob.num_bytes)
        for place in places:
            self._nodes[place].tell(CopyBlob(blob, copied.name))
            self._places.add(copied, place)
        return copied if places else None

    def discard(self, blob: StateBlob) -> None:
        for place in sorted(self._places.discard(blob)):
            self._nodes[place].tell(DiscardBlob(blob))

    def lose(self, node: BlobNode) -> list[StateBlob]:
        """Handle the loss of a node, which is no longer among `nodes`. Returns the blobs that only it had."""
        for other in self._nodes.values():
            if node.has_started:
                other.tell(LeaveOrigin(node.origin))
        return self._places.lose(node.node)
