"""Batches by openai's own client: lines in, answers out, once each, also if the server is stopped on the way."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.actions import Reject
from tilework.core.model import NotServed
from tilework.core.request import OnMiss, RefusalCode
from tilework.core.wire.spec import Spec
from tilework.runtime.ticket import Ticket
from tilework.server.batches.answers import AnswerFile
from tilework.server.batches.lines import check
from tilework.server.batches.runner import AT_ONCE
from waiting import eventually

URL = "/v1/images/generations"


def client(server: Served, key: str = "EMPTY") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def call(number: int, url: str = URL, **fields: object) -> dict[str, Any]:
    return {
        "custom_id": f"call-{number}",
        "method": "POST",
        "url": url,
        "body": {"prompt": "x", "seed": number, **fields},
    }


def lines(*calls: object) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in calls)


def begun(server: Served, *calls: object, endpoint: Any = URL, key: str = "EMPTY", window: Any = "24h") -> str:
    api = client(server, key)
    file = api.files.create(file=("calls.jsonl", lines(*calls)), purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)
    return made.id


def ended(server: Served, batch_id: str, status: str = "completed", key: str = "EMPTY") -> Any:
    api = client(server, key)
    eventually(lambda: api.batches.retrieve(batch_id).status == status)
    return api.batches.retrieve(batch_id)


def answers(server: Served, file_id: str | None, key: str = "EMPTY") -> dict[str, dict[str, Any]]:
    assert file_id is not None
    text = client(server, key).files.content(file_id).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "each call is answered once"
    return {one["custom_id"]: one["response"] for one in found}


def red(response: dict[str, Any]) -> Any:
    file = base64.b64decode(response["body"]["data"][0]["b64_json"])
    pixel: Any = Image.open(io.BytesIO(file)).getpixel((0, 0))
    return pixel[0]


def test_each_line_is_a_call_with_an_answer(tmp_path: Path) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        calls = [call(number) for number in range(40)]
        calls[7]["body"]["size"] = "7x7"
        calls[8]["body"] |= {"priority": "interactive", "slo_s": 9}
        batch = ended(server, begun(server, *calls))
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 40, "completed": 39, "failed": 1}
        assert batch.completed_at is not None
        good, bad = answers(server, batch.output_file_id), answers(server, batch.error_file_id)
        for file_id, name in ((batch.output_file_id, "output-"), (batch.error_file_id, "error-")):
            assert file_id.startswith(name)
            assert client(server).files.retrieve(file_id).filename == f"{file_id}.jsonl"
        assert {name: red(one) for name, one in good.items()} == {f"call-{n}": n for n in range(40) if n != 7}
        assert (list(bad), bad["call-7"]["status_code"]) == (["call-7"], 400)
        assert bad["call-7"]["body"]["error"]["param"] == "size"
        assert good["call-1"]["request_id"] == good["call-1"]["body"]["data"][0]["tilework"]["uid"][:32]
        by_seed = {spec.seed: one for spec, one in zip(server.engine.specs, server.engine.requests, strict=True)}
        assert (by_seed[1].priority, by_seed[8].priority) == ("batch", "interactive")
        for seed, slo_s in ((1, 86400), (8, 9)):
            request = by_seed[seed]
            assert request.deadline_ns is not None
            assert (request.deadline_ns - request.arrival_ns) / 1e9 == pytest.approx(slo_s, abs=5)


@pytest.mark.slow
def test_chats_and_pages(tmp_path: Path) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        first = ended(server, begun(server, chat, endpoint="/v1/chat/completions"))
        assert answers(server, first.output_file_id)["a"]["body"]["object"] == "chat.completion"
        second = ended(server, begun(server, call(1, response_format="url")))
        url = answers(server, second.output_file_id)["call-1"]["body"]["data"][0]["url"]
        assert url.startswith(server.url), "as its client reaches it"
        assert httpx.get(url).headers["content-type"] == "image/png"
        api = client(server)
        assert {one.id for one in api.batches.list(limit=1)} == {first.id, second.id}, "page by page"
        names = [one.id for one in api.files.list()]
        assert len(names) == 4, "two files of calls, and two of answers: no call has failed"
        assert api.files.retrieve(names[0]).bytes == len(api.files.content(names[0]).content)
        assert api.files.delete(names[0]).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.content(names[0])


@pytest.mark.slow
def test_only_so_many_wait_at_a_time_and_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    full = Plan(code=RefusalCode.QUEUE, retry_ns=10**9)
    engine = FakeEngine(script=[full, full], plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch_id = begun(server, *[call(number) for number in range(AT_ONCE + 3)])
        eventually(lambda: len(engine.tickets) == AT_ONCE - 2)
        server.skip(2)
        eventually(lambda: len(engine.tickets) == AT_ONCE)
        server.until_idle()
        assert len(engine.tickets) == AT_ONCE
        engine.plan = Plan()
        for uid in list(engine.tickets):
            server.on_loop(engine.finish, uid)
        assert ended(server, batch_id).request_counts.failed == 0


@pytest.mark.slow
def test_a_batch_that_is_cancelled_ends_with_what_it_has(tmp_path: Path) -> None:
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch_id = begun(server, *[call(number) for number in range(AT_ONCE + 9)])
        eventually(lambda: len(engine.tickets) == AT_ONCE)
        assert client(server).batches.cancel(batch_id).status == "cancelling"
        for uid in list(engine.tickets):
            server.on_loop(engine.finish, uid)
        batch = ended(server, batch_id, "cancelled")
        assert batch.request_counts.completed == AT_ONCE
        assert len(answers(server, batch.output_file_id)) == AT_ONCE


@pytest.mark.slow
def test_a_batch_that_is_cancelled_waits_for_no_room(tmp_path: Path) -> None:
    """What was not begun is neither made nor answered."""
    full = Plan(code=RefusalCode.QUEUE, retry_ns=10**12)
    engine = FakeEngine(script=[full] * 3)
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch_id = begun(server, *map(call, range(3)))
        eventually(lambda: not engine.script)
        client(server).batches.cancel(batch_id)
        batch = ended(server, batch_id, "cancelled")
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 0, "failed": 0}
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        server.skip(1001)
        assert not engine.requests


@pytest.mark.slow
def test_the_next_start_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    """Calls that were open are joined, those that have answers are not made again, and a torn line is made again."""
    settings: dict[str, Any] = {"durable": str(tmp_path), "drain_s": 0.0}
    first = FakeEngine(script=[Plan()] * 5, plan=Plan(is_held=True))
    with serving(first, **settings) as server:
        batch_id = begun(server, *[call(number) for number in range(AT_ONCE + 9)])
        eventually(lambda: len(first.requests) == AT_ONCE + 5)
        eventually(lambda: client(server).batches.retrieve(batch_id).request_counts.completed == 5)  # type: ignore[union-attr]
        output = client(server).batches.retrieve(batch_id).output_file_id
    place = next(tmp_path.glob(f"batches/*/{output}"))
    whole = place.read_bytes().splitlines(keepends=True)
    assert len(whole) == 5
    place.write_bytes(b"".join(whole[:4]) + whole[4][:50])
    second = FakeEngine()
    with serving(second, **settings) as server:
        batch = ended(server, batch_id)
        assert batch.request_counts.model_dump() == {"total": AT_ONCE + 9, "completed": AT_ONCE + 9, "failed": 0}
        good = answers(server, batch.output_file_id)
        assert {name: red(one) for name, one in good.items()} == {f"call-{n}": n for n in range(AT_ONCE + 9)}
        assert len(second.restored) == AT_ONCE
        drawn = [spec.seed for spec in second.specs]
        assert sorted(drawn[AT_ONCE:]) == list(range(AT_ONCE + 5, AT_ONCE + 9)), "no other is drawn again"


@pytest.mark.slow
def test_answers_can_be_fetched_while_more_are_written(tmp_path: Path) -> None:
    """A client gets what was there when it asked. The file is more than what a connection buffers."""
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch = client(server).batches.retrieve(begun(server, call(1)))
        eventually(lambda: len(engine.requests) == 1)  # The runner has looked for answers, and dropped what is none.
        place = next(tmp_path.glob(f"batches/*/{batch.output_file_id}"))
        content = b"x" * ((32 << 20) + 1000)
        place.write_bytes(content)
        with server.http.stream("GET", f"/v1/files/{batch.output_file_id}/content") as answer:
            pieces = answer.iter_raw()
            got = next(pieces)
            with place.open("ab") as file:
                file.write(b"y" * 1000)
            got += b"".join(pieces)
        assert answer.headers["content-length"] == str(len(content))
        assert got == content


@pytest.mark.slow
def test_files_of_a_batch_that_is_not_done_cannot_be_deleted(tmp_path: Path) -> None:
    engine = FakeEngine(script=[Plan()] * 5, plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch_id, api = begun(server, *map(call, range(9))), client(server)
        eventually(lambda: api.batches.retrieve(batch_id).request_counts.completed == 5)  # type: ignore[union-attr]
        batch = api.batches.retrieve(batch_id)
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert file_id is not None
            with pytest.raises(openai.ConflictError, match=f"{batch_id}.*cancel"):
                api.files.delete(file_id)
        for uid in list(engine.tickets):
            server.on_loop(engine.finish, uid)
        assert len(answers(server, ended(server, batch_id).output_file_id)) == 9
        assert api.files.delete(batch.input_file_id).deleted


@pytest.mark.slow
def test_a_batch_whose_files_are_gone_has_failed(tmp_path: Path) -> None:
    with serving(FakeEngine(plan=Plan(is_held=True)), durable=str(tmp_path), drain_s=0) as server:
        batch = client(server).batches.retrieve(begun(server, call(1)))
    next(tmp_path.glob(f"batches/*/{batch.output_file_id}")).unlink()
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        found = ended(server, batch.id, "failed")
        assert found.failed_at is not None
        assert "file" in found.errors.data[0].message
        assert (found.output_file_id, found.error_file_id) == (None, None)


@pytest.mark.slow
def test_a_batch_goes_on_when_its_answers_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append, is_full = AnswerFile.append, True

    def written(file: AnswerFile, number: int, line: bytes) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        append(file, number, line)

    monkeypatch.setattr(AnswerFile, "append", written)
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        batch_id = begun(server, *map(call, range(40)))
        eventually(lambda: "No space left on device" in caplog.text)
        is_full = False
        server.on_loop(server.loop.skip, 60)
        batch = ended(server, batch_id)
        assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
        assert len(answers(server, batch.output_file_id)) == 40


class PromisesNothing(FakeEngine):
    """Refuses each call for a promise, in whatever order they come."""

    def submit(self, specs: Mapping[str, Spec], **terms: Any) -> tuple[Ticket, ...] | Reject:
        self.script = [Plan(refuse_s=99.0)] * (terms["terms"].on_miss is OnMiss.REJECT)
        return super().submit(specs, **terms)


@pytest.mark.slow
def test_a_call_that_would_rather_be_refused_or_whose_model_cannot_run_holds_up_no_other(tmp_path: Path) -> None:
    broken = NotServed(name="broken", reason="no memory", is_first=False)
    engine = PromisesNothing(not_served={"broken": broken})
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        impossible = [call(number, slo_s=0.01, on_miss="reject") for number in range(1, AT_ONCE)]
        impossible.append(call(0, model="broken"))
        batch = ended(server, begun(server, *impossible, call(AT_ONCE)))
        assert list(answers(server, batch.output_file_id)) == [f"call-{AT_ONCE}"]
        bad = answers(server, batch.error_file_id)
        assert sorted(one["status_code"] for one in bad.values()) == [429] * (AT_ONCE - 1) + [503]


@pytest.mark.slow
def test_a_call_is_of_the_batch_however_it_says_other_things(tmp_path: Path) -> None:
    """Null says nothing, and `extra_body` what is in it."""
    said: list[tuple[dict[str, Any], tuple[str, int]]] = [
        ({"extra_body": {"num_inference_steps": 3}}, ("batch", 86400)),
        ({"slo_s": None, "deadline": None, "priority": None}, ("batch", 86400)),
        ({"extra_body": {"slo_s": None}, "deadline": None}, ("batch", 86400)),
        ({"extra_body": {"slo_s": 9, "priority": "interactive"}}, ("interactive", 9)),
        ({"slo_ms": 9000, "extra_body": {"priority": None}}, ("batch", 9)),
    ]
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        batch = ended(server, begun(server, *[call(number, **fields) for number, (fields, _) in enumerate(said)]))
        assert batch.request_counts.completed == len(said)
        made = {spec.seed: one for spec, one in zip(server.engine.specs, server.engine.requests, strict=True)}
        for number, (_, (priority, slo_s)) in enumerate(said):
            assert made[number].priority == priority
            assert ((made[number].deadline_ns or 0) - made[number].arrival_ns) / 1e9 == pytest.approx(slo_s, abs=5)


@pytest.mark.slow
def test_a_line_that_no_client_could_send_spoils_no_other(tmp_path: Path) -> None:
    """Half of a surrogate pair, and no number: JSON can say them."""
    wrong = [call(0, prompt="\ud800"), call(1, guidance_scale=float("nan"))]
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        api = client(server)
        file = api.files.create(file=("calls.jsonl", lines(*wrong, call(3))), purpose="batch")
        made = api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        batch = ended(server, made.id)
        assert list(answers(server, batch.output_file_id)) == ["call-3"]
        bad = answers(server, batch.error_file_id)
        assert {name: one["status_code"] for name, one in bad.items()} == {f"call-{number}": 400 for number in range(2)}
        with pytest.raises(openai.BadRequestError, match="metadata"):
            api.post(
                "/batches",
                cast_to=object,
                options={"headers": {"Content-Type": "application/json"}},
                content=json.dumps(
                    {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h", "metadata": {"a": "\ud800"}}
                ).encode(),
            )


@pytest.mark.slow
def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(
        '[tenants.a]\nkeys = ["a"]\nclasses = ["standard"]\n[tenants.b]\nkeys = ["b"]\n'
    )
    files = {"tenants": str(tmp_path / "tenants.toml"), "durable": str(tmp_path / "state")}
    with serving(FakeEngine(), drain_s=0, **files) as server:
        batch = ended(server, begun(server, call(1), key="a"), key="a")
        assert len(answers(server, batch.output_file_id, "a")) == 1
        assert (server.engine.requests[-1].tenant, server.engine.requests[-1].priority) == ("a", "standard")
        other = client(server, "b")
        assert not list(other.batches.list())
        for asked in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"),  # type: ignore[arg-type]
        ):
            with pytest.raises(openai.NotFoundError):
                asked()


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


WRONG: list[tuple[object, str | None, str]] = [
    ("x", None, "no object"),
    ({**call(1), "custom_id": 1}, "custom_id", "Give a text of less than"),
    ({**call(1), "method": "GET"}, "method", 'Give "POST"'),
    ({**call(1), "url": "/v1/videos"}, "url", f'Give "{URL}"'),
    ({**call(1), "body": []}, "body", "no object"),
    (call(1, size=nested(65)), None, "more than 64 levels"),
    (call(1, stream=True), "stream", "does not stream"),
    (call(1, extra_body={"stream": True}), "stream", "does not stream"),
    ({**call(1), "more": ["x" * 3000] * 1500}, None, "Give fewer or shorter fields"),
    (call(0), "custom_id", 'custom_id = "call-0" is also that of line 1. Give each line its own.'),
]


@pytest.mark.slow
def test_mistakes_are_named_by_line_and_nothing_is_made(tmp_path: Path) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        batch = client(server).batches.retrieve(begun(server, call(0), *[one for one, _, _ in WRONG]))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        found = {one.line: (one.param, one.message) for one in batch.errors.data}
        assert list(found) == [*range(2, 2 + len(WRONG))]
        for line, (_, param, message) in enumerate(WRONG, 2):
            assert found[line][0] == param
            assert message in str(found[line][1])
        assert not server.engine.requests


@pytest.mark.slow
def test_what_cannot_be_a_batch_is_refused(tmp_path: Path) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), max_slo_s=7200.0, batch_bytes=1024) as server:
        api = client(server)
        file = api.files.create(file=("x.jsonl", lines(call(1))), purpose="batch")
        for fields, param in (
            ({"completion_window": "24h"}, "completion_window"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "2h", "endpoint": "/v1/videos"}, "endpoint"),
        ):
            sent: Any = {"input_file_id": file.id, "endpoint": URL, **fields}
            with pytest.raises(openai.BadRequestError, match=param):
                api.batches.create(**sent)
        for name in ("file-0", "../x", "batch-" + "0" * 32):
            with pytest.raises(openai.NotFoundError):
                api.batches.create(input_file_id=name, endpoint=URL, completion_window="1h")  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="purpose"):
            api.files.create(file=("x.jsonl", b"{}"), purpose="assistants")
        with pytest.raises(openai.InternalServerError, match="1024"):
            api.files.create(file=("x.jsonl", b"x" * 2000), purpose="batch")
    with serving(FakeEngine()) as server, pytest.raises(openai.BadRequestError, match="--durable DIR"):
        client(server).files.create(file=("x.jsonl", b"{}"), purpose="batch")


@pytest.mark.slow
def test_a_batch_that_takes_too_long_ends_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilework.server.batches import runner

    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), drain_s=0) as server:
        batch_id = begun(server, *[call(number) for number in range(AT_ONCE + 9)], window="1h")
        eventually(lambda: len(engine.tickets) == AT_ONCE)
        now_s = time.time()
        monkeypatch.setattr(runner.time, "time", lambda: now_s + 3601)
        for uid in list(engine.tickets):
            server.on_loop(engine.finish, uid)
        assert ended(server, batch_id, "expired").request_counts.completed == AT_ONCE


def test_too_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.server.batches.lines.MAX_LINES", 2)
    (tmp_path / "x").write_bytes(lines(*map(call, range(3))))
    assert "more than 2 lines" in check(tmp_path / "x", URL)[1][0].message
    (tmp_path / "y").write_bytes(b"\n\n")
    assert "is empty" in check(tmp_path / "y", URL)[1][0].message
    monkeypatch.setattr("tilework.server.batches.lines._MOST_WITH_EMPTY", 4)
    (tmp_path / "z").write_bytes(b"\n" * 5)
    assert "more than 4 lines, empty ones counted" in check(tmp_path / "z", URL)[1][0].message
