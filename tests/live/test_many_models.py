"""Several models on few devices: weights come and go between runs, and each picture is its model's own."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import table
from runtime.rig import Rig, assert_nothing_is_left
from tilework.control.log import replay
from tilework.core.component import LoadSource
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.commands import WEIGHTS, LoadWeights
from tilework.core.wire.spec import Spec
from tilework.cost.table import CostTable, merged
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

pytestmark = pytest.mark.slow

BUILD: dict[str, Callable[[], Any]] = {"sd3": tiny.build_sd3, "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, ...]:
    tiny.prepare()
    found = []
    for name, build in BUILD.items():
        directory = tmp_path_factory.mktemp(name)
        tiny.save(build(), directory, f"tiny-{name}")
        found.append(ModelSource(path=str(directory), name=name))
    return tuple(found)


@pytest.fixture(scope="module")
def stock(sources: tuple[ModelSource, ...]) -> Callable[[str, Spec], np.ndarray]:
    pipelines = {source.name: tilework.reference(source.path) for source in sources}
    return lambda name, spec: tiny.run_stock(pipelines[name], spec).pixels


def costs() -> CostTable:
    return replace(
        merged([table(pipeline=name) for name in BUILD]), load_bytes_per_s={LoadSource.HOST: 1e9, LoadSource.DISK: 1e8}
    )


@contextmanager
def serving(sources: tuple[ModelSource, ...], num_workers: int, weights_bytes: int | None) -> Iterator[Rig]:
    rig = Rig(sources, "tilework", num_workers, costs(), weights_bytes)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def budget(sources: tuple[ModelSource, ...]) -> int:
    """What the largest of the models weighs, and a tenth: no two of them fit."""
    sizes = []
    for source in sources:
        files = Path(source.path).rglob("*.safetensors")
        sizes.append(sum(file.stat().st_size for file in files))
    return int(1.1 * max(sizes))


def submitted(rig: Rig, count: int) -> dict[str, tuple[str, Spec, Ticket]]:
    """Requests for all models in turn; each is exact."""
    found: dict[str, tuple[str, Spec, Ticket]] = {}
    for index, name in zip(range(count), cycle(BUILD), strict=False):
        spec = tiny.spec(seed=index, exact=True)
        ticket = rig.submit(spec, f"{name}-{index}", model=name)
        assert isinstance(ticket, Ticket)
        found[f"{name}-{index}"] = (name, spec, ticket)
    return found


async def ends(tickets: dict[str, tuple[str, Spec, Ticket]]) -> dict[str, Outcome]:
    outcomes = await asyncio.gather(*(ticket.outcome for _, _, ticket in tickets.values()))
    return dict(zip(tickets, outcomes, strict=True))


def assert_drawn(
    rig: Rig,
    tickets: dict[str, tuple[str, Spec, Ticket]],
    outcomes: dict[str, Outcome],
    stock: Callable[[str, Spec], np.ndarray],
) -> None:
    for uid, outcome in outcomes.items():
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        name, spec, _ = tickets[uid]
        assert np.array_equal(tiny.pixels(outcome.image), stock(name, spec))
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)
    lines = rig.log.getvalue().splitlines()
    assert replay(lines)[1] is None


def actions(rig: Rig, name: str) -> list[dict[str, Any]]:
    """The actions of this name, in order."""
    lines = [json.loads(line) for line in rig.log.getvalue().splitlines()[1:]]
    return [action for line in lines for action in line.get("actions", ()) if action["is"] == name]


def changes(rig: Rig) -> list[str]:
    """What was loaded and dropped, in order."""
    lines = [json.loads(line) for line in rig.log.getvalue().splitlines()[1:]]
    sources = [
        action.get("source") for line in lines for action in line.get("actions", ()) if action["is"] == "LoadComponents"
    ]
    assert set(sources) <= {"host"}, "the workers have read all models when they started"
    actions = [action["is"] for line in lines for action in line.get("actions", ())]
    return [name for name in actions if name in ("LoadComponents", "DropComponents")]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_picture_is_its_models_own_while_weights_come_and_go(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray], num_workers: int
) -> None:
    with serving(sources, num_workers, budget(sources)) as rig:

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            tickets = submitted(rig, 9)
            return tickets, await ends(tickets)

        tickets, outcomes = rig.run(scenario())
        assert {"LoadComponents", "DropComponents"} <= set(changes(rig))
        assert all(map(rig.engine.status.is_on_host, BUILD)), "its memory has room for all that workers have read"
        loaded = [segment.load_ns for outcome in outcomes.values() for segment in outcome.segments]
        assert max(loaded) > 0, "answers say how long they waited for weights"
        assert min(loaded) == 0, "and that steps did not"
        places = [rig.engine.status.devices_with(name) for name in BUILD]
        assert sum(map(len, places)) <= num_workers, "a device has room for one; it may have parts of several"
        assert_drawn(rig, tickets, outcomes, stock)


def test_without_a_limit_all_models_stay_on_all_devices(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(sources, 1, None) as rig:

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            tickets = submitted(rig, 3)
            return tickets, await ends(tickets)

        tickets, outcomes = rig.run(scenario())
        assert not changes(rig)
        assert {rig.engine.status.devices_with(name) for name in BUILD} == {(0,)}
        assert not any(map(rig.engine.status.is_on_host, BUILD)), "no device loads from it"
        assert_drawn(rig, tickets, outcomes, stock)


def test_a_worker_that_is_killed_during_a_load_costs_time_but_no_picture(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(sources, 2, budget(sources)) as rig:
        send, killed = rig.executor.send, list[int]()

        def send_and_kill(device_id: int, outgoing: Any) -> None:
            send(device_id, outgoing)
            if isinstance(outgoing, LoadWeights) and not killed:
                killed.append(device_id)
                os.kill(rig.executor.pids.get(str(device_id)) or 0, signal.SIGKILL)

        monkeypatch.setattr(rig.executor, "send", send_and_kill)

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            tickets = submitted(rig, 6)
            return tickets, await ends(tickets)

        tickets, outcomes = rig.run(scenario())
        assert killed
        assert_drawn(rig, tickets, outcomes, stock)


def test_a_model_whose_files_are_damaged_fails_alone_when_a_worker_is_restarted(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray], tmp_path: Path
) -> None:
    shutil.copytree(sources[1].path, tmp_path / "flux")
    ours = (sources[0], replace(sources[1], path=str(tmp_path / "flux")), sources[2])
    with serving(ours, 1, budget(sources)) as rig:

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            shutil.rmtree(tmp_path / "flux" / "transformer")
            os.kill(rig.executor.pids.get("0") or 0, signal.SIGKILL)
            tickets = submitted(rig, 6)
            return tickets, await ends(tickets)

        tickets, outcomes = rig.run(scenario())
        broken = {uid: outcomes.pop(uid) for uid in ("flux-1", "flux-4")}
        assert {one.status for one in broken.values()} == {Status.FAILED}
        assert all("flux cannot be loaded any more: flux/transformer" in one.reason for one in broken.values())
        assert_drawn(rig, tickets, outcomes, stock)


def test_a_request_that_is_cancelled_during_its_load_disturbs_no_other(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(sources, 1, budget(sources)) as rig:

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            tickets = submitted(rig, 3)
            first = next(iter(tickets))
            rig.engine.cancel(first, "its client went away")
            outcomes = await ends(tickets)
            assert outcomes.pop(first).status is Status.CANCELLED
            return tickets, outcomes

        tickets, outcomes = rig.run(scenario())
        assert len(outcomes) == 2
        assert_drawn(rig, tickets, outcomes, stock)


def test_a_model_that_no_device_has_room_for_is_named(sources: tuple[ModelSource, ...]) -> None:
    rig = Rig(sources, "tilework", 1, costs(), 100_000)
    whose = r"no model can run here: sd3: its stage (\w+) needs [0-9]+ bytes with its weights, and a device has 100000"
    with pytest.raises(WorkerStartFailed, match=whose):
        rig.start()
    rig.runner.close()


def test_two_models_of_one_name_are_refused(sources: tuple[ModelSource, ...]) -> None:
    rig = Rig((sources[0], replace(sources[1], name="sd3")), "tilework", 1, costs())
    with pytest.raises(WorkerStartFailed, match="two models are called 'sd3'"):
        rig.start()
    rig.runner.close()


def test_the_host_reads_what_waits_while_its_device_works(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default policy asks for it: the host has room for the weights of one model, and a request for another comes.

    The files that the controller believes forgotten are, since here the host could keep all.
    """
    both = sources[:2]
    monkeypatch.setattr(LocalExecutor, "host_bytes", budget(both))
    with serving(both, 1, budget(both)) as rig:

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            tickets = {}
            for name, steps in (("sd3", 160), ("flux", 2)):
                spec = tiny.spec(seed=1, steps=steps, exact=True)
                ticket = rig.submit(spec, name, model=name)
                assert isinstance(ticket, Ticket)
                tickets[name] = (name, spec, ticket)
                await until(lambda: tickets["sd3"][2].steps_done > 0)
                kept = {one.digest for one in rig.engine._controller.tracker.sources.kept(0)}
                for file in (rig.executor._blobs.path / WEIGHTS).iterdir():
                    if name == "sd3" and not file.suffix and file.name not in kept:
                        file.unlink()
            outcomes = await ends(tickets)
            await until(
                lambda: rig.log.getvalue().count('"is":"ComponentsRead"') == len(actions(rig, "ReadComponents"))
            )
            return tickets, outcomes

        tickets, outcomes = rig.run(scenario())
        lines = [json.loads(line) for line in rig.log.getvalue().splitlines()[1:]]
        asked = actions(rig, "ReadComponents")
        read = [line["event"]["is_kept"] for line in lines if line["event"]["is"] == "ComponentsRead"]
        assert asked
        assert all(read)
        digests, sources = set[str](), list[str]()
        for action in (action for line in lines for action in line["actions"]):
            if action["is"] == "ReadComponents":
                digests.update(action["components"])
            elif action["is"] == "LoadComponents" and digests & set(action["components"]):
                sources.append(action["source"])
                digests.difference_update(action["components"])
        assert sources[0] == "host", "its device loads what was read from the memory of its host"
        assert_drawn(rig, tickets, outcomes, stock)


