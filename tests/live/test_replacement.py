"""A model whose stages do not fit on a device together, on real workers that change which stages they are for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import table
from live.test_many_models import actions
from runtime.rig import Rig, assert_nothing_is_left
from runtime.test_worker_process import Listener, run
from stages import STAGES
from tilework.control.log import replay
from tilework.core.component import LoadSource
from tilework.core.model import ModelSource
from tilework.core.request import Shape, Status
from tilework.core.time import NS_PER_S
from tilework.core.wire.commands import LoadWeights
from tilework.core.wire.spec import Spec
from tilework.core.work import NewPlacement
from tilework.policy import registry
from tilework.policy.published.tridentserve import monitor
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.traits import PlacementStatus
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import Observer
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

NUM_WORKERS = 3
NUM_WAITING = 128
"""More than half of what a fast machine does in the window of a second: then the policy sees that stages are behind."""
ROOM = 1_000_000
"""Bytes for weights: the text encoders fit, or the transformer beside the VAE, and not both."""
SMALL, LARGE = tiny.spec(steps=1, exact=True), tiny.spec(steps=10, exact=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return ModelSource(path=str(directory), name="sd3")


@pytest.fixture(scope="module")
def stock(source: ModelSource) -> Callable[[Spec], np.ndarray]:
    pipeline, known = tilework.reference(source.path), dict[Spec, np.ndarray]()

    def picture(spec: Spec) -> np.ndarray:
        if spec not in known:
            known[spec] = tiny.run_stock(pipeline, spec).pixels
        return known[spec]

    return picture


@contextmanager
def serving(source: ModelSource, policy: str, num_workers: int) -> Iterator[Rig]:
    costs = replace(
        table(encode_s=0.12, step_s=0.08, decode_s=0.08, pipeline="sd3"),
        load_bytes_per_s={LoadSource.HOST: 1e9, LoadSource.DISK: 1e8},
    )
    rig = Rig(source, policy, num_workers, costs, ROOM)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def assert_served(
    rig: Rig, asked: dict[str, Spec], outcomes: dict[str, Outcome], stock: Callable[[Spec], np.ndarray]
) -> None:
    """Each request has ended once, those that are done with the picture of the stock pipeline; the log replays."""
    for uid, outcome in outcomes.items():
        assert outcome.status is not Status.FAILED, outcome.reason
        if outcome.image is not None:
            assert np.array_equal(tiny.pixels(outcome.image), stock(asked[uid]))
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)
    assert Counter(one["uid"] for one in actions(rig, "Finish")) == dict.fromkeys(asked, 1)
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.slow
def test_a_model_that_is_larger_than_a_device_is_measured_stage_by_stage(source: ModelSource) -> None:
    async def scenario(executor: LocalExecutor, _listener: Listener) -> None:
        rows = await executor.calibrate("sd3", ((Shape(64, 64),),), num_runs=1)
        assert {row.stage for row in rows} == set(STAGES)
        speeds = await executor.end_calibration()
        assert speeds[LoadSource.HOST] > 0, "how fast it loads was measured, too"

    run(scenario, source=source, weights_bytes=ROOM)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tilework", "edf"])
def test_a_model_that_is_larger_than_a_device_is_served_stage_by_stage(
    source: ModelSource, stock: Callable[[Spec], np.ndarray], policy: str
) -> None:
    with serving(source, policy, 2) as rig:
        assert sum(one.num_bytes for one in rig.engine._controller.costs.weights.all) > ROOM
        asked = {str(index): replace(LARGE, seed=index) for index in range(4)}
        outcomes = dict(zip(asked, rig.outcomes(asked), strict=True))
        assert {one.status for one in outcomes.values()} == {Status.DONE}
        assert actions(rig, "LoadComponents")
        assert all(room < ROOM for room in rig.engine.status.usage().weights_free_bytes.values())
        assert_served(rig, asked, outcomes, stock)


@dataclass
class Disturbance(Observer):
    """Once the policy has changed the placement because it is out of balance: does something during the next load."""

    rig: Rig
    do: Callable[[Rig, int], None]
    placements: list[NewPlacement] = field(default_factory=list)
    device_id: int | None = None

    def on_placed(self, placement: NewPlacement) -> None:
        self.placements.append(placement)

    @property
    def is_out_of_balance(self) -> bool:
        return any("was asked for" in placement.why for placement in self.placements)

    def send(self, device_id: int, outgoing: Any) -> None:
        type(self.rig.executor).send(self.rig.executor, device_id, outgoing)
        if isinstance(outgoing, LoadWeights) and self.is_out_of_balance and self.device_id is None:
            self.device_id = device_id
            asyncio.get_running_loop().call_soon(self.do, self.rig, device_id)


def kill_worker(rig: Rig, device_id: int) -> None:
    os.kill(rig.executor.pids.get(str(device_id)) or 0, signal.SIGKILL)


def cancel_request(rig: Rig, device_id: int) -> None:
    """Cancel the request whose run waits for the load."""
    tracker = rig.engine._controller.tracker
    device = tracker.device(device_id)
    assert device is not None
    rig.engine.cancel(tracker.jobs[device.works[-1].job_ids[0]].request.uid, "its client went away")


@pytest.mark.slow
@pytest.mark.parametrize("do", [kill_worker, cancel_request])
def test_devices_change_their_stages_under_traffic_and_no_request_is_lost(
    source: ModelSource,
    stock: Callable[[Spec], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    do: Callable[[Rig, int], None],
) -> None:
    """First small requests, for which two devices encode; then large ones, until two denoise and decode."""
    monkeypatch.setattr(monitor, "_LEAST_WINDOW_NS", NS_PER_S)
    monkeypatch.setitem(registry._GIVEN, "quick", quick)
    with serving(source, "quick", NUM_WORKERS) as rig:
        disturbance, seen = Disturbance(rig, do), list[PlacementStatus]()
        rig.engine.observe(disturbance)
        monkeypatch.setattr(rig.executor, "send", disturbance.send)

        async def scenario() -> tuple[dict[str, Spec], dict[str, Outcome]]:
            asked, tickets = dict[str, Spec](), dict[str, Ticket]()
            for uid, spec in mixed(lambda: disturbance.device_id is None):
                await until(lambda: sum(not one.outcome.done() for one in tickets.values()) < NUM_WAITING)
                ticket = rig.submit(spec, uid)
                assert isinstance(ticket, Ticket)
                asked[uid], tickets[uid] = spec, ticket
                seen.extend(rig.engine.status.usage().placements)
            outcomes = await asyncio.gather(*(ticket.outcome for ticket in tickets.values()))
            return asked, dict(zip(tickets, outcomes, strict=True))

        asked, outcomes = rig.run(scenario())
        types = [Counter(name for group, name in one.groups for _ in group) for one in disturbance.placements]
        assert types[0] == {"DC": 1, "E": 2}
        assert {"DC": 2, "E": 1} in types
        assert disturbance.device_id is not None, "a device has loaded for it"
        ends = Counter(outcome.status for outcome in outcomes.values())
        assert ends[Status.CANCELLED] == (do is cancel_request)
        assert ends[Status.DONE] == len(asked) - ends[Status.CANCELLED]
        assert rig.log.getvalue().count('"is":"DeviceLost"') == (do is kill_worker)
        assert {one.name for one in seen} == {"DC", "E"}
        assert max(one.completions for one in seen if one.name == "E") > 0, "what the policy counts can be seen"
        assert_served(rig, asked, outcomes, stock)


def quick() -> TridentServe:
    """The policy with a window of a second, for which `_LEAST_WINDOW_NS` must have been changed."""
    policy = TridentServe()
    policy.orchestration.monitor.window_ns = NS_PER_S
    return policy


def mixed(goes_on: Callable[[], bool]) -> Iterator[tuple[str, Spec]]:
    """Small requests, more than the first placement waits for, large ones while `goes_on`, then both in turn."""
    for index in range(40):
        yield f"small-{index}", replace(SMALL, seed=index % 4)
    for index in range(600):
        if not goes_on():
            break
        yield f"large-{index}", replace(LARGE, seed=index % 4)
    for index in range(3):
        yield f"last-small-{index}", replace(SMALL, seed=index)
        yield f"last-large-{index}", replace(LARGE, seed=index)
