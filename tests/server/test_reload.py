"""SIGHUP: what a running server reads again, what it refuses, and what becomes of calls that are open meanwhile.

With a process of its own: `live/test_hangup.py`.
"""

from __future__ import annotations

import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from server.test_batches import begun, call, ended
from tilework.server import reload
from tilework.server.config import ServerConfig
from tilework.server.main import Signals
from tilework.server.reload import Reread, Terminal
from waiting import PATIENCE_S, eventually

STUDIO = """
[tenants.studio]
keys = ["first"]
max_open = 2
classes = ["nightly", "standard"]

[classes.nightly]
weight = 0.5
"""
LATER = {"Prefer": "respond-async"}


def of(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(STUDIO)
    return path


def status(server: Served, key: str, **more: str) -> int:
    return server.post({"prompt": "x"}, headers=of(key, **more)).status_code


def test_a_key_is_rotated_while_a_call_with_the_old_one_runs(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old and new for a while, then the new one alone; the call ends as it was accepted."""
    with serving(FakeEngine(plan=Plan(is_held=True)), tenants=str(file)) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            httpx.post, f"{server.url}/v1/images/generations", json={"prompt": "x"}, headers=of("first")
        )
        eventually(lambda: server.engine.requests)
        server.engine.plan = Plan()
        assert status(server, "second") == 401
        for keys, expected in ('"first", "second"', (200, 200)), ('"second"', (401, 200)):
            file.write_text(STUDIO.replace('"first"', keys))
            server.reload()
            assert (status(server, "first"), status(server, "second")) == expected
        server.on_loop(server.engine.finish, server.engine.requests[0].uid)
        assert running.result(PATIENCE_S).status_code == 200
    assert "settings were read again: tenants: 2, their keys: 2" in caplog.text
    assert "first" not in caplog.text, "keys are not logged"


def test_new_limits_hold_for_new_calls_and_count_those_that_are_open(file: Path) -> None:
    with serving(FakeEngine(plan=Plan(is_held=True)), tenants=str(file), drain_s=0) as server:
        assert [status(server, "first", **LATER) for _ in range(3)] == [202, 202, 429]
        file.write_text(STUDIO.replace("max_open = 2", "max_open = 3\nweight = 4"))
        server.reload()
        assert [status(server, "first", **LATER) for _ in range(2)] == [202, 429]
        assert [request.tenant_weight for request in server.engine.requests] == [1, 1, 4]
        file.write_text(STUDIO.replace("max_open = 2", "max_open = 1"))
        server.reload()
        assert status(server, "first", **LATER) == 429
        assert len(server.engine.tickets) == 3, "none is ended"


def test_calls_of_a_tenant_that_goes_end_as_accepted(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeEngine(plan=Plan(is_held=True)), tenants=str(file), api_key="k", drain_s=0) as server:
        uid = server.post({"prompt": "x"}, headers=of("first", **LATER)).json()["uid"]
        file.write_text("")
        server.reload()
        assert "gone: studio" in caplog.text
        assert status(server, "first") == 401
        server.on_loop(server.engine.finish, f"{uid}-0")
        file.write_text(STUDIO)
        server.reload()

        def is_done() -> bool:
            return server.http.get(f"/v1/requests/{uid}", headers=of("first")).json()["status"] == "done"

        eventually(is_done)  # It comes back to its calls.


class Slow:
    """A safety filter that lets the settings change while a request is checked."""

    meanwhile: Any = None

    def refuse_texts(self, _texts: object) -> None:
        type(self).meanwhile()

    def refuse_picture(self, _picture: object) -> None: ...


def test_a_request_keeps_the_tenants_with_which_it_came(file: Path) -> None:
    """Its class is gone when it is submitted."""
    with serving(FakeEngine(), tenants=str(file), safety_filter=f"{__name__}:Slow") as server:

        def meanwhile() -> None:
            file.write_text('[tenants.studio]\nkeys = ["second"]\n')
            server.reload()

        Slow.meanwhile = staticmethod(meanwhile)
        answer = server.post({"prompt": "x", "priority": "nightly"}, headers=of("first"))
        assert answer.status_code == 200, answer.text
        asked = server.engine.requests[-1]
        assert (asked.tenant, asked.priority, asked.weight) == ("studio", "nightly", 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.studio", ("is not TOML", "Correct it there")),
        (STUDIO.replace("= 2", "= 0"), ("tenants.studio.max_open = 0", "give a whole number from 1")),
        (STUDIO.replace('["first"]', "[]"), ("tenants.studio has no keys", "give it a list of keys")),
        (STUDIO.replace('["nightly",', '["nightl",'), ("tenants.studio.classes", "choose among")),
        ("", ("no key is left, so any client could call", "give one in api_key or in")),
        (None, ("cannot be read: No such file", "Give a TOML file")),
    ],
)
def test_a_mistake_leaves_everything_as_it_was(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None, words: tuple[str, ...]
) -> None:
    with serving(FakeEngine(), tenants=str(file)) as server:
        file.unlink() if text is None else file.write_text(text)
        server.reload()
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.levelname == "ERROR"
        assert all(word in line.getMessage() for word in (str(file), *words)), line.getMessage()
        assert "first" not in line.getMessage()
        assert (status(server, "first"), status(server, "wrong")) == (200, 401)
        file.write_text(STUDIO.replace("first", "second"))
        server.reload()
        assert (status(server, "first"), status(server, "second")) == (401, 200), "and the next one is taken"


def test_a_server_that_was_open_may_be_closed_and_its_description_says_so(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("")
    with serving(FakeEngine(), tenants=str(file)) as server:
        server.reload()
        assert "security" not in server.http.get("/openapi.json").json()
        assert "settings were read again: tenants: 1, their keys: 0" in caplog.text
        file.write_text(STUDIO)
        server.reload()
        assert (status(server, "wrong"), status(server, "first")) == (401, 200)
        described = server.http.get("/openapi.json", headers=of("first")).json()
        assert described["security"] == [{"key": []}]
        assert "key" in described["components"]["securitySchemes"]
        assert "schemas" in described["components"]


def test_what_needs_another_start_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each reload; the file of models differs by what it says, not by its comments."""
    models = tmp_path / "models.toml"
    models.write_text('[models.tiny-shapes]\npath = "shapes"\n')
    settings: dict[str, Any] = {"models": str(models), "api_key": "a"}
    now = dict(settings)

    applied: list[object] = []

    def reread() -> Reread:
        differ = ("workers",) if "max_steps" in now else ()
        return Reread(config=ServerConfig(port=0, **now), differ=differ, apply=lambda: applied.append(now))

    with serving(FakeEngine(), reread=reread, **settings) as server:
        models.write_text('# one\n[models.tiny-shapes]\npath = "shapes"\n')
        server.reload()
        assert "not before the next start" not in caplog.text
        now |= {"api_key": "b", "max_steps": 9, "drain_s": 4.0}
        models.write_text('[models.tiny-shapes]\npath = "shapes"\naliases = ["x"]\n')
        server.reload()
        assert f"not before the next start: workers, max_steps, drain_s, what is in {models}" in caplog.text
        assert (status(server, "a"), status(server, "b")) == (401, 200)
        assert len(applied) == 2
        refused = server.post({"prompt": "x", "steps": 10}, headers=of("b"))
        assert refused.status_code == 200, "what needs a start has not changed"


def test_who_watches_by_a_key_that_goes_watches_no_more(file: Path) -> None:
    watching = of("first", Accept="text/event-stream")
    with (
        serving(FakeEngine(), tenants=str(file)) as server,
        server.http.stream("GET", "/v1/live", headers=watching) as answer,
    ):
        told = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(told)
        file.write_text(STUDIO.replace("max_open = 2", "max_open = 7"))
        server.reload()
        server.skip(1)
        next(told)  # Its rights are as they were.
        file.write_text(STUDIO.replace("first", "second"))
        server.reload()
        server.skip(1)
        list(told)  # Raises if it is cut off instead.


@pytest.mark.slow
def test_the_batch_of_a_tenant_that_goes_waits_for_it(file: Path, tmp_path: Path) -> None:
    calls = [call(number) for number in range(40)]
    settings: dict[str, Any] = {"tenants": str(file), "api_key": "k", "durable": str(tmp_path / "state"), "drain_s": 0}
    file.write_text(STUDIO.replace("max_open = 2", "max_open = 20"))
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, **settings) as server:
        batch = begun(server, *calls, key="first")
        eventually(lambda: len(engine.requests) == 16)
        file.write_text("")
        server.reload()
        engine.plan = Plan()
        for request in list(engine.requests):
            server.on_loop(engine.finish, request.uid)
        server.until_idle()
        assert len(engine.requests) == 16, "no call is begun while it is gone"
        file.write_text(STUDIO.replace("max_open = 2", "max_open = 20").replace("first", "second"))
        server.reload()
        server.skip(15)
        done = ended(server, batch, key="second")
        assert done.request_counts.completed == 40


# Terminals.


@pytest.mark.parametrize(
    ("had", "has", "ignored", "closed"),
    [
        (True, False, False, True),
        (True, True, False, False),
        (False, False, False, False),
        (True, False, True, False),
    ],
    ids=["its terminal is closed", "kill -HUP", "a service", "nohup"],
)
def test_a_terminal_that_is_closed_ends_the_server_and_another_signal_does_not(
    monkeypatch: pytest.MonkeyPatch, had: bool, has: bool, ignored: bool, closed: bool
) -> None:
    monkeypatch.setattr(reload, "_has_terminal", lambda: had)
    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.SIG_IGN if ignored else signal.SIG_DFL)
    signals = Signals(terminal=Terminal())
    monkeypatch.setattr(reload, "_has_terminal", lambda: has)
    signals.hang_up()
    assert (signals.stop.is_set(), signals.reload.is_set()) == (closed, not closed)
