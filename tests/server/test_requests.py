"""Calls after they were accepted: asynchronous ones, how they stand, their events, content and end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.request import Refusal
from tilework.server.calls import finish
from waiting import PATIENCE_S, eventually

ASYNC = {"Prefer": "respond-async"}
HELD = Plan(is_held=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), drain_s=0, max_previews=4, max_pixels=400 * 400) as served:
        yield served


@pytest.fixture(autouse=True)
def _unprogrammed(server: Served) -> None:
    server.engine.plan = Plan()
    server.engine.requests.clear()


def begun(server: Served, **ask: Any) -> str:
    """The uid of an accepted call that does nothing until told to."""
    server.engine.plan = HELD
    answer = server.post({"prompt": "x", **ask}, headers=ASYNC)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["uid"])


def get(server: Served, path: str, **options: Any) -> Any:
    answer = server.http.get(path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def events_of(server: Served, uid: str) -> list[dict[str, Any]]:
    with server.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]


# Asynchronous calls.


def test_async_call_is_accepted_with_an_eta_and_outlives_its_connection(server: Served) -> None:
    server.engine.plan, before = HELD, datetime.now(UTC)
    with httpx.Client(base_url=server.url) as client:
        answer = client.post("/v1/images/generations", json={"prompt": "x", "n": 2, "seed": 5}, headers=ASYNC)
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "respond-async"
    body = answer.json()
    uid = body["uid"]
    assert answer.headers["location"] == f"{server.url}/v1/requests/{uid}"
    assert answer.headers["x-request-id"] == uid
    assert (body["status"], body["eta_s"], len(body["images"])) == ("queued", pytest.approx(0.25, abs=0.2), 2)
    arrived = datetime.fromisoformat(body["arrived"])
    assert before <= arrived <= datetime.now(UTC)
    eta_s = (datetime.fromisoformat(body["eta"]) - arrived).total_seconds()
    assert eta_s == pytest.approx(body["eta_s"], abs=0.002)
    early = server.http.get(f"/v1/requests/{uid}/content")
    assert refusal(early) == (409, "not_ready")
    assert int(early.headers["retry-after"]) >= 1
    for index in (0, 1):
        server.on_loop(server.engine.finish, f"{uid}-{index}")
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "done")
    first = server.http.get(f"/v1/requests/{uid}/content")
    second = server.http.get(f"/v1/requests/{uid}/content", params={"index": 1})
    assert first.headers["content-type"] == "image/png"
    assert first.content != second.content
    assert server.http.get(f"/v1/requests/{uid}-1/content").content == second.content
    assert server.http.get(f"/v1/images/{uid}-1/content").content == second.content
    assert refusal(server.http.get(f"/v1/requests/{uid}/content?index=2")) == (404, "request_not_found")
    status = get(server, f"/v1/requests/{uid}")
    assert [image["timeline"]["seed"] for image in status["images"]] == [5, 6]
    assert datetime.fromisoformat(status["expires"]) > arrived


@pytest.mark.parametrize(
    "prefer", ["respond-async, wait=5", 'Wait="5";x=y , RESPOND-ASYNC', "handling=lenient,respond-async,wait=5"]
)
def test_async_call_may_wait_first(server: Served, prefer: str) -> None:
    server.engine.plan = Plan(delay_s=0.05)
    answer = server.post({"prompt": "x"}, headers={"Prefer": prefer})
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "respond-async, wait=5"
    assert answer.json()["data"][0]["b64_json"]


def test_async_call_waits_no_longer_than_asked(server: Served) -> None:
    server.engine.plan = HELD
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(server.post, {"prompt": "x"}, headers={"Prefer": "respond-async, wait=600"}, timeout=60)
        eventually(lambda: server.engine.requests)
        server.skip(500)
        assert not asked.done()
        server.skip(150)
        answer = asked.result(60)
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async, wait=600")


@pytest.mark.parametrize("prefer", ["wait=5", "respond-asynchronously", "", "return=minimal", "x" * 5000])
def test_other_preferences_are_ignored(server: Served, prefer: str) -> None:
    answer = server.post({"prompt": "x"}, headers={"Prefer": prefer})
    assert answer.status_code == 200
    assert "preference-applied" not in answer.headers


# How it stands.


def test_status_follows_the_images(server: Served) -> None:
    uid = begun(server, n=2, num_inference_steps=8, slo_s=60, priority="batch")
    engine = server.engine
    assert get(server, f"/v1/requests/{uid}")["status"] == "queued"
    server.on_loop(engine.begin, f"{uid}-0")
    server.on_loop(engine.step, f"{uid}-0", 3)
    status = get(server, f"/v1/requests/{uid}")
    assert (status["status"], status["priority"], status["slo_s"]) == ("running", "batch", 60)
    first, second = status["images"]
    assert (first["state"], first["step"], first["steps"], second["state"]) == ("running", 3, 8, "queued")
    assert (first["queue_s"], second["queue_s"]) == (0, None)
    server.on_loop(engine.tickets[f"{uid}-0"].pause)
    assert get(server, f"/v1/requests/{uid}-0")["status"] == "paused"
    server.on_loop(engine.finish, f"{uid}-0")
    status = get(server, f"/v1/requests/{uid}")
    assert (status["status"], status["images"][0]["state"], status["images"][1]["state"]) == (
        "running",
        "done",
        "queued",
    )
    alone = get(server, f"/v1/requests/{uid}-1")
    assert (alone["uid"], alone["status"], len(alone["images"])) == (f"{uid}-1", "queued", 1)
    server.on_loop(engine.finish, f"{uid}-1")
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "done")
    done = get(server, f"/v1/requests/{uid}")
    assert (done["eta_s"], done["images"][0]["timeline"]["on_time"]) == (None, True)


@pytest.mark.parametrize(
    ("fields", "is_promised"),
    [({"slo_s": 9, "on_miss": "reject"}, True), ({"slo_s": 9}, False), ({"on_miss": "reject"}, False)],
)
def test_call_and_image_say_whether_their_deadline_is_promised(
    server: Served, fields: dict[str, Any], is_promised: bool
) -> None:
    waited = server.post({"prompt": "x", **fields}).json()["data"][0]["tilework"]
    status = get(server, f"/v1/requests/{waited['uid'].removesuffix('-0')}")
    timeline = status["images"][0]["timeline"]
    assert [one["is_promised"] for one in (waited, status, timeline)] == [is_promised] * 3


def test_failed_call_says_why(server: Served) -> None:
    server.engine.plan = Plan(fail="out of memory")
    uid = server.post({"prompt": "x"}, headers=ASYNC).json()["uid"]
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "failed")
    status = get(server, f"/v1/requests/{uid}")
    assert status["error"]["code"] == "generation_failed"
    assert status["images"][0]["reason"] == "out of memory"
    assert status["error"]["uid"] == uid
    assert refusal(server.http.get(f"/v1/requests/{uid}/content")) == (410, "generation_failed")


@pytest.mark.parametrize(
    ("why", "code"), [(Refusal.CONTENT, "content_policy_violation"), (Refusal.VALUE, "unsupported_value")]
)
def test_what_the_model_refuses_is_the_clients_mistake(server: Served, why: Refusal, code: str) -> None:
    server.engine.plan = Plan(refuse="the call does not take it: too red.", refusal=why)
    answer = server.post({"prompt": "x", "n": 2})
    assert refusal(answer) == (400, code)
    assert answer.json()["error"]["message"].endswith("was not made: the call does not take it: too red.")
    assert answer.headers["x-should-retry"] == "false"


def test_unknown_uids_are_404(server: Served) -> None:
    uid = begun(server)
    for wrong in ("0" * 32, "x", f"{uid}-1", f"{uid}-", f"{uid}-0-0", uid.upper() + "G", "%00", "a" * 3000):
        for path in ("", "/events", "/content", "/decisions"):
            answer = server.http.get(f"/v1/requests/{wrong}{path}")
            assert refusal(answer) == (404, "request_not_found"), (wrong, path)
        assert refusal(server.http.delete(f"/v1/requests/{wrong}")) == (404, "request_not_found")


def test_calls_are_listed_newest_first(server: Served) -> None:
    uids = [begun(server) for _ in range(3)]
    server.on_loop(server.engine.finish, f"{uids[1]}-0")
    eventually(lambda: get(server, f"/v1/requests/{uids[1]}")["status"] == "done")
    listed = get(server, "/v1/requests", params={"limit": 3})
    assert [one["uid"] for one in listed["data"]] == uids[::-1]
    assert [one["status"] for one in listed["data"]] == ["queued", "done", "queued"]
    assert listed["has_more"]
    assert (listed["first_id"], listed["last_id"]) == (uids[2], uids[0])
    for limit in ("0", "101", "x", "1.5"):
        answer = server.http.get("/v1/requests", params={"limit": limit})
        assert refusal(answer) == (400, "invalid_value")
        remedy = "Give an integer from 1 to 100, the most to list (default 20)."
        assert answer.json()["error"]["message"] == f'limit = "{limit}" is not accepted. {remedy}'
        assert answer.json()["error"]["param"] == "limit"


def test_list_goes_on_where_a_page_ended(server: Served) -> None:
    uids = [begun(server) for _ in range(5)][::-1]
    server.http.delete(f"/v1/requests/{uids[1]}")
    first = get(server, "/v1/requests", params={"limit": 2})
    second = get(server, "/v1/requests", params={"limit": 2, "after": first["last_id"]})
    assert [one["uid"] for page in (first, second) for one in page["data"]] == uids[:4]
    begun(server)
    assert get(server, "/v1/requests", params={"limit": 2, "after": uids[1]}) == second, "whatever comes later"
    for after in ("0" * 32, "x", "", f"{uids[0]}-0"):
        answer = server.http.get("/v1/requests", params={"after": after})
        assert refusal(answer) == (400, "invalid_value")
        assert "leave it out" in answer.json()["error"]["message"]


def test_list_shows_the_etas_of_admission(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more is queued, the longer a present one takes, and a page has many."""
    uid = begun(server, n=2)
    at_admission = get(server, f"/v1/requests/{uid}")["eta_s"]
    predict = server.engine.predict
    monkeypatch.setattr(server.engine, "predict", lambda uid: replace(predict(uid), eta_ns=predict(uid).eta_ns + 10**9))
    assert get(server, f"/v1/requests/{uid}")["eta_s"] == pytest.approx(at_admission + 1)
    listed = get(server, "/v1/requests")["data"][0]
    assert (listed["uid"], listed["eta_s"]) == (uid, at_admission)


