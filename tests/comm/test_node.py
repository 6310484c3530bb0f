"""The communicator of a node: its parts, what follows when it is aborted, and NCCL as far as it can be emulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from comm_team import Team, break_off, close, let_them_wait, talk, talk_for_ever
from tilework.comm import links
from tilework.comm.exchange import Piece
from tilework.comm.groups import Groups
from tilework.comm.links import NcclLink
from tilework.comm.node import Node, NodePart
from tilework.comm.rendezvous import Meeting, Rendezvous
from tilework.core.comm import GroupBroken
from tilework.core.model import ModelSource
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from waiting import PATIENCE_S, eventually


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
        split = getattr(options, "split_color", None)
        made = ("connect", rank, size) if split is None else ("split", rank, size, split, options.split_from)
        self.calls = [made, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *[one for one in arguments if not isinstance(one, torch.Tensor | list)]))
            return SimpleNamespace(wait=lambda: None)

        return call


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> NcclLink:
    """Rank 1 of 6, whose devices 0 to 5 are all of the node."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", EmulatedNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _stream: None)
    return NcclLink(torch.distributed.HashStore(), 1, 6, 1)


def test_a_node_of_nccl_is_made_on_its_own_card_and_stream(monkeypatch: pytest.MonkeyPatch, link: NcclLink) -> None:
    """The thread that makes it has the first card otherwise, and its first messages would wait for the run."""
    cards, streams = list[int](), list[Any]()
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    link = NcclLink(torch.distributed.HashStore(), 1, 4, 6)
    assert (cards, streams) == ([6], [torch.device("cuda", 6)])
    assert link._backend.calls == [("connect", 1, 4), "0", ("eager_connect_single_device", torch.device("cuda", 6))]


def test_messages_of_nccl_outside_of_its_parts_go_in_one_group_of_operations(link: NcclLink) -> None:
    """Outside of a group of operations torch would make a communicator for each pair of ranks."""
    part = NodePart(Node(link), 1, (0, 1, 3))
    gather(part)
    coalesced = ["_start_coalescing", "send", "send", "recv", "recv", "_end_coalescing"]
    assert [call[0] for call in link._backend.calls[3:]] == coalesced
    part.abort()
    assert link._backend.calls[-1] == ("abort",)


def split_node(link: NcclLink, monkeypatch: pytest.MonkeyPatch, *, heard: int = 0) -> Node:
    """`heard` is what another rank says of its splits."""
    monkeypatch.setattr(NodePart, "all_gather", lambda self, output, source: output.fill_(heard))
    node = Node(link, 1)
    node.split(tuple(range(6)), "cpu")
    monkeypatch.undo()
    return node


EXCHANGES: dict[str, Callable[[NodePart], None]] = {
    "alltoall_base": lambda part: part.all_to_all(
        torch.empty(part.size), torch.ones(part.size), [1] * part.size, [1] * part.size
    ),
    "_allgather_base": gather,
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_an_exchange_of_an_aligned_group_is_one_call_into_the_communicator(
    link: NcclLink, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], name: str
) -> None:
    """FLUX has 57 attentions of two exchanges each: at degree 8 they were 1,824 calls a step, not 114."""
    node = split_node(link, monkeypatch)
    part = NodePart(node, ranks.index(1), ranks)
    calls: list[Any] = node.part(ranks)._backend.calls  # type: ignore[union-attr]
    num_before = len(calls)
    EXCHANGES[name](part)
    assert [call[0] for call in calls[num_before:]] == [name]


