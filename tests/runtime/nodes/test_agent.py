"""What an agent passes to its workers and when; the executor is played."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clock import LeapingLoop
from runtime.nodes.rig import begin
from runtime.nodes.test_executor import A, B, execute, imported
from tilework.comm.net.channel import Channel
from tilework.comm.net.files import FileServer
from tilework.comm.net.frames import BadFrame
from tilework.comm.net.handshake import Refused, admit
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, Forget, GroupRef
from tilework.core.wire.node_blobs import FetchBlobs, LeaveOrigin, Origin
from tilework.core.work import Group
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.links.groups import GroupTable
from tilework.runtime.nodes.agent import Servers, _Agent, serve_node
from tilework.runtime.nodes.messages import (
    THE_NODE,
    BreakOffGroup,
    Contents,
    Leave,
    Leaving,
    Links,
    Started,
    StartFailed,
    node_codec,
)
from tilework.runtime.nodes.node_workers import NodeWorkers
from tilework.runtime.outbox import Outbox, Outgoing
from waiting import PATIENCE_S, until

TOKEN, EPOCH = b"known to both", 3


class PlayedExecutor:
    """Notes what devices get. It is its own directory of blobs."""

    def __init__(self, path: Path) -> None:
        self.path, self.groups = path, GroupTable()
        self.got: list[Command] = []
        self.broken: list[GroupRef] = []
        self.kept: list[StateBlob] = []
        self._outbox = Outbox(self.got.append)
        self._outbox.open()

    @property
    def blobs(self) -> PlayedExecutor:
        return self

    def add(self, blob: StateBlob) -> None:
        self.kept.append(blob)

    def group(self, devices: Group) -> GroupRef:
        return self.groups.use(devices)[0]

    def break_off(self, ref: GroupRef) -> None:
        if self.groups.forget(ref):
            self.broken.append(ref)

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        self._outbox.send(outgoing)


class Rig:
    def __init__(self, path: Path) -> None:
        self.said: list[Any] = []
        self.executor = PlayedExecutor(path)
        self.agent = _Agent(self, TOKEN, asyncio.Event(), "here", NodeWorkers())  # type: ignore[arg-type]
        self.agent._executor = self.executor  # type: ignore[assignment]

    def send(self, message: object, address: int = THE_NODE) -> None:
        """As a channel to the engine."""
        self.said.append(message)

    def close(self) -> None:
        self.said.append("closed")

    def tell(self, message: object, address: int = THE_NODE) -> None:
        self.agent._handle(address, message)

    async def says(self) -> Any:
        await until(lambda: self.said)
        await asyncio.sleep(0)
        return self.said.pop(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Since Python 3.13 asyncio closes a connection whose writer is not referenced."""
    with closing(writer):
        await reader.read()


def groups_of(rig: Rig) -> list[int]:
    return [one.group.group_id for one in rig.executor.got if one.group is not None]  # type: ignore[union-attr]


def test_a_group_is_the_one_that_the_workers_know_until_it_is_broken_off(tmp_path: Path) -> None:
    rig, devices = Rig(tmp_path), (0, 1)
    for number in (11, 12):
        for device_id in devices:
            rig.tell(execute(number, GroupRef(number, devices)), device_id)
    rig.tell(BreakOffGroup(12, devices))
    rig.tell(execute(13, GroupRef(13, devices)), 0)
    first, *others, last = groups_of(rig)
    assert others == [first] * 3
    assert rig.executor.broken == [GroupRef(first, devices)]
    assert last != first


def test_commands_of_a_group_that_come_after_its_end_are_for_a_broken_group(tmp_path: Path) -> None:
    """Otherwise its members would wait for one that will never come."""
    rig, devices = Rig(tmp_path), (0, 1)
    rig.tell(BreakOffGroup(11, devices))
    rig.tell(execute(7, GroupRef(11, devices)), 0)
    rig.tell(BreakOffGroup(11, devices))
    rig.tell(execute(8, GroupRef(12, devices)), 0)
    late, new = groups_of(rig)
    assert rig.executor.broken == [GroupRef(late, devices)]
    assert new != late


def test_an_import_waits_for_its_blobs_and_nothing_overtakes_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for one in (here, there):
        one.mkdir()
    for name in "ab":
        (there / name).write_text(f"the state {name}")

    async def test() -> None:
        rig, files = Rig(here), FileServer(there, TOKEN, EPOCH)
        await files.start("127.0.0.1")
        rig.tell(FetchBlobs(5, (A, B), Origin("127.0.0.1", files.port, EPOCH), 60.0))
        rig.tell(imported(A, B), 0)
        rig.tell(Forget(1), 0)
        assert rig.executor.got == []
        said = await rig.says()
        assert (said.fetch_id, said.blobs, said.reason) == (5, (A, B), "")
        assert said.run_ns > 0
        await until(lambda: rig.executor.got)
        assert rig.executor.got == [imported(A, B), Forget(1)]
        assert [(here / name).read_text() for name in "ab"] == ["the state a", "the state b"]
        assert rig.executor.kept == [A, B]
        files.close()

    run(test())


