"""What an executor tells its workers of their node's communicator when one of them is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tilework.core.model import ModelSource
from tilework.core.wire.commands import BreakGroup, EnterNode, GroupRef
from tilework.runtime.local_executor import LocalConfig, LocalExecutor

Sent = list[tuple[int, Any]]


@pytest.fixture
def sent() -> Sent:
    return []


@pytest.fixture
def executor(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> LocalExecutor:
    """Three workers, all up, on one communicator; what is sent to those that there are is noted."""
    config = LocalConfig(num_workers=3, sources=(ModelSource(path="m"),), collectives="gloo")
    executor: Any = LocalExecutor(config)
    nothing: Any = type("Nothing", (), {"__getattr__": lambda self, name: lambda *_: None, "pid": 1})()
    executor._blobs = executor._changes = executor._listener = nothing
    executor._workers = dict.fromkeys(range(3), nothing)
    executor._up = {0, 1, 2}
    monkeypatch.setattr(executor, "send", lambda device_id, command: sent.append((device_id, command)))
    monkeypatch.setattr(executor, "_schedule_restart", lambda device_id, reason: None)
    executor._form_node_group()
    made: LocalExecutor = executor
    return made


def test_nobody_waits_for_a_worker_that_was_lost_before_it_entered(executor: LocalExecutor, sent: Sent) -> None:
    """No group of it was used yet; the others are in the middle of entering, and read what is next when that ends."""
    (node,) = {command.node for _, command in sent}
    sent.clear()
    executor._on_exit(1, "killed")
    told = [command for device_id, command in sent if device_id == 0]
    assert told == [BreakGroup(node.group_id, unless_formed=True), EnterNode(GroupRef(node.group_id + 1, (0, 2)))]
    assert [command for device_id, command in sent if device_id == 2] == told


def test_a_worker_that_joins_does_not_break_what_runs(executor: LocalExecutor, sent: Sent) -> None:
    executor._on_exit(1, "killed")
    sent.clear()
    executor._up.add(1)
    executor._form_node_group()
    assert {type(command) for _, command in sent} == {EnterNode}


def test_the_last_worker_is_in_no_node(executor: LocalExecutor, sent: Sent) -> None:
    for device_id in (0, 1):
        executor._on_exit(device_id, "killed")
    sent.clear()
    executor._on_exit(2, "killed")
    assert not sent
