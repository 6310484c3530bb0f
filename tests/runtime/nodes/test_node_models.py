"""Models and LoRAs are added on all nodes, or on none."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from runtime.nodes.rig import (
    INFO,
    KEY,
    Heard,
    config,
    connect,
    contents,
    nodes,
    run,
    started,
)
from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import RemoveLora, RemoveModel
from tilework.core.wire.content import FileContent
from tilework.core.wire.node_blobs import LeaveOrigin
from tilework.core.wire.reports import LoadedModel
from tilework.runtime.executor import ModelRefused, WorkerStartFailed
from tilework.runtime.nodes.executor import NodesExecutor
from tilework.runtime.nodes.messages import (
    BeginNode,
    Changed,
    Contents,
    Leave,
    LoraRead,
    ModelRead,
    ReadLora,
    ReadModel,
    ServeModel,
)
from waiting import until

ANOTHER = ModelSource(path="another", name="another")
READ = ModelRead(LoadedModel(info=replace(INFO, name="another"), identity="another"), replace(KEY, model="another"))


def test_a_model_is_added_on_all_nodes() -> None:
    """The next agent is started with it. One that started meanwhile is sent away, and comes back."""

    async def test() -> None:
        async with nodes() as (executor, heard, agents):
            zero, one = agents
            zero.close()
            await heard.hears(("node lost", 0, (0, 1, 4), set()))
            assert await one.hears(LeaveOrigin)
            early = await connect(executor, begins=False)
            agents.append(early)
            assert len((await early.hears(BeginNode)).models) == 1
            reading = asyncio.get_running_loop().create_task(executor.read_model(ANOTHER, ["toy"]))
            assert await one.hears(ReadModel) == ReadModel(ANOTHER, ("toy",))
            early.say(started())
            assert (await early.hears(Leave)).reason == "the models have changed while it was started"
            early.close()
            one.say(READ)
            assert await reading == READ.model
            assert executor.profile_key("another") == READ.key
            adding = asyncio.get_running_loop().create_task(executor.add_model(ANOTHER))
            assert await one.hears(ServeModel) == ServeModel(ANOTHER)
            one.say(Changed())
            await adding
            late = await connect(executor, begins=False)
            agents.append(late)
            assert [model.name for model in (await late.hears(BeginNode)).models] == ["", "another"]
            late.say(replace(started(), models=(*started().models, READ.model), keys={"toy": KEY, "another": READ.key}))
            await heard.hears(("joined", 0), ("joined", 1), ("joined", 4))
            executor.remove_model("another")
            assert [await agent.hears(RemoveModel) for agent in (one, late)] == [RemoveModel("another")] * 2

    run(test())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (ModelRead(error="there is no such folder"), "there is no such folder"),
        (replace(READ, key=KEY), "another is another model, or runs otherwise"),
    ],
)
def test_a_model_that_a_node_does_not_have_is_added_on_none(other: ModelRead, why: str) -> None:
    async def test() -> None:
        async with nodes() as (executor, _, (zero, one)):
            reading = asyncio.get_running_loop().create_task(executor.read_model(ANOTHER, ["toy"]))
            for agent, answer in ((zero, READ), (one, other)):
                await agent.hears(ReadModel)
                agent.say(answer)
            with pytest.raises(ModelRefused, match=why):
                await reading
            assert [await agent.hears(RemoveModel) for agent in (zero, one)] == [RemoveModel("another")] * 2

    run(test())


def test_a_lora_is_added_where_all_nodes_have_it() -> None:
    """A node that is lost meanwhile does not count."""
    ink, lora = LoraSource(name="ink", path="ink.safetensors"), Lora(changes=frozenset({"denoiser"}))

    async def test() -> None:
        async with nodes() as (executor, heard, agents):
            zero, one = agents
            adding = asyncio.get_running_loop().create_task(executor.add_lora("toy", ink))
            assert [await agent.hears(ReadLora) for agent in agents] == [ReadLora("toy", ink)] * 2
            zero.close()
            one.say(LoraRead(lora))
            assert await adding == lora
            await heard.hears(("node lost", 0, (0, 1, 4), set()))
            assert await one.hears(LeaveOrigin)
            agents.append(await connect(executor, begins=False))
            assert (await agents[2].hears(BeginNode)).models == (ModelSource(path="toy", loras=(ink,)),)
            with_ink = LoadedModel(info=replace(INFO, loras=("ink",)), identity="toy")
            agents[2].say(replace(started(), models=(with_ink,)))
            await heard.hears(("joined", 0), ("joined", 1), ("joined", 4))
            executor.remove_lora("toy", "ink")
            for agent in agents[1:]:
                assert await agent.hears(RemoveLora) == RemoveLora("toy", "ink")
            adding = asyncio.get_running_loop().create_task(executor.add_lora("toy", ink))
            await one.hears(ReadLora)
            one.say(LoraRead(error="it fits another model"))
            await agents[2].hears(ReadLora)
            agents[2].say(LoraRead(lora))
            with pytest.raises(ModelRefused, match="it fits another model"):
                await adding

    run(test())


def test_nodes_with_other_weights_are_not_alike_though_their_steps_cost_the_same() -> None:
    """What the model's directory is called on a node does not matter."""

    async def test() -> None:
        async with nodes(key=replace(KEY, model="toy@1")) as (executor, heard, agents):
            agents[1].close()
            await heard.hears(("node lost", 1, (2, 3, 5), set()))
            agents.append(await connect(executor, key=replace(KEY, model="toy@2")))
            leave = await agents[2].hears(Leave)
            assert leave.reason.startswith("node 1 has toy (toy@2) on abacus, not toy (toy@1)")
            assert leave.differs
            agents[2].close()
            await until(lambda: set(executor.nodes) == {0})
            agents.append(await connect(executor, key=replace(KEY, model="snapshot@1")))
            await heard.hears(("joined", 2), ("joined", 3), ("joined", 5))

    run(test())


