"""What is logged when runs take another time than was measured."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from builders import PIPELINE, request, table
from stages import DECODE, DIFFUSE, stage_of
from tilework.control.driver.result import WorkResult
from tilework.core.time import NS_PER_S
from tilework.core.wire.reports import Ending
from tilework.core.work import Member, Work
from tilework.cost.table_costs import TableCosts
from tilework.runtime.observer import Observer
from tilework.runtime.work_recorder import WorkRecorder

STEP_NS = NS_PER_S // 10


class Rig:
    """A recorder of works of one request, each of which takes a multiple of what the table says."""

    def __init__(self) -> None:
        self.costs = TableCosts(table(0.1, decode_s=0.1))
        self.requests: Any = {1: SimpleNamespace(ticket=SimpleNamespace(request=request("a")))}
        controller: Any = SimpleNamespace(costs=self.costs)
        self.recorder = WorkRecorder(controller, self.requests, None, Observer(), 0)

    def run(self, stage: str, ratio: float, times: int) -> None:
        for _ in range(times):
            work = Work(
                work_id=1,
                stage=stage_of(PIPELINE, stage),
                members=(Member(1, 0, 1, 0),),
                devices=(0,),
                num_steps=1,
                why="",
            )
            self.recorder.begin(work)
            self.costs.observe(work.stage, (request("a"),), 1, 1, round(ratio * STEP_NS))
            self.recorder.observe(WorkResult(work, Ending.DONE, None, {1: 1}))


def test_a_stage_that_takes_another_time_than_measured_is_logged_every_hour_at_most(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = NS_PER_S
    monkeypatch.setattr("tilework.runtime.work_recorder.time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    rig = Rig()
    with caplog.at_level(logging.WARNING, "tilework"):
        rig.run(DIFFUSE, 4.5, times=2)
        rig.run(DECODE, 1.3, times=9)
        assert not caplog.records
        rig.run(DIFFUSE, 4.5, times=9)
        rig.run(DECODE, 0.5, times=30)
        rig.run(DIFFUSE, 4.5, times=9)
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(";")[0] for text in said] == [
        f"{PIPELINE}: the latest runs of {DIFFUSE} took 4.5 times as long as measured",
        f"{PIPELINE}: the latest runs of {DECODE} took 0.5 times as long as measured",
    ]
    assert all("tilework serve --recalibrate" in text for text in said)
    for _ in range(3):  # It comes and goes.
        rig.run(DIFFUSE, 1.0, times=15)
        rig.run(DIFFUSE, 3.0, times=15)
    assert len(caplog.records) == 2
    rig.run(DECODE, 1.0, times=30)
    now_ns += 3600 * NS_PER_S
    rig.run(DIFFUSE, 3.0, times=1)
    assert [record.getMessage().split(" as long")[0] for record in caplog.records[2:]] == [
        f"{PIPELINE}: the latest runs of {DIFFUSE} took 3 times"
    ]