@pytest.mark.parametrize("is_left", [True, False])
def test_an_import_whose_blobs_do_not_come_is_passed_on(tmp_path: Path, is_left: bool) -> None:
    """The worker says that it lacks them. A node that is lost is not waited for."""

    async def test() -> None:
        is_asked = asyncio.Event()

        async def be_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_asked.set()
            await say_nothing(reader, writer)

        silent = await asyncio.start_server(be_asked, "127.0.0.1", 0)
        origin = Origin("127.0.0.1", silent.sockets[0].getsockname()[1], EPOCH)
        rig = Rig(tmp_path)
        rig.tell(FetchBlobs(5, (A, B), origin, 60.0 if is_left else 0.02))
        rig.tell(imported(A, B), 0)
        if is_left:
            await is_asked.wait()
            rig.tell(LeaveOrigin(Origin("127.0.0.1", 1, EPOCH)))
            rig.tell(LeaveOrigin(origin))
        said = await rig.says()
        assert (said.fetch_id, said.blobs) == (5, ())
        assert ("its node was lost" if is_left else "within 0.02 s") in said.reason
        await until(lambda: rig.executor.got)
        assert rig.executor.got == [imported(A, B)]
        assert list(tmp_path.iterdir()) == []
        silent.close()

    run(test())


def test_a_fetch_from_a_node_that_is_lost_before_it_begins_is_answered(tmp_path: Path) -> None:
    """Both messages may come at once. Without an answer the server would count the blobs as on their way for ever."""

    async def test() -> None:
        rig, origin = Rig(tmp_path), Origin("127.0.0.1", 1, EPOCH)
        rig.tell(FetchBlobs(5, (A, B), origin, 60.0))
        rig.tell(LeaveOrigin(origin))
        rig.tell(imported(A), 0)
        said = await rig.says()
        assert (said.fetch_id, said.blobs, said.reason) == (5, (), "its node was lost")
        await until(lambda: rig.executor.got)
        assert rig.agent._coming == {}

    run(test())


class UpAtOnce(PlayedExecutor):
    """It has no models."""

    num_devices, num_slots, host_bytes = 0, 0, None
    devices_up = slots_up = alone = ()
    is_linking = False
    names = frozenset[str]()
    not_loaded = ()

    async def start(self, listener: object) -> tuple[()]:
        return ()

    async def stop(self) -> None: ...


@pytest.mark.parametrize("asks", [True, False])
def test_an_agent_ends_when_it_is_let_go(asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks when it is told to end, and ends unasked if the server lets it go for good. Otherwise it comes back."""
    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: UpAtOnce(tmp_path))
    monkeypatch.setattr("tilework.runtime.nodes.agent.importlib", SimpleNamespace(import_module=lambda _: None))
    monkeypatch.setattr("tilework.runtime.nodes.agent._RETRY_S", 0.01)

    async def test() -> None:
        codec, sessions, leaving = node_codec(), asyncio.Queue[Channel](), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await admit(reader, writer, TOKEN, codec.digest, EPOCH)
            sessions.put_nowait(Channel(reader, writer, codec, EPOCH))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        node = asyncio.create_task(serve_node(Servers([server.sockets[0].getsockname()], TOKEN), leaving))
        async with asyncio.timeout(PATIENCE_S):
            (await sessions.get()).send(Leave("come back"))
            channel = await sessions.get()
            channel.send(begin())
            async for _, message in channel.messages():
                if isinstance(message, Started):
                    leaving.set() if asks else channel.send(Leave("too many", is_final=True))
                elif isinstance(message, Leaving):
                    assert asks
                    channel.send(Leave(message.reason, is_final=True))
            await node
        server.close()

    run(test())


def test_workers_that_could_not_start_are_started_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverUp(UpAtOnce):
        async def start(self, listener: object) -> tuple[()]:
            raise WorkerStartFailed("no memory")

    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: NeverUp(tmp_path))
    monkeypatch.setattr("tilework.runtime.nodes.agent.importlib", SimpleNamespace(import_module=lambda _: None))
    monkeypatch.setattr("tilework.runtime.nodes.agent._RETRY_S", 77)
    monkeypatch.setattr("tilework.runtime.nodes.agent._AFTER_FAILURE_S", 0.01)

    async def test() -> None:
        codec, failures, leaving = node_codec(), list[str](), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await admit(reader, writer, TOKEN, codec.digest, EPOCH)
            channel = Channel(reader, writer, codec, EPOCH)
            channel.send(begin())
            async for _, message in channel.messages():
                if isinstance(message, Contents):
                    continue
                assert isinstance(message, StartFailed)
                failures.append(message.reason)
                channel.send(Leave("it could not start"))
                if len(failures) == 3:
                    leaving.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE_S):
            await serve_node(Servers([server.sockets[0].getsockname()], TOKEN), leaving)
        assert failures == ["no memory"] * 3
        server.close()

    run(test())


def test_a_session_that_fails_as_nobody_has_foreseen_ends_and_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else both ends would wait for ever."""
    starts = iter([KeyError("a bug"), None])

    class UpAtTheSecondTry(UpAtOnce):
        async def start(self, listener: object) -> tuple[()]:
            if (error := next(starts)) is not None:
                raise error
            return ()

    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: UpAtTheSecondTry(tmp_path))
    monkeypatch.setattr("tilework.runtime.nodes.agent.importlib", SimpleNamespace(import_module=lambda _: None))
    monkeypatch.setattr("tilework.runtime.nodes.agent._AFTER_FAILURE_S", 0.01)

    async def test() -> None:
        codec = node_codec()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await admit(reader, writer, TOKEN, codec.digest, EPOCH)
            channel = Channel(reader, writer, codec, EPOCH)
            channel.send(begin())
            with suppress(BadFrame):
                async for _, message in channel.messages():
                    if isinstance(message, Started):
                        channel.send(Leave("that was all", is_final=True))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE_S):
            await serve_node(Servers([server.sockets[0].getsockname()], TOKEN))
        server.close()

    run(test())
    (failed,) = [one for one in caplog.records if one.name.endswith(".session_chores")]
    assert failed.message == "the session of an agent has failed, and ends"
    assert failed.exc_info


