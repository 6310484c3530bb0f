"""The server's log has one line for each call that ended or was refused."""

from __future__ import annotations

import logging
import shlex
from itertools import count

import pytest

from fake_engine import FakeEngine, Plan, serving
from tilework.core.request import RefusalCode
from waiting import eventually

URL = "/v1/images/generations"


def fields(line: str) -> dict[str, str]:
    assert line.startswith("call ")
    return dict(part.split("=", 1) for part in shlex.split(line.removeprefix("call ")))


def test_each_call_is_one_line_without_its_prompt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latency is right, too, while the clock of the machine goes back, by ten minutes at each look at it."""
    monkeypatch.setattr("time.time", count(1e9, -600.0).__next__)
    caplog.set_level(logging.INFO, "tilework.server.calls")
    plans = [Plan(), Plan(fail="it broke"), Plan(code=RefusalCode.NO_DEVICE)]
    with serving(FakeEngine()) as server:
        for number, plan in enumerate(plans, 1):
            server.engine.plan = plan
            server.http.post(URL, json={"prompt": "secret wish", "slo_s": 5, "n": 2})
            eventually(lambda wanted=number: len(caplog.messages) == wanted)
        server.http.post(URL, json={"prompt": "secret wish", "size": "7x7"})
    done, failed, refused, wrong = map(fields, caplog.messages)
    uid = done.pop("uid")
    assert len(uid) == 32
    assert float(done.pop("latency_s")) >= 0
    assert done == {
        "status": "done",
        "deadline_s": "5.000",
        "on_time": "true",
        "tenant": "default",
        "model": "tiny-shapes",
        "size": "48x64",
        "images": "2",
    }
    assert (failed["status"], failed["reason"], failed["on_time"]) == ("failed", "generation_failed", "false")
    assert (refused["status"], refused["http"], refused["tenant"]) == ("refused", "503", "default")
    assert (wrong["status"], wrong["http"], wrong["reason"]) == ("refused", "400", "invalid_value")
    assert "secret" not in caplog.text