def test_a_device_that_waits_for_its_weights_holds_up_no_other(
    sources: tuple[ModelSource, ...], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    """One device waits for a read from the disk that does not end, since another process seems to read the same."""
    both = sources[:2]
    with serving(both, 2, budget(both)) as rig:
        costs = rig.engine._controller.costs
        sd3, flux = (
            {one for stage in costs.graph(one.name).stages for one in costs.weights.components(stage)} for one in both
        )
        digest = max(flux - sd3, key=lambda one: one.num_bytes).digest

        async def scenario() -> tuple[dict[str, tuple[str, Spec, Ticket]], dict[str, Outcome]]:
            weights, tickets = rig.executor._blobs.path / WEIGHTS, {}
            (weights / digest).unlink()
            with (weights / f"{digest}.reading").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for uid, name in (("held", "flux"), *((f"free-{index}", "sd3") for index in range(4))):
                    spec = tiny.spec(seed=1, exact=True)
                    ticket = rig.submit(spec, uid, model=name)
                    assert isinstance(ticket, Ticket)
                    tickets[uid] = (name, spec, ticket)
                    await until(lambda: any(digest in load["components"] for load in actions(rig, "LoadComponents")))
                for uid in list(tickets)[1:]:
                    assert (await tickets[uid][2].outcome).status is Status.DONE
                assert not tickets["held"][2].outcome.done()
            return tickets, await ends(tickets)

        tickets, outcomes = rig.run(scenario())
        assert_drawn(rig, tickets, outcomes, stock)
