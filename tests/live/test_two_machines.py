"""Machines that are network namespaces, with a router between them: what docs/cluster.md says, and what a cut does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from suite.hosts import hosts
from suite.network import Network, Way, missing, network

from builders import table
from debian import has
from tilework.cli.options.nodes import TOKEN
from tilework.cost.table_file import table_json
from tilework.pipelines.model_index import shipped_directory
from waiting import PATIENCE_S, eventually

has("ip", "iproute2")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
BODY = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 12}
WAY = Way(delay_s=0.01, loss=0.01)


class Machine:
    """A host with a home and models of its own: what lies in `folder` it has as `at`."""

    def __init__(self, joined: Network, name: str, folder: Path, at: Path) -> None:
        self.joined, self.name, self.folder, self.at = joined, name, folder, at
        self.address = joined.address(name)
        shutil.copytree(shipped_directory(), folder / "sdxl", copy_function=shutil.copyfile)
        (folder / "home").mkdir()

    def runs(self, command: str, token: str) -> subprocess.Popen[str]:
        """Run a command of the docs there."""
        inside = f'mount --bind "{self.folder}" "{self.at}" && cd "{self.at}" && exec {sys.executable} -m {command}'
        environment = os.environ | {TOKEN: token, "HOME": str(self.at / "home"), "PYTHONPATH": _paths()}
        with (self.folder / "said").open("a") as said:
            return subprocess.Popen(
                [*self.joined.on(self.name), "sh", "-c", inside],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text("utf-8", "replace")


def _paths() -> str:
    return os.pathsep.join(str(Path(one).resolve()) for one in sys.path if one)


@contextmanager
def ending(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in reversed(processes):
            one.terminate()
            one.communicate(timeout=PATIENCE_S)


def costs(folder: Path) -> Path:
    """A table, so that nothing is measured."""
    path = folder / "costs.json"
    path.write_text(json.dumps(table_json(table(0.02, 0.05, 0.02, pipeline="shapes"))))
    return path


def line_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start"
    return json.loads(line)


def asked(url: str, headers: Mapping[str, str] | None = None, **more: Any) -> httpx.Response:
    body, route = BODY | more, f"{url}/v1/images/generations"
    return httpx.post(route, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)


def test_two_machines_with_a_copy_of_the_model_each_draw_together(tmp_path: Path) -> None:
    """As docs/cluster.md has it, with a token that is wrong first."""
    at, running = tmp_path / "here", list[subprocess.Popen[str]]()
    at.mkdir()
    with network("one", "two") as joined, ending(running):
        joined.set_all(WAY)
        one, two = (Machine(joined, name, tmp_path / name, at) for name in ("one", "two"))
        where = f"--host {one.address} --port 8000 --agents {one.address}:7070 --cost {costs(tmp_path)}"
        serving = one.runs(f"tilework serve ./sdxl --workers 1 --nodes 2 {where} --json", "right")
        running += [serving, one.runs(f"tilework agent {one.address}:7070", "right")]
        wrong = two.runs(f"tilework agent {one.address}:7070", "wrong")
        running.append(wrong)
        eventually(lambda: "another token; give both the same TILEWORK_CLUSTER_TOKEN" in two.said)
        wrong.terminate()
        running.append(two.runs(f"tilework agent {one.address}:7070", "right"))
        url = line_of(serving)["url"]
        answer = asked(url, n=2)
        assert answer.status_code == 200, answer.text
        status = httpx.get(f"{url}/v1/requests/{answer.headers['x-request-id']}", trust_env=False).json()
        runs = [run for image in status["images"] for run in image["timeline"]["segments"]]
        assert {device for run in runs for device in run["devices"]} == {0, 1}


@pytest.fixture
def url_of_two_nodes(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """The address of a server, and what cuts off both of its nodes and joins them again."""
    options: Sequence[str] = ["shapes", "--workers", "1", "--cost", str(costs(tmp_path))]
    with hosts(tmp_path, num_servers=1, num_nodes=2, options=options, way=WAY) as all_of_it:
        joined, nodes = all_of_it.network, all_of_it.nodes
        yield (
            all_of_it.url(all_of_it.servers[0]),
            lambda: [joined.cut(node) for node in nodes] and None,
            lambda: [joined.join(node) for node in nodes] and None,
        )


def test_nothing_is_promised_on_nodes_that_are_cut_off(
    url_of_two_nodes: tuple[str, Callable[[], None], Callable[[], None]],
) -> None:
    """Until they are lost, too, and again as soon as they are back."""
    url, cut, join = url_of_two_nodes

    def promised() -> httpx.Response:
        return asked(url, {"Prefer": "respond-async"}, slo_s=60, on_miss="reject")

    eventually(lambda: httpx.get(f"{url}/ready", trust_env=False).json()["devices_up"] == 2)
    assert promised().status_code == 202
    cut()
    eventually(lambda: promised().status_code == 503)
    assert httpx.get(f"{url}/ready", trust_env=False).json()["devices_up"] == 2, "they are not lost yet"
    assert "have been silent for a second" in promised().json()["error"]["message"]
    assert asked(url, {"Prefer": "respond-async"}).status_code == 202
    join()
    eventually(lambda: promised().status_code == 202)
