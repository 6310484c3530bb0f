"""What is recorded of a request when its works end in another order than they ran in."""

from __future__ import annotations

import asyncio

import tiny
from builders import controller, request
from stages import DECODE, DIFFUSE, stage_of
from tilework.control.driver.result import WorkResult
from tilework.core.wire.reports import Ended, Ending
from tilework.core.wire.spec import Image
from tilework.core.work import Group, Member, Work
from tilework.runtime.observer import Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.ticket import Ticket
from tilework.runtime.work_recorder import WorkRecorder

STEPS = 4
IMAGE = Image(1, 1, bytes(3))


def ended(work_id: int, stage: str, devices: Group, position: int, num_steps: int = 1) -> WorkResult:
    """A work that ran at the time of its number; a decode has made a picture."""
    work = Work(
        work_id=work_id,
        stage=stage_of("toy", stage),
        members=(Member(0, 1, position, position - 1),),
        devices=devices,
        num_steps=num_steps,
        why="",
    )
    report = Ended(work_id, work_id, work_id, num_steps, images={0: IMAGE} if stage == DECODE else {})
    return WorkResult(work=work, ending=Ending.DONE, event=None, members={0: position}, report=report)


def test_what_later_works_have_told_stays_when_an_earlier_one_ends_after_them() -> None:
    """One device of its group reports late, and the others go on meanwhile."""
    asked, requests, loop = request("a", steps=STEPS), RequestTable(), asyncio.new_event_loop()
    ticket = Ticket(request=asked, eta_ns=0, eta_p90_ns=0, outcome=loop.create_future())
    loop.close()
    requests.add(0, tiny.spec(steps=STEPS), ticket)
    recorder = WorkRecorder(controller(), requests, None, Observer(), 0)
    for result in (ended(2, DIFFUSE, (1,), 4), ended(3, DECODE, (1,), 5), ended(1, DIFFUSE, (0, 1), 1, num_steps=3)):
        recorder.record(result)
    assert requests[0].image is IMAGE
    assert ticket.steps_done == STEPS
    assert [segment.start_ns for segment in ticket.segments] == [1, 2, 3], "in the order in which they ran"
    assert ticket.first_start_ns == 1
