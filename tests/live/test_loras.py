"""LoRAs of several models on few devices: each picture is that of its model with its LoRAs, by stock means."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import table
from loras import save_lora, use_stock
from runtime.rig import Rig, assert_nothing_is_left
from tilework.control.log import replay
from tilework.core.component import LoadSource
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.request import OnMiss, Status, Terms
from tilework.core.time import NS_PER_S
from tilework.core.wire.commands import LoadWeights
from tilework.core.wire.spec import Spec
from tilework.cost.table import merged
from tilework.pipelines.components import modules_of
from tilework.runtime.ticket import Outcome, Ticket
from tilework.worker.models.shared_weights import weights_of

BUILD: Mapping[str, Callable[[], Any]] = {"sd3": tiny.build_sd3, "flux": tiny.build_flux}
NAMES = (*BUILD, "shapes")
USES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("sd3", {"ink": 1.0}),
    ("flux", {}),
    ("sd3", {"chalk": 0.7, "ink": 0.4}),
    ("flux", {"chalk": 1.2}),
    ("sd3", {}),
    ("flux", {"ink": 1.0}),
    ("shapes", {"ink": 0.9}),
    ("shapes", {}),
)

pytestmark = pytest.mark.slow
OF_TINY = range(6)
Drawn = dict[str, tuple[int, Ticket]]


@dataclass(frozen=True)
class Place:
    """Saved models with their LoRAs, the last of them shipped and larger, and the stock pictures of `USES`."""

    sources: tuple[ModelSource, ...]
    model_bytes: int
    shipped_bytes: int
    lora_bytes: int
    pictures: tuple[np.ndarray, ...]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    tiny.prepare()
    root, sources = tmp_path_factory.mktemp("models"), list[ModelSource]()
    for name, build in BUILD.items():
        tiny.save(build(), root / name, f"tiny-{name}")
        files = {
            "ink": save_lora(build(), root / f"{name}-loras" / "ink.safetensors", 1, text_encoder=True),
            "chalk": save_lora(build(), root / f"{name}-loras" / "chalk.safetensors", 2),
        }
        loras = tuple(LoraSource(one, str(file)) for one, file in files.items())
        sources.append(ModelSource(path=str(root / name), name=name, loras=loras))
    shipped = tilework.reference("shapes")
    shipped_bytes = sum(weight.nbytes for module in modules_of(shipped).values() for weight in weights_of(module))
    ink = save_lora(shipped, root / "shapes-loras" / "ink.safetensors", 3, text_encoder=True)
    shapes = ModelSource(path="shapes", name="shapes", loras=(LoraSource("ink", str(ink)),))
    pictures = tuple(stock([*sources, shapes], index) for index in range(len(USES)))
    assert len({picture.tobytes() for picture in pictures}) == len(USES), "LoRAs without effect prove nothing"
    model_bytes = max(num_bytes(Path(one.path)) for one in sources)
    lora_bytes = max(Path(one.path).stat().st_size for source in sources for one in source.loras)
    return Place((*sources, shapes), model_bytes, shipped_bytes, lora_bytes, pictures)


def num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*.safetensors"))


def stock(sources: list[ModelSource], index: int) -> np.ndarray:
    name, scales = USES[index]
    source = next(one for one in sources if one.name == name)
    pipeline = tilework.reference(source.path)
    if scales:
        use_stock(pipeline, {one.name: Path(one.path) for one in source.loras}, scales)
    length = 0 if name == "shapes" else tiny.TEXT_LENGTH  # As their `tilework.json` say.
    return tiny.run_stock(pipeline, spec_of(index), max_sequence_length=length).pixels


def spec_of(index: int, **changes: Any) -> Spec:
    loras = tuple(UsedLora(name, scale) for name, scale in USES[index][1].items())
    return tiny.spec(seed=index, exact=True, loras=loras, **changes)


@contextmanager
def serving(
    place: Place, num_workers: int, weights_bytes: int | None, names: tuple[str, ...] = tuple(BUILD)
) -> Iterator[Rig]:
    costs = replace(
        merged([table(pipeline=name) for name in names]), load_bytes_per_s={LoadSource.HOST: 1e9, LoadSource.DISK: 1e8}
    )
    sources = tuple(one for one in place.sources if one.name in names)
    rig = Rig(sources, "tilework", num_workers, costs, weights_bytes)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def submitted(rig: Rig, count: int, uses: Iterable[int] = OF_TINY, **terms: Any) -> Drawn:
    found: Drawn = {}
    for number, index in zip(range(count), cycle(uses), strict=False):
        ticket = rig.submit(spec_of(index), f"request-{number}", model=USES[index][0], **terms)
        assert isinstance(ticket, Ticket)
        found[f"request-{number}"] = index, ticket
    return found


def drawn(rig: Rig, submit: Callable[[], Drawn]) -> tuple[Drawn, dict[str, Outcome]]:
    async def scenario() -> tuple[Drawn, dict[str, Outcome]]:
        tickets = submit()
        outcomes = await asyncio.gather(*(ticket.outcome for _, ticket in tickets.values()))
        return tickets, dict(zip(tickets, outcomes, strict=True))

    return rig.run(scenario())


def assert_stock(rig: Rig, place: Place, tickets: Drawn, outcomes: Mapping[str, Outcome]) -> None:
    for uid, outcome in outcomes.items():
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(tiny.pixels(outcome.image), place.pictures[tickets[uid][0]]), USES[tickets[uid][0]]
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)
    assert replay(rig.log.getvalue().splitlines())[1] is None


def loads(rig: Rig) -> list[str]:
    """The stages for which something was loaded, as the log names them."""
    lines = [json.loads(line) for line in rig.log.getvalue().splitlines()[1:]]
    return [one["stage"] for line in lines for one in line["actions"] if one["is"] == "LoadComponents"]


def test_pictures_with_loras_are_stock_while_models_and_loras_come_and_go(place: Place) -> None:
    with serving(place, 1, int(1.05 * place.model_bytes) + place.lora_bytes) as rig:
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 8))
        assert any("ink" in stage for stage in loads(rig)), "a LoRA is loaded when a request needs it"
        assert_stock(rig, place, tickets, outcomes)


def test_nothing_is_lost_of_mixed_traffic_with_kills_and_cancels_during_loads(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped model and two others, all with LoRAs, on two devices with room for the shipped one and another."""
    room = int(1.05 * (place.shipped_bytes + place.model_bytes)) + place.lora_bytes
    with serving(place, 2, room, NAMES) as rig:
        send, sent, cancelled = rig.executor.send, list[int](), list[str]()

        def send_and_disturb(device_id: int, outgoing: Any) -> None:
            send(device_id, outgoing)
            if isinstance(outgoing, LoadWeights):
                sent.append(device_id)
                if len(sent) == 4:
                    os.kill(rig.executor.pids.get(str(device_id)) or 0, signal.SIGKILL)
                elif len(sent) == 6:
                    waiting = [uid for uid in rig.engine._requests.uids if uid not in cancelled]
                    cancelled.append(waiting[0])
                    asyncio.get_running_loop().call_soon(rig.engine.cancel, waiting[0], "its client went away")

        monkeypatch.setattr(rig.executor, "send", send_and_disturb)
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 24, range(len(USES))))
        assert len(sent) >= 6
        assert [outcomes.pop(uid).status for uid in cancelled] == [Status.CANCELLED]
        assert len(outcomes) == 23
        assert_stock(rig, place, tickets, outcomes)


