"""Servers that are kept: processes of a shell in their place, and without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tilework.runtime.nodes.ray_server import ServerKeeper
from waiting import PATIENCE_S, until

SERVER = """
exec 9> {lock}
flock 9
echo "ready $$"
exec sleep 60
"""


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.runtime.nodes.ray_server._PAUSE_S", 0.01)


def keeper(script: str) -> ServerKeeper:
    return ServerKeeper(["sh", "-c", script], os.environ, os.getcwd())


def test_the_standby_serves_when_the_server_is_killed_and_there_is_another_one_then(tmp_path: Path) -> None:
    async def test() -> None:
        kept = keeper(SERVER.format(lock=tmp_path / "lock"))
        pids = [int((await kept.ready()).split()[1])]

        async def is_replaced() -> bool:
            return await kept.serving_pid() not in (None, pids[-1])

        for _ in range(3):
            os.kill(pids[-1], signal.SIGKILL)
            await until(is_replaced)
            pids.append(await kept.serving_pid())
        assert len(set(pids)) == 4
        await kept.end()
        assert await kept.ended() == ""
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_server_that_cannot_start_is_given_up_with_what_it_said() -> None:
    async def test() -> None:
        kept = keeper("echo there is no such model >&2; exit 1")
        assert await kept.ready() == ""
        assert "there is no such model" in await kept.ended()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