SMALL = FileContent(num_bytes=1234, quick="1")
LARGE, OTHER = replace(SMALL, num_bytes=1236), replace(SMALL, quick="2")
SIZES = "vae.safetensors differs from node 0's (sizes 1,236 and 1,234)"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (contents(vae=LARGE), SIZES),
        (contents(vae=OTHER), "vae.safetensors differs from node 0's (both have 1,234 bytes)"),
        (contents(), "it has no vae.safetensors, which node 0 has"),
        (contents(vae=SMALL, unet=SMALL), "it has unet.safetensors, which node 0 does not have"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_node_with_other_files_is_sent_away_before_it_has_loaded(is_late: bool, other: Contents, why: str) -> None:
    """The message names the model, the first file that differs, and the node that has another."""
    reason = f"node 1 has another model toy: {why}; copy the model from one to the other"

    async def test() -> None:
        executor = NodesExecutor(config(least_nodes=1 if is_late else 0))
        await executor.listen()
        starting = asyncio.get_running_loop().create_task(executor.start(Heard()))
        agents = [await connect(executor, begins=False) for _ in range(2)]
        for agent in agents:
            await agent.hears(BeginNode)
        agents[0].say(contents(vae=SMALL))
        await until(lambda: executor.nodes[0].contents)
        if is_late:
            agents[0].say(started(KEY))
            await starting
        agents[1].say(other)
        leave = await agents[1].hears(Leave)
        assert leave.reason == f"{reason}: all nodes of a server must be alike"
        assert leave.differs
        assert not leave.is_final
        if not is_late:
            with pytest.raises(WorkerStartFailed, match=re.escape(reason)):
                await starting
        await executor.stop()
        for agent in agents:
            agent.close()

    run(test())


def test_whole_weights_are_compared_when_they_are_known() -> None:
    """A start does not wait for that. Models that are not served, and those of nodes that leave, do not count."""
    one, two = (replace(SMALL, whole=whole) for whole in ("1", "2"))
    unserved = [Contents({**contents(vae=one).models, **contents("another", vae=vae).models}) for vae in (one, two)]

    async def test() -> None:
        async with nodes() as (executor, heard, agents):

            async def says(node: int, said: Contents) -> None:
                agents[node].say(said)
                await until(lambda: executor.nodes[node].contents == said.models)

            await says(0, contents(vae=SMALL))
            await says(1, contents(vae=one))
            await says(1, unserved[0])
            await says(0, unserved[1])
            assert not heard.all
            await says(1, contents(vae=two))
            ((is_leaving, node, devices, reason),) = heard.all
            assert (is_leaving, node, devices) == ("node leaving", 1, (2, 3, 5))
            why = "node 1 has another model toy: vae.safetensors differs from node 0's (both have 1,234 bytes)"
            assert reason.startswith(why)
            await says(0, contents(vae=one))
            heard.let_go()
            assert (await agents[1].hears(Leave)).differs
            agents[1].close()
            await heard.hears(("node lost", 1, (2, 3, 5), set()))
            assert len(heard.all) == 2

    run(test())


def test_a_model_with_other_files_is_added_on_none_and_the_file_is_named() -> None:
    async def test() -> None:
        async with nodes() as (executor, _, (zero, one)):
            reading = asyncio.get_running_loop().create_task(executor.read_model(ANOTHER, ["toy"]))
            for agent, weights in ((zero, SMALL), (one, LARGE)):
                await agent.hears(ReadModel)
                agent.say(Contents({**contents(vae=SMALL).models, **contents("another", vae=weights).models}))
                agent.say(READ)
            with pytest.raises(ModelRefused, match=re.escape(f"node 1 has another model another: {SIZES}")):
                await reading
            assert [await agent.hears(RemoveModel) for agent in (zero, one)] == [RemoveModel("another")] * 2
            assert not zero.told.qsize()

    run(test())
