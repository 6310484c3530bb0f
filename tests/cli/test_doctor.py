"""`tilework doctor` on machines that lack something, one thing at a time."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from cards import card, with_cards
from tilework.cli.app import app
from tilework.cli.commands import doctor
from tilework.cli.commands.doctor import Finding, Level
from tilework.distribution import install_command
from tilework.pipelines.cuda.state import CudaState
from tilework.pipelines.setup import host_memory
from tilework.pipelines.video import mp4

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


def of_cuda(device: str, state: CudaState) -> list[Finding]:
    return list(doctor.cuda_findings(device, state))


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
    assert "does not exist" in model["found"]
    assert f"127.0.0.1:{taken} cannot be listened on: Address already in use" == port["found"]
    assert "another --port" in port["remedy"]
    shown = CliRunner().invoke(app, ["doctor", "--port", str(taken)])
    assert shown.exit_code == 1
    assert f"error   port {taken}: 127.0.0.1:{taken} cannot be listened on" in shown.stdout
    assert "to do: stop what listens there" in shown.stdout


def test_a_cuda_build_without_a_device() -> None:
    state = replace(with_cards(), driver="none is loaded", problem="Found no NVIDIA driver")
    build, devices = of_cuda("cuda", state)
    assert (build.level, devices.level) == (Level.OK, Level.ERROR)
    assert "built for CUDA 13.0" in build.found
    assert devices.found == "torch sees none (Found no NVIDIA driver); the driver: none is loaded"
    assert "a driver for CUDA 13.0" in devices.remedy
    assert of_cuda("auto", state)[1].level is Level.WARNING, "it serves on CPUs"


def test_a_cpu_build_for_devices() -> None:
    state = replace(with_cards(), built_for=None)
    assert [one.level for one in of_cuda("auto", state)] == [Level.OK]
    (build,) = of_cuda("cuda", state)
    assert build.level is Level.ERROR
    assert "CUDA build of torch" in build.remedy


def test_each_card_is_told_of() -> None:
    taken = card(problem="CUDA-capable device(s) is/are busy or unavailable")
    state = with_cards(card(), card(free_gb=10), taken)
    _, driver, _, *cards = of_cuda("auto", state)
    assert driver.what == "driver"
    assert cards[0] == Finding(Level.OK, "device 0", "a card, 79.0 GB of 80.0 GB free")
    assert cards[1].level is Level.WARNING, "another program has its memory"
    assert (cards[2].level, cards[2].found) == (Level.ERROR, f"a card: {taken.problem}")


def test_without_nvml_workers_take_longer_to_start() -> None:
    found = {one.what: one for one in of_cuda("cuda", replace(with_cards(card()), has_nvml=False))}
    assert found["NVML"].level is Level.WARNING
    assert "no worker can be forked" in found["NVML"].found


@pytest.mark.parametrize("lacks", ["compiler", "headers", "nothing"])
def test_cards_need_a_compiler_for_kernels(lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(
        doctor.shutil, "which", lambda name: "/usr/bin/clang" if lacks != "compiler" and name == "clang" else None
    )
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    found = {one.what: one for one in of_cuda("auto", with_cards(card()))}["C compiler"]
    if lacks == "nothing":
        assert (found.level, found.found) == (Level.OK, "/usr/bin/clang")
    else:
        assert found.level is Level.WARNING
        assert ("Python.h is missing" in found.found) == (lacks == "headers")
        assert "gcc" in found.remedy


@pytest.mark.parametrize(("free_bytes", "level"), [(64 << 20, Level.WARNING), (8 << 30, Level.OK)])
def test_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, free_bytes: int, level: Level) -> None:
    usage = SimpleNamespace(total=free_bytes, used=0, free=free_bytes)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found = doctor.shared_memory_finding()
    assert found.level is level
    assert ("--shm-size" in found.remedy) == (level is Level.WARNING)


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, use, whole = tmp_path / "max", tmp_path / "current", tmp_path / "meminfo"
    limit.write_text("max\n")
    use.write_text(f"{3 * GB}\n")
    whole.write_text(f"MemTotal: {128 * GB // 1024} kB\nMemAvailable: {64 * GB // 1024} kB\n")
    for name, file in (("_GROUP_LIMIT", limit), ("_GROUP_USE", use), ("_MACHINE", whole)):
        monkeypatch.setattr(host_memory, name, file)
    assert doctor.memory_finding(0).level is Level.OK
    assert doctor.memory_finding(100 * GB).level is Level.WARNING, "the weights alone are more"
    limit.write_text(f"{5 * GB}\n")
    found = doctor.memory_finding(0)
    assert found.level is Level.WARNING
    assert found.found.startswith("2.0 GB free")


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (512, 1024))
    assert doctor.open_files_finding(384).level is Level.OK
    few = doctor.open_files_finding(1000)
    assert "enough for 384 of 1000" in few.found
    assert "ulimit -Hn 4000" in few.remedy


@pytest.mark.parametrize(
    ("extra", "asked_for", "level", "text"),
    [
        ("serve", "numpy>=1", Level.OK, "numpy"),
        ("serve", "numpy>=1000", Level.ERROR, "is not >=1000"),
        ("serve", "a-package-that-is-not>=1", Level.ERROR, "a-package-that-is-not not installed"),
        ("redis", "a-package-that-is-not>=1", Level.OK, install_command("redis")),
        ("redis", "numpy>=1000", Level.WARNING, "is not >=1000"),
    ],
)
def test_packages_are_compared_with_their_ranges(extra: str, asked_for: str, level: Level, text: str) -> None:
    found = doctor.packages_finding(extra, [Requirement(asked_for)])
    assert found.level is level
    assert text in found.found
    assert bool(found.remedy) == (level is not Level.OK)


def test_a_part_of_what_is_optional_is_no_error() -> None:
    """Other programs may need it."""
    found = doctor.packages_finding("quantize", [Requirement("numpy"), Requirement("a-package-that-is-not")])
    assert (found.level, found.found) == (Level.WARNING, "a-package-that-is-not not installed")


def test_each_extra_has_its_own_packages() -> None:
    named = [Requirement(text) for text in ("numpy", 'torch; extra == "serve"', 'redis; extra == "redis"')]
    assert [[one.name for one in doctor._of(named, extra)] for extra in ("", "serve", "redis", "solve")] == [
        ["numpy"],
        ["torch"],
        ["redis"],
        [],
    ]


def test_an_old_python() -> None:
    assert doctor.python_finding("3.12.1", SpecifierSet(">=3.11")).level is Level.OK
    assert doctor.python_finding("3.10.9", SpecifierSet(">=3.11")).level is Level.ERROR


def test_without_the_extension_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = doctor._extension_finding()
    assert found.level is Level.WARNING
    assert "C compiler" in found.remedy


def test_an_encoder_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.videos_finding().level is Level.OK
    monkeypatch.setattr(mp4, "_AAC", "an-encoder-that-is-not")
    found = doctor.videos_finding()
    assert found.level is Level.ERROR
    assert "lacks an-encoder-that-is-not" in found.found


def test_without_pyav_pictures_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._version
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "av" else installed(name))
    (packages,) = (one for one in doctor.library_findings() if one.what == "packages of [serve]")
    assert packages.level is Level.OK
    found = doctor.videos_finding()
    assert found.level is Level.WARNING
    assert found.remedy == install_command("serve")