def test_an_address_that_does_not_answer_does_not_keep_an_agent_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power refuses no connection: the kernel tries for two minutes, and workers wait for one."""
    monkeypatch.setattr("tilework.runtime.nodes.agent.importlib", SimpleNamespace(import_module=lambda _: None))
    monkeypatch.setattr("tilework.runtime.nodes.agent._CONNECT_S", 0.05)

    async def test() -> None:
        with socket.socket() as silent, socket.socket() as filling:
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            filling.connect(silent.getsockname())  # Now the kernel answers nobody else there.
            come, leaving = asyncio.Event(), asyncio.Event()
            server = await asyncio.start_server(lambda *_: come.set(), "127.0.0.1", 0)
            addresses = [silent.getsockname(), server.sockets[0].getsockname()]
            node = asyncio.create_task(serve_node(Servers(addresses, TOKEN), leaving))
            async with asyncio.timeout(PATIENCE_S):
                await come.wait()
            node.cancel()
            server.close()

    run(test())


def test_a_server_that_says_nothing_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may have lost its power: no connection ends then. What an import waits for is not awaited then."""
    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: UpAtOnce(tmp_path))

    async def test() -> None:
        connections = asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
        server = await asyncio.start_server(lambda *ends: connections.put_nowait(ends), "127.0.0.1", 0)
        channels = []
        for ends in (await asyncio.open_connection(*server.sockets[0].getsockname()), await connections.get()):
            channels.append(Channel(*ends, node_codec(), EPOCH))
        played = PlayedExecutor(tmp_path)
        agent = _Agent(channels[0], TOKEN, asyncio.Event(), "here", NodeWorkers())
        running = asyncio.create_task(agent.run())
        channels[1].send(replace(begin(), silence_s=0.2))
        async for _, message in channels[1].messages():
            if isinstance(message, Started):
                break
        agent._executor = played  # type: ignore[assignment]
        channels[1].send(FetchBlobs(5, (A,), Origin(*server.sockets[0].getsockname(), EPOCH), 60.0))
        channels[1].send(imported(A), 0)
        assert await running == "the server has said nothing for 0.2 s"
        played.send(0, Forget(1))
        await until(lambda: played.got)
        assert played.got == [Forget(1)]
        channels[1].close()
        server.close()

    run(test())


