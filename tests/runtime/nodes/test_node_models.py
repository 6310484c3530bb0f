"""Models and LoRAs are added on all nodes, or on none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from runtime.nodes.rig import INFO, KEY, connect, nodes, run, started
from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import RemoveLora, RemoveModel
from tilework.core.wire.node_blobs import LeaveOrigin
from tilework.core.wire.reports import LoadedModel
from tilework.runtime.executor import ModelRefused
from tilework.runtime.nodes.messages import (
    Begin,
    Changed,
    Leave,
    LoraRead,
    ModelRead,
    ReadLora,
    ReadModel,
    ServeModel,
)

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
            assert len((await early.hears(Begin)).models) == 1
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
            assert [model.name for model in (await late.hears(Begin)).models] == ["", "another"]
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
            assert (await agents[2].hears(Begin)).models == (ModelSource(path="toy", loras=(ink,)),)
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
    async def test() -> None:
        async with nodes() as (executor, heard, agents):
            agents[1].close()
            await heard.hears(("node lost", 1, (2, 3, 5), set()))
            agents.append(await connect(executor, key=replace(KEY, model="toy@2")))
            assert (await agents[2].hears(Leave)).reason.startswith("node 1 has toy (toy@2) on abacus, not toy (toy)")

    run(test())
