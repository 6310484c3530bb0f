"""Simulated nodes: what a cut and a late fetch do, on the code that knows nodes when it serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from tilework.core.time import NS_PER_S
from tilework.core.wire.blobs import StateBlob
from tilework.sim.clock import Clock
from tilework.sim.faults import FaultInjector, parse_faults
from tilework.sim.network import Network
from tilework.sim.nodes.front_ends import FrontEnds
from tilework.sim.nodes.nodes import SILENCE_NS, SimNodes
from tilework.sim.runs import State

STATE = State(((0, 3),), 3)


@dataclass(slots=True)
class Rig:
    """Three nodes of one device each, and what happened when."""

    clock: Clock
    nodes: SimNodes
    fetches: list[tuple[int, ...]]
    unheard: list[tuple[float, tuple[int, ...]]]
    seen: list[tuple[str, float]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.seen.append((what, self.clock.now_ns / NS_PER_S))

    def write(self, node: int) -> StateBlob:
        blob = self.nodes.put(STATE, node)
        self.nodes.blobs.written([blob], self.nodes.session(node))
        return blob

    def bring(self, blob: StateBlob, node: int) -> None:
        """Let a node fetch a blob, and note when it is there or cannot come."""
        session = self.nodes.session(node)
        self.nodes.blobs.bring([blob], session)
        session.when_there([blob], lambda: self.note("there" if blob.name in session.files else "lost"))


def rig(*faults: str, state_copies: int = 1) -> Rig:
    clock, injector = Clock(), FaultInjector(parse_faults(faults), 1)
    network, fetches = Network(clock, injector, lambda device: device), list[tuple[int, ...]]()
    unheard = list[tuple[float, tuple[int, ...]]]()
    told = (lambda *one: fetches.append(one)), (lambda nodes: unheard.append((clock.now_ns / NS_PER_S, nodes)))
    nodes = SimNodes(3, clock, injector, network, state_copies, *told)
    for node in range(3):
        nodes.begin(node)
    return Rig(clock, nodes, fetches, unheard)


def test_a_node_fetches_what_it_lacks() -> None:
    one = rig()
    blob = one.write(0)
    one.bring(blob, 2)
    assert one.seen == [("there", 0.0)]
    assert one.nodes.blobs.nodes(blob) == {0, 2}
    one.nodes.discard([blob])
    assert (one.nodes.num_files, one.nodes.blobs.num_kept) == (0, 0)


def test_a_late_fetch_comes_though_the_blob_was_discarded_meanwhile() -> None:
    """It stays nowhere, since it is not kept any more."""
    one = rig("fetch=1:4")
    blob = one.write(0)
    one.bring(blob, 1)
    one.nodes.discard([blob])
    one.clock.run()
    ((what, at_s),) = one.seen
    assert what == "there"
    assert 2 <= at_s <= 6
    assert (one.nodes.num_files, one.nodes.blobs.num_kept) == (0, 0)


def test_how_long_a_fetch_took_is_told_if_all_came() -> None:
    one = rig("fetch=1:4")
    one.bring(one.write(0), 1)
    one.clock.run()
    ((origin, node, num_bytes, run_ns),) = one.fetches
    assert (origin, node, num_bytes) == (0, 1, 1)
    assert run_ns / NS_PER_S == one.seen[0][1]


def test_the_next_server_has_the_states_of_nodes_that_are_there_and_hears_nothing_of_before() -> None:
    one = rig()
    kept, late = one.write(0), one.write(2)
    before = one.nodes.session(0)
    one.nodes.end_server(late={2})
    one.nodes.begin_server()
    for node in range(3):
        one.nodes.begin(node)
    assert (one.nodes.blobs.nodes(kept), one.nodes.blobs.nodes(late)) == ({0}, set())
    one.nodes.receive(before, lambda: one.note("of the old session"))
    one.nodes.receive(one.nodes.session(0), lambda: one.note("of the new one"))
    assert one.seen == [("of the new one", 0.0)]
    assert not one.nodes.num_outdated


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_fetch_fails_when_it_takes_too_long_or_its_node_is_lost(is_lost: bool) -> None:
    one = rig("fetch=1:40")
    blob, origin = one.write(0), one.nodes.session(0)
    one.bring(blob, 1)
    if is_lost:
        one.nodes.end(origin)
        assert one.nodes.lose(origin) == [blob]
        assert one.nodes.lose(origin) is None, "it is lost once"
    one.clock.run()
    assert one.seen == [("lost", 0.0 if is_lost else 10.0)]
    assert not one.fetches, "it says nothing of the way"
    assert one.nodes.blobs.nodes(blob) == (set() if is_lost else {0})


@pytest.mark.parametrize("length_s", [4, 25])
def test_messages_of_a_node_wait_while_it_is_cut_off_and_count_unless_it_was_given_up(length_s: int) -> None:
    one = rig("partition")
    session = one.nodes.session(1)

    def silent() -> None:
        one.note("given up")
        one.nodes.lose(session)

    one.nodes.cut(session, length_s * NS_PER_S, silent, lambda: one.note("back"))
    for number in (1, 2):
        one.nodes.to_server(session, lambda number=number: one.note(f"message {number}"))  # type: ignore[misc]
    one.clock.run()
    if length_s * NS_PER_S < SILENCE_NS:
        assert one.seen == [("message 1", 4.0), ("message 2", 4.0)]
    else:
        assert one.seen == [("given up", 10.0), ("back", 25.0)]
    assert one.unheard == [(1.0, (1,)), (length_s, ())]
    assert not one.nodes.num_outdated


def test_messages_of_a_node_do_not_overtake_each_other_when_the_server_goes_on_after_a_pause() -> None:
    """The second is sent when the server goes on, before the first, which has waited for the node's way, is handled."""
    one = rig("partition")
    clock, session = one.clock, one.nodes.session(1)
    one.nodes.cut(session, 4 * NS_PER_S, lambda: None, lambda: None)
    clock.at(3 * NS_PER_S, lambda: one.nodes.to_server(session, lambda: one.note("joined")))
    one.nodes.to_server(session, lambda: one.note("lost"))
    clock.pause_until(6 * NS_PER_S, lambda: one.note("resumed"))
    clock.run()
    assert one.seen == [("resumed", 6.0), ("lost", 6.0), ("joined", 6.0)]


