"""Webhooks: who may be told, what they are told, that openai's library knows the sender, and that none is forgotten."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from fake_engine import VIDEOS, FakeEngine, Plan, Served, serving
from listener import Post, listening
from tilework.server.config import ConfigError, load_config
from tilework.server.webhooks.notice import notice
from tilework.server.webhooks.sender import AT_ONCE
from waiting import PATIENCE_S, eventually

SECRET = "whsec_" + base64.b64encode(bytes(range(24))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(1, 25))).decode()
LATER = {"Prefer": "respond-async"}


@dataclass
class Receiver:
    """A client's own server. It answers with the next of `statuses`, or 200 when they are used up."""

    statuses: list[int] = field(default_factory=list)
    got: list[Post] = field(default_factory=list)
    url: str = ""
    may_answer: threading.Event = field(default_factory=threading.Event)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    found.may_answer.set()

    def answer(post: Post) -> tuple[int, dict[str, str]]:
        found.got.append(post)
        assert found.may_answer.wait(PATIENCE_S)
        return found.statuses.pop(0) if found.statuses else 200, {"Location": f"{found.url}/other"}

    with listening(answer) as found.url:
        yield found


def settings(receiver: Receiver) -> dict[str, Any]:
    return {"webhook_origins": f"https://a.example, {receiver.url}", "webhook_secret": SECRET}


def uid_of(answer: httpx.Response) -> str:
    assert answer.status_code in (200, 202), answer.text
    return answer.headers["x-request-id"]


def is_from(got: Post, secret: str) -> bool:
    """What openai's library says."""
    _, headers, body = got
    try:
        openai.OpenAI(api_key="x").webhooks.verify_signature(body, headers, secret=secret)
    except openai.InvalidWebhookSignatureError:
        return False
    return True


def test_a_signed_notice_comes_when_a_call_has_ended(receiver: Receiver) -> None:
    with serving(FakeEngine(), **settings(receiver)) as server:
        uid = uid_of(server.post({"prompt": "a secret wish", "slo_s": 9, "webhook": f"{receiver.url}/done?x=1"}))
        eventually(lambda: receiver.got)
        ((path, headers, body),) = receiver.got
        assert (path, headers["webhook-id"], headers["content-type"]) == ("/done?x=1", f"evt_{uid}", "application/json")
        assert is_from(receiver.got[0], SECRET)
        assert not is_from(receiver.got[0], OTHER)
        assert not is_from((path, headers, body.replace(b"done", b"lost")), SECRET)
        (event,) = receiver.bodies()
        assert (event["id"], event["object"], event["type"]) == (f"evt_{uid}", "event", "tilework.request.done")
        assert event["data"] == server.http.get(f"/v1/requests/{uid}").json()
        assert "a secret wish" not in body.decode()
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="taken"}') == 1)
        uid_of(server.post({"prompt": "x"}))
        server.skip(7200)
        assert len(receiver.got) == 1


@pytest.mark.slow
def test_of_every_end_and_on_every_route(receiver: Receiver) -> None:
    engine = FakeEngine(info=VIDEOS, script=[Plan(fail="out of memory"), Plan(is_held=True), Plan(), Plan()])
    with serving(engine, drain_s=0, **settings(receiver)) as server:
        body = {"prompt": "x", "webhook": receiver.url}
        failed = uid_of(server.post(body, headers=LATER))
        cancelled = uid_of(server.post(body, headers=LATER))
        server.http.delete(f"/v1/requests/{cancelled}")
        video = server.http.post("/v1/videos", json={"prompt": "x", "webhook_url": receiver.url}).json()["id"]
        chat = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"webhook": receiver.url}}
        drawn = uid_of(server.http.post("/v1/chat/completions", json=chat))
        eventually(lambda: len(receiver.got) == 4)
        assert {event["data"]["uid"]: event["type"].rpartition(".")[2] for event in receiver.bodies()} == {
            failed: "failed",
            cancelled: "cancelled",
            video: "done",
            drawn: "done",
        }


def has_failed(server: Served, number: int) -> bool:
    return server.metric('tilework_webhook_attempts_total{result="failed"}') == number


def has_got(receiver: Receiver, number: int) -> bool:
    return len(receiver.got) == number


@pytest.mark.slow
def test_it_is_tried_again_until_it_is_taken(receiver: Receiver) -> None:
    receiver.statuses = [500, 302, 404]
    with serving(FakeEngine(), **settings(receiver)) as server:
        uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        for number, wait_s in enumerate((5, 30, 120), 1):
            eventually(partial(has_failed, server, number))
            server.skip(wait_s - 2)
            assert len(receiver.got) == number, "not before its time"
            server.skip(3)
            eventually(partial(has_got, receiver, number + 1))
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="taken"}') == 1)
        server.skip(4000)
        assert len(receiver.got) == 4
        assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1, "so a receiver knows repeats"
        assert {path for path, _, _ in receiver.got} == {"/"}, "a redirect is not followed"


