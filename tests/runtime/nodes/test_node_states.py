"""States of jobs on nodes: fetched where they are needed, handed over, copied, and lost with their node."""

from __future__ import annotations

import pytest

from runtime.nodes.rig import (
    A,
    B,
    Heard,
    PlayedAgent,
    connect,
    does,
    ended,
    execute,
    imported,
    nodes,
    run,
)
from stages import stage_of
from tilework.core.actions import ReadComponents
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.node_blobs import BlobsFetched, CopyBlob, DiscardBlob, FetchBlobs, LeaveOrigin
from tilework.core.wire.reports import WeightsRead
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import (
    Leave,
    Leaving,
    WorkerJoined,
    WorkerLost,
)


async def has_written(executor: NodesExecutor, heard: Heard, agent: PlayedAgent, device_id: int, *blobs: str) -> None:
    """A device of node 0 has written blobs."""
    await does(executor, agent, device_id, ended(1, *blobs))
    await heard.hears(("report", device_id, ended(1, *blobs)))


def test_a_node_fetches_what_an_import_needs_before_it_gets_it() -> None:
    """Once, for all its devices; what it has and what is discarded meanwhile needs no fetch, or is discarded."""

    async def test() -> None:
        async with nodes() as (executor, heard, (zero, one)):
            await has_written(executor, heard, zero, 0, "a", "b")
            executor.send(2, imported(A, B))
            executor.send(3, imported(A))
            asked = await one.hears(FetchBlobs)
            assert (asked.blobs, asked.origin) == ((A, B), executor.nodes[0].origin)
            assert [await one.hears_for(0), await one.hears_for(1)] == [imported(A, B), imported(A)]
            executor.discard(B)
            assert await zero.hears(DiscardBlob) == DiscardBlob(B)
            one.say(BlobsFetched(asked.fetch_id, (A, B), 7))
            assert await one.hears(DiscardBlob) == DiscardBlob(B)
            await heard.hears(("fetched", 0, 1, 2, 7))
            executor.send(0, imported(A))
            assert await zero.hears_for(0) == imported(A)
            executor.discard(A)
            assert [await zero.hears(DiscardBlob), await one.hears(DiscardBlob)] == [DiscardBlob(A)] * 2

    run(test())


def test_what_was_not_fetched_is_fetched_again() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, one)):
            await has_written(executor, heard, zero, 0, "a")
            executor.send(2, imported(A))
            asked = await one.hears(FetchBlobs)
            await one.hears_for(0)
            one.say(BlobsFetched(asked.fetch_id, (), 7, "no room"))
            await does(executor, one, 2, ended(2))
            await heard.hears(("report", 2, ended(2)))
            executor.send(2, imported(A))
            assert (await one.hears(FetchBlobs)).blobs == (A,)

    run(test())


def test_only_what_is_still_kept_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    """A copy that comes too late, since its blob was discarded, is no warning."""

    async def test() -> None:
        async with nodes(state_copies=2) as (executor, heard, (zero, one)):
            for work_id, blob in enumerate((A, B), 2):
                await has_written(executor, heard, zero, 0, blob.name)
                asked = await one.hears(FetchBlobs)
                if blob is A:
                    executor.discard(blob)
                one.say(BlobsFetched(asked.fetch_id, (), 7, f"no {blob.name}"))
                await does(executor, one, 2, ended(work_id))
                await heard.hears(("report", 2, ended(work_id)))

    run(test())
    assert [record.getMessage() for record in caplog.records] == ["node 1: no b"]


def test_a_stop_does_not_wait_for_agents_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with nodes():
            pass

    run(test())
    assert [record.name for record in caplog.records] == []


