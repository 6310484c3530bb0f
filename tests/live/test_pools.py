"""Models with workers of their own: the shipped model under two names, on two workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import tiny
from builders import table
from runtime.rig import Rig, kill
from tilework.core.actions import Reject
from tilework.core.model import ModelSource
from tilework.core.request import RefusalCode, Status
from tilework.core.wire.commands import LoadWeights
from tilework.cost.table import CostTable, merged
from tilework.runtime.ticket import Outcome
from waiting import until

NAMES = ("first", "second")
SOURCES = tuple(ModelSource(path="shapes", name=name, devices=(index,)) for index, name in enumerate(NAMES))


@contextmanager
def serving(costs: CostTable | None, weights_bytes: int | None = None) -> Iterator[Rig]:
    rig = Rig(SOURCES, "tilework", 2, costs, weights_bytes)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def outcomes(rig: Rig, count: int) -> dict[str, list[Outcome]]:
    async def scenario() -> dict[str, list[Outcome]]:
        tickets = {
            name: rig.engine.submit({f"{name}-{index}": tiny.spec(seed=index) for index in range(count)}, model=name)
            for name in NAMES
        }
        found = {}
        for name, answer in tickets.items():
            assert not isinstance(answer, Reject)
            found[name] = list(await asyncio.gather(*(ticket.outcome for ticket in answer)))
        return found

    return rig.run(scenario())


def devices_of(found: list[Outcome]) -> set[int]:
    assert {one.status for one in found} == {Status.DONE}, [one.reason for one in found]
    return {device_id for one in found for segment in one.segments for device_id in segment.devices}


def test_each_model_is_drawn_by_its_worker_which_alone_has_it() -> None:
    with serving(merged([table(pipeline=name) for name in NAMES])) as rig:
        found = outcomes(rig, 4)
        assert {name: devices_of(of_one) for name, of_one in found.items()} == {"first": {0}, "second": {1}}
        assert [rig.engine.status.devices_serving(name) for name in NAMES] == [(0,), (1,)]
        assert [rig.engine.status.devices_with(name) for name in NAMES] == [(0,), (1,)]
        assert [[one.name for one in rig.executor._started_with[device_id]] for device_id in (0, 1)] == [  # type: ignore[union-attr]
            ["first"],
            ["second"],
        ]


@pytest.mark.slow
def test_a_model_whose_worker_is_lost_is_refused_with_the_reason_and_the_other_goes_on() -> None:
    with serving(merged([table(pipeline=name) for name in NAMES])) as rig:
        kill(rig, 0)
        rig.run(until(lambda: rig.engine.status.health().num_devices_up == 1))
        refused = rig.submit(tiny.spec(), "refused", model="first")
        assert isinstance(refused, Reject)
        assert (refused.reason, refused.code) == ("no device that serves first is up", RefusalCode.NO_DEVICE)
        rig.run(until(lambda: rig.engine.status.health().num_devices_up == 2))
        found = outcomes(rig, 1)
        assert {name: devices_of(of_one) for name, of_one in found.items()} == {"first": {0}, "second": {1}}


@pytest.mark.slow
def test_a_worker_loads_and_measures_only_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights on demand."""
    rig = Rig(SOURCES[1:], "tilework", 2, None, 1 << 30)
    loads: list[int] = []
    send = rig.executor.send

    def note(device_id: int, outgoing: object) -> None:
        loads.extend([device_id] if isinstance(outgoing, LoadWeights) else [])
        send(device_id, outgoing)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.executor, "send", note)
    rig.start()
    try:

        async def one() -> Outcome:
            answer = rig.engine.submit({"a": tiny.spec()})
            assert not isinstance(answer, Reject)
            return await answer[0].outcome

        assert devices_of([rig.run(one())]) == {1}
        assert set(loads) == {1}
    finally:
        rig.close()
