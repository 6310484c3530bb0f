"""What an executor tells its workers of their node's communicator, and which of them may form groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tilework.core.wire.commands import BreakGroup, CloseGroup, EnterNode, GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.core.work import Group
from tilework.runtime.links.communicator import NodeCommunicator
from tilework.runtime.links.groups import GroupTable

ALL = (0, 1, 2)


class Rig:
    """Three workers, of which what they are sent is noted; timers go off when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.silent: set[int] = set()
        self.links: list[tuple[Group, bool]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.table = GroupTable()
        self.node = NodeCommunicator(
            self.table,
            lambda device_id, command: self.sent.append((device_id, command)),
            lambda _node_id: SimpleNamespace(has_come=lambda one: one not in self.silent, end=lambda: None),
            lambda: self.links.append((self.node.linked, self.node.is_forming)),
            self._later,  # type: ignore[arg-type]
        )

    def _later(self, delay_s: float, call: Callable[[], None]) -> Any:
        timer = (delay_s, call)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self.timers and self.timers.remove(timer))

    def told(self, device_id: int) -> list[Any]:
        told = [command for one, command in self.sent if one == device_id]
        self.sent = [(one, command) for one, command in self.sent if one != device_id]
        return told

    def entered(self) -> GroupRef:
        """The node that was entered last."""
        node: GroupRef = next(command.node for _, command in reversed(self.sent) if isinstance(command, EnterNode))
        return node

    def meet(self, *devices: int) -> GroupRef:
        """Let these say that the node that was entered last stands."""
        node = self.entered()
        for device_id in devices:
            self.node.answered(device_id, NodeFormed(node.group_id, 1))
        return node

    def group(self, *devices: int) -> GroupRef:
        return self.table.use(devices, self.node.node_id(devices))[0]


@pytest.fixture
def rig() -> Rig:
    """All workers stand, and have been told so."""
    rig = Rig()
    rig.node.form(ALL)
    rig.meet(*ALL)
    rig.sent.clear()
    rig.links.clear()
    return rig


def test_groups_are_offered_only_once_all_workers_have_met() -> None:
    rig = Rig()
    rig.node.form(ALL)
    node = rig.meet(2, 0)
    assert rig.links == [((), True)]
    rig.node.answered(1, NodeFormed(node.group_id, 1))
    assert rig.links == [((), True), (ALL, False)]
    assert rig.group(0, 2).node_id == node.group_id
    assert not rig.timers


def test_a_loss_ends_the_node_once_and_the_next_forms_at_once(rig: Rig) -> None:
    """What runs in groups without the lost worker goes on: the former node is closed behind it."""
    kept, former = rig.group(0, 2), rig.table.use((0, 1))
    rig.node.lose(1, (0, 2))
    (node,) = {command.node for _, command in rig.sent if isinstance(command, EnterNode)}
    told = [CloseGroup(kept.group_id), CloseGroup(kept.node_id or 0), EnterNode(node)]
    assert (rig.told(0), rig.told(2)) == (told, told)
    assert not rig.told(1)[2:], "what it is told is sent to nobody"
    assert former[0].node_id is None
    assert rig.links == [((), True)]
    rig.sent.append((0, EnterNode(node)))
    rig.meet(0, 2)
    assert rig.links[1:] == [((0, 2), False)]
    assert rig.group(0, 2).node_id == node.group_id


def test_what_runs_in_groups_of_a_former_node_can_be_broken_off(rig: Rig) -> None:
    """A second loss, or a second group that is stuck; else a healthy worker waits for the lost one, and is killed."""
    table, first, second, third = rig.table, rig.group(0, 1), rig.group(1, 2), rig.group(0, 2)
    rig.node.break_off(third)
    assert table.forget(first)
    assert not table.forget(first)
    assert table.forget_device(2) == [second, third]


