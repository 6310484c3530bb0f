"""A server over two nodes is killed under load, or hangs; its standby goes on, with the same workers and their states.

One on another machine, which can kill no process of the first, goes on without its help.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from builders import table
from live.nodes import TOKEN
from live.test_durable import Server, entries, first_steps, kept_step, kept_steps, kill_amid, stop_amid, uid_of
from tilework.cli.local_agents import LocalAgents, free_port, local_agents, session
from tilework.cli.options.nodes import TOKEN as TOKEN_VARIABLE
from tilework.control.log import LogEntry
from tilework.core.actions import Finish
from tilework.cost.table_file import table_json
from tilework.store.epochs import JOURNAL
from tilework.store.lease import FENCED
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow
ENDS = (kill_amid, stop_amid)
"""Of a server that is stopped its standby finds that it hangs, after ten seconds, and kills it."""
NUM_CALLS = 6
ELSEWHERE = """
import runpy
from tilework.store import owner
owner.this_machine = lambda: "another machine"
runpy.run_module("tilework", run_name="__main__", alter_sys=True)
"""
# Of the server that is stopped: when it goes on, the thread that renews its lease is the last to run.
LATE = """
import runpy, threading
from tilework.store import lease
renew = lease.Lease._renew
def late(self):
    if threading.current_thread().name == "lease" and lease._now_ns() >= self._until_ns:
        threading.Event().wait()
    renew(self)
lease.Lease._renew = late
runpy.run_module("tilework", run_name="__main__", alter_sys=True)
"""


class Standby:
    """A server that waits while another one uses the directory; `program` are the options of Python that begin it."""

    def __init__(
        self, tmp_path: Path, http_port: int, where: Sequence[str], program: Sequence[str] = ("-m", "tilework")
    ) -> None:
        options = ["--workers", "1", *where, "--port", str(http_port)]
        durable = ["--durable", str(tmp_path / "state"), "--cost", str(tmp_path / "costs.json"), "--standby", "--json"]
        command = [sys.executable, *program, "serve", "shapes", *options, *durable]
        self.url = f"http://127.0.0.1:{http_port}"
        environment = os.environ | {TOKEN_VARIABLE: TOKEN, "TILEWORK_DRAIN_S": "0.2"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def ready(self) -> Server:
        """The server, once it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        return Server(self.process, self.url, json.loads(line)["restored"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[tuple[LocalAgents, Callable[[], Standby]]]:
    """Two agents, and what starts servers for them."""
    agents_port, http_port = free_port(), free_port()
    write_costs(tmp_path)
    started: list[Standby] = []

    def start() -> Standby:
        started.append(Standby(tmp_path, http_port, ["--nodes", "2", "--agents", f"127.0.0.1:{agents_port}"]))
        return started[-1]

    with local_agents(2, port=agents_port, token=TOKEN) as agents:
        try:
            yield agents, start
        finally:
            for one in started:
                one.close()


def test_a_standby_goes_on_where_a_server_was_that_is_killed_or_hangs(tmp_path: Path) -> None:
    """Nothing that was accepted is lost, nothing done twice; all workers stay, and pictures are the same."""
    state = tmp_path / "state"
    with two_nodes(tmp_path) as (agents, start):
        server = start().ready()
        expected = [server.pictures(uid_of(server.later(seed))) for seed in range(NUM_CALLS)]
        workers = [session(agent.pid) for agent in agents.processes]
        for end_amid in ENDS:
            standby = start()
            uids = [uid_of(server.later(seed)) for seed in range(NUM_CALLS)]
            end_amid(server.process.pid, partial(has_kept, state, uids))
            server = standby.ready()
            assert server.restored > 0
            assert [server.pictures(uid) for uid in uids] == expected
        assert [session(agent.pid) for agent in agents.processes] == workers, "no worker was started again"
        assert server.stop(signal.SIGTERM) == 0
    check_logs(state)


def write_costs(tmp_path: Path) -> None:
    costs = table(0.02, 0.05, 0.02, pipeline="shapes")
    (tmp_path / "costs.json").write_text(json.dumps(table_json(costs)))


def has_kept(state: Path, uids: Sequence[str]) -> bool:
    """Whether states of some of these calls are kept."""
    return any(kept_step(state, f"{uid}-0") > 0 for uid in uids)


def check_logs(state: Path) -> None:
    """What was restored has gone on from where its states were, and none of it had ended.

    Of one that had ended just before the kill all steps are kept: only its picture was not yet safe.
    """
    logs = [entries(state, number) for number in range(1, len(ENDS) + 2)]
    ended = set[str]()
    for index, log in enumerate(logs):
        reached, begun = kept_steps(log), first_steps(log)
        assert index == 0 or any(step > 0 for step in reached.values()), "agents have kept states"
        assert all(begun[uid] == step for uid, step in reached.items() if uid in begun)
        assert not ended & begun.keys()
        ended |= finished(log)
    assert len(ended) == NUM_CALLS * (len(ENDS) + 1)


def test_a_server_that_was_fenced_from_another_machine_ends_when_it_goes_on(tmp_path: Path) -> None:
    """It has decided nothing since; each call ends once, with its picture; the other one has no use for its end."""
    state = tmp_path / "state"
    write_costs(tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(closing(Standby(tmp_path, free_port(), [], ["-c", LATE])))
        server = first.ready()
        second = stack.enter_context(closing(Standby(tmp_path, free_port(), [], ["-c", ELSEWHERE])))
        expected = [server.pictures(uid_of(server.later(seed))) for seed in range(NUM_CALLS)]
        uids = [uid_of(server.later(seed)) for seed in range(NUM_CALLS)]
        stop_amid(server.process.pid, partial(is_amid, state, uids))
        other = second.ready()
        assert other.restored > 0
        assert [other.pictures(uid) for uid in uids] == expected
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(PATIENCE_S) == FENCED
        assert [other.pictures(uid) for uid in uids] == expected, "it has removed none of them"
        assert other.stop(signal.SIGTERM) == 0
    before, after = entries(state, 1), entries(state, 2)
    assert before[-1].now_ns < after[0].now_ns
    assert not finished(before) & finished(after)
    assert finished(before) | finished(after) >= {f"{uid}-0" for uid in uids}


def is_amid(state: Path, uids: Sequence[str]) -> bool:
    """Whether a call is under way, and every one of which the log has the end has ended for its client, too."""
    with closing(sqlite3.connect(f"file:{state / JOURNAL}?mode=ro", uri=True)) as journal:
        ended = {f"{uid}-0" for (uid,) in journal.execute("SELECT uid FROM record")}
    return has_kept(state, uids) and finished(entries(state, 1)) <= ended


def finished(log: Sequence[LogEntry]) -> set[str]:
    return {one.uid for entry in log for one in entry.actions if isinstance(one, Finish)}
