"""Idempotency keys: a call that is sent again joins the first one, whatever has become of its connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.server.calls.call import Call
from tilework.server.calls.submitter import CallSubmitter
from waiting import eventually

HELD = Plan(is_held=True)
RECONNECT_S = 600.0
keys = (f"key-{number}" for number in range(10**6))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilework.server.http.server._KEEP_ALIVE_S", 10**6)  # The tests skip minutes.
        with serving(FakeEngine(), drain_s=0, reconnect_s=RECONNECT_S, result_bytes=4000) as served:
            yield served


@dataclass
class Owners:
    """How many connections have begun to wait for a call, and how many of them have ceased to."""

    num_came: int = 0
    num_gone: int = 0


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Owners:
    seen, own, disown = Owners(), CallSubmitter.own, CallSubmitter.disown

    def owning(submitter: CallSubmitter, call: Call) -> None:
        own(submitter, call)
        seen.num_came += 1

    def disowning(submitter: CallSubmitter, call: Call) -> None:
        disown(submitter, call)
        seen.num_gone += 1

    monkeypatch.setattr(CallSubmitter, "own", owning)
    monkeypatch.setattr(CallSubmitter, "disown", disowning)
    return seen


@pytest.fixture(autouse=True)
def _unprogrammed(server: Served) -> None:
    server.engine.plan = Plan()
    server.engine.script.clear()
    for seen in (server.engine.specs, server.engine.requests, server.engine.cancelled):
        seen.clear()


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": next(keys)}


def abandoned(server: Served, key: dict[str, str], owners: Owners) -> None:
    """Send a call whose client goes away while it waits."""
    num_came, num_gone = owners.num_came, owners.num_gone
    body = b'{"prompt": "x"}'
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), **key}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"POST /v1/images/generations HTTP/1.1\r\n{head}\r\n".encode() + body)
        eventually(lambda: owners.num_came > num_came)
    eventually(lambda: owners.num_gone > num_gone)


def finish_all(server: Served) -> None:
    for request in server.engine.requests:
        server.on_loop(server.engine.finish, request.uid)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_same_key_and_body_give_the_same_pictures(server: Served, key: dict[str, str]) -> None:
    first = server.post({"prompt": "x", "n": 2}, headers=key)
    again = server.post({"n": 2, "prompt": "x"}, headers=key)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert first.json() == again.json()
    assert len(server.engine.requests) == 2
    assert server.post({"prompt": "x", "n": 2}).json() != first.json()


def test_two_at_once_are_one_call(server: Served, key: dict[str, str], owners: Owners) -> None:
    server.engine.plan = HELD
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(
                httpx.post, f"{server.url}/v1/images/generations", json={"prompt": "x"}, headers=key, timeout=30
            )
            for _ in range(2)
        ]
        eventually(lambda: owners.num_came == 2)
        uid = server.engine.requests[0].uid
        finish_all(server)
        answers = [call.result(30) for call in calls]
    assert len(server.engine.requests) == 1
    assert {answer.headers["x-request-id"] for answer in answers} == {uid[:-2]}
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False, True]
    assert answers[0].json() == answers[1].json()


def test_two_clients_share_a_call_until_the_last_one_goes(server: Served, key: dict[str, str], owners: Owners) -> None:
    server.engine.plan = HELD
    with ThreadPoolExecutor(1) as pool:
        stays = pool.submit(server.post, {"prompt": "x"}, headers=key)
        eventually(lambda: owners.num_came == 1)
        abandoned(server, key, owners)
        server.skip(2 * RECONNECT_S)
        assert server.engine.cancelled == {}, "one client is still waiting"
        finish_all(server)
        assert stays.result(30).status_code == 200


def test_call_may_be_joined_after_a_disconnect(server: Served, key: dict[str, str], owners: Owners) -> None:
    server.engine.plan = HELD
    abandoned(server, key, owners)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(server.post, {"prompt": "x"}, headers=key)
        eventually(lambda: owners.num_came == 2)
        server.skip(2 * RECONNECT_S)
        assert server.engine.cancelled == {}, "the client has come back"
        finish_all(server)
        answer = again.result(30)
    assert answer.status_code == 200
    assert answer.headers["idempotent-replayed"] == "true"
    assert len(server.engine.requests) == 1


def test_call_that_is_not_joined_again_is_cancelled_and_its_key_is_free(
    server: Served, key: dict[str, str], owners: Owners
) -> None:
    server.engine.plan = HELD
    abandoned(server, key, owners)
    server.skip(RECONNECT_S / 2)
    assert server.engine.cancelled == {}
    server.skip(RECONNECT_S)
    eventually(lambda: server.engine.cancelled)
    assert set(server.engine.cancelled.values()) == {"the client has disconnected"}
    server.engine.plan = Plan()
    answer = server.post({"prompt": "x"}, headers=key)
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers


def test_stream_and_later_answers_share_keys_too(server: Served, key: dict[str, str]) -> None:
    body = {"prompt": "x", "stream": True}
    first = server.post(body, headers=key)
    again = server.post(body, headers=key)
    assert again.headers["idempotent-replayed"] == "true"
    pictures = [
        json.loads(line.removeprefix("data: "))["b64_json"]
        for answer in (first, again)
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert len(pictures) == 2
    assert pictures[0] == pictures[1]
    assert len(server.engine.requests) == 1


def test_async_call_is_joined_and_then_never_cancelled_by_a_disconnect(
    server: Served, key: dict[str, str], owners: Owners
) -> None:
    server.engine.plan = HELD
    later = {**key, "Prefer": "respond-async"}
    first, again = (server.post({"prompt": "x"}, headers=later) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.headers["idempotent-replayed"] == "true"
    assert first.json()["uid"] == again.json()["uid"]
    abandoned(server, key, owners)
    server.skip(2 * RECONNECT_S)
    assert server.engine.cancelled == {}
    finish_all(server)
    assert server.post({"prompt": "x"}, headers=key).status_code == 200


class Later(datetime):
    """A clock that is two hours ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=2)