def test_without_a_limit_loras_stay_on_all_devices(place: Place) -> None:
    with serving(place, 2, None) as rig:
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 8))
        assert not loads(rig)
        assert_stock(rig, place, tickets, outcomes)


def test_a_worker_that_is_killed_during_a_load_costs_no_picture(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(place, 2, int(1.05 * place.model_bytes) + place.lora_bytes) as rig:
        send, sent = rig.executor.send, list[int]()

        def send_and_kill(device_id: int, outgoing: Any) -> None:
            send(device_id, outgoing)
            if isinstance(outgoing, LoadWeights):
                sent.append(device_id)
                if len(sent) == 3:
                    os.kill(rig.executor.pids.get(str(device_id)) or 0, signal.SIGKILL)

        monkeypatch.setattr(rig.executor, "send", send_and_kill)
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 8))
        assert len(sent) > 3
        assert_stock(rig, place, tickets, outcomes)


def test_promises_hold_through_loads(place: Place) -> None:
    with serving(place, 1, int(1.05 * place.model_bytes) + place.lora_bytes) as rig:
        due_ns, terms = rig.engine.now_ns() + 30 * NS_PER_S, Terms(on_miss=OnMiss.REJECT)
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 6, deadline_ns=due_ns, terms=terms))
        assert all(one.finished_ns <= due_ns for one in outcomes.values())
        assert_stock(rig, place, tickets, outcomes)


def test_a_lora_whose_file_has_changed_fails_alone(place: Place, tmp_path: Path) -> None:
    first, *others = place.sources
    ink, chalk = first.loras
    copy = tmp_path / "ink.safetensors"
    copy.write_bytes(Path(ink.path).read_bytes())
    changed = replace(place, sources=(replace(first, loras=(LoraSource("ink", str(copy)), chalk)), *others))
    with serving(changed, 1, int(1.05 * place.model_bytes) + place.lora_bytes) as rig:
        copy.write_bytes(Path(chalk.path).read_bytes())
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 6))
        failed = {uid: outcomes.pop(uid) for uid in ("request-0", "request-2")}
        assert {one.status for one in failed.values()} == {Status.FAILED}
        assert all("has no LoRA ink here" in one.reason for one in failed.values()), failed
        assert_stock(rig, changed, tickets, outcomes)


def test_a_device_without_memory_for_a_load_costs_no_picture(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may take no more memory from its third load on, so that this fails; the next process may again."""
    with serving(place, 1, int(1.05 * place.model_bytes) + place.lora_bytes) as rig:
        send, limited = rig.executor.send, list[int]()
        sent = 0

        def send_and_limit(device_id: int, outgoing: Any) -> None:
            nonlocal sent
            if isinstance(outgoing, LoadWeights) and not limited:
                sent += 1
                if sent == 3:
                    limited.append(rig.executor.pids.get(str(device_id)) or 0)
                    resource.prlimit(limited[0], resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
            send(device_id, outgoing)

        monkeypatch.setattr(rig.executor, "send", send_and_limit)
        tickets, outcomes = drawn(rig, lambda: submitted(rig, 8))
        assert limited
        assert rig.executor.pids.get("0") != limited[0], "it could not load"
        assert_stock(rig, place, tickets, outcomes)