def test_a_lost_node_takes_what_only_it_had() -> None:
    """Others leave it at once, reads are answered, and the next agent gets its place and all devices join."""

    async def test() -> None:
        async with nodes() as (executor, heard, agents):
            zero, one = agents
            await has_written(executor, heard, zero, 0, "a", "b")
            executor.send(2, imported(A))
            asked = await one.hears(FetchBlobs)
            await one.hears_for(0)
            one.say(BlobsFetched(asked.fetch_id, (A,), 7))
            executor.read_ahead(ReadComponents(5, 0, stage_of("toy", "encode"), ("x",), 1, ()))
            await zero.hears(ReadComponents)
            origin = executor.nodes[0].origin
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 4), {"b"}), ("read", WeightsRead(5, False)))
            assert await one.hears(LeaveOrigin) == LeaveOrigin(origin)
            executor.send(0, execute(9))  # Its works are about to be revoked.
            agents.append(await connect(executor))
            await heard.hears(("joined", 0), ("joined", 1), ("joined", 4))
            assert executor.copy(B) is None
            executor.send(0, imported(A))
            assert (await agents[2].hears(FetchBlobs)).origin == executor.nodes[1].origin

    run(test())


@pytest.mark.parametrize("comes", [True, False])
def test_a_node_that_leaves_goes_when_it_has_handed_over_its_states(comes: bool) -> None:
    """Its devices are up but not for others, and no worker joins. What does not come is lost with it."""

    async def test() -> None:
        async with nodes() as (executor, heard, (zero, one)):
            await has_written(executor, heard, zero, 0, "a", "b")
            executor.send(2, imported(A))
            asked = await one.hears(FetchBlobs)
            await one.hears_for(0)
            one.say(BlobsFetched(asked.fetch_id, (A,), 7))
            zero.say(Leaving("told to"))
            await heard.hears(("node leaving", 0, (0, 1, 4), "told to"))
            assert executor.devices_up == (2, 3)
            zero.say(WorkerLost(1, "killed"))
            zero.say(WorkerJoined(1))
            await does(executor, zero, 0, ended(2, "c"))
            await heard.hears(("lost", 1, "killed"), ("report", 0, ended(2, "c")))
            heard.let_go()
            asked = await one.hears(FetchBlobs)
            assert asked.blobs == (B, StateBlob("c", 1))
            assert zero.told.empty()
            one.say(BlobsFetched(asked.fetch_id, asked.blobs if comes else (), 7, "" if comes else "no room"))
            assert await zero.hears(Leave) == Leave("told to", is_final=True)
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 4), set() if comes else {"b", "c"}))

    run(test())


def test_states_are_handed_over_again_if_the_node_that_got_them_is_lost() -> None:
    async def test() -> None:
        async with nodes(num_nodes=3) as (executor, heard, (zero, one, two)):
            await has_written(executor, heard, zero, 0, "a")
            executor.dismiss(0, "too many")
            executor.dismiss(0, "twice")
            heard.let_go()
            assert (await one.hears(FetchBlobs)).blobs == (A,)
            one.close()
            assert await two.hears(LeaveOrigin)
            asked = await two.hears(FetchBlobs)
            assert asked.blobs == (A,)
            two.say(BlobsFetched(asked.fetch_id, (A,), 7))
            assert await zero.hears(LeaveOrigin)
            assert await zero.hears(Leave) == Leave("too many", is_final=True)
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 6), set()))

    run(test())


def test_copies_are_on_each_node_that_has_the_blob() -> None:
    async def test() -> None:
        async with nodes() as (executor, heard, (zero, _)):
            await has_written(executor, heard, zero, 0, "a")
            copied = executor.copy(A)
            assert copied is not None
            assert await zero.hears(CopyBlob) == CopyBlob(A, copied.name)
            executor.discard(A)
            assert await zero.hears(DiscardBlob) == DiscardBlob(A)
            assert executor.copy(copied) is not None

    run(test())


def test_states_are_kept_on_as_many_nodes_as_are_wanted() -> None:
    async def test() -> None:
        async with nodes(state_copies=2) as (executor, heard, (zero, one)):
            await has_written(executor, heard, zero, 0, "a", "b")
            asked = await one.hears(FetchBlobs)
            assert asked.blobs == (A, B)
            one.say(BlobsFetched(asked.fetch_id, (A, B), 7))
            await does(executor, one, 3, ended(2))
            await heard.hears(("report", 3, ended(2)))
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 4), set()))

    run(test())
