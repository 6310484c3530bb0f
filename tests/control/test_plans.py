"""What a policy may say besides starts: jobs that it cannot serve, and which stages devices are for."""

from __future__ import annotations

import pytest

from builders import only, request, table
from scripted import Script, start
from stages import ENCODE
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Finish, Place, RunWork
from tilework.core.events import DeviceJoined, Submitted
from tilework.core.request import Status
from tilework.core.work import NewPlacement, Plan
from tilework.policy import registry


def scripted(monkeypatch: pytest.MonkeyPatch, *plans: Plan) -> Controller:
    """A controller with one device, whose policy returns these plans after that has joined."""
    monkeypatch.setitem(registry._GIVEN, "script", lambda: Script([Plan(), *plans]))
    control = Controller(ControllerConfig(policy="script"), table())
    control.handle(DeviceJoined(0, 0), 0)
    return control


def test_a_job_that_a_policy_cannot_serve_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of that plan counts; the policy is asked again, without the job."""
    hopeless = Plan(failures=((0, "it fits on no placement"),), starts=(start(ENCODE, 0, job=1),))
    control = scripted(monkeypatch, Plan(), hopeless, Plan(starts=(start(ENCODE, 0, job=1),)))
    control.handle(Submitted(request("a")), 0)
    actions = control.handle(Submitted(request("b")), 0)
    (ended,) = only(Finish, actions)
    assert (ended.uid, ended.status, ended.reason) == ("a", Status.FAILED, "it fits on no placement")
    assert [work.job_ids for work in (one.work for one in only(RunWork, actions))] == [(1,)]
    assert control.num_jobs == 1


def test_a_placement_is_recorded_before_the_starts_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = NewPlacement(groups=(((0,), "EDC"),), why="the share of V2 went from 10% to 40%")
    control = scripted(monkeypatch, Plan(placement=placement, starts=(start(ENCODE, 0),)))
    actions = control.handle(Submitted(request("a")), 0)
    assert [type(one) for one in actions if isinstance(one, Place | RunWork)] == [Place, RunWork]
    assert only(Place, actions) == [Place(placement)]
    assert control.tracker.devices[0].memory.components == ()