def test_repeat_is_not_measured_against_the_clock_again(
    server: Served, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the first call has passed when its client comes back; to a new call the same body is wrong."""
    at = datetime.now(UTC) + timedelta(hours=1)
    text = at.isoformat()
    image = {"prompt": "x", "deadline": text, "output_format": "webp", "size": "64x32", "response_format": "url"}
    chat = {"messages": [{"role": "user", "content": "x"}], "extra_body": {"deadline": text, "output_format": "webp"}}
    calls = [("/v1/images/generations", image), ("/v1/chat/completions", chat)]
    first = [server.http.post(path, json=body, headers={"Idempotency-Key": path}) for path, body in calls]
    server.engine.plan = HELD
    opened = server.post(image, headers={**key, "Prefer": "respond-async"})
    assert [answer.status_code for answer in (*first, opened)] == [200, 200, 202]
    monkeypatch.setattr("tilework.server.api.images.datetime", Later)
    assert refusal(server.post(image)) == (400, "invalid_value")
    again = [server.http.post(path, json=body, headers={"Idempotency-Key": path}) for path, body in calls]
    assert [answer.headers.get("idempotent-replayed") for answer in again] == ["true", "true"]
    assert [answer.json() for answer in again] == [answer.json() for answer in first]
    joined = server.post(image, headers={**key, "Prefer": "respond-async"})
    assert (joined.status_code, joined.json()["uid"]) == (202, opened.json()["uid"])
    finish_all(server)
    assert server.post(image, headers=key).json()["data"][0]["url"].endswith(f"{opened.json()['uid']}-0/content")


def test_another_body_is_refused(server: Served, key: dict[str, str]) -> None:
    for plan in (HELD, Plan()):
        server.engine.plan = plan
        if plan is HELD:
            server.post({"prompt": "x"}, headers={**key, "Prefer": "respond-async"})
        answer = server.post({"prompt": "y"}, headers=key)
        assert refusal(answer) == (422, "idempotency_key_reused")
        assert answer.json()["error"]["param"] == "Idempotency-Key"
        finish_all(server)


def test_what_was_refused_or_wrong_or_failed_burns_no_key(server: Served, key: dict[str, str]) -> None:
    server.engine.script = [Plan(refuse_s=9), Plan(fail="out of memory")]
    wrong = server.post({"prompt": "x", "n": 0}, headers=key)
    refused = server.post({"prompt": "y", "slo_s": 1, "on_miss": "reject"}, headers=key)
    failed = server.post({"prompt": "z"}, headers=key)
    assert [answer.status_code for answer in (wrong, refused, failed)] == [400, 429, 500]
    answer = server.post({"prompt": "w"}, headers=key)
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers


@pytest.mark.parametrize("text", ["", "x" * 256, "schlüssel".encode(), b"\xff", "a\tb"])
def test_wrong_keys_are_refused(server: Served, text: str | bytes) -> None:
    answer = server.post({"prompt": "x"}, headers={"Idempotency-Key": text})
    assert refusal(answer) == (400, "invalid_value")
    assert "255 printable ASCII" in answer.json()["error"]["message"]
    assert server.engine.requests == []


def test_replay_says_when_the_pictures_had_to_go(server: Served, key: dict[str, str]) -> None:
    assert server.post({"prompt": "x"}, headers=key).status_code == 200
    for seed in range(40):
        server.post({"prompt": "x", "seed": seed, "response_format": "url"})
    answer = server.post({"prompt": "x"}, headers=key)
    assert refusal(answer) == (410, "result_expired")
    assert len(server.engine.requests) == 41


def test_key_ends_with_the_pictures() -> None:
    def asked(prompt: str) -> httpx.Response:
        url = f"{brief.url}/v1/images/generations"
        return httpx.post(url, json={"prompt": prompt}, headers={"Idempotency-Key": "k"}, timeout=30)

    with serving(FakeEngine(), result_ttl_s=600) as brief:
        first = asked("x").headers["x-request-id"]
        brief.skip(500)
        assert asked("x").headers["x-request-id"] == first
        assert refusal(asked("y")) == (422, "idempotency_key_reused")
        brief.skip(200)
        assert asked("y").status_code == 200
