"""Nodes that have a copy of the model each: the same one, and ones in which a byte is another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from builders import table
from live.nodes import TOKEN
from tilework.cli.local_agents import local_agents
from tilework.control.controller import ControllerConfig
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.pipelines.model_index import shipped_directory
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor
from waiting import until

pytestmark = pytest.mark.slow
EACH = LocalConfig(num_workers=1, sources=(ModelSource(path="./shapes"),), start_timeout_s=120)
COSTS = table(encode_s=0.02, step_s=0.05, decode_s=0.05, degrees=(1,), pipeline="shapes")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def copy(place: Path) -> Path:
    """A copy of the model, which an agent there has as ./shapes; returns the file of its transformer."""
    shutil.copytree(shipped_directory(), place / "shapes", copy_function=shutil.copyfile, dirs_exist_ok=True)
    return place / "shapes" / WEIGHTS


def spoil(path: Path, *, amid: bool) -> None:
    """Change a byte of the largest tensor: amid it, where the sample has a block, or at its begin."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    tensors = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
    first, last = max(tensors, key=lambda one: one[1] - one[0])
    content[begin + ((first + last) // 2 if amid else first)] ^= 1
    path.write_bytes(content)


def test_nodes_serve_copies_of_a_model_and_others_are_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is sent away tries again by itself, and is taken when its files are right."""
    log, places = tmp_path / "agents.log", [tmp_path / name for name in ("one", "two", "three")]
    _, _, weights = map(copy, places)
    spoil(weights, amid=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(one).resolve()) for one in sys.path if one))
    reason = re.compile(
        rf"(executor.py:\d+|node \d leaves:|:\d+:) node \d has another model shapes: {WEIGHTS} differs from "
    )

    def reasons(text: str) -> list[str]:
        """Where in a log the reason stands: of one that is sent away, of a leave, and with the agent's server."""
        return [re.sub(r"\d+", "", one) for one in reason.findall(text)]

    async def test() -> None:
        executor = NodesExecutor(NodesConfig(num_nodes=2, each=EACH, token=TOKEN.encode()))
        starting = EngineStart(EngineConfig(controller=ControllerConfig(), table=COSTS), executor)
        await executor.listen()
        with local_agents(0, port=executor.port, token=TOKEN, log=log) as running:
            for place in places[:2]:
                monkeypatch.chdir(place)
                running.start()
            engine = await starting.start()
            await draw(engine)
            running.kill(running.processes[1])
            await until(lambda: len(executor.devices_up) == 1)
            monkeypatch.chdir(places[2])
            running.start()
            await until(lambda: "executor.py:" in reasons(caplog.text))
            await until(lambda: reasons(log.read_text()))
            assert "has joined" not in caplog.text, "its workers were not awaited"
            copy(places[2])
            spoil(weights, amid=False)
            await until(lambda: "node  leaves:" in reasons(caplog.text))
            assert "has joined" in caplog.text, "that it differs was found when all was read"
            copy(places[2])
            await until(lambda: len(executor.devices_up) == 2)
            await draw(engine)
            assert reasons(log.read_text()) == ["::"], "it says why once"
            await engine.stop()

    asyncio.run(test())


async def draw(engine: Engine) -> None:
    """Two images at once, one on each node."""
    specs = {
        f"{seed}": Spec(prompt="a red circle", height=64, width=64, steps=12, guidance_scale=4.0, seed=seed)
        for seed in range(2)
    }
    tickets = engine.submit(specs)
    assert isinstance(tickets, tuple)
    outcomes = [await ticket.outcome for ticket in tickets]
    assert [one.status for one in outcomes] == [Status.DONE] * 2
    assert {device for one in outcomes for part in one.segments for device in part.devices} == {0, 1}