def test_what_waits_for_the_controller_comes_in_order_of_time() -> None:
    """A node that is lost and comes again while the controller is paused is lost first, whatever was planned first."""
    clock, seen = Clock(), list[str]()
    for what, at_s in (("came again", 2), ("was lost", 1)):
        clock.at(at_s * NS_PER_S, lambda what=what: seen.append(what))  # type: ignore[misc]
    clock.pause_until(3 * NS_PER_S, lambda: seen.append("resumed"))
    clock.run()
    assert seen == ["resumed", "was lost", "came again"]


def test_a_node_that_leaves_hands_over_what_only_it_has() -> None:
    one = rig("fetch=1:4")
    blob, session = one.write(1), one.nodes.session(1)
    session.is_cordoned = True
    assert not one.nodes.hands_over(session)
    one.clock.run()
    assert one.nodes.hands_over(session)
    assert one.nodes.blobs.nodes(blob) == {1, 2}


def test_clients_of_a_front_end_that_dies_are_lost_once() -> None:
    clock, lost = Clock(), Counter[str]()
    front_ends = FrontEnds(clock, FaultInjector(parse_faults(["frontend=0.5:2"]), 1), lambda uid: lost.update([uid]))
    for uid in range(60):
        front_ends.take(str(uid))
    clock.run()
    assert 10 < len(lost) < 50, "about half of the clients wait"
    assert set(lost.values()) == {1}
