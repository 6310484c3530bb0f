"""Blobs of simulated states, and the transfers of states between devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tilework.control.driver.state_registry import StateMove
from tilework.core.wire.blobs import StateBlob
from tilework.sim.clock import Clock
from tilework.sim.device import StateTransfer
from tilework.sim.runs import State


class BlobStore:
    """The states that devices have serialized, by blob, and the nodes that have each.

    A blob that a fault has lost has no state.
    """

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._nodes: dict[str, set[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, blob: StateBlob | None) -> bool:
        return blob is not None and blob.name in self._states

    def __getitem__(self, blob: StateBlob) -> State:
        return self._states[blob.name]

    def put(self, state: State, node: int) -> StateBlob:
        self._next += 1
        blob = StateBlob(str(self._next), 1)
        self._states[blob.name], self._nodes[blob.name] = state, {node}
        return blob

    def copy_to(self, blob: StateBlob, node: int) -> None:
        """A node has fetched a blob, if that was there."""
        if blob in self:
            self._nodes[blob.name].add(node)

    def hand_over(self, node: int, other: int) -> None:
        """A node leaves: another one fetches the blobs that only it has."""
        for nodes in self._nodes.values():
            if nodes == {node}:
                nodes.add(other)

    def lose_node(self, node: int) -> list[StateBlob]:
        """A node is lost: returns the blobs that only it had, which are gone."""
        for nodes in self._nodes.values():
            nodes.discard(node)
        gone = [StateBlob(name, 1) for name, nodes in self._nodes.items() if not nodes]
        self.discard(gone)
        return gone

    def discard(self, blobs: Collection[StateBlob]) -> None:
        for blob in blobs:
            self._states.pop(blob.name, None)
            self._nodes.pop(blob.name, None)

    def keep_only(self, blobs: Collection[StateBlob]) -> None:
        """Remove all other blobs, as the next server does when it starts."""
        names = {blob.name for blob in blobs}
        self._states = {name: state for name, state in self._states.items() if name in names}
        self._nodes = {name: nodes for name, nodes in self._nodes.items() if name in names}

    def delivered_by(self, move: StateMove) -> tuple[State | None, bool]:
        """The state that a resolved move delivers (None: nothing), and whether a fault has lost one of its blobs.

        A simulated state includes what earlier stages wrote. Without any the target has all that it needs.
        """
        if not move.states:
            return None, False
        is_lost = any(state.blob not in self for state in move.states)
        return None if is_lost else self._states[move.states[-1].blob.name], is_lost


class StateTransfers:
    """The transfers of all moves. Those of a move that waits for the end of a work are sent when it is resolved."""

    def __init__(self, clock: Clock, blobs: BlobStore, node: Callable[[int], int]) -> None:
        self._clock = clock
        self._blobs = blobs
        self._node = node
        self._waiting: dict[StateMove, list[StateTransfer]] = {}

    def begin(self, move: StateMove, times_ns: Mapping[int, int]) -> Iterator[tuple[int, StateTransfer]]:
        """The transfers of a move, one per target, which take so long; sent now if the move is resolved."""
        transfers = [StateTransfer(job_id=move.job_id, move_ns=times_ns[target]) for target in move.targets]
        if move.is_resolved:
            self._send(move, transfers)
        else:
            self._waiting[move] = transfers
        return zip(move.targets, transfers, strict=True)

    def resolve(self, move: StateMove) -> None:
        """Send the transfers of a move that has waited."""
        self._send(move, self._waiting.pop(move))

    def _send(self, move: StateMove, transfers: Iterable[StateTransfer]) -> None:
        state, is_lost = self._blobs.delivered_by(move)
        for node in set(map(self._node, move.targets)):
            for one in move.states:
                self._blobs.copy_to(one.blob, node)
        for transfer in transfers:
            transfer.send(state, self._clock.now_ns, is_lost)

    def clear(self) -> None:
        """Forget the waiting transfers, since the server has ended."""
        self._waiting.clear()
