"""The transfers of states between devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tilework.control.driver.state_registry import StateMove
from tilework.core.work import Group
from tilework.sim.clock import Clock
from tilework.sim.config import DeviceLayout
from tilework.sim.device import StateTransfer
from tilework.sim.nodes.nodes import NodeSession, SimNodes


class StateTransfers:
    """The transfers of all moves. Those of a move that waits for the end of a work are sent when it is resolved.

    A node that lacks a blob fetches it first; `on_sent` is called with the targets whose transfers have waited for
    that.
    """

    def __init__(self, clock: Clock, nodes: SimNodes, layout: DeviceLayout, on_sent: Callable[[Group], None]) -> None:
        self._clock = clock
        self._nodes = nodes
        self._layout = layout
        self._on_sent = on_sent
        self._waiting: dict[StateMove, dict[int, StateTransfer]] = {}

    def begin(self, move: StateMove, times_ns: Mapping[int, int]) -> Iterator[tuple[int, StateTransfer]]:
        """Return the transfers of a move, one per target, which take so long; sent now if the move is resolved."""
        transfers = {target: StateTransfer(job_id=move.job_id, move_ns=times_ns[target]) for target in move.targets}
        if move.is_resolved:
            self._send(move, transfers)
        else:
            self._waiting[move] = transfers
        return iter(transfers.items())

    def resolve(self, move: StateMove) -> None:
        """Send the transfers of a move that has waited."""
        self._send(move, self._waiting.pop(move))

    def _send(self, move: StateMove, transfers: Mapping[int, StateTransfer]) -> None:
        """Send each node its transfers, and tell it to fetch what it lacks before. A node that is lost gets nothing."""
        blobs = [one.blob for one in move.states]
        by_node = dict[int, dict[int, StateTransfer]]()
        for target, transfer in transfers.items():
            by_node.setdefault(self._layout.node(target), {})[target] = transfer
        for node, some in by_node.items():
            session = self._nodes.places.there.get(node)
            if session is not None:
                self._nodes.blobs.bring(blobs, session)
                send = partial(self._send_now, move, some, session)
                self._nodes.to_node(session, partial(session.when_there, blobs, send))

    def _send_now(self, move: StateMove, transfers: Mapping[int, StateTransfer], session: NodeSession) -> None:
        """Send what the node has by now. A simulated state includes what earlier stages wrote.

        Without any the targets have all that they need.
        """
        is_lost = not all(self._nodes.is_there(state.blob, session) for state in move.states)
        state = None if is_lost or not move.states else self._nodes.state(move.states[-1].blob)
        for transfer in transfers.values():
            transfer.send(state, self._clock.now_ns, is_lost)
        self._on_sent(tuple(transfers))

    def clear(self) -> None:
        """Forget the waiting transfers, since the server has ended."""
        self._waiting.clear()