def test_decisions_tell_why(server: Served) -> None:
    uid = begun(server, n=2)
    told = get(server, f"/v1/requests/{uid}/decisions")
    assert [one["kind"] for one in told["decisions"]] == ["accepted", "accepted"]
    assert "nobody is ahead" in told["decisions"][0]["text"]
    for index in (0, 1):
        server.on_loop(server.engine.finish, f"{uid}-{index}")
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "done")
    alone = get(server, f"/v1/requests/{uid}-1/decisions")
    assert (alone["uid"], alone["status"]) == (f"{uid}-1", "done")
    assert [(one["uid"], one["kind"]) for one in alone["decisions"]] == [
        (f"{uid}-1", "accepted"),
        (f"{uid}-1", "finished"),
    ]


# The end.


def test_delete_cancels_every_image_and_may_be_repeated(server: Served) -> None:
    uid = begun(server, n=2)
    for path in (uid, f"{uid}-1", uid):
        answer = server.http.delete(f"/v1/requests/{path}")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert {server.engine.cancelled[f"{uid}-{index}"] for index in (0, 1)} == {"the client has cancelled it"}
    status = get(server, f"/v1/requests/{uid}")
    assert (status["error"]["code"], status["images"][0]["state"]) == ("cancelled", "cancelled")
    assert refusal(server.http.get(f"/v1/requests/{uid}/content")) == (410, "cancelled")


