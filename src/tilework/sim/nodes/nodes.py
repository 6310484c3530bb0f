"""Simulated nodes: sessions of agents with the server, blobs that they fetch, clocks, and cut links of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from tilework.control.nodes.blobs import NodeBlobs
from tilework.control.nodes.clock import ClockOffset
from tilework.control.nodes.places import NodePlaces
from tilework.core.events import LinksChanged
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.node_blobs import BlobsFetched, DiscardBlob, FetchBlobs, LeaveOrigin, Origin
from tilework.core.wire.reports import Ended
from tilework.sim.clock import Clock
from tilework.sim.faults import FaultInjector
from tilework.sim.network import Network
from tilework.sim.runs import Run, State

SILENCE_NS = 10 * NS_PER_S  # As `runtime.nodes.config` has it.
_FETCH_S = 10.0  # As `runtime.nodes.config` has it.
_UNHEARD_NS = NS_PER_S  # As `runtime.nodes.remote_node` has it.
_MAX_PING_NS = 5 * NS_PER_MS  # One way.


class SimNodes:
    """The nodes 0 to `num_nodes` - 1, each in its latest session with the server.

    What the server knows of them is real: their places (`NodePlaces`), their blobs (`NodeBlobs`), their clocks. A
    message of a session that has lost its place is refused. A node that is cut off for `SILENCE_NS` is given up. It
    goes on meanwhile, and ends its workers once it notices.

    A fetch takes no time here, unless a fault delays it: `StateTransfer.move_ns` has its usual time. Of one that did,
    `on_fetched` is told the node that had the states, the one that has them now, their bytes and the time.
    """

    def __init__(
        self,
        num_nodes: int,
        clock: Clock,
        injector: FaultInjector,
        network: Network,
        state_copies: int,
        on_fetched: Callable[[int, int, int, int], None],
        on_unheard: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._num = num_nodes
        self._clock = clock
        self._injector = injector
        self._network = network
        self._state_copies = min(state_copies, num_nodes)
        self._on_fetched = on_fetched
        self._on_unheard = on_unheard
        self._sessions: dict[int, NodeSession] = {}
        self._states: dict[str, State] = {}
        self._forgotten: set[StateBlob] = set()
        self._names = count(1)
        self._epochs = count(1)
        self._sent_in: dict[int, NodeSession] = {}  # The sessions of works, by their ids.
        self.num_outdated = 0  # Messages of sessions that were given up, and works of ended ones, that counted.
        self.num_clock_errors = 0  # Times that were off by more than was stated.
        self.num_missing = 0  # Blobs that a node lacks, though the server believes them there.
        self.num_false_fetches = 0  # Fetches that count as measured, but have failed, or were from another node.
        self.begin_server()

    def begin_server(self) -> None:
        """Begin as the next server: it knows no session."""
        self._sent_in.clear()
        self.unheard = frozenset[int]()  # Nodes that have said nothing for a moment.
        self.places = NodePlaces[NodeSession](self._num)
        self.blobs = NodeBlobs(self.places.there, fetch_s=_FETCH_S, copies=self._state_copies, prefix="copy")

    # Sessions.

    def session(self, node: int) -> NodeSession:
        """Return the latest session of a node."""
        return self._sessions[node]

    def begin(self, node: int) -> None:
        """Begin a session of a node, unless there is one. The server knows by now that the one before has ended."""
        before = self._sessions.get(node)
        if before is not None and not before.has_ended:
            return
        ahead_ns = 0
        kept = set[str]() if before is None else before.files
        if self._injector.injects("clock"):
            ahead_ns = ns_from_s((self._injector.fraction("clock") * 2 - 1) * self._injector.faults.size("clock"))
        self._sessions[node] = session = NodeSession(node, next(self._epochs), ahead_ns, self._tell, kept)
        self.places.take(node, session)
        self.blobs.written([StateBlob(name, 1) for name in kept], session)

    def end(self, session: NodeSession) -> None:
        """Remove the agent of a node and all that it has."""
        session.has_ended = True
        session.files.clear()
        session.coming.clear()

    def end_server(self, late: Collection[int]) -> None:
        """End the server and all sessions. Nodes keep their blobs for the next one, unless they are
        `late` for it.
        """
        for session in self._sessions.values():
            if session.node in late:
                self.end(session)
            session.has_ended = session.is_given_up = True
            session.coming.clear()

    def lose(self, session: NodeSession) -> list[StateBlob] | None:
        """Let the server learn that a node is lost; return the blobs that only it had, or None if known already."""
        if not self.places.lose(session.node, session):
            return None
        session.is_given_up = True
        gone = self.blobs.lose(session)
        self._drop_states(gone)
        return gone

    def hands_over(self, session: NodeSession) -> bool:
        """Let another node fetch what only this one has; returns whether that has come, or cannot."""
        if not session.is_handing_over:
            session.is_handing_over = True
            self.blobs.hand_over(session)
        return not self.blobs.is_fetched_from(session)

    def cut(
        self, session: NodeSession, length_ns: int, on_silent: Callable[[], None], on_back: Callable[[], None]
    ) -> None:
        """Hold all messages between a node and the server for so long.

        While it is silent for more than a moment, `on_unheard` is told so. If that is more than the server waits for,
        `on_silent` is called when it gives the node up, and `on_back` when the node learns of it. A node that is cut
        off is not cut off again.
        """
        now_ns = self._clock.now_ns
        if not self._network.cut(session.node, now_ns + length_ns):
            return
        if length_ns > _UNHEARD_NS:
            self._clock.at(now_ns + _UNHEARD_NS, partial(self._note_silence, session.node, is_unheard=True))
            self._clock.at(now_ns + length_ns, partial(self._note_silence, session.node, is_unheard=False))
        if length_ns > SILENCE_NS:
            self._clock.at(now_ns + SILENCE_NS, on_silent)
            back = partial(self._unless_ended, session, on_back)
            self._clock.at(now_ns + length_ns, back, is_device_event=True)

    def _note_silence(self, node: int, *, is_unheard: bool) -> None:
        before = self.unheard
        self.unheard = before | {node} if is_unheard else before - {node}
        if self.unheard != before:
            self._on_unheard(tuple(sorted(self.unheard)))

    # Messages.

    def to_server(self, session: NodeSession, call: Callable[[], None]) -> None:
        """Send a message of a node: `call` handles it, if it arrives while its session counts."""
        self._network.deliver(session.node, partial(self.receive, session, call))

    def receive(self, session: NodeSession, call: Callable[[], None]) -> None:
        """Handle a message that has arrived from a node, if its session counts."""
        if self.places.is_current(session.node, session):
            self.num_outdated += session.is_given_up
            call()

    def send_work(self, work_id: int, node: int) -> None:
        """Note that a work is sent to devices of a node."""
        self._sent_in[work_id] = self.places.there[node]

    def begin_work(self, work_id: int, node: int) -> None:
        """Note that devices of a node begin a work, which must have been sent in its session."""
        self.num_outdated += self._sent_in.get(work_id) is not self._sessions[node]

    def to_node(self, session: NodeSession, call: Callable[[], None]) -> None:
        """Send a message to a node: `call` handles it, if its session has not ended by then."""
        self._network.deliver(session.node, partial(self._unless_ended, session, call), is_device_event=True)

    def _unless_ended(self, session: NodeSession, call: Callable[[], None]) -> None:
        if not session.has_ended:
            call()

    def _tell(self, session: NodeSession, message: object) -> None:
        self.to_node(session, partial(self._handle, session, message))

    def _handle(self, session: NodeSession, message: object) -> None:
        """Do as the agent of a node does."""
        match message:
            case DiscardBlob(blob):
                session.files.discard(blob.name)
            case FetchBlobs():
                self._fetch(session, message)
            case LeaveOrigin(origin):
                for fetch in {id(one): one for one in session.coming.values()}.values():
                    if fetch.message.origin == origin:
                        fetch.found = ()
                        self._end_fetch(session, fetch, "its node was lost")
            case _:
                raise AssertionError(f"a simulated node does not handle {message}")

    # Blobs.

    def put(self, state: State, node: int) -> StateBlob:
        """Keep a state that a device of a node has written; return its blob."""
        blob = StateBlob(str(next(self._names)), 1)
        self._states[blob.name] = state
        self._sessions[node].files.add(blob.name)
        return blob

    def state(self, blob: StateBlob) -> State | None:
        """Return the state that was written as a blob; None if the server needs it no more."""
        return self._states.get(blob.name)

    def has(self, blob: StateBlob) -> bool:
        """Return whether some node has a blob."""
        return any(blob.name in session.files for session in self._sessions.values())

    def forget(self, blob: StateBlob) -> None:
        """Lose a blob on all nodes, as a fault; the server does not know."""
        self._forgotten.add(blob)
        for session in self._sessions.values():
            session.files.discard(blob.name)

    def keep_only(self, blobs: Collection[StateBlob]) -> None:
        """Remove all other blobs, as the next server does when it starts."""
        names = {blob.name for blob in blobs}
        for session in self._sessions.values():
            session.files &= names

    @property
    def num_files(self) -> int:
        return sum(len(session.files) for session in self._sessions.values())

    def discard(self, blobs: Collection[StateBlob]) -> None:
        """Discard blobs that the server no longer needs."""
        for blob in blobs:
            self.blobs.discard(blob)
        self._drop_states(blobs)

    def _drop_states(self, blobs: Iterable[StateBlob]) -> None:
        for blob in blobs:
            self._states.pop(blob.name, None)

    def _fetch(self, session: NodeSession, message: FetchBlobs) -> None:
        """Begin to fetch: what its origin discards later comes all the same, unless the origin is lost."""
        found = list[StateBlob]()
        reason = ""
        origin = next((one for one in self._sessions.values() if one.origin == message.origin), None)
        for blob in message.blobs:
            if origin is None or not self.is_there(blob, origin):
                reason = "it is not there"
                break
            found.append(blob)
        fetch = Fetch(message=message, found=tuple(found), origin=origin, begin_ns=self._clock.now_ns)
        session.coming |= {blob.name: fetch for blob in message.blobs}
        if not self._injector.injects("fetch"):
            self._end_fetch(session, fetch, reason)
            return
        takes_s = self._injector.magnitude("fetch")
        if takes_s > message.timeout_s:
            takes_s = message.timeout_s
            fetch.found = ()
            reason = "it took too long"
        end = partial(self._end_fetch, session, fetch, reason)
        self._clock.at(self._clock.now_ns + ns_from_s(takes_s), end, is_device_event=True)

    def is_there(self, blob: StateBlob, session: NodeSession) -> bool:
        """Return whether a node has a blob; note if it lacks one that the server believes it has.

        Of a node that has ended it may believe so until it learns of the end.
        """
        is_there = blob.name in session.files
        may_lack = blob in self._forgotten or session.has_ended
        if not is_there and not may_lack and self.places.is_current(session.node, session):
            self.num_missing += session.node in self.blobs.nodes(blob)
        return is_there

    def _end_fetch(self, session: NodeSession, fetch: Fetch, reason: str) -> None:
        """End a fetch, unless it or its session has ended before."""
        message = fetch.message
        if session.has_ended or session.coming.get(message.blobs[0].name) is not fetch:
            return
        if fetch.origin is None or fetch.origin.has_ended:
            fetch.found = ()
            reason = "its node was lost"
        session.files |= {blob.name for blob in fetch.found}
        for blob in message.blobs:
            del session.coming[blob.name]
        for call in fetch.waiting:
            call()
        answer = BlobsFetched(message.fetch_id, fetch.found, self._clock.now_ns - fetch.begin_ns, reason)
        self.to_server(session, partial(self._fetched, answer, session, fetch.origin))

    def _fetched(self, answer: BlobsFetched, session: NodeSession, origin: NodeSession | None) -> None:
        """Let the server hear of a fetch, and learn from its time."""
        place = self.blobs.fetched(answer, session)
        if place is None or not answer.run_ns:
            return
        is_measured = origin is not None and self.places.is_current(place, origin) and not answer.reason
        self.num_false_fetches += not is_measured
        self._on_fetched(place, session.node, sum(blob.num_bytes for blob in answer.blobs), answer.run_ns)

    # Clocks.

    def dated(self, session: NodeSession, run: Run, report: Ended) -> None:
        """Give a report the times that the server reads from it: those of the node's clock, converted."""
        if not session.ahead_ns:
            return
        sent_ns, there, back = self._clock.now_ns, *(self._injector.fraction("clock") for _ in range(2))
        node_ns = sent_ns + int(there * _MAX_PING_NS) + session.ahead_ns
        session.clock.add(sent_ns, node_ns, sent_ns + int(there * _MAX_PING_NS) + int(back * _MAX_PING_NS))
        report.start_ns = session.clock.engine_ns(run.start_ns + session.ahead_ns)
        report.end_ns = session.clock.engine_ns(run.end_ns + session.ahead_ns)
        error_ns = session.clock.error_ns
        assert error_ns is not None
        self.num_clock_errors += abs(report.end_ns - run.end_ns) > error_ns


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """Blobs on their way to a node: `found` are those that the session of its `origin` has.

    Calls `waiting` at the end.
    """

    message: FetchBlobs
    found: tuple[StateBlob, ...]
    origin: NodeSession | None
    begin_ns: int
    waiting: list[Callable[[], None]] = field(default_factory=list)


