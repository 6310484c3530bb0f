"""What a tenant may have of batches and files, how long they are kept, and that lists of them cost nothing."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.server.batches import answers as batch_answers
from tilework.server.batches import disk, lines
from tilework.server.batches.runner import AT_ONCE
from tilework.server.batches.shelf import KEPT_S
from waiting import eventually

from .test_batches import URL as ENDPOINT
from .test_batches import begun, call, client, ended
from .test_batches import lines as file_lines

DAY_S = 86400
URL: Any = ENDPOINT
TENANTS = '[tenants.a]\nkeys = ["a"]\n{}\n[tenants.b]\nkeys = ["b"]\n'


def two_tenants(directory: Path, more: str = "") -> dict[str, Any]:
    (directory / "tenants.toml").write_text(TENANTS.format(more))
    return {"tenants": str(directory / "tenants.toml"), "durable": str(directory / "state"), "drain_s": 0.0}


def uploaded(server: Served, key: str = "EMPTY", content: bytes | None = None, **more: Any) -> Any:
    file = ("calls.jsonl", file_lines(call(1)) if content is None else content)
    return client(server, key).files.create(file=file, purpose="batch", **more)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now_s = time.time() + seconds
    monkeypatch.setattr("tilework.server.batches.shelf.time.time", lambda: now_s)


def names(directory: Path, pattern: str) -> set[str]:
    return {one.name for one in directory.rglob(f"tenant-*/{pattern}")}


def finish_all(server: Served) -> None:
    for uid in list(server.engine.tickets):
        server.on_loop(server.engine.finish, uid)


def test_uploads_and_batches_count_as_calls_of_their_key(tmp_path: Path) -> None:
    with serving(FakeEngine(), **two_tenants(tmp_path, "requests_per_minute = 3")) as server:
        file = uploaded(server, "a")
        for _ in range(2):
            client(server, "a").batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        for refused in (
            lambda: uploaded(server, "a"),
            lambda: client(server, "a").batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h"),
        ):
            with pytest.raises(openai.RateLimitError, match="3 calls") as found:
                refused()
            assert int(found.value.response.headers["retry-after"]) >= 1
        uploaded(server, "b")


def test_a_tenant_has_so_many_batches_and_the_one_that_ended_first_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before its answers were there for an hour; one without answers goes at once."""
    with serving(FakeEngine(), max_batches=3, **two_tenants(tmp_path)) as server:
        api = client(server, "a")
        batches = [ended(server, begun(server, call(number), key="a"), key="a") for number in range(3)]
        with pytest.raises(openai.RateLimitError, match="3 batches, and may have 3") as found:
            begun(server, call(4), key="a")
        assert found.value.code == "too_many_kept"
        assert 0 < int(found.value.response.headers["retry-after"]) <= KEPT_S
        assert ended(server, begun(server, call(4), key="b"), key="b"), "the limit is of each tenant"
        later(monkeypatch, KEPT_S + 5)
        failed = begun(server, "no call", key="a")
        gone = min(batches, key=lambda one: (one.completed_at, one.id))
        kept = {one.id for one in batches} - {gone.id}
        assert {one.id for one in api.batches.list()} == {failed, *kept}
        for asked in (
            lambda: api.batches.retrieve(gone.id),
            lambda: api.files.content(gone.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                asked()
        assert not names(tmp_path, f"{gone.id}*") | names(tmp_path, f"{gone.output_file_id}*")
        assert api.files.retrieve(gone.input_file_id).id, "files of calls stay"


def test_a_batch_without_answers_makes_room_at_once(tmp_path: Path) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), max_batches=2, drain_s=0) as server:
        kept = ended(server, begun(server, call(1)))
        failed = [begun(server, "no call") for _ in range(5)]
        assert {one.id for one in client(server).batches.list()} == {kept.id, failed[-1]}


