"""A model that exceeds one device, served by pairs of real workers that have its weights together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import loras
import tilework
import tiny
from builders import table
from live.test_many_models import actions
from live.test_stock import Served, Turns, assert_pictures
from runtime.rig import Rig, assert_nothing_is_left
from stages import DIFFUSE, STAGES
from tilework.control.log import replay
from tilework.core.component import LoadSource
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource, NewModel
from tilework.core.request import Shape, Status
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable
from tilework.policy import registry
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.models.cell_choice import sizes_of, smallest_cell
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until
from zoo.registry import ZOO, build, quiet

WHOLE = 5_330_880
ROOM = 4_000_000
"""Bytes for weights of a device, fewer than the transformer has. A cell of two has room for each stage, and not for all
of them together."""
CELL = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("flux")
    pipeline = tiny.build_flux()
    config = dict(pipeline.transformer.config) | {"num_layers": 2, "num_single_layers": 8}
    pipeline.transformer = type(pipeline.transformer).from_config(config).eval()
    tiny.save(pipeline, directory / "model", "flux")
    file = loras.save_lora(pipeline, directory / "loras" / "ink.safetensors", seed=5)
    return ModelSource(path=str(directory / "model"), name="flux", loras=(LoraSource("ink", str(file)),))


@pytest.fixture(scope="module")
def stock(source: ModelSource) -> Callable[[Spec], np.ndarray]:
    known = dict[Spec, np.ndarray]()

    def picture(spec: Spec) -> np.ndarray:
        if spec not in known:
            pipeline = tilework.reference(source.path)
            if spec.loras:
                loras.use_stock(pipeline, {"ink": Path(source.loras[0].path)}, {"ink": spec.loras[0].scale})
            known[spec] = tiny.run_stock(pipeline, spec).pixels
        return known[spec]

    return picture


def costs(pipeline: str) -> CostTable:
    """Without speeds of loads, which are measured at the start."""
    return table(encode_s=0.05, step_s=0.05, decode_s=0.05, degrees=(1, 2), pipeline=pipeline)


@contextmanager
def serving(source: ModelSource, policy: str = "tilework", room: int = ROOM) -> Iterator[Rig]:
    rig = Rig(source, policy, 4, costs(source.name), room, cell_size=CELL)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def assert_served(rig: Rig, asked: dict[str, Spec], stock: Callable[[Spec], np.ndarray]) -> None:
    """Each request is done once, with the picture of the stock pipeline; the log replays, and nothing is left."""
    for uid, outcome in zip(asked, rig.outcomes(asked), strict=True):
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        difference = tiny.pixels(outcome.image).astype(int) - stock(asked[uid])
        assert abs(difference).max() <= 1, "the same but for the rounding of a pixel"
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)
    assert Counter(one["uid"] for one in actions(rig, "Finish"))[uid] == 1
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.slow
def test_a_model_that_exceeds_a_device_is_served_by_the_smallest_cells_in_which_it_fits(
    source: ModelSource, stock: Callable[[Spec], np.ndarray]
) -> None:
    sizes = asyncio.run(sizes_of([source]))
    assert [smallest_cell(sizes, 4, room).size for room in (2 * WHOLE, ROOM, WHOLE // 2)] == [1, CELL, 4]
    with serving(source) as rig:
        info, health = rig.engine.models["flux"], rig.engine.status.health()
        assert (info.cell, info.max_degree, health.num_devices, health.num_devices_up) == (2, 2, 2, 2)
        assert {LoadSource.HOST, LoadSource.DISK} == set(rig.engine._controller.costs.table.load_bytes_per_s)
        assert set(rig.engine.status.usage().resident_bytes) == {"0.0", "0.1", "1.0", "1.1"}
        asked = {str(seed): tiny.spec(seed=seed, height=128, width=64 * (1 + seed % 2)) for seed in range(5)}
        asked["inked"] = tiny.spec(loras=(UsedLora("ink", 1.0),))
        assert_served(rig, asked, stock)
        assert len(actions(rig, "DropComponents")) > 2, "not all stages fit at once"
        assert all(0 <= room < ROOM for room in rig.engine.status.usage().weights_free_bytes.values())
        assert rig.log.getvalue().count('"is":"DeviceLost"') == 0


@pytest.mark.slow
def test_a_model_with_an_adapter_of_its_own_is_served_by_cells(tmp_path: Path) -> None:
    tiny.prepare()
    tiny.save(tiny.build_sd3(), tmp_path / "sd3", "sd3")
    with serving(ModelSource(path=str(tmp_path / "sd3"), name="sd3"), room=10**8) as rig:
        asked = {str(seed): tiny.spec(seed=seed, height=64 * seed) for seed in (1, 2)}
        reference = tilework.reference(rig.engine.models["sd3"].path)
        assert_served(rig, asked, lambda spec: tiny.run_stock(reference, spec).pixels)
        assert rig.engine.models["sd3"].cell == CELL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rank"),
    [
        ("fixed-sp1", 0),
        ("fixed-sp2", 1),
        pytest.param("fixed-sp1", 1, marks=pytest.mark.exhaustive),
        pytest.param("fixed-sp2", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_a_cell_that_loses_a_worker_is_started_again_and_its_request_resumes(
    source: ModelSource, stock: Callable[[Spec], np.ndarray], policy: str, rank: int
) -> None:
    """At degree 2 the other cell has its part in the request, too, and lives on."""
    with serving(source, policy) as rig:
        executor, spec = rig.executor, tiny.spec(steps=40, height=128, width=128)
        before = executor.pids

        async def scenario() -> None:
            ticket = rig.submit(spec, "killed")
            assert isinstance(ticket, Ticket)
            await until(lambda: ticket.steps_done >= 8)
            os.kill(before[f"0.{rank}"], signal.SIGKILL)
            outcome = await ticket.outcome
            assert outcome.status is Status.DONE, outcome.reason
            assert outcome.image is not None
            assert abs(tiny.pixels(outcome.image).astype(int) - stock(spec)).max() <= 1
            assert sum(one.num_steps for one in outcome.segments if one.stage == DIFFUSE) < 40 + 40, "it resumes"
            await until(lambda: len(executor.devices_up) == 2)

        rig.run(scenario())
        after = executor.pids
        assert {name for name in after if after[name] != before[name]} == {"0.0", "0.1"}
        lost = [one for one in map(json.loads, rig.log.getvalue().splitlines()[1:]) if "DeviceLost" in json.dumps(one)]
        assert len(lost) == 1
        assert_served(rig, {"next": tiny.spec()}, stock)


@pytest.mark.slow
def test_clips_move_between_cells_share_them_and_lose_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock call, which is replayed where it goes on: Wan, one step at a time on one cell, both, the other, both."""
    monkeypatch.setitem(registry._GIVEN, "turns", Turns)
    tiny.prepare()
    model, directory = ZOO["wan21"], tmp_path / "wan21"
    build(model).save_pretrained(str(directory), safe_serialization=True)
    tiny.write_defaults(directory, **{side: model.inputs.get(side, 64) for side in ("height", "width")})
    stock = tilework.reference(str(directory))
    quiet(stock)
    rig = Rig(ModelSource(path=str(directory)), "turns", 4, costs("wan21"), 10**8, cell_size=2)
    served = Served(model, rig, stock)
    asked = {uid: (replace(spec, exact=False), picture) for uid, (spec, picture) in served.specs("clip").items()}
    try:
        rig.start()

        async def scenario() -> list[Outcome]:
            tickets = [rig.submit(spec, uid) for uid, (spec, _) in asked.items()]
            assert all(isinstance(ticket, Ticket) for ticket in tickets)
            await until(lambda: max(one.steps_done for one in tickets) >= 3)
            os.kill(rig.executor.pids["1.1"], signal.SIGKILL)
            outcomes = await asyncio.gather(*(one.outcome for one in tickets))
            await until(lambda: rig.engine.status.health().num_devices_up == 2)
            return outcomes

        assert_pictures(rig.run(scenario()), asked)
        rig.wait_until_idle()
        assert_nothing_is_left(rig.engine)
        assert replay(rig.log.getvalue().splitlines())[1] is None
        assert {tuple(one["work"]["devices"]) for one in actions(rig, "RunWork")} >= {(0,), (1,), (0, 1)}
    finally:
        rig.close()


