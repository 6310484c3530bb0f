"""Histories of logs: predictions, lost works, the time of a request, and why it was late or not served."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from builders import request, table
from recorded import Play, lost_and_broken, recorded
from stages import DIFFUSE
from tilework.cli.views.explanation import summary_document
from tilework.control.account import account_of, cause_of
from tilework.control.history import History, PastRequest
from tilework.control.history_recorder import read_history
from tilework.core.events import Cancelled, Submitted, WorkFailed, WorkFinished
from tilework.core.request import OnMiss, Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig


def slower(costs: CostTable, factor: float) -> CostTable:
    return replace(costs, rows=tuple(replace(row, seconds=row.seconds * factor) for row in costs.rows))


def of(history: History, uid: str) -> PastRequest:
    (past,) = [past for past in history.requests if past.request.uid == uid]
    return past


def test_predictions_are_those_of_the_controller_with_its_corrections() -> None:
    """The devices take twice as long as in the table."""
    requests = [request(str(i), 2.0 * i, steps=10) for i in range(30)]
    exact = recorded(requests).history
    assert all(past.predicted_ns == past.run_ns for past in exact.works)
    history = recorded(requests, devices=slower(table(), 2.0)).history
    diffuse = [past for past in history.works if past.work.stage.name == DIFFUSE]
    ratios = [(past.run_ns or 0) / (past.predicted_ns or 1) for past in diffuse]
    assert ratios[0] == 2.0
    assert ratios[-1] == pytest.approx(1.0, abs=0.01)


def test_a_lost_work_is_kept_with_its_reason() -> None:
    lines, work_lost = lost_and_broken()
    history = read_history(lines)
    (lost,) = history.lost
    assert (lost.work, lost.steps, lost.end_ns - lost.start_ns) == (work_lost, 1, 60 * NS_PER_MS)
    assert [(change.device_id, change.is_up) for change in history.devices[4:]] == [(3, False), (3, True)]
    assert history.devices[4].reason == "killed by signal 9"
    assert history.num_devices == 4
    assert cause_of(account_of(history, of(history, "a"))) is None, "it has not ended"


def test_a_lost_work_is_the_first_cause_of_a_late_request() -> None:
    play = Play("fixed-sp1", 1, table())
    (encode, *works) = play.tell(Submitted(request("a", steps=2, slo_s=0.25)))
    works += play.finish(encode, 0.01)
    works = play.tell(WorkFailed(works[0].work_id, "out of memory"), 0.1)
    while works:
        works += play.finish(works[0], 0.1)
        del works[0]
    history = read_history(play.lines)
    assert of(history, "a").on_time is False
    assert cause_of(account_of(history, of(history, "a"))) == "1 of its works was lost: out of memory"


# Accounts.


def test_a_wait_names_the_requests_that_ran_meanwhile() -> None:
    """One device; b and c arrive while a runs, and are due in this order."""
    one = SimConfig(num_devices=1)
    requests = [request("a", steps=20, slo_s=9.0), request("b", 0.5, slo_s=9.0), request("c", 0.6, slo_s=9.5)]
    history = recorded(requests, "fixed-sp1", sim=one).history
    ends_ns = {past.request.uid: past.finish_ns or 0 for past in history.requests}
    account = account_of(history, of(history, "c"))
    assert dict(account.blockers) == {
        "a": ends_ns["a"] - requests[2].arrival_ns,
        "b": ends_ns["b"] - ends_ns["a"],
    }
    assert account.blockers[0][0] == "a"
    assert account.waited_ns == sum(duration_ns for _, duration_ns in account.blockers)
    assert account.idle_ns == 0
    assert account.waited_ns + account.ran_ns == ends_ns["c"] - requests[2].arrival_ns
    alone = account_of(history, of(history, "a"))
    assert (alone.waited_ns, alone.blockers, alone.overrun_ns) == (0, (), 0)
    assert alone.slack_ns == 9 * NS_PER_S - ends_ns["a"]


def test_works_on_other_devices_are_no_blockers() -> None:
    """c arrives when both devices are busy, and gets that of b, which is done first."""
    requests = [request("a", steps=20), request("b", steps=10), request("c", 0.3, steps=10)]
    history = recorded(requests, "fixed-sp1").history
    assert of(history, "a").job_id == 0
    account = account_of(history, of(history, "c"))
    assert account.blockers == (("b", (of(history, "b").finish_ns or 0) - requests[2].arrival_ns),)


def test_time_in_which_its_devices_had_no_work_is_idle() -> None:
    sim = SimConfig(num_devices=1, dispatch_ns=20 * NS_PER_MS)
    history = recorded([request("a", steps=10)], "fixed-sp1", sim=sim).history
    account = account_of(history, of(history, "a"))
    assert account.idle_ns == account.waited_ns == 20 * NS_PER_MS * len(account.works)


@pytest.mark.parametrize(
    ("requests", "factor", "pattern"),
    [
        ([request("b", steps=10, slo_s=1.9)], 2.0, r"its works took 0\.\d\d s longer than predicted"),
        (
            [request("a", steps=20, slo_s=2.2), request("b", 0.5, steps=10, slo_s=2.0)],
            1.0,
            r"waited 1\.56 s and ran 1\.06 s; waited longest for a \(1\.56 s\)",
        ),
        (
            [request("a", steps=20, slo_s=2.2), request("b", 0.5, side=64, steps=40, slo_s=1.5)],
            1.1,  # Its works took longer than predicted, but by less than it was late.
            r"waited 1\.\d\d s and ran 1\.12 s; waited longest for a \(1\.\d\d s\)",
        ),
        (
            [request("b", steps=10, slo_s=0.5)],
            1.0,
            r"its works took 1\.06 s, and it had 0\.50 s",
        ),
    ],
)
def test_the_cause_is_the_first_reason_that_explains_it(requests: list[Request], factor: float, pattern: str) -> None:
    history = recorded(requests, "fixed-sp1", sim=SimConfig(num_devices=1), devices=slower(table(), factor)).history
    past = of(history, "b")
    assert past.on_time is False
    assert re.fullmatch(pattern, cause_of(account_of(history, past)) or "")


@pytest.mark.parametrize("is_due", [True, False])
def test_a_request_that_was_not_served_is_not_late(is_due: bool) -> None:
    """With or without a deadline, the cause is the reason of its end."""
    slo_s = 9.0 if is_due else None
    play = Play("edf", 1, table())
    for uid in "ab":
        play.tell(Submitted(request(uid, slo_s=slo_s, on_miss=OnMiss.REJECT)))
    play.tell(Cancelled("b", "the client has gone away"), 0.5)
    play.tell(Submitted(request("c", 0.5, slo_s=0.2, on_miss=OnMiss.REJECT)))
    play.tell(Submitted(replace(request("d", 0.5, slo_s=slo_s), pipeline="other")))
    while (work := next(iter(play.controller.tracker.works.values()), None)) is not None:
        play.tell(WorkFailed(work.work_id, "no memory"), 0.1)
    history = read_history(play.lines)
    ends = {past.request.uid: (past.on_time, cause_of(account_of(history, past)) or "") for past in history.requests}
    assert ends["a"] == (False if is_due else None, "failed: no memory (attempt 3 of 3)"), (
        "a failed request misses its deadline"
    )
    assert ends["b"] == (None, "cancelled: the client has gone away")
    assert ends["c"][0] is ends["d"][0] is None
    assert ends["c"][1].startswith("refused (deadline_unreachable): ")
    assert ends["d"][1].startswith("refused (unknown_cost): ")
    summary = summary_document(history)
    assert summary["promises"] == {"kept": 0, "broken": int(is_due)}
    assert summary["attainment"] == (0 if is_due else None)


def test_no_request_waits_for_itself() -> None:
    """The end of its encode is reported so late that, by the log, its steps began before."""
    play = Play("fixed-sp1", 1, table())
    (encode, *works) = play.tell(Submitted(request("a", steps=2)))
    steps, decode = [*works, *play.tell(WorkFinished(encode.work_id, 10 * NS_PER_MS), 0.05)]
    play.tell(WorkFinished(steps.work_id, 30 * NS_PER_MS), 0.001)
    play.finish(decode, 0.02)
    history = read_history(play.lines)
    account = account_of(history, of(history, "a"))
    assert [work.work for work in account.works] == [steps, encode, decode]
    assert account.blockers == ()
    assert account.waited_ns == account.idle_ns == 21 * NS_PER_MS, "until its steps began"
    assert account.waited_ns + account.ran_ns == 71 * NS_PER_MS
