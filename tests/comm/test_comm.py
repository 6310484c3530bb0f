"""Groups of real processes: what they say to each other, how they meet, and how they end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from threading import Thread, Timer

import numpy as np
import pytest
import torch

from comm_team import (
    ANSWER_S,
    Team,
    all_gather,
    all_to_all,
    break_all,
    break_off,
    broadcast,
    close,
    keep_error,
    let_them_wait,
    open_and_close,
    raised,
    relay,
    remembered,
    talk,
    talk_for_ever,
    talk_late,
    values,
)
from tilework.comm.joining import Joining
from tilework.comm.rendezvous import Meeting
from tilework.comm.sockets import SocketComm
from tilework.core.comm import GroupBroken

SOON_S = 30.0  # Sooner than LINK_TIMEOUT_S, after which the members of a node break off by themselves.

NO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
WAYS = ["sockets", pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=[NO_GPUS, pytest.mark.gpu])]
PIECES = {
    "even": [[3] * 4] * 4,
    "uneven": [[1, 5, 2, 7], [4, 0, 3, 1], [9, 2, 6, 0], [0, 8, 1, 3]],
    "one speaks": [[2, 3, 4, 5], [0] * 4, [0] * 4, [0] * 4],
    "nobody speaks": [[0] * 4] * 4,
}
"""PIECES[name][i][j] is the length of what rank i has for rank j."""


@pytest.fixture(scope="module", params=WAYS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param, min(4, torch.cuda.device_count()) if request.param == "nccl" else 4)
    yield team
    team.end()


@pytest.fixture
def mortals() -> Iterator[Team]:
    """Three processes to be killed."""
    team = Team("sockets", 3)
    yield team
    team.end()


def all_members(team: Team) -> range:
    return range(len(team.members))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("pieces", PIECES)
def test_all_to_all(team: Team, dtype: torch.dtype, pieces: str) -> None:
    size = len(team.members)
    lengths = PIECES[pieces]
    answers = team.ask(all_members(team), all_to_all, team.new_group(*all_members(team)), dtype, lengths)
    for rank, answer in enumerate(answers):
        expected = [values(source, rank, lengths[source][rank]) for source in range(size)]
        assert answer == np.concatenate(expected).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("length", [0, 1, 1000])
def test_all_gather_broadcast_send_and_recv(team: Team, dtype: torch.dtype, length: int) -> None:
    everyone, ref = all_members(team), team.new_group(*all_members(team))
    size = len(everyone)
    everything = np.concatenate([values(rank, 0, length) for rank in everyone]).tolist()
    assert team.ask(everyone, all_gather, ref, dtype, length) == [everything] * size
    for root in everyone:
        said = values(root, 0, 2 * length).tolist()
        assert team.ask(everyone, broadcast, ref, dtype, length, root) == [said] * size
    assert team.ask(everyone, relay, ref, dtype, length) == [values(9, 9, length).tolist()] * size


def test_ranks_follow_the_order_of_the_group(team: Team) -> None:
    first, last = 0, len(team.members) - 1
    ref = team.new_group(last, first)
    assert team.ask([last, first], relay, ref, torch.float32, 3) == [values(9, 9, 3).tolist()] * 2
    team.tell([last, first], broadcast, ref, torch.float32, 1, 0)
    assert [team.members[device_id].answer() for device_id in (first, last)] == [values(0, 0, 2).tolist()] * 2


@pytest.mark.parametrize("team", WAYS[:2], indirect=True)
def test_overlapping_groups_in_one_global_order(team: Team) -> None:
    """Members form different groups, and different numbers of them, and use them by turns."""
    members = [(0, 1), (1, 2, 3), (0, 1, 2, 3), (2, 3), (0, 3), (0, 2, 3)]
    refs = [team.new_group(*devices) for devices in members]
    order = [refs[index] for index in (0, 1, 0, 2, 4, 1, 3, 5, 2, 0, 5, 4, 3, 1)]
    for ref in order:
        team.tell(ref.devices, talk, ref)
    for ref in order:
        assert [team.members[device_id].answer() for device_id in ref.devices] == [True] * len(ref.devices)


def test_a_member_may_join_late(team: Team) -> None:
    """To the forming of the group and to a collective, with the others waiting."""
    everyone, ref = all_members(team), team.new_group(*all_members(team))
    for _ in range(2):
        team.tell(everyone[:-1], talk, ref)
        team.tell(everyone[-1:], talk_late, ref, 1.0)
        assert [member.answer() for member in team.members] == [True] * len(everyone)


@pytest.mark.parametrize("team", ["sockets"], indirect=True)
def test_breaking_off_ends_a_call_whose_peer_never_joins(team: Team) -> None:
    ref = team.new_group(0, 1, 2)
    assert team.ask(ref.devices, talk, ref) == [True] * 3
    team.tell((0, 1), talk, ref)
    let_them_wait()
    team.tell((0, 1), break_off, ref.group_id)
    assert [type(team.members[device_id].answer(SOON_S)) for device_id in (0, 1)] == [GroupBroken] * 2
    # The third is told by the connections alone, also when it comes much later.
    assert isinstance(team.members[2].ask(talk, ref), GroupBroken)


@pytest.mark.parametrize("team", ["sockets"], indirect=True)
def test_one_member_breaking_off_ends_the_calls_of_those_that_wait_for_it(team: Team) -> None:
    ref = team.new_group(0, 1)
    assert team.ask(ref.devices, talk, ref) == [True] * 2
    team.members[0].tell(talk, ref)
    let_them_wait()
    team.members[1].tell(break_off, ref.group_id)
    assert isinstance(team.members[0].answer(SOON_S), GroupBroken)


@pytest.mark.parametrize("team", ["sockets"], indirect=True)
def test_breaking_off_ends_the_wait_for_members_that_never_come(team: Team) -> None:
    ref = team.new_group(0, 1, 2)
    team.tell((0, 1), talk, ref)
    let_them_wait()
    team.tell((0, 1), break_off, ref.group_id)
    assert [type(team.members[device_id].answer(SOON_S)) for device_id in (0, 1)] == [GroupBroken] * 2


@pytest.mark.parametrize("team", ["sockets"], indirect=True)
def test_a_broken_group_stays_broken_and_a_new_one_works(team: Team) -> None:
    early, used, fresh = (team.new_group(0, 1) for _ in range(3))
    team.members[0].tell(break_off, early.group_id)
    assert isinstance(team.members[0].ask(talk, early), GroupBroken)
    assert str(early.group_id) not in os.listdir(team.rendezvous.address)
    assert team.ask((0, 1), talk, used) == [True] * 2
    team.tell((0, 1), break_off, used.group_id)
    for _ in range(2):
        assert [type(answer) for answer in team.ask((0, 1), talk, used)] == [GroupBroken] * 2
    assert team.ask((0, 1), close, early.group_id, used.group_id) == [None] * 2
    assert team.ask((0, 1), talk, fresh) == [True] * 2


@pytest.mark.parametrize("team", ["sockets"], indirect=True)
def test_closed_groups_leave_nothing_behind(team: Team) -> None:
    everyone = all_members(team)
    before = team.ask(everyone, open_and_close, [team.new_group(*everyone)])
    others = os.listdir(team.rendezvous.address)
    for devices, count in (((0, 1), 75), ((2, 3), 75), (everyone, 50)):
        team.tell(devices, open_and_close, [team.new_group(*devices) for _ in range(count)])
    for member in team.members:
        member.answer()
    assert [member.answer() for member in team.members] == before
    assert os.listdir(team.rendezvous.address) == others


def test_a_killed_member_is_seen_by_those_in_a_collective_with_it(mortals: Team) -> None:
    ref = mortals.new_group(0, 1, 2)
    mortals.tell(ref.devices, talk_for_ever, ref)
    let_them_wait()
    mortals.members[2].kill()
    assert [type(mortals.members[device_id].answer(SOON_S)) for device_id in (0, 1)] == [GroupBroken] * 2
    survivors = mortals.new_group(0, 1)
    assert mortals.ask((0, 1), talk, survivors) == [True] * 2


def test_a_loss_is_passed_on_to_those_that_wait_for_a_survivor(mortals: Team) -> None:
    ref = mortals.new_group(0, 1, 2)
    assert mortals.ask(ref.devices, talk, ref) == [True] * 3
    mortals.tell((1, 2), relay, ref, torch.float32, 1)
    let_them_wait()
    mortals.members[0].kill()
    assert [type(mortals.members[device_id].answer(SOON_S)) for device_id in (1, 2)] == [GroupBroken] * 2


def test_broken_groups_leave_nothing_but_their_number(mortals: Team) -> None:
    """Also while somebody keeps the errors that they raised."""
    before = mortals.ask((0, 1), open_and_close, [mortals.new_group(0, 1)])
    for _ in range(20):
        ref = mortals.new_group(0, 1)
        assert mortals.ask((0, 1), talk, ref) == [True] * 2
        mortals.members[0].tell(keep_error, ref)
        mortals.members[1].tell(break_off, ref.group_id)
        assert mortals.members[0].answer() is None
        assert mortals.ask((0, 1), close, ref.group_id) == [None] * 2
    never = mortals.new_group(0, 1, 2)
    mortals.members[0].tell(talk, never)
    let_them_wait()
    mortals.members[0].tell(break_off, never.group_id)
    assert isinstance(mortals.members[0].answer(), GroupBroken)
    mortals.members[0].ask(close, never.group_id)
    assert mortals.ask((0, 1), open_and_close, [mortals.new_group(0, 1)]) == before
    assert mortals.ask((0, 1), remembered) == [0, 0]
    assert os.listdir(mortals.rendezvous.address) == []


def test_a_member_that_was_lost_while_connecting_is_seen_by_those_that_connect_to_it(mortals: Team) -> None:
    lost = mortals.new_group(0, 1)
    with Joining(Meeting(mortals.rendezvous.address, lost.group_id).path, 0, 2):
        pass  # It has listened, and is gone.
    assert isinstance(mortals.members[1].ask(talk, lost), GroupBroken)


def test_breaking_off_ends_the_wait_for_a_member_that_was_lost_while_connecting(mortals: Team) -> None:
    """The others have come and never connect."""
    for _ in range(3):
        lost = mortals.new_group(0, 1, 2)
        directory = Meeting(mortals.rendezvous.address, lost.group_id).path
        with Joining(directory, 1, 3), Joining(directory, 2, 3):
            mortals.members[0].tell(talk, lost)
            let_them_wait()
            mortals.members[0].tell(break_off, lost.group_id)
            assert isinstance(mortals.members[0].answer(SOON_S), GroupBroken)
        mortals.members[0].ask(close, lost.group_id)
    survivors = mortals.new_group(0, 1)
    assert mortals.ask((0, 1), talk, survivors) == [True] * 2


def test_a_member_that_is_lost_before_it_has_said_its_rank_breaks_the_group(tmp_path: Path) -> None:
    with Joining(tmp_path, 0, 3) as joining, socket.socket(socket.AF_UNIX) as lost:
        lost.connect(joining._address(0))
        assert not joining.advance()
        lost.close()
        with pytest.raises(GroupBroken):
            joining.advance()


def test_a_group_forms_whoever_comes_first_and_leaves_no_socket(tmp_path: Path) -> None:
    """Directories may lie deeper than an address of a socket is long."""
    directory = tmp_path / ("long" * 40)
    for order in permutations(range(3)):
        members: dict[int, Joining] = {}
        with ExitStack() as stack:
            for rank in order:
                members[rank] = stack.enter_context(Joining(directory, rank, 3))
                is_done = [member.advance() for _ in range(2) for member in members.values()]
            assert all(is_done[-3:])
        shutil.rmtree(directory)
        for rank, member in members.items():
            for other, connection in member.connections.items():
                connection.send(bytes([rank]))
                assert members[other].connections[rank].recv(1) == bytes([rank])
        for member in members.values():
            for connection in member.connections.values():
                connection.close()


def test_pieces_larger_than_the_buffers_pass_each_other(tmp_path: Path) -> None:
    """Both ends write 8 MB before either reads: they must take turns."""
    mine, theirs = socket.socketpair()
    ends = SocketComm(0, {1: mine}), SocketComm(1, {0: theirs})
    sent = [torch.randn(2_000_000) for _ in ends]
    heard = [torch.empty(2_000_000) for _ in ends]
    threads = [
        Thread(target=end.exchange, args=([(1 - rank, sent[rank])], [(1 - rank, heard[rank])]))
        for rank, end in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_S)
    assert torch.equal(heard[0], sent[1])
    assert torch.equal(heard[1], sent[0])
    for end in ends:
        end.close()


@pytest.mark.parametrize("when", ["before", "while reading", "while writing"])
def test_a_connection_that_breaks_wakes_who_waits_for_it(when: str) -> None:
    """Also a sender: gloo left one asleep whose bytes were being written."""
    mine, theirs = socket.socketpair()
    comm = SocketComm(0, {1: mine})
    pieces = [(1, torch.zeros(2_000_000))]
    calls = {"before": (pieces, []), "while reading": ([], pieces), "while writing": (pieces, [])}
    if when == "before":
        theirs.close()
    else:
        Timer(0.2, theirs.close).start()
    with pytest.raises(GroupBroken):
        comm.exchange(*calls[when])
    comm.close()


def test_breaking_all_ends_current_and_later_calls(mortals: Team) -> None:
    """In a collective and for a group to form."""
    ref, forming, later = (mortals.new_group(0, 1, 2) for _ in range(3))
    assert mortals.ask(ref.devices, talk, ref) == [True] * 3
    mortals.members[0].tell(talk, ref)
    mortals.members[1].tell(talk, forming)
    let_them_wait()
    mortals.tell((0, 1), break_all)
    assert [type(mortals.members[device_id].answer(SOON_S)) for device_id in (0, 1)] == [GroupBroken] * 2
    assert [type(answer) for answer in mortals.ask((0, 1), talk, later)] == [GroupBroken] * 2


def test_break_off_ends_the_wait_for_a_dead_member(mortals: Team) -> None:
    ref = mortals.new_group(0, 1, 2)
    mortals.members[2].kill()
    mortals.tell((0, 1), talk, ref)
    let_them_wait()
    mortals.tell((0, 1), break_off, ref.group_id)
    assert [type(mortals.members[device_id].answer(SOON_S)) for device_id in (0, 1)] == [GroupBroken] * 2


def test_a_member_that_missed_the_loss_learns_of_it_in_its_next_call(mortals: Team) -> None:
    ref = mortals.new_group(0, 1, 2)
    assert mortals.ask(ref.devices, talk, ref) == [True] * 3
    mortals.members[2].kill()
    assert mortals.ask((0, 1), raised, ref) == [["broken"] * 2] * 2


def test_without_a_rendezvous_no_group_forms(mortals: Team) -> None:
    mortals.rendezvous.close()
    answer = mortals.members[0].ask(talk, mortals.new_group(0, 1))
    assert isinstance(answer, GroupBroken)


def test_the_server_can_host_a_rendezvous_without_torch() -> None:
    block = (
        "import sys; sys.modules['torch'] = None; from tilework.comm.rendezvous import Rendezvous; Rendezvous().close()"
    )
    subprocess.run([sys.executable, "-c", block], check=True)


def test_a_group_of_one_copies_and_misuse_is_no_broken_group() -> None:
    comm = SocketComm(0, {})
    output = torch.empty(3)
    comm.all_to_all(output, torch.arange(3.0), [3], [3])
    assert output.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError):
        comm.all_gather(torch.empty(2), torch.arange(3.0))
    comm.close()
    with pytest.raises(GroupBroken):
        comm.all_gather(output, output)