@pytest.mark.slow
def test_cells_are_measured_as_devices(source: ModelSource) -> None:
    with serving(source) as rig:

        async def scenario() -> None:
            executor, batches = rig.executor, ((Shape(64, 64),),)
            rows = await executor.calibrate("flux", batches, num_runs=1)
            assert {(row.stage, row.degree) for row in rows} == {(stage, 1) for stage in STAGES}
            assert all(row.state_bytes for row in rows if row.stage != STAGES[-1])
            rows = await executor.calibrate("flux", batches, degree=2, num_runs=1)
            assert {row.degree for row in rows} == {2}, "pairs of cells"
            assert DIFFUSE in {row.stage for row in rows}
            assert executor.profile_key("flux").hardware.startswith("2 x ")
            await executor.end_calibration()

        rig.run(scenario())


@pytest.mark.slow
def test_a_stage_that_no_cell_has_room_for_is_named(source: ModelSource) -> None:
    with (
        pytest.raises(WorkerStartFailed, match="flux cannot run here: its stage diffuse needs"),
        serving(source, room=WHOLE // 2),
    ):
        pass


@pytest.mark.slow
def test_a_model_that_comes_later_is_split_as_well(source: ModelSource, stock: Callable[[Spec], np.ndarray]) -> None:
    with serving(source) as rig:
        rig.run(rig.engine.catalog.add(NewModel(path=source.path, name="later"), measure=False))
        assert rig.engine.models["later"].cell == 2
        outcome = rig.run(later(rig))
        assert outcome.image is not None
        assert abs(tiny.pixels(outcome.image).astype(int) - stock(tiny.spec())).max() <= 1


async def later(rig: Rig) -> Outcome:
    (ticket,) = rig.engine.submit({"later": tiny.spec()}, model="later")  # type: ignore[misc]
    return await ticket.outcome
