"""Which loads may begin before their turn."""

from __future__ import annotations

import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

from commands import steps
from tilework.comm.groups import Groups
from tilework.comm.messages import send_message
from tilework.core.wire.commands import DropWeights, LoadWeights, StartOver
from tilework.worker.models.loads_ahead import LoadsAhead
from tilework.worker.process import _execute_all, _PipeEnd

RUN, OTHER_RUN = steps(1, ((1, 0),), 1), steps(2, ((1, 1),), 1)


def received(*commands: object) -> LoadsAhead:
    ahead = LoadsAhead()
    for command in commands:
        ahead.receive(command)  # type: ignore[arg-type]
    return ahead


def test_loads_behind_runs_begin_once() -> None:
    first, second = LoadWeights(1, ("a",)), LoadWeights(2, ("b",))
    ahead = received(RUN, first, OTHER_RUN, second)
    assert ahead.take() == [first, second]
    assert ahead.take() == []


def test_a_load_for_which_something_is_dropped_waits_for_its_turn() -> None:
    drop, load, behind = DropWeights(("a",)), LoadWeights(1, ("b",)), LoadWeights(2, ("c",))
    ahead = received(RUN, drop, load)
    assert ahead.take() == []
    ahead.executed(RUN)
    ahead.executed(drop)
    assert ahead.take() == [], "its turn is next"
    ahead.receive(behind)
    assert ahead.take() == [behind], "nothing is dropped any more"


def test_a_change_of_any_other_kind_holds_loads_up_too() -> None:
    assert received(StartOver(), LoadWeights(1, ("a",))).take() == []


def test_a_load_that_had_its_turn_does_not_begin_again() -> None:
    load, other = LoadWeights(1, ("a",)), LoadWeights(2, ("b",))
    ahead = received(load, other)
    ahead.executed(load)
    assert ahead.take() == [other]


def test_a_process_takes_note_of_what_comes_and_of_what_has_had_its_turn() -> None:
    parent, child = socket.socketpair()
    link, executed = _PipeEnd(child, partial(Groups, 0, "")), list[object]()
    drop, load, later = DropWeights(("a",)), LoadWeights(1, ("b",)), LoadWeights(2, ("c",))
    for command in (drop, load):
        send_message(parent, command)
    parent.close()  # Ends it.
    worker: Any = SimpleNamespace(loads=SimpleNamespace(load_block=lambda: False), execute=executed.append)
    _execute_all(link, worker)
    assert executed == [drop, load]
    link.loads_ahead.receive(later)
    assert link.loads_ahead.take() == [later], "no drop is left in the queue"