@pytest.mark.parametrize("has_place", [True, False])
def test_a_server_without_a_place_leaves_workers_as_they_wait(
    has_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server learns later than the agent that a connection is gone: until then the node's own place is taken."""
    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: UpAtOnce(tmp_path))

    class Channel:
        epoch, own_host = EPOCH, "127.0.0.1"

        def __init__(self) -> None:
            self.has_started = asyncio.Event()

        async def messages(self) -> AsyncIterator[tuple[int, Any]]:
            if has_place:
                yield THE_NODE, begin()
                await self.has_started.wait()
            yield THE_NODE, Leave("all 2 places for nodes are taken")

        def send(self, message: object, address: int = THE_NODE) -> None:
            self.has_started.set()

    async def test() -> None:
        workers = NodeWorkers(wait_s=60)
        executor = await workers.begin(begin(), lambda _num: None)
        workers.wait([])
        agent = _Agent(Channel(), TOKEN, asyncio.Event(), "here", workers)  # type: ignore[arg-type]
        assert await agent.run() == "all 2 places for nodes are taken"
        assert (await workers.begin(begin(), lambda _num: None) is executor) == (not has_place)
        await workers.close()

    run(test())


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_node_that_differs_or_is_not_admitted_asks_again_after_pauses_that_grow(
    is_admitted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reason is logged once. Another address, and the same one after another reason, is tried as often as ever."""
    differing, other = ("10.0.0.1", 1), ("10.0.0.2", 1)
    tries: dict[tuple[str, int], list[float]] = {differing: [], other: []}
    monkeypatch.setattr("tilework.runtime.nodes.agent.importlib", SimpleNamespace(import_module=lambda _: None))

    async def connection(host: str, port: int) -> tuple[tuple[str, int], SimpleNamespace]:
        tries[host, port].append(asyncio.get_running_loop().time())
        if (host, port) == other:
            raise ConnectionRefusedError("no server")
        return (host, port), SimpleNamespace(close=lambda: None)

    async def no_join(*_: object) -> int:
        if is_admitted:
            return EPOCH
        if len(tries[differing]) == 13:
            leaving.set()
        if len(tries[differing]) == 10:
            raise ConnectionResetError("the models have changed")
        raise Refused("node 1 has another model")

    class SentAway:
        has_failed = False

        def __init__(self, _channel: object, _token: bytes, leaving: asyncio.Event, *_: object) -> None:
            self.differs, self.leaving = len(tries[differing]) != 10, leaving

        async def run(self) -> str:
            if len(tries[differing]) == 13:
                self.leaving.set()
            return "node 1 has another model" if self.differs else "the models have changed"

    played = {"_connection": connection, "join": no_join, "Channel": lambda *_: None, "_Agent": SentAway}
    for name, fake in played.items():
        monkeypatch.setattr(f"tilework.runtime.nodes.agent.{name}", fake)

    leaving = asyncio.Event()

    async def test() -> None:
        await serve_node(Servers([differing, other], TOKEN), leaving)

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(test())
    pauses = [round(later - before, 2) for before, later in pairwise(tries[differing])]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 0.25, 1, 2]
    assert {round(later - before, 2) for before, later in pairwise(tries[other])} == {0.25}
    logged = [one.getMessage().partition(": ")[2] for one in caplog.records if "10.0.0.1" in one.getMessage()]
    assert logged == ["node 1 has another model", "the models have changed", "node 1 has another model"]


@pytest.mark.parametrize("differs", [True, False])
def test_an_agent_knows_whether_it_was_let_go_since_it_differs(differs: bool) -> None:
    class Channel:
        async def messages(self) -> AsyncIterator[tuple[int, Any]]:
            yield THE_NODE, Leave("node 1 has another model", differs=differs)

    async def test() -> None:
        agent = _Agent(Channel(), TOKEN, asyncio.Event(), "here", NodeWorkers())  # type: ignore[arg-type]
        assert await agent.run() == "node 1 has another model"
        assert agent.differs == differs

    run(test())


def test_an_agent_tells_what_its_files_hold_before_it_starts_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of whole weights when it has read them."""
    told = list[object]()

    class Starts(UpAtOnce):
        async def start(self, listener: object) -> tuple[()]:
            assert [type(one) for one in told] == [Contents]
            return ()

    monkeypatch.setattr("tilework.runtime.nodes.node_workers.LocalExecutor", lambda _: Starts(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def test() -> None:
        channel = {"host": "127.0.0.1", "own_host": "127.0.0.1", "epoch": EPOCH}
        here = SimpleNamespace(send=lambda message, _=0: told.append(message), **channel)
        agent = _Agent(here, TOKEN, asyncio.Event(), "here", NodeWorkers())  # type: ignore[arg-type]
        agent._handle(THE_NODE, replace(begin(), models=(ModelSource(path="shapes"),)))
        await until(lambda: sum(isinstance(one, Contents) for one in told) == 2)
        first, _, _, last = [one for one in told if isinstance(one, (Contents, Started, Links))]
        assert isinstance(first, Contents)
        assert isinstance(last, Contents)
        samples, wholes = first.models["shapes"], last.models["shapes"]
        assert samples == {name: replace(one, whole="") for name, one in wholes.items()}
        assert {Path(name).suffix for name, one in wholes.items() if one.whole} == {".safetensors"}

    run(test())


def test_an_agent_that_has_no_workers_yet_leaves_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        rig = Rig(tmp_path)
        rig.agent._begin_task(rig.agent._ask_to_leave())
        rig.agent._leaving.set()
        assert await rig.says() == "closed"

    run(test())
