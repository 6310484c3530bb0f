"""The state blobs of all nodes: what is fetched from where, copied and discarded."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from itertools import count

from tilework.core.wire.blobs import StateBlob
from tilework.runtime.nodes.blob_places import BlobPlaces
from tilework.runtime.nodes.messages import BlobsFetched, CopyBlob, DiscardBlob, FetchBlobs, LeaveOrigin
from tilework.runtime.nodes.remote_node import RemoteNode

_log = logging.getLogger(__name__)


class RemoteBlobs:
    """Tells `nodes`, those that are there by their place, what to do with blobs. Each is kept on `copies` nodes."""

    def __init__(self, nodes: Mapping[int, RemoteNode], *, fetch_s: float, copies: int) -> None:
        self._nodes, self._fetch_s, self._copies = nodes, fetch_s, copies
        self._places = BlobPlaces()
        self._ids = count(1)
        self._prefix = f"copy-{secrets.token_hex(6)}"  # No name is ever used again.

    def written(self, blobs: Iterable[StateBlob], node: RemoteNode) -> None:
        """A device of a node has written blobs."""
        for blob in blobs:
            self._places.add(blob, node.node)

    def bring(self, blobs: Iterable[StateBlob], node: RemoteNode) -> None:
        """Let a node fetch what it lacks of these."""
        for other, lacking in self._places.lacking(blobs, node.node).items():
            fetch = FetchBlobs(next(self._ids), tuple(lacking), self._nodes[other].origin, self._fetch_s)
            node.fetches[fetch.fetch_id] = fetch
            for blob in lacking:
                self._places.fetch(blob, node.node)
            node.tell(fetch)

    def copy_to_others(self, blobs: Iterable[StateBlob], node: RemoteNode) -> None:
        """Let the nodes after this one fetch what is still kept of these, as far as copies are wanted."""
        kept = [blob for blob in blobs if self._places.nodes(blob)]
        for other in self._after(node)[: self._copies - 1]:
            self.bring(kept, other)

    def _after(self, node: RemoteNode) -> list[RemoteNode]:
        """The other nodes that stay, in the order of their places, from the next one on."""
        places = sorted(self._nodes, key=lambda place: (place < node.node, place))
        others = [self._nodes[place] for place in places]
        return [one for one in others if one is not node and one.started and not one.leaves_because]

    def hand_over(self, node: RemoteNode) -> None:
        """Let another node fetch what only this one has. It `is_fetched_from` until that has come, or cannot."""
        for other in self._after(node)[:1]:
            self.bring(self._places.only_on(node.node), other)

    def is_fetched_from(self, node: RemoteNode) -> bool:
        """Whether another node fetches something from this one."""
        return any(fetch.origin == node.origin for one in self._nodes.values() for fetch in one.fetches.values())

    def fetched(self, answer: BlobsFetched, node: RemoteNode) -> int | None:
        """A node has fetched blobs, or could not; what is not kept any more it discards.

        Returns the place of the node that had all of them; None if some did not come, or if that is lost.
        """
        fetch, is_lacking = node.fetches.pop(answer.fetch_id), False
        for blob in fetch.blobs:
            if blob not in answer.blobs:
                self._places.not_fetched(blob, node.node)
                is_lacking |= bool(self._places.nodes(blob))  # One that was discarded meanwhile is not missed.
            elif not self._places.fetched(blob, node.node):
                node.tell(DiscardBlob(blob))
        if is_lacking:
            _log.warning("node %d: %s", node.node, answer.reason)
        if answer.reason:
            return None
        return next((place for place, one in self._nodes.items() if one.started and one.origin == fetch.origin), None)

    def copy(self, blob: StateBlob) -> StateBlob | None:
        """A second name on all nodes that have it; None if none has.

        A node that has no room for the name lacks the copy when that is imported.
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

    def lose(self, node: RemoteNode) -> list[StateBlob]:
        """A node is lost, and not among `nodes` any more. Returns the blobs that only it had."""
        for other in self._nodes.values():
            if node.started is not None:
                other.tell(LeaveOrigin(node.origin))
        return self._places.lose(node.node)
