"""`tilework doctor` on machines that lack something, one thing at a time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from tilework.cli.app import app
from tilework.cli.doctor import libraries, machine, served
from tilework.cli.doctor.finding import Finding, Level
from tilework.pipelines.video import export

GB = 10**9


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def asked(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status of `tilework doctor`, and what it says by what it looked at."""
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--json", *map(str, arguments)])
    document = json.loads(result.stdout)
    assert document["serves"] == (result.exit_code == 0)
    return result.exit_code, {check["what"]: check for check in document["checks"]}


def of_torch(device: str) -> list[Finding]:
    return list(machine.torch_findings(device))


def test_a_sound_machine_can_serve() -> None:
    status, checks = asked("shapes")
    assert status == 0
    assert "torch" in checks["packages of [serve]"]["found"]
    assert checks["model shapes"]["level"] == "ok"
    assert {"Python", "packages", "C extension", "torch", "videos", "memory", "open files", "port 0"} <= set(checks)
    assert all((check["level"] == "ok") == (check["remedy"] == "") for check in checks.values())


def test_an_error_is_the_exit_status_and_has_a_remedy(tmp_path: Path, taken: int) -> None:
    status, checks = asked(tmp_path / "absent", "--port", taken)
    assert status == 1
    model, port = checks[f"model {tmp_path / 'absent'}"], checks[f"port {taken}"]
    assert "is no directory" in model["found"]
    assert f"127.0.0.1:{taken} cannot be listened on: Address already in use" == port["found"]
    assert "another --port" in port["remedy"]
    shown = CliRunner().invoke(app, ["doctor", "--port", str(taken)])
    assert shown.exit_code == 1
    assert f"error   port {taken}: 127.0.0.1:{taken} cannot be listened on" in shown.stdout
    assert "to do: stop what listens there" in shown.stdout


def test_a_cuda_build_without_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "absent")
    build, devices = of_torch("cuda")
    assert (build.level, devices.level) == (Level.OK, Level.ERROR)
    assert "built for CUDA 12.8" in build.found
    assert devices.found == "torch sees none; the driver: none is loaded"
    assert "a driver for CUDA 12.8" in devices.remedy
    assert of_torch("cpu")[1].level is Level.WARNING, "it serves on CPUs"


def test_a_cpu_build_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [one.level for one in of_torch("cpu")] == [Level.OK]
    (build,) = of_torch("cuda")
    assert build.level is Level.ERROR
    assert "CUDA build of torch" in build.remedy


def with_device(monkeypatch: pytest.MonkeyPatch, free_bytes: int, problem: Exception | None = None) -> Finding:
    """What is said of a device with 80 GB, on which a first tensor cannot be made if there is a problem."""

    def ones(*_: Any, **__: Any) -> Any:
        if problem is not None:
            raise problem
        return tensor(1)

    tensor = torch.ones
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes, 80 * GB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="a card"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    _, driver, device = of_torch("cuda")
    assert driver.what == "driver"
    return device


def test_devices_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_device(monkeypatch, 79 * GB) == Finding(Level.OK, "device 0", "a card, 79.0 GB of 80.0 GB free")
    assert with_device(monkeypatch, 10 * GB).level is Level.WARNING, "another program has its memory"
    broken = with_device(monkeypatch, 79 * GB, RuntimeError("no kernel image is available\nand more"))
    assert (broken.level, broken.found) == (Level.ERROR, "a card: no kernel image is available")


@pytest.mark.parametrize(("free_bytes", "level"), [(64 << 20, Level.WARNING), (8 << 30, Level.OK)])
def test_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, free_bytes: int, level: Level) -> None:
    usage = SimpleNamespace(total=free_bytes, used=0, free=free_bytes)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    found = machine.shared_memory_finding()
    assert found.level is level
    assert ("--shm-size" in found.remedy) == (level is Level.WARNING)


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_free_bytes", lambda: 64 * GB)
    limit, use = tmp_path / "max", tmp_path / "current"
    limit.write_text("max\n")
    use.write_text(f"{3 * GB}\n")
    monkeypatch.setattr(machine, "_GROUP_LIMIT", limit)
    monkeypatch.setattr(machine, "_GROUP_USE", use)
    assert machine.memory_finding(0).level is Level.OK
    assert machine.memory_finding(100 * GB).level is Level.WARNING, "the weights alone are more"
    limit.write_text(f"{5 * GB}\n")
    found = machine.memory_finding(0)
    assert found.level is Level.WARNING
    assert found.found.startswith("2.0 GB free")


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1024, 4096))
    assert machine.open_files_finding(200).level is Level.OK
    assert "ulimit -n 4000" in machine.open_files_finding(1000).remedy


@pytest.mark.parametrize(
    ("extra", "asked_for", "level", "text"),
    [
        ("serve", "numpy>=1", Level.OK, "numpy"),
        ("serve", "numpy>=1000", Level.ERROR, "is not >=1000"),
        ("serve", "a-package-that-is-not>=1", Level.ERROR, "a-package-that-is-not not installed"),
        ("redis", "a-package-that-is-not>=1", Level.OK, "pip install 'tilework[redis]'"),
    ],
)
def test_packages_are_compared_with_their_ranges(extra: str, asked_for: str, level: Level, text: str) -> None:
    found = libraries.packages_finding(extra, [Requirement(asked_for)])
    assert found.level is level
    assert text in found.found
    assert bool(found.remedy) == (level is Level.ERROR)


def test_each_extra_has_its_own_packages() -> None:
    named = [Requirement(text) for text in ("numpy", 'torch; extra == "serve"', 'redis; extra == "redis"')]
    assert [[one.name for one in libraries._of(named, extra)] for extra in ("", "serve", "redis", "solve")] == [
        ["numpy"],
        ["torch"],
        ["redis"],
        [],
    ]


def test_an_old_python() -> None:
    assert libraries.python_finding("3.12.1", SpecifierSet(">=3.11")).level is Level.OK
    assert libraries.python_finding("3.10.9", SpecifierSet(">=3.11")).level is Level.ERROR


def test_without_the_extension_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    found = libraries._extension_finding()
    assert found.level is Level.WARNING
    assert "C compiler" in found.remedy


def test_an_encoder_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.videos_finding().level is Level.OK
    monkeypatch.setattr(export, "_AAC", "an-encoder-that-is-not")
    found = served.videos_finding()
    assert found.level is Level.ERROR
    assert "lacks an-encoder-that-is-not" in found.found
