"""Somebody who types the commands of a page, in a checkout with a few small models and files beside it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx

from suite.documents import Block
from tilework.cli.local_agents import free_port

_READY_S = 600.0  # With other work beside it.
_STOP_S = 60.0
_TAIL = 400
_SERVER = re.compile(r"(?:[A-Z_]+=\S+ )*(?:tilework|make) serve\b(?!.*--show-config)")
_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8000")
_LEFT_OUT = (".git", ".venv", "out", "node_modules", "__pycache__", ".*_cache", ".hypothesis")


class Ending(StrEnum):
    DONE = "done"
    STOPPED = "stopped"  # It ran for as long as it may, without an error.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`output` is the end of what a failed command said."""

    place: str
    command: str
    ending: Ending
    seconds: float
    output: str = ""


def copy_of_checkout(checkout: Path, directory: Path) -> Path:
    """What a reader has, without what builds and runs leave there."""
    return Path(shutil.copytree(checkout, directory, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True))


@dataclass(slots=True, kw_only=True)
class PageReader:
    """Types in `checkout`; a command that takes longer than `limit_s` is stopped.

    A server that a block starts runs until the end of its section, or until another is started. A block that calls one
    finds the shipped model where none runs. `close` ends the last one.
    """

    checkout: Path
    programs: Path
    limit_s: float
    _exports: list[str] = field(default_factory=list, init=False)
    _servers: list[subprocess.Popen[str]] = field(default_factory=list, init=False)
    _section: tuple[Path, int] | None = field(default=None, init=False)
    _port: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.programs.mkdir(exist_ok=True)
        stamps = " ".join(f"-o .venv/{name}" for name in ("torch", "serve", "docs", "dev"))
        self._program("tilework", f'{sys.executable} -m tilework "$@"')
        self._program("python", f'{sys.executable} "$@"')
        self._program("make", f'{shutil.which("make")} {stamps} BIN={Path(sys.executable).parent} "$@"')
        (self.programs / ".curlrc").write_text("fail-with-body\n")

    def read(self, block: Block) -> Iterator[Outcome]:
        """Type the commands of a block. After one that failed, the rest is left."""
        if self._section != (block.page, block.section):
            self.close()
            self._section, self._port = (block.page, block.section), free_port()
        commands = [_ADDRESS.sub(f"127.0.0.1:{self._port}", command) for command in block.commands]
        calls = any(_ADDRESS.search(command) for command in block.commands)
        if calls and not self._servers and not any(_SERVER.match(command) for command in commands):
            commands.insert(0, "tilework serve")
        for command in commands:
            start_s = time.monotonic()
            ending, output = self._serve(command) if _SERVER.match(command) else self._run(command)
            seconds = time.monotonic() - start_s
            yield Outcome(place=block.place, command=command, ending=ending, seconds=seconds, output=output)
            if ending is Ending.FAILED:
                return

    def close(self) -> None:
        """End the server that runs, if one does."""
        while self._servers:
            _end(self._servers.pop())

    def _run(self, command: str) -> tuple[Ending, str]:
        if command.startswith("export "):
            self._exports.append(command)
        process = self._start(command)
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Ending.STOPPED, ""
        return (Ending.FAILED, output[-_TAIL:]) if process.returncode else (Ending.DONE, "")

    def _serve(self, command: str) -> tuple[Ending, str]:
        self.close()
        process = self._start(command, stdout=self.programs / "server.log")
        self._servers.append(process)
        until_s = time.monotonic() + _READY_S
        while process.poll() is None and time.monotonic() < until_s:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self._port}/ready", timeout=5).status_code == httpx.codes.OK:
                    return Ending.DONE, ""
            time.sleep(0.2)
        return Ending.FAILED, (self.programs / "server.log").read_text("utf-8")[-_TAIL:]

    def _start(self, command: str, stdout: Path | None = None) -> subprocess.Popen[str]:
        script = "\n".join([*self._exports, command])
        environment = os.environ | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.checkout / "src"),
            "CURL_HOME": str(self.programs),
            "TILEWORK_PORT": str(self._port),
            "TILEWORK_PROFILES": str(self.programs / "costs.sqlite"),
        }
        out = subprocess.PIPE if stdout is None else stdout.open("w")
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _program(self, name: str, command: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\nexec {command}\n")
        path.chmod(0o755)


def _end(process: subprocess.Popen[str]) -> None:
    """With all processes that it started, and with force after a minute."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