def test_parts_are_split_off_the_node_by_all_of_its_ranks(link: NcclLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by those that are in none: device 4 and 5 are no whole block of four."""
    node, backend = split_node(link, monkeypatch), link._backend
    pair, four = (node.part(ranks)._backend for ranks in ((0, 1), (0, 1, 2, 3)))  # type: ignore[union-attr]
    assert pair.calls[0] == ("split", 1, 2, 0, backend)
    assert four.calls[0] == ("split", 1, 4, 0, backend)
    assert node.part((1, 2)) is None
    link._rank = 4
    assert link.split([(0, 1, 2, 3)]) is None
    assert backend.calls[-1] == ("perform_nocolor_split", torch.device("cuda", 1))
    node.abort()
    assert [one.calls[-1] for one in (backend, pair, four)] == [("abort",)] * 3


def test_no_rank_uses_parts_that_another_could_not_make(link: NcclLink, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_node(link, monkeypatch, heard=1).part((0, 1)) is None


@pytest.fixture
def mortals() -> Iterator[Team]:
    team = Team("gloo", 3)
    yield team
    team.end()


@pytest.mark.slow
def test_the_others_go_on_in_the_next_node_when_a_worker_is_lost(mortals: Team) -> None:
    """Groups that need nothing of it go on in the former one, also while the next one forms."""
    kept, lost = mortals.new_group(0, 1), mortals.new_group(1, 2)
    for ref in (kept, lost):
        assert mortals.ask(ref.devices, talk, ref) == [True] * len(ref.devices)
    mortals.members[2].kill()
    mortals.tell((0, 1), break_off, lost.group_id)
    assert mortals.ask((0, 1), talk, kept) == [True] * 2
    mortals.tell((1,), talk_for_ever, lost)
    assert isinstance(mortals.members[1].answer(), GroupBroken)
    mortals.enter(0, 1)
    again = mortals.new_group(0, 1)
    assert mortals.ask((0, 1), talk, again) == [True] * 2
    assert mortals.ask((0, 1), talk, kept) == [True] * 2, "the former one ends when it is closed"
    assert mortals.ask((0, 1), close, kept.node_id) == [None] * 2
    assert [type(answer) for answer in mortals.ask((0, 1), talk, mortals.new_group(0, 1))] == [bool] * 2


@pytest.mark.slow
def test_a_group_whose_calls_are_under_way_ends_with_its_node_alone(mortals: Team) -> None:
    ref, other = mortals.new_group(0, 1), mortals.new_group(0, 2)
    assert mortals.ask((0, 2), talk, other) == [True] * 2
    mortals.tell((0, 1), talk_for_ever, ref)
    mortals.tell((0,), break_off, other.group_id)
    let_them_wait()
    assert not mortals.members[0]._connection.poll(), "a group that is not under way takes none with it"
    mortals.tell((0, 1), break_off, ref.group_id)
    assert [type(mortals.members[device_id].answer()) for device_id in (0, 1)] == [GroupBroken] * 2


NODE = GroupRef(7, (0, 1))
PART = GroupRef(8, (0, 1), NODE.group_id)


@pytest.fixture
def told() -> SimpleQueue[NodeFormed]:
    return SimpleQueue()


@pytest.fixture
def groups(told: SimpleQueue[NodeFormed]) -> Iterator[Groups]:
    """Of the worker of device 0, which is alone."""
    rendezvous = Rendezvous()
    groups = Groups(0, rendezvous.address, "gloo", tell=told.put)
    yield groups
    groups.break_all()
    rendezvous.close()


def test_forming_blocks_nobody_and_a_member_that_never_comes_is_named(
    groups: Groups, told: SimpleQueue[NodeFormed], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups._timeout_s = 0.1
    groups.enter(NODE)  # It returns at once.
    report = told.get(timeout=PATIENCE_S)
    assert (report.group_id, report.error) == (NODE.group_id, "worker 1 did not come within 0.1 s")
    with pytest.raises(GroupBroken, match="worker 1 did not come"):
        groups.open(PART)


def test_what_keeps_nccl_from_forming_is_said_and_what_to_try(
    groups: Groups, told: SimpleQueue[NodeFormed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(
            "NCCL error in: NCCLUtils.hpp:219, unhandled system error\nncclSystemError: ...\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-1\nException raised from ..."
        )

    monkeypatch.setitem(links.LINKS, "nccl", fail)
    groups._collectives = "nccl"
    Meeting(groups._address, NODE.group_id).come(1)
    groups.enter(NODE)
    error = told.get(timeout=PATIENCE_S).error
    assert "unhandled system error (Error while creating shared memory segment /dev/shm/nccl-1);" in error
    assert "\n" not in error
    for remedy in ("NCCL_P2P_DISABLE=1", "--shm-size", "NCCL_DEBUG"):
        assert remedy in error


@pytest.mark.usefixtures("link")
def test_workers_of_cards_form_a_node_of_nccl(
    groups: Groups, told: SimpleQueue[NodeFormed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first messages are tensors of the card: NCCL takes no others."""
    made: list[Any] = []
    monkeypatch.setattr(NodePart, "meet", lambda part, kind: made.append(kind))
    monkeypatch.setattr(Node, "split", lambda node, devices, kind: made.extend((type(node._link), kind)))
    config = LocalConfig(num_workers=2, sources=(ModelSource(path="shapes", device="cuda"),))
    groups._collectives = LocalExecutor(config)._collectives
    Meeting(groups._address, NODE.group_id).come(1)
    groups.enter(NODE)
    assert told.get(timeout=PATIENCE_S).error == ""
    assert made == ["cuda", NcclLink, "cuda"]


def test_a_connection_that_hangs_is_left_behind_and_ended_when_it_comes(
    groups: Groups, told: SimpleQueue[NodeFormed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A back end's constructor cannot be interrupted."""
    go_on, notes = Event(), Notes()

    def connect(*_: Any) -> Notes:
        go_on.wait()
        return notes

    groups._timeout_s = 0.1
    monkeypatch.setitem(links.LINKS, "gloo", connect)
    Meeting(groups._address, NODE.group_id).come(1)
    groups.enter(NODE)
    assert "could not connect within" in told.get(timeout=PATIENCE_S).error
    go_on.set()
    eventually(lambda: notes.calls == ["abort"])


def test_first_messages_that_do_not_arrive_are_aborted(
    groups: Groups, told: SimpleQueue[NodeFormed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with wrong IOMMU settings, or too little shared memory in a container."""
    aborted = Event()
    notes = Notes(during=aborted.wait)
    notes.abort = aborted.set  # type: ignore[method-assign]
    groups._timeout_s = 0.1
    monkeypatch.setitem(links.LINKS, "gloo", lambda *_: notes)
    Meeting(groups._address, NODE.group_id).come(1)
    groups.enter(NODE)
    assert "first messages did not arrive within" in told.get(timeout=PATIENCE_S).error
    assert aborted.is_set()


def test_a_member_that_never_enters_is_not_waited_for_once_the_node_is_broken_off(
    groups: Groups, told: SimpleQueue[NodeFormed]
) -> None:
    groups.enter(NODE)
    Timer(0.05, partial(groups.break_off, NODE.group_id)).start()
    with pytest.raises(GroupBroken, match="broken off"):
        groups.open(PART)
    assert told.empty(), "the runtime knows"
    groups.close(NODE.group_id)
    with pytest.raises(GroupBroken, match="has ended"):
        groups.open(PART)