def test_only_so_many_batches_of_a_tenant_run_and_others_wait(tmp_path: Path) -> None:
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, max_running_batches=2, **two_tenants(tmp_path)) as server:
        api = client(server, "a")
        ids = [begun(server, *[call(n) for n in range(AT_ONCE + 1)], key="a") for _ in range(2)]
        waiting, unwanted = begun(server, call(1), key="a"), begun(server, call(2), key="a")
        eventually(lambda: len(engine.tickets) == 2 * AT_ONCE)
        begun(server, call(1), key="b")
        eventually(lambda: len(engine.tickets) == 2 * AT_ONCE + 1)
        states = [api.batches.retrieve(one).status for one in (*ids, waiting, unwanted)]
        assert states == ["in_progress", "in_progress", "validating", "validating"]
        api.batches.cancel(unwanted)
        assert ended(server, unwanted, "cancelled", key="a").request_counts.completed == 0
        with pytest.raises(openai.ConflictError, match=waiting):
            api.files.delete(api.batches.retrieve(waiting).input_file_id)
        engine.plan = Plan()
        finish_all(server)
        assert ended(server, waiting, key="a").request_counts.completed == 1


def test_the_next_start_lets_batches_wait_in_the_same_order(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"durable": str(tmp_path), "drain_s": 0.0, "max_running_batches": 1}
    with serving(FakeEngine(plan=Plan(is_held=True)), **settings) as server:
        ids = [begun(server, call(number)) for number in range(3)]
        cancelled = begun(server, call(9))
        eventually(lambda: client(server).batches.retrieve(ids[0]).status == "in_progress")
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, **settings) as server:
        wanted = ["in_progress", "validating", "validating"]
        eventually(lambda: sorted(client(server).batches.retrieve(one).status for one in ids) == wanted)
        client(server).batches.cancel(cancelled)
        ended(server, cancelled, "cancelled")
        engine.plan = Plan()
        eventually(lambda: bool(engine.tickets))
        finish_all(server)
        assert {ended(server, one).request_counts.completed for one in ids} == {1}


def test_a_batch_whose_window_passes_while_it_waits_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, durable=str(tmp_path), max_running_batches=1, drain_s=0) as server:
        begun(server, call(1))
        waiting = begun(server, call(2), window="60m")
        eventually(lambda: bool(engine.tickets))
        later(monkeypatch, 3601)
        server.on_loop(server.loop.skip, 61)
        assert ended(server, waiting, "expired").request_counts.completed == 0


def test_a_tenant_has_so_many_files_and_half_of_the_room(tmp_path: Path) -> None:
    with serving(FakeEngine(), max_batch_files=2, batch_bytes=10_000, **two_tenants(tmp_path)) as server:
        first = uploaded(server, "a", b"x" * 4000)
        with pytest.raises(openai.RateLimitError, match="may have 5000"):
            uploaded(server, "a", b"x" * 1001)
        uploaded(server, "a", b"x" * 1000)
        with pytest.raises(openai.RateLimitError, match="2 files of calls, and may have 2"):
            uploaded(server, "a", b"")
        uploaded(server, "b", b"x" * 5000)
        client(server, "a").files.delete(first.id)
        uploaded(server, "a", b"x" * 4000)


def test_files_expire_when_their_client_says_and_not_while_a_batch_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"durable": str(tmp_path), "drain_s": 0.0}
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    with serving(FakeEngine(plan=Plan(is_held=True)), **settings) as server:
        api = client(server)
        short, usual = uploaded(server, expires_after=hour), uploaded(server)
        assert (short.expires_at, usual.expires_at) == (short.created_at + 3600, usual.created_at + 30 * DAY_S)
        needed = uploaded(server, expires_after=hour)
        batch = api.batches.create(input_file_id=needed.id, endpoint=URL, completion_window="24h")
    later(monkeypatch, 3605)
    with serving(FakeEngine(plan=Plan(is_held=True)), **settings) as server:
        api = client(server)
        eventually(lambda: not names(tmp_path, f"{short.id}*"))
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(short.id)
        assert {one.id for one in api.files.list(purpose="batch")} == {usual.id, needed.id}
        assert api.files.retrieve(batch.output_file_id or "").expires_at is None
        eventually(lambda: bool(server.engine.tickets))
        finish_all(server)
        ended(server, batch.id)
        eventually(lambda: {one.id for one in api.files.list(purpose="batch")} == {usual.id})
        server.on_loop(server.loop.skip, 61)
        eventually(lambda: not names(tmp_path, f"{needed.id}*"))