def test_one_that_joins_takes_no_group_from_the_others(rig: Rig) -> None:
    rig.node.lose(2, (0, 1))
    rig.meet(0, 1)
    used = rig.group(0, 1)
    rig.sent.clear()
    rig.links.clear()
    rig.node.form(ALL)
    assert rig.links == [((0, 1), True)], "the worker that joins is alone until it is connected"
    assert rig.group(0, 1) == used
    assert {type(command) for _, command in rig.sent} == {EnterNode}
    node = rig.meet(*ALL)
    assert rig.links[1:] == [(ALL, False)]
    assert rig.told(0)[1:] == [CloseGroup(used.group_id), CloseGroup(used.node_id or 0)]
    assert rig.group(0, 1).node_id == node.group_id


def test_several_groups_that_break_off_at_once_form_one_node(rig: Rig) -> None:
    """Those after the first are parts of a node that has ended."""
    broken = [rig.group(0, 1), rig.group(1, 2), rig.group(*ALL)]
    for ref in broken:
        rig.node.break_off(ref)
    assert sum(isinstance(command, EnterNode) for command in rig.told(0)) == 1
    assert rig.links == [((), True)]


def test_a_worker_that_is_lost_while_a_node_forms_is_waited_for_by_nobody() -> None:
    rig = Rig()
    rig.node.form(ALL)
    given_up = rig.meet(0)
    rig.sent.clear()
    rig.node.lose(1, (0, 2))
    assert rig.told(2)[:2] == [BreakGroup(given_up.group_id), CloseGroup(given_up.group_id)]
    rig.node.answered(2, NodeFormed(given_up.group_id, 1))
    rig.node.answered(0, NodeFormed(given_up.group_id, 0, "broken off"))
    assert rig.node.is_forming, "late answers are of no node"
    rig.meet(0, 2)
    assert rig.node.linked == (0, 2)


@pytest.mark.parametrize("how", ["one says so", "none answers"])
def test_a_node_that_cannot_form_leaves_all_alone_and_is_tried_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others do not wait for one that has failed: their back end could not be interrupted for long."""
    rig = Rig()
    delays_s = list[float]()
    rig.node.form(ALL)
    for _ in range(8):
        node = rig.meet(0)
        if how == "one says so":
            rig.node.answered(2, NodeFormed(node.group_id, 0, "out of memory"))
            assert rig.node.failure == "worker 2: out of memory"
        else:
            for _ in range(2):  # They have come, and more does not follow.
                ((_, look),) = rig.timers
                rig.timers.clear()
                look()
            assert rig.node.failure == "workers 1, 2 did not answer within 45 s"
        assert rig.links[-1] == ((), False)
        assert (1, BreakGroup(node.group_id)) in rig.sent
        ((delay_s, again),) = rig.timers
        delays_s.append(delay_s)
        rig.timers.clear()
        again()
        assert rig.node.is_forming
    assert delays_s == [5, 10, 20, 40, 80, 160, 300, 300]
    assert "workers 0, 1, 2 cannot form groups, and serve each request on one device: " in caplog.text
    rig.meet(*ALL)
    assert (rig.node.linked, rig.node.failure) == (ALL, "")


def test_one_that_stands_still_takes_groups_from_the_others_for_a_moment(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it is found and killed, which may take longer, or goes on."""
    rig.silent = {1}
    rig.node.break_off(rig.group(1, 2))
    ((delay_s, go_without),) = rig.timers
    assert delay_s == 2.0
    go_without()
    rig.meet(0, 2)
    assert rig.node.linked == (0, 2)
    for again_s in (5.0, 10.0):
        ((delay_s, again),) = rig.timers
        assert delay_s == again_s
        rig.timers.clear()
        again()
        assert (rig.node.linked, rig.node.is_forming) == ((0, 2), True), "groups are offered while it is tried"
        ((_, go_without),) = rig.timers
        go_without()
        assert (rig.node.linked, rig.node.is_forming) == ((0, 2), False)
    rig.silent.clear()
    ((_, again),) = rig.timers
    again()
    rig.meet(*ALL)
    assert rig.node.linked == ALL
    assert not rig.timers
    assert "workers 0, 1, 2 run alone until they are connected again" in caplog.text
    assert "workers 0, 2 can form groups" in caplog.text


def test_the_last_worker_is_in_no_node(rig: Rig) -> None:
    rig.node.lose(0, (1, 2))
    rig.node.lose(1, (2,))
    assert (rig.node.linked, rig.node.is_forming) == ((), False)
    assert not rig.timers
