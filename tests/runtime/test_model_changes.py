"""Which workers are told of a model or LoRA that comes while they serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import AddLora, AddModel, Command
from tilework.core.wire.reports import LoraAdded, ModelAdded
from tilework.runtime.models.changes import ModelChanges
from waiting import PATIENCE_S, until

SOURCE, LORA = ModelSource(path="m", name="m"), LoraSource("ink", "ink.safetensors")


class Workers:
    """Those that are up, of which 3 is a CPU slot, and what each was sent."""

    def __init__(self, path: Path) -> None:
        self.up, self.sent = [0], list[tuple[int, Command]]()
        self.changes = ModelChanges(
            directory=path,
            timeout_s=PATIENCE_S,
            grace_s=1.0,
            cell_size=1,
            up=lambda: self.up,
            slots=lambda: [3],
            send=lambda device_id, command: self.sent.append((device_id, command)),
        )
        self.skeleton = b"skeleton"
        self.changes._skeletons["m"] = self.skeleton


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_worker_that_comes_up_meanwhile_gets_the_model_too(is_restarted: bool, tmp_path: Path) -> None:
    """It was started without it. The first may take minutes to answer: it ends its work before."""

    async def test() -> None:
        workers = Workers(tmp_path)
        workers.up = [0, 1]
        adding = asyncio.create_task(workers.changes.add(SOURCE))
        told = AddModel(SOURCE, workers.skeleton)
        await until(lambda: workers.sent == [(0, told), (1, told)])
        workers.changes.answered(1, ModelAdded("m"))
        if is_restarted:
            workers.changes.lost(1)
        else:
            workers.up = [0, 1, 2]
        workers.changes.answered(0, ModelAdded("m"))
        late = 1 if is_restarted else 2
        await until(lambda: adding.done() or len(workers.sent) == 3)
        assert workers.sent[-1] == (late, told)
        assert workers.changes._skeletons
        workers.changes.answered(late, ModelAdded("m"))
        await adding
        assert not workers.changes._skeletons, "workers that are started later read the model themselves"

    asyncio.run(test())


def test_a_worker_that_comes_up_meanwhile_gets_the_lora_too_and_a_slot_does_not(tmp_path: Path) -> None:
    async def test() -> None:
        workers = Workers(tmp_path)
        adding = asyncio.create_task(workers.changes.add_lora("m", LORA))
        await until(lambda: workers.sent == [(0, AddLora("m", LORA))])
        workers.up = [0, 1, 3]
        lora = Lora(changes=frozenset())
        workers.changes.answered(0, LoraAdded(lora))
        await until(lambda: adding.done() or len(workers.sent) == 2)
        workers.changes.answered(1, LoraAdded(lora))
        assert await adding == lora
        assert [device_id for device_id, _ in workers.sent] == [0, 1]

    asyncio.run(test())


def test_workers_that_are_lost_are_not_awaited(tmp_path: Path) -> None:
    async def test() -> None:
        workers = Workers(tmp_path)
        adding = asyncio.create_task(workers.changes.add(SOURCE))
        await until(lambda: workers.sent)
        workers.up = []
        workers.changes.lost(0)
        await adding

    asyncio.run(test())