def test_delete_of_what_is_done_lets_its_pictures_go(server: Served) -> None:
    """Its key is free again, as that of a call that was cancelled."""
    headers = {"Prefer": "respond-async, wait=5", "Idempotency-Key": "delete"}
    uid = server.post({"prompt": "x", "n": 2}, headers=headers).headers["x-request-id"]
    assert server.http.get(f"/v1/requests/{uid}-1/content").status_code == 200
    kept = server.metric("tilework_store_entries")
    for _ in range(2):
        answer = server.http.delete(f"/v1/requests/{uid}-1")
        assert (answer.status_code, answer.json()["status"], answer.json()["uid"]) == (200, "done", f"{uid}-1")
    assert server.metric("tilework_store_entries") == kept - 2
    gone = server.http.get(f"/v1/requests/{uid}/content")
    assert refusal(gone) == (410, "result_expired")
    assert "deleted" in gone.json()["error"]["message"]
    assert server.post({"prompt": "x", "n": 2}, headers=headers).headers["x-request-id"] != uid


@pytest.mark.parametrize("part", ["call_status", "call_decisions"])
def test_call_whose_record_cannot_be_written_ends_all_the_same(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(finish, part, broken)
    headers = {"Idempotency-Key": part}
    answer = server.post({"prompt": "x"}, headers=headers)
    uid = answer.headers["x-request-id"]
    assert answer.json()["data"][0]["b64_json"], "the pictures are there"
    assert f"call {uid} has ended" in caplog.text
    assert "a bug" in caplog.text
    assert refusal(server.http.get(f"/v1/requests/{uid}")) == (404, "request_not_found")
    assert uid not in {one["uid"] for one in get(server, "/v1/requests")["data"]}
    monkeypatch.undo()
    assert server.post({"prompt": "x"}, headers=headers).headers["x-request-id"] != uid


def test_deleting_ends_a_call_that_a_client_waits_for(server: Served) -> None:
    """The waiting client sees a 409, and is told not to try again."""
    server.engine.plan = HELD
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/images/generations", json={"prompt": "x"})
        eventually(lambda: server.engine.requests)
        uid = server.engine.requests[0].uid
        assert server.http.delete(f"/v1/requests/{uid}").status_code == 200
        answer = waiting.result(PATIENCE_S)
    assert refusal(answer) == (409, "cancelled")
    assert answer.headers["x-should-retry"] == "false"


def test_pictures_that_no_call_asked_to_keep_are_gone(server: Served) -> None:
    uid = server.post({"prompt": "x"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", uid)
    assert get(server, f"/v1/requests/{uid}")["expires"] is None
    answer = server.http.get(f"/v1/requests/{uid}/content")
    assert refusal(answer) == (410, "result_expired")
    assert "did not ask to keep them" in answer.json()["error"]["message"]


# Events.


def test_events_go_from_the_present_state_to_the_end(server: Served) -> None:
    uid = begun(server, num_inference_steps=8, preview_every=3)
    engine, image = server.engine, f"{uid}-0"
    server.on_loop(engine.begin, image)
    server.on_loop(engine.step, image, 3)
    tasks = server.tasks()
    with server.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        told = (json.loads(line.removeprefix("data: ")) for line in lines)
        kinds = [next(told) for _ in range(3)]
        assert [one["type"] for one in kinds] == ["tilework.accepted", "tilework.preview", "tilework.progress"]
        assert (kinds[1]["step"], kinds[2]["step"], kinds[2]["steps"], kinds[2]["state"]) == (3, 3, 8, "running")
        server.on_loop(engine.step, image, 4)
        assert next(told)["step"] == 4
    eventually(lambda: tasks.issuperset(server.tasks()))
    # The reader has gone, which cancels nothing; another one begins with the present state.
    assert image not in engine.cancelled
    server.on_loop(engine.finish, image)
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "done")
    for path in (uid, image):
        told_after = events_of(server, path)
        assert [one["type"] for one in told_after] == ["tilework.accepted", "tilework.done"]
        assert told_after[1]["timeline"]["status"] == "done"


def test_events_of_a_cancelled_call_end(server: Served) -> None:
    uid = begun(server)
    with server.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("event: "))
        assert [next(lines), next(lines)] == ["event: tilework.accepted", "event: tilework.progress"]
        httpx.delete(f"{server.url}/v1/requests/{uid}")
        assert list(lines) == ["event: tilework.progress", "event: tilework.cancelled"]
    assert [one["type"] for one in events_of(server, uid)] == ["tilework.accepted", "tilework.cancelled"]


def test_events_of_a_failed_call_say_why(server: Served) -> None:
    server.engine.plan = Plan(fail="out of memory")
    uid = server.post({"prompt": "x"}, headers=ASYNC).json()["uid"]
    eventually(lambda: get(server, f"/v1/requests/{uid}")["status"] == "failed")
    last = events_of(server, uid)[-1]
    assert (last["type"], last["code"]) == ("tilework.failed", "generation_failed")
    assert "out of memory" in last["reason"]


# Deadlines and limits.


def test_deadline_may_be_a_time_of_day(server: Served) -> None:
    at = datetime.now(UTC) + timedelta(seconds=100)
    west = at.astimezone(timezone(timedelta(hours=-5)))
    for text in (
        at.isoformat(),
        west.isoformat(),
        at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").lower(),
    ):
        assert server.post({"prompt": "x", "deadline": text}).status_code == 200, text
        request = server.engine.requests[-1]
        assert request.deadline_ns is not None
        assert 90e9 < request.deadline_ns - request.arrival_ns <= 100e9
    both = server.post({"prompt": "x", "deadline": at.isoformat(), "slo_s": 5})
    assert refusal(both) == (400, "invalid_value")
    assert "slo_s is given as well" in both.json()["error"]["message"]


def test_refusal_names_the_field_that_was_sent_and_what_to_send_instead(server: Served) -> None:
    """The answer's own value, sent in the same field, is as late as the earliest deadline, and no earlier."""
    asked = datetime.now(timezone(timedelta(hours=2))) + timedelta(seconds=2)
    sent = {"slo_s": 2.0, "deadline": asked.isoformat(), "slo_ms": 2000.0}
    for field, value in sent.items():
        server.engine.script = [Plan(refuse_s=3.2504)]
        ask = {field: value, "on_miss": "reject"}
        if field == "slo_ms":
            body = {"messages": [{"role": "user", "content": "x"}], "extra_body": ask}
            answer = server.http.post("/v1/chat/completions", json=body)
        else:
            answer = server.post({"prompt": "x", **ask})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (429, field, "deadline_unreachable")
        assert error["message"].startswith(f"{field} = {json.dumps(value)} cannot be met")
        assert [name for name in sent if f"{name} = " in error["message"]] == [field]
        found = re.search(f'{field} = "?([^" ]*)"?: ask for that', error["message"])
        assert found is not None
        if field == "deadline":
            assert found[1] == error["earliest"]
            moved_s = (datetime.fromisoformat(found[1]) - asked).total_seconds()
            later_s = error["earliest_s"] - error["slo_s"] + 0.5  # A client takes time to ask again.
            assert later_s <= moved_s <= later_s + 0.001
        else:
            assert float(found[1]) == error["earliest_s"] * (1000 if field == "slo_ms" else 1)
            assert "earliest" not in error
        assert 3.2504 <= error["earliest_s"] < 3.3


def test_number_of_previews_and_pixels_is_limited(server: Served) -> None:
    ask = {"prompt": "x", "num_inference_steps": 20}
    answer = server.post({**ask, "preview_every": 3})
    assert refusal(answer) == (400, "invalid_value")
    assert "at least 4 for 20 steps" in answer.json()["error"]["message"]
    assert server.post({**ask, "preview_every": 4}).status_code == 200
    assert server.engine.specs[-1].preview_every == 4
    answer = server.post({"prompt": "x", "size": "512x496"})
    assert refusal(answer) == (400, "invalid_value")
    assert "160000 pixels" in answer.json()["error"]["message"]