@contextmanager
def notified() -> Iterator[tuple[Served, socket.socket]]:
    """A server that has sent a notice, and the connection by which it waits for the answer; that ends last."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with serving(FakeEngine(), webhook_origins=url, webhook_secret=SECRET) as server:
            uid_of(server.post({"prompt": "x", "webhook": url}))
            connection, _ = listener.accept()
            stack.enter_context(connection)
            assert connection.recv(1 << 16).startswith(b"POST / ")
            yield server, connection


@pytest.mark.slow
def test_the_head_of_an_answer_is_enough() -> None:
    """A receiver that never ends its answers holds up no other notice, and no stop."""
    with notified() as (server, connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\nthanks")
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="taken"}') == 1)


@pytest.mark.slow
def test_an_attempt_has_ten_seconds_however_slowly_its_answer_comes() -> None:
    with notified() as (server, connection):
        for _ in range(2):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            server.until_idle()
            server.skip(6)
        assert has_failed(server, 1)


@pytest.mark.slow
def test_a_notice_is_signed_when_it_is_sent(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it begins to wait for others: receivers take no signature that is minutes old."""
    receiver.may_answer.clear()
    with serving(FakeEngine(), **settings(receiver)) as server:
        for _ in range(AT_ONCE + 1):
            uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        eventually(partial(has_got, receiver, AT_ONCE))
        now_s = time.time()
        monkeypatch.setattr("tilework.server.webhooks.sender.time.time", lambda: now_s + 600)
        receiver.may_answer.set()
        eventually(partial(has_got, receiver, AT_ONCE + 1))
        assert int(receiver.got[-1][1]["webhook-timestamp"]) >= int(now_s) + 600


@pytest.mark.slow
def test_a_receiver_may_want_no_more(receiver: Receiver) -> None:
    receiver.statuses = [410]
    with serving(FakeEngine(), **settings(receiver)) as server:
        uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="taken"}') == 1)
        server.skip(4000)
        assert len(receiver.got) == 1


@pytest.mark.slow
def test_it_is_given_up_with_the_record_of_its_call(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.statuses = [500] * 99
    with serving(FakeEngine(), result_ttl_s=10.0, **settings(receiver)) as server:
        uid = uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="failed"}') == 1)
        server.skip(40)
        assert server.http.get(f"/v1/requests/{uid}").status_code == 404

        def is_given_up() -> bool:
            server.skip(40)  # Again, if an attempt was under way at first.
            return "the call is forgotten" in caplog.text

        eventually(is_given_up)
        seen = len(receiver.got)
        server.skip(4000)
        server.skip(4000)
        assert len(receiver.got) == seen <= 2


@pytest.mark.slow
def test_the_next_start_goes_on_with_it(receiver: Receiver, tmp_path: Path) -> None:
    durable = {"durable": str(tmp_path / "state"), **settings(receiver)}
    receiver.statuses = [500]
    with serving(FakeEngine(), **durable) as server:
        uid = uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        eventually(lambda: len(receiver.got) == 1)
    with serving(FakeEngine(), **durable) as server:
        eventually(lambda: server.metric('tilework_webhook_attempts_total{result="taken"}') == 1)
        assert receiver.bodies()[0] == receiver.bodies()[1]
        assert server.http.get(f"/v1/requests/{uid}").json()["status"] == "done"
    with serving(FakeEngine(), **durable) as server:
        assert server.http.get(f"/v1/requests/{uid}").json()["status"] == "done"
    assert len(receiver.got) == 2, "it is not told again"


@pytest.mark.slow
def test_a_call_that_goes_on_after_a_start_tells_its_webhook(receiver: Receiver, tmp_path: Path) -> None:
    durable = {"durable": str(tmp_path / "state"), "drain_s": 0.0, **settings(receiver)}
    with serving(FakeEngine(plan=Plan(is_held=True)), **durable) as server:
        uid = uid_of(server.post({"prompt": "x", "webhook": receiver.url}, headers=LATER))
    assert not receiver.got
    with serving(FakeEngine(), **durable):
        eventually(lambda: receiver.got)
    assert receiver.bodies()[0]["data"]["uid"] == uid


@pytest.mark.slow
def test_a_stop_waits_until_it_was_tried(receiver: Receiver) -> None:
    receiver.may_answer.clear()
    with serving(FakeEngine(), **settings(receiver)) as server:
        uid_of(server.post({"prompt": "x", "webhook": receiver.url}))
        eventually(lambda: receiver.got)
        server.stop()
        for _ in range(50):
            server.skip(0.1)
        assert server.engine.log == ["started", "draining"], "it waits for the answer"
        receiver.may_answer.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        "https://b.example/x",
        "https://a.example.b.example/x",
        "https://a.example@b.example/x",
        "https://a.example:444/x",
        "http://a.example/x",
        "//a.example",
        "https://a.example\n/x",
        "",
        "x",
    ],
)
def test_only_named_origins_are_called(url: str) -> None:
    with serving(FakeEngine(), webhook_origins="https://a.example", webhook_secret=SECRET) as server:
        error = server.post({"prompt": "x", "webhook": url}).json()["error"]
        assert error["param"] == "webhook"
        assert "Give a URL that begins with one of https://a.example." in error["message"]


@pytest.mark.slow
def test_a_server_calls_nobody_unless_told() -> None:
    with serving(FakeEngine()) as server:
        error = server.post({"prompt": "x", "webhook": "https://a.example"}).json()["error"]
        assert (error["param"], error["code"]) == ("webhook", "unsupported_value")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"webhook_origins": "https://a.example"}, "set TILEWORK_WEBHOOK_SECRET as well"),
        ({"webhook_origins": "*", "webhook_secret": SECRET}, "give origins such as https://example.org"),
        ({"webhook_secret": "short"}, "give a text of at least 16 characters"),
        ({"webhook_secret": "whsec_!"}, "cannot be used"),
    ],
)
def test_settings_that_cannot_be_are_named_and_secrets_are_not_shown(settings: dict[str, str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as found:
        load_config(settings)
    assert settings.get("webhook_secret", "-") not in str(found.value).replace("set TILEWORK", "")


def test_a_secret_may_be_any_text() -> None:
    one = notice("u", "https://a.example", "done", 1, {})
    headers = dict(one.headers("a text of some length", 2_000_000_000))
    with patch.object(time, "time", return_value=2_000_000_000.0):
        assert is_from(("", headers, one.body), "a text of some length")
