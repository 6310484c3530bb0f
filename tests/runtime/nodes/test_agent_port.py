"""Who may connect where a server listens for agents, and how much those may hold who must not."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import pytest

from runtime.nodes.rig import connect, does, ended, nodes, run
from tilework.comm.net.frames import frame
from tilework.runtime.nodes import agent_port
from waiting import until

SHARE = agent_port._LEAST_SHARE


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ends(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; returns whether it was cut off."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        return True
    return False


def test_connections_that_say_nothing_leave_room_for_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a share waits; the rest is cut off at once, and all after the time of a greeting."""
    monkeypatch.setattr(agent_port, "TIMEOUT_S", 3.0)
    monkeypatch.setattr("tilework.comm.net.handshake.TIMEOUT_S", 1.5)

    async def test() -> None:
        async with nodes() as (executor, heard, (zero, _)):
            silent = [await asyncio.open_connection("127.0.0.1", executor.port) for _ in range(3 * SHARE)]
            ending = [asyncio.create_task(ends(reader)) for reader, _ in silent]
            await until(lambda: sum(one.done() for one in ending) >= 2 * SHARE)
            assert executor._port._greeting.total() == SHARE
            await does(executor, zero, 0, ended(1))
            await heard.hears(("report", 0, ended(1)))
            await asyncio.gather(*ending)
            assert not executor._port._greeting
            for _, writer in silent:
                writer.close()
            zero.close()
            await until(lambda: 0 not in executor.nodes)
            await connect(executor)
            await until(lambda: 0 in executor.nodes and executor.nodes[0].has_started)

    run(test())


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"".join(frame(bytes(80), 0)),
        struct.pack("!4sIIQ", b"TLW1", 0, 0, 1 << 40),
    ],
    ids=["nothing", "http", "wrong", "endless"],
)
def test_wrong_greetings_hold_nothing(greeting: bytes) -> None:
    """A thousand of each leave descriptors, memory and the agents alone."""

    async def wrong(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        if not greeting:
            writer.write_eof()
        await ends(reader)
        writer.close()

    async def test() -> None:
        async with nodes() as (executor, heard, (zero, _)):
            await asyncio.gather(*(wrong(executor.port) for _ in range(20)))
            before, bytes_before = descriptors(), resident_bytes()
            for _ in range(50):
                await asyncio.gather(*(wrong(executor.port) for _ in range(20)))
            await until(lambda: descriptors() <= before)
            assert resident_bytes() - bytes_before < 16 << 20
            assert not executor._port._greeting
            assert set(executor.nodes) == {0, 1}
            await does(executor, zero, 0, ended(1))
            await heard.hears(("report", 0, ended(1)))

    run(test())


def test_a_port_has_an_address_while_it_listens() -> None:
    async def test() -> None:
        async with nodes() as (executor, _, _):
            assert executor.address == f"127.0.0.1:{executor.port}"
            executor._port.close()
            assert executor.address is None

    run(test())