class NodeSession:
    """The agent of a node from its greeting on, and a `BlobNode` of the server.

    Of the server are `fetches`, `clock`, and how far it is with leaving. Of the agent are `files`, the names of its
    blobs; `coming`, what it fetches, by the name of the blob; and `ahead_ns`, how far its clock is ahead of that of the
    server. It `has_ended` when its workers have; the server learns that later, or gave it up before.
    """

    def __init__(
        self, node: int, epoch: int, ahead_ns: int, tell: Callable[[NodeSession, object], None], files: Iterable[str]
    ) -> None:
        self.node = node
        self.origin = Origin(f"node {node}", 0, epoch)
        self.has_started = True
        self.fetches: dict[int, FetchBlobs] = {}
        self.is_cordoned = self.is_handing_over = False
        self.clock = ClockOffset()
        self.files = set(files)
        self.coming: dict[str, Fetch] = {}
        self.ahead_ns = ahead_ns
        self.has_ended = False
        self.is_given_up = False
        self._tell = tell

    @property
    def stays(self) -> bool:
        return not self.is_cordoned

    def tell(self, message: object) -> None:
        self._tell(self, message)

    def when_there(self, blobs: Iterable[StateBlob], call: Callable[[], None]) -> None:
        """Call when none of these blobs is on its way any more, now or later; not if the session ends before."""
        awaited = {id(fetch): fetch for blob in blobs if (fetch := self.coming.get(blob.name)) is not None}
        if not awaited:
            call()
            return
        missing = len(awaited)

        def one_ended() -> None:
            nonlocal missing
            missing -= 1
            if not missing and not self.has_ended:
                call()

        for fetch in awaited.values():
            fetch.waiting.append(one_ended)


class SimLinks:
    """Links of simulated accelerators to the others of their node: all are connected, but for a while after `cut`.

    Accelerators without links run in no group. `after` calls later, unless the server has been restarted by then."""

    def __init__(
        self, after: Callable[[int, Callable[[], None]], None], on_event: Callable[[LinksChanged], object]
    ) -> None:
        self._after = after
        self._on_event = on_event
        self._cuts: Counter[int] = Counter()  # Number of open cuts, by device.

    def cut(self, devices: Iterable[int], length_ns: int) -> None:
        """Let each of these devices be alone for this time."""
        cut = tuple(devices)
        self._cuts.update(cut)
        self._tell()
        self._after(length_ns, lambda: self._mend(cut))

    def restart(self) -> None:
        """Begin as the next server, for which all are connected."""
        self._cuts.clear()

    def _mend(self, cut: Iterable[int]) -> None:
        self._cuts -= Counter(cut)
        self._tell()

    def _tell(self) -> None:
        self._on_event(LinksChanged(tuple(sorted(self._cuts)), bool(self._cuts)))
