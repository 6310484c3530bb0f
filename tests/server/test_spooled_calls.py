"""Calls that end while their store takes no results: none fails, and once too many wait, later ones are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest

from fake_engine import CLIPS, FakeEngine, Plan, Served, serving
from listener import Post, listening
from store.scripted_store import ScriptedStore
from tilework.server.calls import finish
from waiting import eventually

AWAY = "Redis: OOM command not allowed"
LATER = {"Prefer": "respond-async"}
BODY = {"prompt": "x", "seed": 3}
HELD = Plan(is_held=True)


@contextmanager
def over(shared: ScriptedStore, engine: FakeEngine | None = None, **settings: Any) -> Iterator[Served]:
    """A server whose results go to `shared`."""
    more: dict[str, Any] = {"results": "redis://h", "drain_s": 0.1, **settings}
    with (
        patch("tilework.server.api.app._shared_store", lambda *_: shared),
        serving(FakeEngine() if engine is None else engine, **more) as server,
    ):
        yield server


def scripted() -> ScriptedStore:
    return ScriptedStore(max_bytes=1 << 20)


def status(server: Served, uid: str) -> Any:
    return server.http.get(f"/v1/requests/{uid}").json()


def done(server: Served, **body: Any) -> str:
    """The uid of an asynchronous call, which is done."""
    answer = server.post(BODY | body, headers=LATER)
    assert answer.status_code == 202, answer.text
    uid: str = answer.json()["uid"]
    eventually(lambda: status(server, uid)["status"] not in ("queued", "running"))
    assert status(server, uid)["status"] == "done", status(server, uid)
    return uid


def is_back(server: Served, shared: ScriptedStore) -> None:
    shared.problem = ""
    server.skip(10)
    eventually(lambda: server.metric("tilework_spool_entries") == 0)


def test_calls_that_end_while_the_store_is_away_are_done_and_all_can_be_asked_of_them() -> None:
    told, shared = list[Post](), scripted()

    def answer(post: Post) -> tuple[int, dict[str, str]]:
        told.append(post)
        return 200, {}

    with listening(answer) as url, over(shared, webhook_origins=url, webhook_secret="s" * 16) as server:
        usual = server.http.get(f"/v1/requests/{done(server)}/content").content
        shared.problem = AWAY
        first, second = done(server, webhook=f"{url}/told"), done(server)
        content = server.http.get(f"/v1/requests/{first}/content")
        assert (content.status_code, content.headers["content-type"]) == (200, "image/png")
        assert content.content == usual
        part = server.http.get(f"/v1/requests/{first}/content", headers={"Range": "bytes=1-3"})
        assert (part.status_code, part.content) == (206, b"PNG")
        kept = server.post(BODY | {"response_format": "url"}).json()["data"][0]["url"]
        assert server.http.get(kept).status_code == 200
        eventually(lambda: told)
        assert json.loads(told[0][2])["type"] == "tilework.request.done"
        keyed = {"Idempotency-Key": "k"}
        assert server.post(BODY, headers=keyed).json() == server.post(BODY, headers=keyed).json()
        assert server.http.delete(f"/v1/requests/{second}").status_code == 200
        assert server.http.get(f"/v1/requests/{second}/content").status_code == 410
        is_back(server, shared)
        assert len(shared.held) == 4
        assert not any(second in uid for uid in shared.held)
        assert server.http.get(f"/v1/requests/{first}/content").content == usual


def test_ready_and_metrics_say_what_waits_and_the_server_stays_ready() -> None:
    shared = scripted()
    with over(shared) as server:
        ready = server.http.get("/ready").json()
        assert (ready["waiting_results"], ready["unwritten_s"]) == (0, 0)
        shared.problem = AWAY
        done(server)
        done(server)
        server.skip(30)
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["waiting_results"]) == (200, 2)
        assert 30 <= ready.json()["unwritten_s"] < 300
        assert server.metric("tilework_spool_entries") == 2
        assert server.metric("tilework_spool_bytes") > 100
        assert server.metric("tilework_store_unwritten_seconds") >= 30
        assert server.metric('tilework_unready{reason="disk_unwritable"}') == 0
        is_back(server, shared)
        eventually(lambda: server.metric("tilework_store_unwritten_seconds") == 0)


def test_once_too_many_wait_calls_to_be_fetched_later_are_refused_and_others_go_on(tmp_path: Path) -> None:
    shared = scripted()
    with over(shared, durable=str(tmp_path / "state"), spool_bytes=2000) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": BODY}
        file = api.files.create(file=("calls.jsonl", json.dumps(line).encode()), purpose="batch").id
        shared.problem = AWAY
        while (last := server.post(BODY, headers=LATER)).status_code == 202:
            uid = last.json()["uid"]
            eventually(lambda uid=uid: status(server, uid)["status"] == "done")
        assert server.metric("tilework_spool_entries") > 2
        assert server.metric("tilework_spool_bytes") <= 2000
        server.skip(20)
        for refused in (server.post(BODY, headers=LATER), server.post(BODY | {"response_format": "url"})):
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "results_full")
            assert refused.headers["Retry-After"] == "10"
            assert "taken none for 2" in error["message"]
            assert AWAY in error["message"]
        with pytest.raises(openai.APIStatusError) as caught:
            api.batches.create(input_file_id=file, endpoint="/v1/images/generations", completion_window="24h")
        assert (caught.value.status_code, caught.value.code) == (503, "results_full")
        assert server.metric('tilework_refusals_total{reason="results_full"}') >= 3
        assert server.http.get("/ready").status_code == 200
        assert server.post(BODY).json()["data"][0]["b64_json"]
        assert server.post(BODY | {"stream": True}, headers=LATER).status_code == 200
        keyed = [server.post(BODY, headers={"Idempotency-Key": f"key-{number}"}) for number in range(10)]
        assert [one.status_code for one in keyed] == [200] * 10, "their clients wait"
        is_back(server, shared)
        api.batches.create(input_file_id=file, endpoint="/v1/images/generations", completion_window="24h")
        done(server)


def test_room_is_kept_for_calls_that_were_accepted() -> None:
    """Those that are open are as large as those that wait, as far as is known."""
    shared = scripted()
    with over(shared, FakeEngine(script=[Plan()], plan=HELD), spool_bytes=1100) as server:
        shared.problem = AWAY
        done(server)
        most = 1100 // int(server.metric("tilework_spool_bytes"))
        assert most > 2
        answers = [server.post(BODY, headers=LATER) for _ in range(most)]
        assert [one.status_code for one in answers] == [202] * (most - 1) + [503]
        uids = [one.json()["uid"] for one in answers[:-1]]
        for uid in uids:
            server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: all(status(server, uid)["status"] == "done" for uid in uids))


def test_each_frame_of_a_clip_needs_room() -> None:
    shared = scripted()
    with over(shared, FakeEngine(info=CLIPS), spool_bytes=2000) as server:
        shared.problem = AWAY
        done(server, num_frames=5)
        assert server.post(BODY | {"num_frames": 13}, headers=LATER).json()["error"]["code"] == "results_full"


def test_a_call_for_which_there_is_no_room_any_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "PATIENCE_S", 0)
    shared = scripted()
    with over(shared, FakeEngine(plan=HELD), spool_bytes=1) as server:
        uid = server.post(BODY, headers=LATER).json()["uid"]
        shared.problem = AWAY
        server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: status(server, uid)["status"] == "failed")
        error = status(server, uid)["error"]
        assert error["code"] == "result_unwritable"
        assert "cannot write them to their store, nor to its disk meanwhile. Send the request again" in error["message"]


def test_a_stop_waits_for_what_would_be_lost_and_a_durable_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, shown = scripted(), list[str]()
    with over(shared, on_progress=shown.append, drain_s=600) as server:
        shared.problem = AWAY
        uid = done(server)
        assert server.http.get(f"/v1/requests/{uid}/content").status_code == 200
        server.stop()
        eventually(lambda: shown)
        assert "0 images not fetched, 1 result not in their store, at most 600 s" in shown[0]
        server.skip(300)
        assert "stopped" not in server.engine.log
        shared.problem = ""
        server.skip(10)
        eventually(lambda: "stopped" in server.engine.log)
        assert len(shared.held) == 1
    with over(shared, durable=str(tmp_path / "state"), drain_s=600) as server:
        shared.problem = AWAY
        done(server)
    with over(shared, durable=str(tmp_path / "state")) as server:
        is_back(server, shared)
        assert len(shared.held) == 2
    assert "results are lost" not in caplog.text
