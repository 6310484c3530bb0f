"""A Redis server for a test, and whether there can be one."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as NotUp

import debian
from waiting import eventually


def skip_without_redis() -> None:
    if not debian.has("redis-server", "redis-server"):
        pytest.skip("there is no redis-server, and apt-get cannot install it here")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def redis_server(
    directory: Path, *options: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its address and process; on a free port if none is given."""
    port = free_port() if port is None else port
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        _wait_until_up(port, process)
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


def _wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    with Redis(port=port) as client:

        def is_up() -> bool:
            assert process.poll() is None
            try:
                return bool(client.ping())
            except NotUp:
                return False

        eventually(is_up)
