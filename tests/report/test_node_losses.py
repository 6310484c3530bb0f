"""What is said about a lost node: which requests were there, and where and with which step they went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders import request, table
from stages import DIFFUSE, stage_of
from tilework.cli.views.node_losses import NodeLoss, node_losses
from tilework.control.controller import ControllerConfig
from tilework.control.history import History, LostWork, PastDevice, PastRequest, PastWork
from tilework.control.log import LogHeader
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Status
from tilework.core.time import NS_PER_S
from tilework.core.work import Member, Work

STEPS = 10
LOST_NS = 5 * NS_PER_S
REASON = "its agent has closed the connection"


def device(device_id: int, node: int, at_s: int, reason: str = "") -> PastDevice:
    kind = DeviceKind.ACCELERATOR if device_id < 2 else DeviceKind.CPU
    return PastDevice(at_ns=at_s * NS_PER_S, device_id=device_id, node=node, is_up=not reason, kind=kind, reason=reason)


def work(number: int, job_id: int, first: int, count: int, on: int, span_s: tuple[float, float]) -> PastWork:
    """Steps from `first` on, from 0, of a job."""
    made = Work(
        work_id=number,
        stage=stage_of("toy", DIFFUSE),
        members=(Member(job_id, 0, 1 + first, first),),
        devices=(on,),
        num_steps=count,
        why="",
    )
    start_ns, end_ns = (round(NS_PER_S * at_s) for at_s in span_s)
    return PastWork(work=made, start_ns=start_ns, end_ns=end_ns, steps=count, run_ns=end_ns - start_ns)


def lost(past: PastWork, steps: int = 0) -> LostWork:
    return LostWork(work=past.work, start_ns=past.start_ns, end_ns=past.end_ns, steps=steps, reason=REASON)


def asked(uid: str, job_id: int, finish_s: float | None) -> PastRequest:
    end_ns = None if finish_s is None else round(NS_PER_S * finish_s)
    status = None if finish_s is None else Status.DONE
    one = replace(request(uid), steps=STEPS)
    return PastRequest(request=one, job_id=job_id, status=status, finish_ns=end_ns)


UP = [device(0, 0, 0), device(1, 1, 0), device(2, 0, 0), device(3, 1, 0)]
NODE_1 = [device(1, 1, 5, REASON), device(3, 1, 5, REASON)]


def told(
    requests: Sequence[PastRequest],
    works: Sequence[PastWork] = (),
    gone: Sequence[LostWork] = (),
    devices: Sequence[PastDevice] = (*UP, *NODE_1),
) -> tuple[NodeLoss, ...]:
    header = LogHeader(version="", config=ControllerConfig(), table=table())
    history = History(
        header=header,
        end_ns=20 * NS_PER_S,
        works=tuple(works),
        requests=tuple(requests),
        lost=tuple(gone),
        devices=tuple(devices),
    )
    return node_losses(history, {"a": 7})


def test_a_request_goes_on_where_its_state_is() -> None:
    before, cut_off = work(1, 0, 0, 4, 1, (1, 3)), lost(work(2, 0, 4, 2, 1, (3, 5)))
    after = work(3, 0, 4, 2, 0, (6, 7))
    (loss,) = told([asked("a", 0, 9)], [before, after], [cut_off])
    assert str(loss) == f"node 1 (devices 1, 3) was lost at 5.0 s: {REASON}"
    (move,) = loss.moves
    assert str(move) == "request 7: steps 5-6 of 10 on device 1 (lost), then steps 5-6 of 10 on device 0"
    assert move.steps_again == 0


def test_steps_of_which_no_state_is_left_are_made_again() -> None:
    before, after = work(1, 0, 0, 4, 1, (1, 4)), work(3, 0, 1, 3, 0, (6, 7))
    (loss,) = told([asked("a", 0, 9)], [before, after])
    (move,) = loss.moves
    assert str(move) == "request 7: steps 1-4 of 10 on device 1, then steps 2-4 of 10 on device 0, 3 steps again"


def test_other_requests_are_not_named() -> None:
    """One ended before, one was on the other node, one came later; of one that was to begin there nothing was lost."""
    here = work(1, 0, 0, 4, 1, (1, 4))
    elsewhere, later = work(2, 1, 0, 4, 0, (1, 6)), work(3, 2, 0, 4, 0, (7, 8))
    queued, begun = lost(work(4, 3, 0, 4, 1, (5, 5))), work(5, 3, 0, 4, 0, (8, 9))
    requests = [asked("a", 0, 4.5), asked("b", 1, 9), asked("c", 2, 9), asked("d", 3, 9)]
    (loss,) = told(requests, [here, elsewhere, later, begun], [queued])
    assert loss.moves == ()


@pytest.mark.parametrize("finish_s", [None, 6])
def test_a_request_that_never_went_on(finish_s: float | None) -> None:
    (loss,) = told([asked("b", 0, finish_s)], [work(1, 0, 0, 4, 1, (1, 4))])
    assert [str(move) for move in loss.moves] == ["request b: steps 1-4 of 10 on device 1, then nothing"]


def test_a_lost_worker_is_no_lost_node() -> None:
    assert told([], devices=[*UP, NODE_1[0]]) == ()
    assert told([], devices=[device(0, 0, 0), device(0, 0, 5, REASON)]) == (), "there is but one machine"


def test_a_node_comes_back() -> None:
    (loss,) = told([], devices=[*UP, *NODE_1, device(1, 1, 11), device(3, 1, 12)])
    assert str(loss).endswith("; another agent took its place at 11.0 s")
    assert loss.to_json() == {
        "at_s": 5.0,
        "back_s": 11.0,
        "node": 1,
        "devices": [1, 3],
        "reason": REASON,
        "moves": [],
    }
