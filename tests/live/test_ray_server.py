"""`tilework serve --cluster ... --durable`: Ray goes on with the server when it is killed, or the command is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import table
from live.ray_here import ray
from live.test_durable import Server, kept_step, kill_amid, uid_of
from processes import descendants, title
from tilework.cli.local_agents import free_port
from tilework.cli.nodes import kept_name
from tilework.cost.table_file import table_json
from tilework.runtime.nodes.ray_agents import NAMESPACE
from waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_CALLS = 4


@contextmanager
def cluster() -> Iterator[Any]:
    """Two nodes on this machine."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "gcs_server_port": free_port()})
    started.add_node(num_cpus=1)
    try:
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


class Command:
    """The command that starts the server, or follows the one that there is."""

    def __init__(self, tmp_path: Path, address: str, port: int) -> None:
        where = ["--cluster", address, "--nodes", "2", "--workers", "1", "--agents", "127.0.0.1:0"]
        durable = ["--durable", str(tmp_path / "state"), "--cost", str(tmp_path / "costs.json"), "--json"]
        command = [sys.executable, "-m", "tilework", "serve", "shapes", "--port", str(port), *where, *durable]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ready(self) -> Server:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        answer = json.loads(line)
        return Server(self.process, answer["url"], answer["restored"])


def workers_of(pid: int) -> set[int]:
    """The worker processes below a process."""
    return {one for one in descendants(pid) if "tilework: worker" in title(one)}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def serving_pid(keeper: Any) -> int | None:
    """The process that serves; None while there is none, or nothing that keeps it."""
    try:
        pid: int | None = ray.get(keeper.serving_pid.remote())
    except ray.exceptions.ActorUnavailableError:
        return None
    return pid


def test_ray_goes_on_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """So when the process is killed that keeps it. Then the command is killed, and its next start finds the server.

    A signal ends all.
    """
    state, port = tmp_path / "state", free_port()
    (tmp_path / "costs.json").write_text(json.dumps(table_json(table(0.02, 0.05, 0.02, pipeline="shapes"))))
    with cluster() as started:
        first = Command(tmp_path, started.address, port)
        server = first.ready()
        expected = [server.pictures(uid_of(server.later(seed))) for seed in range(NUM_CALLS)]
        ray.init(address=started.address, namespace=NAMESPACE, log_to_driver=False, _node_ip_address="127.0.0.1")
        keeper = ray.get_actor(kept_name(state.resolve()))
        raylets = [node.all_processes["raylet"][0].process.pid for node in started.list_all_nodes()]
        eventually(lambda: all(workers_of(pid) for pid in raylets))
        workers = [workers_of(pid) for pid in raylets]
        uids = [uid_of(server.later(seed)) for seed in range(NUM_CALLS)]
        killed = ray.get(keeper.serving_pid.remote())
        kill_amid(killed, lambda: any(kept_step(state, f"{uid}-0") > 0 for uid in uids))
        eventually(lambda: ray.get(keeper.serving_pid.remote()) not in (None, killed))
        assert [server.pictures(uid) for uid in uids] == expected
        assert [workers_of(pid) for pid in raylets] == workers, "they are those of before"
        serving = ray.get(keeper.serving_pid.remote())
        os.kill(parent(serving), signal.SIGKILL)
        eventually(lambda: title(serving) == "")
        eventually(lambda: serving_pid(keeper) not in (None, serving))
        assert server.pictures(uids[0]) == expected[0]
        assert first.process.poll() is None, "the command follows the process that keeps it now"
        first.process.kill()
        second = Command(tmp_path, started.address, port)
        server = second.ready()
        assert server.pictures(uids[0]) == expected[0]
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(60) == 0
        eventually(lambda: not any(workers_of(pid) for pid in raylets))
