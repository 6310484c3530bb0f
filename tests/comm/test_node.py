"""The communicator of a node: its parts, what follows when it is aborted, and NCCL as far as it can be emulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from comm_team import Team, break_off, talk, talk_for_ever
from tilework.comm import links
from tilework.comm.exchange import Piece
from tilework.comm.groups import Groups
from tilework.comm.links import NcclLink
from tilework.comm.node import Node, NodePart
from tilework.comm.rendezvous import Rendezvous
from tilework.core.comm import GroupBroken
from tilework.core.wire.commands import GroupRef


@dataclass
class Notes:
    """A link that takes notes; `during` is called while messages are under way."""

    calls: list[Any] = field(default_factory=list)
    during: Callable[[], None] = lambda: None

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        self.calls.append(([rank for rank, _ in sends], [rank for rank, _ in receives]))
        self.during()

    def abort(self) -> None:
        self.calls.append("abort")


def gather(part: NodePart) -> None:
    part.all_gather(torch.empty(part.size), torch.ones(1))


def test_a_part_talks_to_its_own_members_by_their_ranks_of_the_node() -> None:
    notes = Notes()
    part = NodePart(Node(notes), 1, (5, 2, 7))
    gather(part)
    gather(part.among([2, 1]))  # type: ignore[arg-type]
    assert notes.calls == [([7, 5], [5, 7]), ([7], [7])]


def test_calls_that_were_under_way_when_the_node_was_aborted_are_known_as_such() -> None:
    """The call itself raises nothing, as on a GPU."""
    notes = Notes()
    node = Node(notes)
    part, other = NodePart(node, 0, (0, 1)), NodePart(node, 0, (0, 2))
    cell = part.among([0, 1])
    gather(part)
    assert not part.has_aborted_calls
    notes.during = other.abort
    gather(part)
    assert part.has_aborted_calls
    assert cell.has_aborted_calls
    with pytest.raises(GroupBroken):
        gather(part)
    part.abort()
    assert notes.calls.count("abort") == 1


def test_a_communicator_that_fails_is_aborted() -> None:
    def fail() -> None:
        raise RuntimeError("unhandled system error")

    notes = Notes(during=fail)
    part = NodePart(Node(notes), 0, (0, 1))
    with pytest.raises(GroupBroken):
        gather(part)
    assert notes.calls[-1] == "abort"


def test_members_that_met_while_the_node_was_aborted_have_not_met() -> None:
    notes = Notes()
    part = NodePart(Node(notes), 0, (0, 1))
    notes.during = part.abort
    with pytest.raises(GroupBroken):
        part.meet("cpu")


class EmulatedNccl:
    """torch's NCCL back end, of which only the order of calls is known here."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.calls = [("connect", rank, size, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))]

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("device", device))

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Any:
        self.calls.append("end")
        return SimpleNamespace(wait=lambda: self.calls.append("wait"))

    def send(self, tensors: list[Any], rank: int, tag: int) -> None:
        self.calls.append(("send", rank))

    def recv(self, tensors: list[Any], rank: int, tag: int) -> None:
        self.calls.append(("recv", rank))

    def abort(self) -> None:
        self.calls.append("abort")


def test_messages_of_nccl_go_in_one_group_on_one_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a group of operations torch would make a communicator for each pair of ranks."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", EmulatedNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    cards = list[int]()
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    link = NcclLink(None, 1, 4, 6)  # type: ignore[arg-type]
    assert cards == [6], "the thread that connects has the first card, unless it says so"
    assert link._backend.calls == [("connect", 1, 4, "0"), ("device", torch.device("cuda", 6))]
    part = NodePart(Node(link), 1, (0, 1, 3))
    gather(part)
    assert link._backend.calls[2:] == ["start", ("send", 3), ("send", 0), ("recv", 0), ("recv", 3), "end", "wait"]
    part.abort()
    assert link._backend.calls[-1] == "abort"


@pytest.fixture
def mortals() -> Iterator[Team]:
    team = Team("gloo", 3)
    yield team
    team.end()


@pytest.mark.slow
def test_the_others_go_on_in_the_next_node_when_a_worker_is_lost(mortals: Team) -> None:
    """Also in a group that was kept from the former one."""
    kept, lost = mortals.new_group(0, 1), mortals.new_group(0, 1, 2)
    for ref in (kept, lost):
        assert mortals.ask(ref.devices, talk, ref) == [True] * len(ref.devices)
    mortals.tell(lost.devices, talk_for_ever, lost)
    mortals.members[2].kill()
    mortals.tell((0, 1), break_off, lost.group_id)
    assert [type(mortals.members[device_id].answer()) for device_id in (0, 1)] == [GroupBroken] * 2
    assert [type(answer) for answer in mortals.ask((0, 1), talk, kept)] == [GroupBroken] * 2, "of the former node"
    mortals.enter(0, 1)
    assert mortals.ask((0, 1), talk, kept) == [True] * 2
    mortals.enter(1)
    mortals.enter(0, 1)
    assert mortals.ask((0, 1), talk, kept) == [True] * 2


def test_a_member_that_never_enters_is_not_waited_for_once_the_node_is_broken_off() -> None:
    rendezvous = Rendezvous()
    groups = Groups(0, rendezvous.address, "gloo")
    Timer(0.05, partial(groups.break_off, 7, unless_formed=True)).start()
    with pytest.raises(GroupBroken):
        groups.enter(GroupRef(7, (0, 1)))
    with pytest.raises(GroupBroken):
        groups.open(GroupRef(8, (0, 1)))
    rendezvous.close()


def test_a_node_that_has_formed_goes_on_without_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in its other groups is not done again."""
    monkeypatch.setitem(links.LINKS, "gloo", lambda *_: Notes())
    monkeypatch.setattr(NodePart, "meet", lambda self, device: None)
    rendezvous = Rendezvous()
    groups = Groups(0, rendezvous.address, "gloo")
    groups.enter(GroupRef(7, (0,)))
    kept = groups.open(GroupRef(8, (0,)))
    groups.break_off(7, unless_formed=True)
    assert groups.open(GroupRef(8, (0,))) is kept
    assert not kept.has_aborted_calls
    groups.break_off(7)
    assert kept.has_aborted_calls
    rendezvous.close()
