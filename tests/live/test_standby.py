"""A server over two nodes is killed under load; its standby goes on, with the same workers and their states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from builders import table
from live.nodes import TOKEN
from live.test_durable import Server, entries, first_steps, kept_step, kept_steps, kill_amid, uid_of
from tilework.cli.agents.local_agents import LocalAgents, free_port, local_agents, session
from tilework.cli.options.nodes import TOKEN as TOKEN_VARIABLE
from tilework.core.actions import Finish
from tilework.cost.table_file import table_json

pytestmark = pytest.mark.slow
NUM_KILLS = 2
NUM_CALLS = 6


class Standby:
    """A server that waits while another one uses the directory."""

    def __init__(self, tmp_path: Path, agents_port: int, http_port: int) -> None:
        where = ["--nodes", "2", "--workers", "1", "--agents", f"127.0.0.1:{agents_port}", "--port", str(http_port)]
        durable = ["--durable", str(tmp_path / "state"), "--cost", str(tmp_path / "costs.json"), "--standby", "--json"]
        command = [sys.executable, "-m", "tilework", "serve", "shapes", *where, *durable]
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
    ports = free_port(), free_port()
    costs = table(0.02, 0.05, 0.02, pipeline="shapes")
    (tmp_path / "costs.json").write_text(json.dumps(table_json(costs)))
    started: list[Standby] = []

    def start() -> Standby:
        started.append(Standby(tmp_path, *ports))
        return started[-1]

    with local_agents(2, port=ports[0], token=TOKEN) as agents:
        try:
            yield agents, start
        finally:
            for one in started:
                one.close()


def test_a_standby_goes_on_where_a_killed_server_was(tmp_path: Path) -> None:
    """Nothing that was accepted is lost, nothing done twice; all workers stay, and pictures are the same."""
    state = tmp_path / "state"
    with two_nodes(tmp_path) as (agents, start):
        server = start().ready()
        expected = [server.pictures(uid_of(server.later(seed))) for seed in range(NUM_CALLS)]
        workers = [session(agent.pid) for agent in agents.processes]
        for _ in range(NUM_KILLS):
            standby = start()
            uids = [uid_of(server.later(seed)) for seed in range(NUM_CALLS)]
            kill_amid(server.process.pid, partial(has_kept, state, uids))
            server = standby.ready()
            assert server.restored > 0
            assert [server.pictures(uid) for uid in uids] == expected
        assert [session(agent.pid) for agent in agents.processes] == workers, "no worker was started again"
        assert server.stop(signal.SIGTERM) == 0
    check_logs(state)


def has_kept(state: Path, uids: Sequence[str]) -> bool:
    """Whether states of some of these calls are kept."""
    return any(kept_step(state, f"{uid}-0") > 0 for uid in uids)


def check_logs(state: Path) -> None:
    """What was restored has gone on from where its states were, and none of it had ended.

    Of one that had ended just before the kill all steps are kept: only its picture was not yet safe.
    """
    logs = [entries(state, number) for number in range(1, NUM_KILLS + 2)]
    ended = set[str]()
    for index, log in enumerate(logs):
        reached, begun = kept_steps(log), first_steps(log)
        assert index == 0 or any(step > 0 for step in reached.values()), "agents have kept states"
        assert all(begun[uid] == step for uid, step in reached.items() if uid in begun)
        assert not ended & begun.keys()
        ended |= {one.uid for entry in log for one in entry.actions if isinstance(one, Finish)}
    assert len(ended) == NUM_CALLS * (NUM_KILLS + 1)
