"""Nodes that leave: each goes when others have all that only it had.

Rejected: works that stop at their next step. Policies that never stop a work would meet jobs that must not be started
yet.
"""

from __future__ import annotations

from tilework.control.nodes.blobs import NodeBlobs
from tilework.runtime.nodes.remote_node import RemoteNode


class Departures:
    """The nodes that leave and have no works any more."""

    def __init__(self, blobs: NodeBlobs) -> None:
        self._blobs = blobs
        self._going: list[RemoteNode] = []

    def begin(self, node: RemoteNode) -> None:
        """Let a node that leaves, and whose works have ended, hand over its states."""
        self._blobs.hand_over(node)
        self._going.append(node)
        self.go_on()

    def go_on(self) -> None:
        """Let go of the nodes whose states others have, as far as they can get them."""
        for node in [one for one in self._going if not self._blobs.is_fetched_from(one)]:
            self._going.remove(node)
            if node.leave is not None:  # Otherwise it is lost because of its messages.
                node.tell(node.leave)

    def lost(self, node: RemoteNode) -> None:
        """Handle the loss of a node, whether it was leaving or not."""
        self._going = [one for one in self._going if one is not node]
        for other in self._going:  # The lost node may have had what they handed over.
            self._blobs.hand_over(other)
        self.go_on()