def test_batches_go_with_their_answers_and_answers_when_their_client_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), batch_ttl_s=2.0 * DAY_S, drain_s=0) as server:
        api, file = client(server), uploaded(server)
        more: Any = {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
        ask: Any = {"input_file_id": file.id, "endpoint": URL, "completion_window": "1h"}
        made = [api.batches.create(**ask, **more), api.batches.create(**ask)]
        short, usual = (ended(server, one.id) for one in made)
        end_s = short.completed_at
        assert api.files.retrieve(short.output_file_id).expires_at == end_s + 3600
        assert api.files.retrieve(usual.output_file_id).expires_at == usual.completed_at + 2 * DAY_S
        later(monkeypatch, 3605)
        server.on_loop(server.loop.skip, 61)
        eventually(lambda: names(tmp_path, "output-*") == {usual.output_file_id})
        assert not names(tmp_path, "error-*"), "an empty file went when its batch ended"
        assert {one.id for one in api.batches.list()} == {short.id, usual.id}
        later(monkeypatch, 2 * DAY_S + 5)
        server.on_loop(server.loop.skip, 61)
        eventually(lambda: not names(tmp_path, "*"))
        assert not list(api.batches.list())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 5000}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
    ],
)
def test_a_wrong_expiry_is_named(fields: dict[str, str], param: str, durable: Served) -> None:
    files = {"file": ("x.jsonl", b"{}")}
    answer = durable.http.post("/v1/files", files=files, data={"purpose": "batch", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("expiry", [{"anchor": "created_at", "seconds": 1}, {"anchor": "x", "seconds": 3600}, 7, {}])
def test_a_wrong_expiry_of_answers_is_named(expiry: object, durable: Served) -> None:
    body = {"input_file_id": "file-0", "endpoint": URL, "output_expires_after": expiry}
    error = durable.http.post("/v1/batches", json=body).json()["error"]
    assert error["param"].startswith("output_expires_after")
    assert "3600 to 2592000 seconds" in error["message"]


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(FakeEngine(), durable=str(tmp_path_factory.mktemp("durable")), drain_s=0) as server:
        yield server


def test_files_come_in_pages(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"durable": str(tmp_path), "drain_s": 0.0}
    with serving(FakeEngine(), **settings) as server:
        api = client(server)
        calls = {uploaded(server).id for _ in range(5)}
        ended(server, begun(server, call(1)))
        newest = [one.id for one in api.files.list(limit=2)]
        assert len(newest) == len(set(newest)) == 7, "the client asks for page after page"
        assert [one.id for one in api.files.list(limit=3, order="asc")] == newest[::-1]
        assert len(list(api.files.list(purpose="batch_output", limit=1))) == 1
        assert calls < {one.id for one in api.files.list(purpose="batch", limit=4)}
        page = server.http.get(f"/v1/files?limit=2&after={newest[4]}").json()
        assert [one["id"] for one in page["data"]] == newest[5:]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (newest[5], newest[6], False)
        assert server.http.get("/v1/files?limit=2").json()["has_more"]
        assert server.http.get("/v1/files?purpose=cats").status_code == 400
    with serving(FakeEngine(), **settings) as server:
        again = {one.id for one in client(server).files.list()}
        assert again == set(newest)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_behind_what_is_not_there_is_refused_as_for_requests(path: str, tmp_path: Path) -> None:
    with serving(FakeEngine(), **two_tenants(tmp_path)) as server:
        batch = ended(server, begun(server, call(1), key="a"), key="a")
        of_other = batch.id if path == "/v1/batches" else batch.input_file_id
        wanted = server.http.get("/v1/requests?after=x", headers={"Authorization": "Bearer b"})
        for after in ("x", of_other):
            found = server.http.get(f"{path}?after={after}", headers={"Authorization": "Bearer b"})
            assert found.status_code == wanted.status_code == 400
            error, like = found.json()["error"], wanted.json()["error"]
            assert {**error, "message": ""} == {**like, "message": ""}
            assert after in error["message"]


def test_what_a_kill_left_is_removed_and_what_another_version_wrote_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"durable": str(tmp_path), "drain_s": 0.0, "batch_ttl_s": 3600.0, "batch_bytes": 20_000}
    with serving(FakeEngine(plan=Plan(is_held=True)), **settings) as server:
        batch = client(server).batches.retrieve(begun(server, call(1)))
    folder = tmp_path / "batches" / "tenant-default"
    document = (folder / batch.id).read_text()
    (folder / batch.id).write_text(document.replace('"validating"', '"pondering"'))
    (folder / str(batch.output_file_id)).write_bytes(b"x" * 100)
    (folder / "file-0.new").write_bytes(b"x" * 15_000)
    left = {"file-0.new", f"output-{'0' * 32}.index", f"output-{'1' * 32}", f"error-{'2' * 32}"}
    (folder / f"output-{'0' * 32}.index").write_bytes(b"x")
    for name in (f"output-{'1' * 32}", f"error-{'2' * 32}"):
        (folder / name).touch()
        os.utime(folder / name, (4e9, 4e9))  # In the year 2096, so that it has not expired.
    before = names(tmp_path, "*") - left
    later(monkeypatch, DAY_S)
    for _ in range(2):
        with serving(FakeEngine(), **settings) as server:
            api = client(server)
            eventually(lambda: names(tmp_path, "*") == before)
            server.on_loop(server.loop.skip, 61)
            server.until_idle()
            assert not list(api.batches.list())
            kept = {one.id: one.bytes for one in api.files.list()}
            assert kept[str(batch.output_file_id)] == 100
            assert len(kept) == 3
            with pytest.raises(openai.InternalServerError, match=f"{sum(kept.values())} bytes of 20000"):
                uploaded(server, content=b"x" * 20_000)
        assert names(tmp_path, "*") == before, "its files do not expire, for it may need them"


def test_no_route_lists_a_directory_or_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        loop, seen = server.on_loop(threading.current_thread), set[str]()

        def off_loop(owner: object, name: str) -> None:
            function: Callable[..., Any] = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                assert threading.current_thread() is not loop, f"{name} on the loop"
                seen.add(name)
                return function(*args, **kwargs)

            monkeypatch.setattr(owner, name, watched)

        api = client(server)
        uploaded(server)
        for name in ("_write", "read_batch", "remove"):
            off_loop(disk, name)
        for name in ("check", "read_calls"):
            off_loop(lines, name)
        for name in ("begin", "read_on", "append", "forget"):
            off_loop(batch_answers.AnswerFile, name)
        monkeypatch.setattr("tilework.server.batches.service.check", lines.check)
        monkeypatch.setattr("tilework.server.batches.runner.read_calls", lines.read_calls)
        for owner, name in (("os", "scandir"), ("os", "listdir")):
            monkeypatch.setattr(f"{owner}.{name}", None)
        off_loop(Path, "open")
        off_loop(Path, "unlink")
        batch = ended(server, begun(server, call(1)))
        assert len(list(api.files.list(limit=1))) == 3
        assert len(list(api.batches.list(limit=1))) == 1
        assert api.files.content(batch.output_file_id).content
        api.files.delete(batch.output_file_id)
        assert {"_write", "read_batch", "remove", "check", "read_calls", "append", "open", "unlink"} <= seen


def flood(server: Served, key: str, file_id: str, is_done: Callable[[], bool]) -> tuple[set[str], int]:
    """Make batches as fast as one can, until it is done: those that were accepted, and how many others got 429."""
    accepted, num_refused = set[str](), 0
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        while not is_done():
            made = http.post("/v1/batches", json={"input_file_id": file_id, "endpoint": URL})
            assert made.status_code in (200, 429), made.text
            if made.status_code == 200:
                accepted.add(made.json()["id"])
            num_refused += made.status_code == 429
            http.get("/v1/batches?limit=100")
            http.get("/v1/files")
    return accepted, num_refused


def test_a_flood_of_batches_takes_what_its_tenant_may_have_and_all_accepted_ones_end(tmp_path: Path) -> None:
    engine = FakeEngine(plan=Plan(is_held=True))
    with serving(engine, max_batches=20, max_running_batches=2, **two_tenants(tmp_path)) as server:
        file_id = uploaded(server, "a", file_lines(*map(call, range(AT_ONCE + 4)))).id
        before = len(server.tasks())
        is_done = counted(60)
        with ThreadPoolExecutor(4) as pool:
            floods = [pool.submit(flood, server, "a", file_id, is_done) for _ in range(4)]
            found = [one.result() for one in floods]
        accepted = set().union(*(one for one, _ in found))
        assert (len(accepted), sum(num for _, num in found)) == (20, 40)
        eventually(lambda: len(engine.tickets) == 2 * AT_ONCE)
        server.until_idle()
        assert len(engine.tickets) == 2 * AT_ONCE
        assert len(server.tasks()) - before < 4 * 2 * AT_ONCE, "calls of those that run"
        assert len(names(tmp_path, "*")) == 1 + 20 * 3 + len(names(tmp_path, "*.index"))
        engine.plan = Plan()
        call_of_other = server.post({"prompt": "x"}, headers={"Authorization": "Bearer b"})
        assert call_of_other.status_code == 200, "others are served meanwhile"
        finish_all(server)
        for batch_id in accepted:
            assert ended(server, batch_id, key="a").request_counts.completed == AT_ONCE + 4


def counted(most: int) -> Callable[[], bool]:
    """Whether it was asked that often."""
    counter = itertools.count()
    return lambda: next(counter) >= most


@pytest.mark.slow
def test_a_long_flood_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Two floods of 1,000 requests for batches: after the second one there is as much as after the first."""
    with serving(FakeEngine(), max_batches=50, **two_tenants(tmp_path)) as server:
        file_id, levels = uploaded(server, "a", file_lines(*map(call, range(40)))).id, list[int]()
        for _ in range(2):
            is_done = counted(1000)
            with ThreadPoolExecutor(4) as pool:
                floods = [pool.submit(flood, server, "a", file_id, is_done) for _ in range(4)]
                while not all(one.done() for one in floods):
                    assert server.post({"prompt": "x"}, headers={"Authorization": "Bearer b"}).status_code == 200
                accepted = set().union(*(one.result()[0] for one in floods))
            for batch_id in accepted:
                assert ended(server, batch_id, key="a").request_counts.completed == 40
            server.on_loop(gc.collect)
            levels.append(int(Path("/proc/self/statm").read_text().split()[1]))
        assert levels[1] <= 1.05 * levels[0]


def test_files_are_listed_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    """Also those of one second, and while they are deleted from page to page; and what is wrong is named."""
    with serving(FakeEngine(), durable=str(tmp_path), drain_s=0) as server:
        api = client(server)
        made = [api.files.create(file=("a.jsonl", b"{}"), purpose="batch").id for _ in range(7)]
        assert [one.id for one in api.files.list(order="asc", limit=2)] == made
        assert [one.id for one in api.files.list(limit=3)] == made[::-1]
        gone = []
        for one in api.files.list(limit=2):
            api.files.delete(one.id)
            gone.append(one.id)
        assert gone == made[::-1]
        for query, remedy in (("limit=0", "an integer from 1 to 10000"), ("order=x", '"asc" or "desc"')):
            assert remedy in server.http.get(f"/v1/files?{query}").json()["error"]["message"]
        assert "an integer from 1 to 100" in server.http.get("/v1/batches?limit=0").json()["error"]["message"]
