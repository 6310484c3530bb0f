"""Options of a server over several nodes, and of its agents: mistakes are named before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.command_line import invoke
from tilework.cli.nodes import AgentNodes, Machines, RayNodes, ThisMachine
from tilework.core.model import ModelSource
from tilework.distribution import install_command
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.local_config import LocalConfig


def wanted(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Machines, LocalConfig]:
    """What `tilework serve` would serve with."""
    given: dict[str, Any] = {}

    def serving(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("tilework.cli.serving.Serving", serving)
    invoke("serve", *arguments)
    return given["workers"].machines, given["workers"].each


def test_a_server_has_the_nodes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted(monkeypatch)[0] == ThisMachine()
    nodes, each = wanted(monkeypatch, "--nodes", "2", "--workers", "4")
    assert nodes == AgentNodes(num_nodes=2, host="127.0.0.1", port=7070)
    assert each.num_workers == 4
    nodes, _ = wanted(monkeypatch, "--nodes", "2", "--agents", "[::1]:9", "--state-copies", "2")
    assert nodes == AgentNodes(num_nodes=2, host="::1", port=9, state_copies=2)


def test_ray_starts_the_agents_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.cli.nodes.find_spec", lambda name: object())
    nodes, _ = wanted(monkeypatch, "--cluster", "auto")
    assert nodes == RayNodes(cluster="auto")


@pytest.mark.parametrize(("device", "num_cards"), [("cuda", 4), ("cpu", 0)])
def test_ray_reserves_a_card_for_each_worker_of_one(
    monkeypatch: pytest.MonkeyPatch, device: str, num_cards: int
) -> None:
    asked: dict[str, Any] = {}

    def starter(**options: Any) -> Any:
        asked.update(options)
        raise WorkerStartFailed("no cluster")

    monkeypatch.setattr("tilework.runtime.nodes.ray_agents.RayAgents", starter)
    nodes = RayNodes(cluster="auto")
    with pytest.raises(WorkerStartFailed):
        nodes.executor(LocalConfig(num_workers=4, sources=(ModelSource(path="shapes", device=device),)))
    assert (asked["num_cpus"], asked["num_accelerators"]) == (4, num_cards)


def test_ray_keeps_a_durable_server_of_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it starts is this very command, which serves then."""
    followed: list[Any] = []
    monkeypatch.setattr("tilework.cli.nodes.find_spec", lambda name: object())
    monkeypatch.setattr("tilework.cli.commands.serve.follow", lambda *given, json: followed.append((*given, json)))
    arguments = ("--cluster", "auto", "--durable", str(tmp_path), "--json")
    invoke("serve", *arguments)
    assert followed == [(RayNodes(cluster="auto"), tmp_path, True)]
    monkeypatch.setenv("TILEWORK_DURABLE", str(tmp_path))
    invoke("serve", "--cluster", "auto", "--json")
    assert followed[1:] == followed[:1], "a variable says the same as an option"
    monkeypatch.delenv("TILEWORK_DURABLE")
    monkeypatch.setenv("TILEWORK_KEPT", "1")
    assert wanted(monkeypatch, *arguments)[0] == RayNodes(cluster="auto")
    assert len(followed) == 2


def test_a_standby_needs_the_directory_that_it_waits_for(mistake: Callable[..., str]) -> None:
    said = mistake("serve", "--standby", "--port", 0)
    assert said == "--standby is given, and it waits for the directory of another server; give it, as --durable DIR"


def test_devices_of_models_count_through_all_nodes(mistake: Callable[..., str], tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[models.a]\npath = "shapes"\ndevices = [4]\n')
    options = ("--models", models, "--workers", 2, "--nodes", 2, "--port", 0)
    assert "models.a.devices has 4, and there are 4 workers, from 0" in mistake("serve", *options)
    models.write_text('[models.a]\npath = "shapes"\ndevices = [3]\n')
    assert "devices = [3] of a has none of node 0" in mistake("serve", *options)


@pytest.mark.parametrize("address", ["7070", "host", "host:", ":7070", "host:70700", "host:x"])
def test_an_address_that_is_none_is_named(mistake: Callable[..., str], address: str) -> None:
    for command in (("serve", "--nodes", 2, "--agents", address), ("agent", address)):
        assert f"HOST:PORT is {address!r}; give an address and a port" in mistake(*command)


def test_a_server_may_start_with_fewer_nodes(monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str]) -> None:
    nodes, _ = wanted(monkeypatch, "--nodes", "3", "--least-nodes", "1")
    assert isinstance(nodes, AgentNodes)
    assert (nodes.num_nodes, nodes.least_nodes) == (3, 1)
    monkeypatch.undo()
    assert "least nodes = 3 is not possible; give 1 to 2" in mistake("serve", "--nodes", 2, "--least-nodes", 3)


@pytest.mark.parametrize(
    ("option", "value"), [("--agents", "127.0.0.1:7070"), ("--least-nodes", 1), ("--state-copies", 2)]
)
def test_what_nodes_have_is_refused_without_any(mistake: Callable[..., str], option: str, value: object) -> None:
    assert mistake("serve", option, value).startswith(f"{option} is {value}, and the server has no nodes")


def test_an_agent_has_a_server_or_a_registry(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_REGISTRY", raising=False)
    for given in ((), ("10.0.0.5:7070", "--registry", "etcd://x")):
        assert "give either the HOST:PORT of a server, or --registry" in mistake("agent", *given)
    assert "registry is 'x'; give etcd://HOST:PORT" in mistake("agent", "--registry", "x")


def test_an_agent_needs_the_port_of_its_server(mistake: Callable[..., str]) -> None:
    assert "give the port that the server listens on" in mistake("agent", "127.0.0.1:0")


def test_nodes_on_a_network_need_a_token(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_CLUSTER_TOKEN", raising=False)
    said = mistake("serve", "--nodes", 2, "--agents", "0.0.0.0:7070", "--port", 0)
    assert "agents may connect to 0.0.0.0 without a token; set TILEWORK_CLUSTER_TOKEN" in said


def test_a_cluster_needs_its_extra(mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.cli.nodes.find_spec", lambda name: None)
    assert f"--cluster needs Ray; run: {install_command('cluster')}" in mistake("serve", "--cluster", "auto")
