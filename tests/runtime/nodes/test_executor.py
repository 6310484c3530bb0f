"""What an executor over nodes tells which node, and what it makes of what nodes say or of their loss."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.nodes.rig import (
    INFO,
    KEY,
    A,
    B,
    Heard,
    config,
    connect,
    does,
    ended,
    execute,
    imported,
    nodes,
    run,
    started,
)
from tilework.core.component import LoadSource
from tilework.core.model import ModelSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget, GroupRef, RemoveModel, StopWork
from tilework.core.wire.node_blobs import FetchBlobs, KeepBlobs
from tilework.core.wire.reports import CardReading, DeviceReading, LoadedModel, NotLoaded
from tilework.runtime.executor import CannotRun, WorkerStartFailed
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes import remote_node
from tilework.runtime.nodes.config import BadNodes
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import (
    BeginNode,
    BreakOffGroup,
    EndMeasuring,
    KillWorker,
    Leave,
    Links,
    LoadSpeeds,
    MeasureModel,
    ModelMeasured,
    NodeMemory,
    StartFailed,
    WorkerJoined,
    WorkerLost,
    WorkersLeft,
)
from waiting import until


def with_devices(*devices: int, weights_bytes: int | None = None) -> LocalConfig:
    """A node of two workers, and a model that these of all devices serve."""
    source = ModelSource(path="toy", name="toy", devices=devices)
    return replace(config().each, sources=(source,), weights_bytes=weights_bytes)


def test_commands_and_reports_go_by_the_numbers_of_each_node() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, one)):
            assert (executor.num_devices, executor.num_slots, executor.devices_up) == (4, 2, (0, 1, 2, 3))
            assert [executor.node(device_id) for device_id in range(6)] == [0, 0, 1, 1, 0, 1]
            ref = executor.group((2, 3))
            for device_id in (2, 3):
                executor.send(device_id, execute(7, ref))
            executor.send(5, Forget(1))
            executor.break_off(ref)
            executor.kill(3, "stuck")
            sent = execute(7, GroupRef(ref.group_id, (0, 1)))
            assert [await one.hears_for(0), await one.hears_for(1), await one.hears_for(2)] == [sent, sent, Forget(1)]
            assert await one.hears(BreakOffGroup) == BreakOffGroup(ref.group_id, (0, 1))
            assert await one.hears(KillWorker) == KillWorker(1, "stuck")
            assert executor.group((2, 3)).group_id != ref.group_id, "a group that was broken off is another one then"
            assert zero.told.empty()
            one.say(WorkerLost(1, "killed"))
            await heard.hears(("lost", 3, "killed"))
            assert executor.devices_up == (0, 1, 2)
            one.say(WorkerJoined(1))
            await heard.hears(("joined", 3))

    run(test())


def test_a_model_may_be_served_by_some_devices_of_all_nodes() -> None:
    """Each node is told its own. It is measured on a node that has some."""

    async def test() -> None:
        executor, heard, agents = NodesExecutor(config(each=with_devices(3, weights_bytes=8))), Heard(), []
        await executor.listen()
        starting = asyncio.create_task(executor.start(heard))
        for _ in range(2):
            agents.append(await connect(executor, begins=False))
        told = [(await agent.hears(BeginNode)).models[0].devices for agent in agents]
        assert told == [(), (1,)]
        for agent in agents:
            agent.say(started())
        await starting
        assert executor.serving == {"toy": (3,)}
        measuring = asyncio.create_task(executor.calibrate("toy", ()))
        await agents[1].hears(MeasureModel)
        agents[1].say(ModelMeasured(()))
        await measuring
        ending = asyncio.create_task(executor.end_calibration())
        await agents[1].hears(EndMeasuring)
        agents[1].say(LoadSpeeds({LoadSource.DISK: 5.0}))
        assert await ending == {LoadSource.DISK: 5.0}
        assert agents[0].told.empty(), "it has loaded nothing"
        await executor.stop()

    run(test())


def test_a_node_has_cells_as_its_devices() -> None:
    async def test() -> None:
        each = replace(config().each, cell_size=2, weights_bytes=8)
        executor, heard, agents = NodesExecutor(config(each=each)), Heard(), []
        await executor.listen()
        starting = asyncio.create_task(executor.start(heard))
        for _ in range(2):
            agents.append(await connect(executor))
        await starting
        assert (executor.cell_size, executor.devices_up, executor.slots_up) == (2, (0, 1), (2, 3))
        executor.send(1, execute(7))
        executor.send(3, Forget(1))
        assert [await agents[1].hears_for(0), await agents[1].hears_for(1)] == [execute(7), Forget(1)]
        agents[1].say(NodeMemory({"0.0": 40, "0.1": 41, "1": 42}, {}))
        await until(lambda: executor.resident_bytes == {"1.0": 40, "1.1": 41, "3": 42})
        await executor.stop()

    run(test())


def test_times_of_a_node_are_converted_to_our_clock() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, _)):
            executor.nodes[0].clock.add(0, 1_000_000, 2)
            executor.send(1, execute(1))
            assert await zero.hears_for(1) == execute(1)
            now_ns = time.monotonic_ns()
            zero.say(replace(ended(1), start_ns=now_ns + 1_000_100, end_ns=now_ns + 1_000_200), 1)
            await heard.hears(("report", 1, replace(ended(1), start_ns=now_ns + 101, end_ns=now_ns + 201)))

    run(test())


def test_what_workers_say_of_themselves_is_known_by_their_numbers_until_their_node_is_lost() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, one)):
            first, second = (DeviceReading(card=CardReading(celsius=one), allocator=None) for one in (60, 70))
            zero.say(NodeMemory({"0": 10, "2": 30}, {"0": first}))
            one.say(NodeMemory({"0": 40, "1": 41}, {"1": second}))
            await does(executor, zero, 0, ended(1))
            await does(executor, one, 2, ended(1))
            await heard.hears(("report", 0, ended(1)), ("report", 2, ended(1)))
            assert executor.resident_bytes == {"0": 10, "4": 30, "2": 40, "3": 41}
            assert executor.readings == {"0": first, "3": second}
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 4), set()))
            assert executor.resident_bytes == {"2": 40, "3": 41}
            assert executor.readings == {"3": second}

    run(test())


def test_commands_wait_for_a_future_and_a_stop_does_not() -> None:
    async def test() -> None:
        async with nodes() as (executor, _, (zero, _)):
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            for outgoing in (future, execute(7), execute(8), StopWork(7), StopWork(9)):
                executor.send(0, outgoing)
            assert await zero.hears_for(0) == StopWork(9)
            future.set_result(Forget(3))
            assert [await zero.hears_for(0) for _ in range(3)] == [Forget(3), execute(7, revoked=True), execute(8)]

    run(test())


def test_what_waits_for_a_lost_worker_is_not_sent_to_the_next() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, _)):
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            for outgoing in (future, execute(7)):
                executor.send(0, outgoing)
            zero.say(WorkerLost(0, "killed"))
            zero.say(WorkerJoined(0))
            await heard.hears(("lost", 0, "killed"), ("joined", 0))
            executor.send(0, Forget(3))
            future.set_result(Forget(2))
            executor.send(0, Forget(4))
            assert [await zero.hears_for(0) for _ in range(2)] == [Forget(3), Forget(4)]

    run(test())


def test_a_node_that_says_nothing_is_lost() -> None:
    async def test() -> None:
        async with nodes(ping_s=0.01, silence_s=0.05) as (_, heard, _):
            await until(lambda: any(one[:2] == ("node lost", 1) for one in heard.all))

    run(test())


def test_nodes_that_say_nothing_for_a_moment_are_named_until_they_speak() -> None:
    async def test() -> None:
        async with nodes() as (_, heard, (zero, one)):
            await until(lambda: heard.silent == (0, 1))
            zero.say(Links((), False))
            await until(lambda: heard.silent == (1,))
            one.close()
            await until(lambda: any(each[:2] == ("node lost", 1) for each in heard.all))
            assert 1 not in heard.silent

    run(test())


def test_a_pause_of_the_server_is_no_silence_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with nodes(ping_s=0.01, silence_s=600.0) as (_, heard, agents):
            hours = SimpleNamespace(monotonic=count(0, 3600).__next__, monotonic_ns=time.monotonic_ns)
            monkeypatch.setattr(remote_node, "time", hours)
            pings = [agent.num_pings for agent in agents]
            await until(lambda: all(now.num_pings > before + 10 for now, before in zip(agents, pings, strict=True)))
            assert not any(one[0] == "node lost" for one in heard.all)

    run(test())


def test_without_any_node_requests_are_given_up_after_a_time() -> None:
    async def test() -> None:
        async with nodes(absent_s=0.01) as (_, heard, (zero, one)):
            one.say(WorkersLeft((0, 2)))
            await heard.hears(("given up", {0, 1, 2, 4, 5}))
            one.say(WorkersLeft(()))
            leaves = ("node leaving", 1, (2, 3, 5), "its workers were lost, and none could be started again")
            await heard.hears(("given up", {0, 1, 4}), leaves)
            zero.close()
            one.close()
            await heard.hears(("given up", set()))

    run(test())


@pytest.mark.parametrize("why", ["could not start", "has no workers left"])
def test_a_node_that_can_do_nothing_leaves_its_place(why: str) -> None:
    """Its agent starts anew, or another one has the place. Without any, requests are given up after a time."""

    async def test() -> None:
        async with nodes(absent_s=0.01) as (executor, heard, agents):
            zero, one = agents
            if why == "could not start":
                one.close()
                await heard.hears(("node lost", 1, (2, 3, 5), set()))
                agents.append(one := await connect(executor, begins=False))
                await one.hears(BeginNode)
                one.say(StartFailed("no memory"))
                assert await one.hears(Leave) == Leave("node 1 could not start: no memory", is_final=False)
            else:
                one.say(WorkersLeft(()))
                leaves = ("node leaving", 1, (2, 3, 5), "its workers were lost, and none could be started again")
                await heard.hears(("given up", {0, 1, 4}), leaves)
                heard.let_go()
                assert await one.hears(Leave) == Leave(leaves[3], is_final=False)
            zero.close()
            one.close()
            await heard.hears(("given up", set()))

    run(test())


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (ModelMeasured((), "no memory"), WorkerStartFailed),
        (ModelMeasured((), "no memory", cannot_run=True), CannotRun),
        (None, WorkerStartFailed),
    ],
)
def test_a_measurement_fails_with_its_node(answer: ModelMeasured | None, raised: type[Exception]) -> None:
    async def test() -> None:
        async with nodes() as (executor, _, (zero, _)):
            measuring = asyncio.get_running_loop().create_task(executor.calibrate("toy", ()))
            assert (await zero.hears(MeasureModel)).model == "toy"
            zero.close() if answer is None else zero.say(answer)
            with pytest.raises(raised, match="no memory" if answer else "node 0 was lost"):
                await measuring

    run(test())


def test_nodes_must_be_alike() -> None:
    async def test() -> None:
        executor, heard = NodesExecutor(config()), Heard()
        await executor.listen()
        starting = asyncio.get_running_loop().create_task(executor.start(heard))
        agents = [await connect(executor), await connect(executor, key=replace(KEY, hardware="slide rule"))]
        with pytest.raises(WorkerStartFailed, match=r"node 1 has toy \(toy\) on slide rule, not toy \(toy\) on abacus"):
            await starting
        for agent in agents:
            agent.close()

    run(test())


TWO_SOURCES = replace(config().each, sources=(ModelSource(path="cut"), ModelSource(path="toy")))
NOT_LOADED = replace(started(), not_loaded=(NotLoaded(0, "cut", "OSError: no end"),))
BOTH = replace(
    started(),
    models=(LoadedModel(info=replace(INFO, name="cut"), identity="cut"), *started().models),
    keys={"cut": replace(KEY, model="cut"), "toy": KEY},
)


@pytest.mark.parametrize("says_first", [0, 1])
def test_a_model_that_a_node_cannot_load_is_served_by_none(says_first: int) -> None:
    """Whichever node says so: a node that has it forgets it, and one that is not part of the server starts again."""

    async def test() -> None:
        executor, heard = NodesExecutor(config(each=TWO_SOURCES)), Heard()
        await executor.listen()
        starting = asyncio.get_running_loop().create_task(executor.start(heard))
        agents = [await connect(executor, begins=False) for _ in range(2)]
        for agent in agents:
            assert [one.path for one in (await agent.hears(BeginNode)).models] == ["cut", "toy"]
        answers = [NOT_LOADED, BOTH] if says_first == 0 else [BOTH, NOT_LOADED]
        agents[0].say(answers[0])
        await until(lambda: executor.devices_up != ())
        agents[1].say(answers[1])
        if says_first == 1:
            assert await agents[0].hears(RemoveModel) == RemoveModel("cut")
        assert (await agents[1].hears(Leave)).reason == "the models have changed while it was started"
        agents[1].close()
        await until(lambda: set(executor._nodes) == {0})
        agents.append(await connect(executor, begins=False))
        assert [one.path for one in (await agents[2].hears(BeginNode)).models] == ["toy"]
        agents[2].say(started())
        assert [one.info.name for one in await starting] == ["toy"]
        assert list(executor.not_loaded) == [NotLoaded(0, "cut", f"on node {says_first}: OSError: no end")]
        await executor.stop()
        for agent in agents:
            agent.close()

    run(test())


def test_a_node_that_cannot_load_a_model_does_not_join_a_server_that_serves_it() -> None:
    async def test() -> None:
        executor, heard = NodesExecutor(config(each=TWO_SOURCES, least_nodes=1)), Heard()
        await executor.listen()
        starting = asyncio.get_running_loop().create_task(executor.start(heard))
        agents = [await connect(executor, begins=False) for _ in range(2)]
        for agent in agents:
            await agent.hears(BeginNode)
        agents[0].say(BOTH)
        await starting
        agents[1].say(NOT_LOADED)
        reason = "cannot load a model (cut cannot be loaded: OSError: no end): all nodes of a server must be alike"
        assert (await agents[1].hears(Leave)).reason == f"node 1 {reason}"
        assert not executor.not_loaded
        await executor.stop()
        for agent in agents:
            agent.close()

    run(test())


def test_a_node_that_ends_while_the_server_does_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with nodes() as (executor, _, agents):

            async def drain() -> None:
                agents[1].close()
                await until(lambda: set(executor._nodes) == {0})

            monkeypatch.setattr(executor._nodes[0].channel, "drain", drain)
            await executor.stop()
            assert (await agents[0].hears(Leave)).reason == "the server has ended"

    run(test())


def test_more_nodes_than_places_are_sent_away() -> None:
    async def test() -> None:
        async with nodes() as (executor, _, agents):
            agents.append(await connect(executor, begins=False))
            assert (await agents[2].hears(Leave)).reason == "all 2 places for nodes are taken"

    run(test())


def test_a_start_waits_for_the_least_nodes_and_others_join_later() -> None:
    async def test() -> None:
        executor, heard = NodesExecutor(config(num_nodes=3, least_nodes=1)), Heard()
        await executor.listen()
        starting = asyncio.get_running_loop().create_task(executor.start(heard))
        agents = [await connect(executor, name="first")]
        try:
            await starting
            assert (executor.num_devices, executor.devices_up, executor.slots_up) == (6, (0, 1), (6,))
            agents.append(await connect(executor, name="second"))
            await heard.hears(("joined", 2), ("joined", 3), ("joined", 7))
            assert (executor.devices_up, executor.slots_up) == ((0, 1, 2, 3), (6, 7))
            assert executor.node_names == {"first": (0, 1), "second": (2, 3)}
        finally:
            await executor.stop()
            for agent in agents:
                agent.close()

    run(test())


def test_a_start_without_enough_nodes_says_what_to_do() -> None:
    async def test() -> None:
        wanted = config()
        executor = NodesExecutor(replace(wanted, each=replace(wanted.each, start_timeout_s=0.05)))
        with pytest.raises(WorkerStartFailed, match=r"0 of 2 nodes connected within 0.05 s; .* tilework agent"):
            await executor.start(Heard())

    run(test())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_nodes": 0}, "nodes = 0 is not possible"),
        ({"least_nodes": 3}, "least nodes = 3 is not possible"),
        ({"state_copies": 3}, "state copies = 3 is not possible; give 1 to 2"),
        ({"host": "0.0.0.0", "token": b""}, "set TILEWORK_CLUSTER_TOKEN"),
        ({"each": with_devices(0, 4)}, "devices of toy has 4, and 2 nodes have 4 together, from 0; leave it out"),
        ({"each": with_devices(2)}, "none of node 0, so that node would not know the model; name one of each node"),
        ({"each": replace(with_devices(0, 2), cell_size=2)}, "devices of toy has 2, and 2 nodes have 2 together"),
    ],
)
def test_nodes_that_cannot_be_had_are_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadNodes, match=why):
        config(**options)


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_server_has_the_states_that_agents_have_kept_if_its_journal_names_them(
    is_durable: bool, tmp_path: Path
) -> None:
    """All others are removed, and all of a node that comes too late."""

    async def test() -> None:
        each = replace(config().each, owner=tmp_path if is_durable else None)
        executor, heard, agents = NodesExecutor(config(num_nodes=3, least_nodes=2, each=each)), Heard(), []
        await executor.listen()
        starting = asyncio.create_task(executor.start(heard))
        for blobs in (("a", "b"), ("b", "c")):
            agents.append(await connect(executor, begins=False))
            await agents[-1].hears(BeginNode)
            agents[-1].say(started(blobs=blobs))
        await starting
        if is_durable:
            assert executor.inherit({A, B, StateBlob("d", 1)}) == {A, B}
        kept = [set((await agent.hears(KeepBlobs)).blobs) for agent in agents]
        assert kept == ([{A, B}, {B}] if is_durable else [set(), set()])
        agents.append(await connect(executor, begins=False))
        await agents[-1].hears(BeginNode)
        agents[-1].say(started(blobs=("b",)))
        assert (await agents[-1].hears(KeepBlobs)).blobs == ()
        if is_durable:
            executor.send(2, imported(A))
            assert (await agents[1].hears(FetchBlobs)).blobs == (A,)
        await executor.stop()
        last = None if is_durable else Leave("the server has ended")
        assert await agents[0].hears_for(-1) == last, "those of a durable server wait for its next start"

    run(test())
