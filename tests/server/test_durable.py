"""What outlives a server: its journal, its results, its blobs; and how its next start goes on with the calls."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.checkpoint import Checkpoint
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.server.calls import finish
from tilework.server.calls.journal import DurableJournal
from tilework.store import durable, files
from tilework.store import journal as journal_file
from tilework.store.disk import CHECK_S, Disk
from tilework.store.durable import DurableDirectory
from tilework.store.files import FileStore
from tilework.store.given_pictures import GivenPictures
from tilework.store.journal import Ended, Journal, JournalUnusable, NotWritten, OpenCall
from tilework.store.results import Unwritten
from waiting import PATIENCE_S, eventually

ENDED = 'tilework_requests_total{{class="standard",outcome="{}"}}'
ASYNC = {"Prefer": "respond-async"}
NEW = {"a-0": Checkpoint(), "a-1": Checkpoint()}
TEXT, STEPPED = SavedState(0, 1, StateBlob("c", 5)), SavedState(1, 4, StateBlob("s", 7))


@pytest.fixture
def killed(tmp_path: Path) -> Any:
    """Copies a directory that a server uses: what the disk would hold if the server were killed now."""
    numbers = count()

    def copy(directory: Path) -> Path:
        place = tmp_path / f"after-{next(numbers)}"
        shutil.copytree(directory, place)
        return place

    return copy


def opened(uid: str = "a", **more: Any) -> OpenCall:
    return OpenCall(**{"uid": uid, "model": "m", "document": b"{}", "checkpoints": NEW} | more)


def ended(uid: str = "a", has_key: bool = True) -> Ended:
    return Ended(uid=uid, has_key=has_key, document=b"ended")


# The journal.


def test_what_a_method_has_written_survives_a_kill(tmp_path: Path, killed: Any) -> None:
    path = tmp_path / "now"
    path.mkdir()
    with closing(Journal(path / "j")) as journal:
        steps: list[Callable[[], None]] = [
            lambda: journal.begin(opened()),
            lambda: journal.keep("a-1", TEXT),
            lambda: journal.keep("a-1", STEPPED),
            lambda: journal.begin(opened("b", checkpoints={"b-0": Checkpoint((TEXT,))})),
            lambda: journal.end(ended()),
            lambda: journal.free_key("a"),
            lambda: journal.forget("b"),
            lambda: journal.drop(["a"]),
        ]
        found = []
        for step in steps:
            step()
            with closing(Journal(killed(path) / "j")) as later:
                found.append((later.open_calls(), later.records()))
    conditioned = {**NEW, "a-1": Checkpoint((TEXT,))}
    stepped = {**NEW, "a-1": Checkpoint((TEXT, STEPPED))}
    b = opened("b", checkpoints={"b-0": Checkpoint((TEXT,))})
    assert found == [
        ([opened()], []),
        ([opened(checkpoints=conditioned)], []),
        ([opened(checkpoints=stepped)], []),
        ([opened(checkpoints=stepped), b], []),
        ([b], [ended()]),
        ([b], [ended(has_key=False)]),
        ([], [ended(has_key=False)]),
        ([], []),
    ]


def test_encoding_again_gives_up_the_state_of_the_former_attempt(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")) as journal:
        journal.begin(opened())
        journal.keep("a-0", TEXT)
        journal.keep("a-0", STEPPED)
        again = SavedState(0, 1, StateBlob("d", 5))
        journal.keep("a-0", again)
        assert journal.open_calls()[0].checkpoints["a-0"] == Checkpoint((again,))


def test_a_state_of_a_call_that_has_ended_is_not_kept(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")) as journal:
        journal.begin(opened())
        journal.keep("a-0", TEXT)
        journal.end(ended())
        journal.keep("a-0", STEPPED)
        assert journal._connection.execute("SELECT count(*) FROM state").fetchone() == (0,)


def fill(journal: Journal) -> None:
    """From now on the disk is full."""
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")


def make_room(journal: Journal) -> None:
    journal._connection.execute("PRAGMA max_page_count = 1000000")


def is_ready(server: Served) -> bool:
    """Once the disk was tried again."""
    server.skip(CHECK_S)
    return server.http.get("/ready").status_code == 200


def wait_for_room(server: Served) -> None:
    """Until the server has found that its disk can be written again."""
    eventually(lambda: is_ready(server))


def test_full_disk_changes_nothing_and_ends_are_written_later(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")) as journal:
        journal.begin(opened())
        fill(journal)
        with pytest.raises(NotWritten, match="full"):
            journal.begin(opened("b", document=b"x" * 100_000, checkpoints={}))
        with pytest.raises(NotWritten, match="full"):
            journal.end(Ended(uid="a", has_key=False, document=b"x" * 100_000))
        assert [call.uid for call in journal.open_calls()] == ["a"]
        make_room(journal)
        journal.begin(opened("c", checkpoints={}))
        journal.end(ended("c"))
        assert [record.uid for record in journal.records()] == ["a", "c"]
        assert journal.open_calls() == []


def test_directory_belongs_to_one_server(tmp_path: Path) -> None:
    with (
        closing(DurableDirectory(tmp_path / "new" / "place")),
        pytest.raises(JournalUnusable, match="used by a running server; stop that one"),
    ):
        DurableDirectory(tmp_path / "new" / "place")
    DurableDirectory(tmp_path / "new" / "place").close()


def test_a_standby_has_the_directory_when_its_server_has_ended(tmp_path: Path) -> None:
    first, others = DurableDirectory(tmp_path), Queue[DurableDirectory | None]()
    waiting = threading.Thread(
        target=lambda: others.put(DurableDirectory(tmp_path, on_wait=lambda: others.put(None))), daemon=True
    )
    waiting.start()
    assert others.get(timeout=10) is None, "it says that it waits"
    assert waiting.is_alive()
    first.close()
    second = others.get(timeout=PATIENCE_S)
    assert second is not None
    second.close()


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    versions = (("older", "PRAGMA user_version = 1"), ("newer", "PRAGMA user_version = 99"))
    for name, _ in versions:
        Journal(tmp_path / name).close()
    for name, statement in (("foreign", "CREATE TABLE t (x)"), *versions):
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.execute(statement)
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at\n" * 20)
    reasons = {"foreign": "no journal", "older": "version 1,.*older", "newer": "version 99.*newer"}
    for name, why in (*reasons.items(), ("text", "not a database")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(JournalUnusable, match=f"{name} .*{why}.*another directory"):
            Journal(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_clock_and_logs_go_on_from_start_to_start(tmp_path: Path) -> None:
    times_ns = []
    for number in range(1, 14):
        with closing(DurableDirectory(tmp_path)) as directory:
            log = directory.new_log()
            assert log.name == f"events-{number}.jsonl"
            log.touch()
            times_ns.append(directory.now_ns())
    assert times_ns[0] == 0
    assert times_ns == sorted(set(times_ns))


def test_the_clock_goes_on_where_it_was_when_that_of_the_machine_is_set_to_an_earlier_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ten minutes, after half an hour of work; the start after that goes on from there, too."""
    machine = SimpleNamespace(unix_s=1e9, monotonic_s=0.0)
    clocks = SimpleNamespace(
        time_ns=lambda: ns_from_s(machine.unix_s), monotonic_ns=lambda: ns_from_s(machine.monotonic_s)
    )
    monkeypatch.setattr(durable, "time", clocks)
    begins_s = []
    for back_s in (0, 600, 0):
        machine.unix_s -= back_s
        with closing(DurableDirectory(tmp_path)) as directory:
            begins_s.append(s_from_ns(directory.now_ns()))
            machine.unix_s += 1800
            machine.monotonic_s += 1800
    assert begins_s == [0, 1800, 3600]


def test_documents_of_version_6_can_be_read(tmp_path: Path) -> None:
    """A field that is added gets a default; any other change raises the version, and older directories are refused."""
    ask = {
        "model": "tiny-shapes",
        "specs": [
            {
                "prompt": "x",
                "negative_prompt": "",
                "height": 16,
                "width": 16,
                "steps": 2,
                "guidance_scale": 1.0,
                "seed": 1,
            }
        ],
        "deadline": {"slo_s": 2.0, "field": "slo_s", "value": 2},
        "terms": {"on_miss": "reject", "tenant": "t"},
        "as_url": False,
        "output_format": "png",
        "quality": 90,
        "user": None,
    }
    key = {"tenant": "t", "text": "k", "fingerprint": "ab"}
    call = {"uid": "a", "key": key, "ask": ask, "arrival_ns": 5, "arrived_s": 7.5}
    texts = {"status_json": '{"a": "é"}', "decisions_json": "{}", "unfetched": [[0, 0]]}
    record = {"uid": "b", "key": None, "ask": ask, "arrived_s": 1.5, "fresh_until_ns": 9, **texts}
    with closing(Journal(tmp_path / "j")) as journal:
        journal.begin(opened(document=json.dumps(call).encode(), checkpoints={"a-0": Checkpoint()}))
        journal.end(Ended(uid="b", has_key=True, document=json.dumps(record).encode()))
        durable = DurableJournal(journal, GivenPictures(tmp_path / "pictures"))
        (again,) = durable.open_calls()
        kept = again.call
        assert (kept.deadline_ns, kept.key and kept.key.fingerprint, again.checkpoints) == (
            2_000_000_005,
            b"ab",
            (Checkpoint(),),
        )
        ((known, has_key),) = durable.records()
        assert (known.status_json.decode(), known.unfetched, has_key) == ('{"a": "é"}', {(0, 0)}, True)
        journal.begin(opened("c", document=b'{"uid": "c"}', checkpoints={}))
        with pytest.raises(JournalUnusable, match="another version of tilework"):
            durable.open_calls()


# Results as files.


def test_results_outlive_the_process_in_their_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FileStore(tmp_path, max_bytes=8, ttl_ns=100)
        for index, uid in enumerate(("a", "b", "a")):
            await store.put(uid, f"{uid}{index}\n{{".encode(), "image/png", index)
        (tmp_path / ".new-000000000009").write_bytes(b"half")
        (tmp_path / "000000000007").write_bytes(b"no head")
        torn = tmp_path / "000000000008"
        torn.write_bytes((tmp_path / "000000000002").read_bytes()[:-1])
        later = FileStore(tmp_path, max_bytes=8, ttl_ns=100)
        assert (len(later), later.num_bytes) == (2, 8)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000002", "000000000003"]
        await later.put("c", b"c3", "image/webp", 5)
        assert await later.get("b", 6) is None, "the oldest makes room"
        assert await content(later, "a", 6) == (b"a2\n{", "image/png")
        assert await later.get("a", 102) is None
        assert await content(later, "c", 102) == (b"c3", "image/webp")

    asyncio.run(scenario())


async def content(store: FileStore, uid: str, now_ns: int) -> tuple[bytes, str]:
    result = await store.get(uid, now_ns)
    assert result is not None
    with closing(result):
        return await result.read(), result.media_type


# StateBlobs.


def inherited(root: Path, owner: Path, *names: str) -> StateBlobDirectory:
    """The directory of the owner's next start, which knows these blobs."""
    directory = StateBlobDirectory(root, owner)
    wanted = {StateBlob(name, 3) for name in names}
    assert directory.inherit(wanted) <= wanted
    return directory


def test_blobs_of_a_durable_server_are_for_its_next_start_only(tmp_path: Path) -> None:
    owner, root = tmp_path / "state", tmp_path / "shared"
    owner.mkdir()
    root.mkdir()
    first = inherited(root, owner, "1-2-a-0", "1-2-a-1")
    for name in ("1-2-a-0", "1-2-a-7", ".1-2-a-8"):
        (first.path / name).touch()
    (first.path / "groups-x").mkdir()
    os.close(first._lock)  # As a kill does.
    StateBlobDirectory(root).close()
    StateBlobDirectory(root, tmp_path / "another").close()
    assert (first.path / "1-2-a-7").exists(), "another server has removed them"
    second = inherited(root, owner, "1-2-a-0", "1-2-a-1")
    assert second.path == first.path
    assert {path.name for path in second.path.iterdir()} == {"1-2-a-0", "lock", "owner"}
    second.close()
    third = inherited(root, owner)
    assert not (third.path / "1-2-a-0").exists()
    third.close()
    assert not list(root.iterdir()), "nothing is left when nothing is needed"


def test_blobs_stay_if_the_next_start_fails_and_go_with_their_owner(tmp_path: Path) -> None:
    owner, root = tmp_path / "state", tmp_path / "shared"
    owner.mkdir()
    root.mkdir()
    first = inherited(root, owner)
    (first.path / "1-2-a-0").touch()
    os.close(first._lock)
    StateBlobDirectory(root, owner).close()  # It did not come to inherit.
    assert (first.path / "1-2-a-0").exists()
    owner.rmdir()
    StateBlobDirectory(root).close()
    assert not list(root.iterdir())


# The server, around an engine without devices.


def held() -> FakeEngine:
    return FakeEngine(plan=Plan(is_held=True))


def start(server: Served, prompt: str = "x", **headers: str) -> str:
    """An asynchronous call; returns its uid."""
    answer = server.post({"prompt": prompt, "seed": 7, "n": 2, "slo_s": 60}, headers=ASYNC | headers)
    assert answer.status_code == 202
    return str(answer.json()["uid"])


def status(server: Served, uid: str) -> Any:
    return server.http.get(f"/v1/requests/{uid}").json()


def test_calls_go_on_after_a_kill_and_ended_ones_are_remembered(tmp_path: Path, killed: Any) -> None:
    with serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server:
        done, open_, deleted, cancelled = (start(server, f"p{n}", **{"Idempotency-Key": f"k{n}"}) for n in range(4))
        for uid in (done, deleted):
            for index in range(2):
                server.on_loop(server.engine.finish, f"{uid}-{index}")
            eventually(lambda uid=uid: status(server, uid)["status"] == "done")
        released = {f"{uid}-{index}" for uid in (done, deleted) for index in range(2)}
        eventually(lambda: set(server.engine.released) == released)
        server.http.delete(f"/v1/requests/{deleted}")
        server.http.delete(f"/v1/requests/{cancelled}")
        picture = server.http.get(f"/v1/requests/{done}/content").content
        before = {request.uid: request for request in server.engine.requests}
        state = killed(tmp_path / "state")
    with serving(held(), durable=str(state), drain_s=0.1) as server:
        engine = server.engine
        assert [wanted.uid for wanted, _ in engine.restored] == [f"{open_}-0", f"{open_}-1"]
        assert [wanted.spec.prompt for wanted, _ in engine.restored] == ["p1", "p1"]
        for request in engine.requests:
            first = before[request.uid]
            assert abs(request.arrival_ns - first.arrival_ns) < 1_000_000_000
            assert replace(request, arrival_ns=first.arrival_ns) == first, "the deadline, too"
        assert server.http.get("/ready").json()["restored_requests"] == 2
        listed = server.http.get("/v1/requests").json()["data"]
        assert [call["uid"] for call in listed] == [cancelled, deleted, open_, done]
        assert [call["status"] for call in listed] == ["cancelled", "done", "queued", "done"]
        assert server.http.get(f"/v1/requests/{done}/content").content == picture
        assert server.http.get(f"/v1/requests/{deleted}/content").status_code == 410
        assert start(server, "p1", **{"Idempotency-Key": "k1"}) == open_
        again = server.post({"prompt": "p0", "seed": 7, "n": 2, "slo_s": 60}, headers={"Idempotency-Key": "k0"})
        assert (again.headers["x-request-id"], again.status_code) == (done, 200)
        others = {start(server, f"p{n}", **{"Idempotency-Key": f"k{n}"}) for n in (2, 3)}
        assert not others & {deleted, cancelled}, "their keys were free"
        for index in range(2):
            server.on_loop(engine.finish, f"{open_}-{index}")
        eventually(lambda: status(server, open_)["status"] == "done")
        assert server.http.get(f"/v1/requests/{open_}/content?index=1").status_code == 200


def test_no_client_learns_of_a_call_or_its_end_before_the_disk_has_it(tmp_path: Path) -> None:
    """Not who sends it, nor who sends it again with its key, nor who waits for its pictures."""
    going, held_up = threading.Event(), threading.Event()
    going.set()

    def fdatasync(_descriptor: int) -> None:
        if not going.is_set():
            held_up.set()
        assert going.wait(PATIENCE_S)

    key, body = {"Idempotency-Key": "k"}, {"prompt": "x", "seed": 7}
    with (
        serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server,
        ThreadPoolExecutor(3) as pool,
        patch.object(journal_file.os, "fdatasync", fdatasync),
    ):
        going.clear()
        first, again = (pool.submit(server.post, body, headers=ASYNC | key) for _ in range(2))
        assert held_up.wait(PATIENCE_S)
        eventually(lambda: len(server.engine.requests) == 1)
        assert server.http.get("/health").status_code == 200, "nothing else waits for the disk"
        assert not first.done()
        assert not again.done()
        going.set()
        (uid,) = {one.result(PATIENCE_S).json()["uid"] for one in (first, again)}
        pictures = pool.submit(server.post, body, headers=key)
        server.until_idle()
        going.clear()
        held_up.clear()
        server.on_loop(server.engine.finish, f"{uid}-0")
        assert held_up.wait(PATIENCE_S)
        assert not pictures.done()
        going.set()
        assert pictures.result(PATIENCE_S).status_code == 200


def test_a_call_that_the_disk_does_not_take_is_refused_and_cancelled(tmp_path: Path) -> None:
    broken = patch.object(journal_file.os, "fdatasync", side_effect=OSError(5, "Input/output error"))
    with serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server:
        with broken:
            answer = server.post({"prompt": "x"}, headers=ASYNC)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "disk_unwritable")
        (request,) = server.engine.requests
        assert list(server.engine.cancelled) == [request.uid]


def test_a_given_picture_stays_until_the_disk_has_the_end_of_its_call(tmp_path: Path) -> None:
    """Else a machine that is lost between the two would have to draw the call again, and could not."""

    async def scenario() -> None:
        with closing(Journal(tmp_path / "j")) as journal:
            durable = DurableJournal(journal, GivenPictures(tmp_path / "pictures"))
            journal.begin(opened())
            with patch.object(durable.pictures, "release") as release:
                durable.forget("a")
                release.assert_not_called()
                await durable.sync()
                release.assert_called_once_with({"a"})

    asyncio.run(scenario())


@pytest.mark.parametrize("weights", ["weights of ", "other weights of "])
def test_a_call_goes_on_from_its_checkpoint_only_with_the_same_weights(
    tmp_path: Path, killed: Any, weights: str
) -> None:
    """Another model may have its name by the next start."""
    with serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server:
        uid = start(server)
        state = killed(tmp_path / "state")
    at = SavedState(0, 3, StateBlob("1-2-a-0", 5))
    with closing(Journal(state / "tilework.sqlite")) as journal:
        journal.keep(f"{uid}-1", at)
    engine = held()
    engine.weights = weights
    with serving(engine, durable=str(state), drain_s=0.1):
        states = [checkpoint.states for _, checkpoint in engine.restored]
        assert states == [(), (at,) if weights == "weights of " else ()]


def test_stop_leaves_what_is_open_to_the_next_start(tmp_path: Path) -> None:
    """A client that waits is told so, and not to send it again; pictures that were not fetched do not delay a stop."""
    state, answers = str(tmp_path / "state"), []
    with serving(held(), durable=state, drain_s=0.2) as server:
        unread = start(server)
        for index in range(2):
            server.on_loop(server.engine.finish, f"{unread}-{index}")
        eventually(lambda: status(server, unread)["status"] == "done")
        waiter = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/images/generations", json={"prompt": "waits"}))
        )
        waiter.start()
        eventually(lambda: len(server.http.get("/v1/requests").json()["data"]) == 2)
    waiter.join(PATIENCE_S)
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["x-should-retry"]) == (
        503,
        "kept",
        "false",
    )
    with serving(FakeEngine(), durable=state, drain_s=60) as server:
        (wanted, _), *others = server.engine.restored
        assert (wanted.spec.prompt, others) == ("waits", [])
        uid = wanted.uid.removesuffix("-0")
        assert answer.json()["error"]["uid"] == uid
        eventually(lambda: status(server, uid)["status"] == "done")
        assert server.http.get(f"/v1/requests/{unread}/content").status_code == 200
    with serving(FakeEngine(), durable=state) as server:
        assert server.engine.restored == []
        assert status(server, uid)["status"] == "done"


def test_call_that_cannot_be_journalled_is_refused_and_the_server_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals: list[Journal] = []
    make = DurableJournal.__init__

    def init(self: DurableJournal, journal: Journal, pictures: GivenPictures) -> None:
        journals.append(journal)
        make(self, journal, pictures)

    monkeypatch.setattr(DurableJournal, "__init__", init)
    with serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server:
        kept = start(server)
        server.on_loop(fill, journals[0])
        body = {"prompt": "x" * 4000, "n": 10}
        refused = [server.post(body, headers=ASYNC) for _ in range(20)][-1]  # The first ones may find room yet.
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_unwritable")
        ready = server.http.get("/ready").json()["error"]
        assert ready["status"] == "disk_unwritable"
        assert "full" in ready["message"]
        assert "state" not in ready["message"], "where the directory is concerns no client"
        num_open = sum(call["status"] == "queued" for call in server.http.get("/v1/requests?limit=100").json()["data"])
        assert ready["open_requests"] == 10 * (num_open - 1) + 2, "it was cancelled"
        num_refused = 10 * (20 + 1 - num_open)
        assert server.metric('tilework_refusals_total{reason="disk_unwritable"}') == num_refused
        assert server.metric(ENDED.format("rejected")) == num_refused
        assert server.metric(ENDED.format("cancelled")) == 0
        assert server.metric('tilework_unready{reason="disk_unwritable"}') == 1
        server.on_loop(make_room, journals[0])
        wait_for_room(server)
        assert server.metric('tilework_unready{reason="disk_unwritable"}') == 0
        assert server.post(body, headers=ASYNC).status_code == 202
        assert status(server, kept)["status"] == "queued"


def test_a_full_disk_is_tried_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while it is known or suspected to be full: otherwise nothing is written."""
    disk, write = Disk(tmp_path), Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Path, "write_bytes", write)
    disk.check()
    assert not write.called
    disk.suspect()
    assert disk.problem == "", "it may have been another disk"
    disk.check()
    disk.check()
    assert (disk.problem, write.call_count) == ("No space left on device", 2)
    monkeypatch.undo()
    disk.check()
    assert disk.problem == ""
    assert list(tmp_path.iterdir()) == []
    disk.failed(sqlite3.OperationalError("database or disk is full"))
    assert disk.problem == "database or disk is full"


def test_a_lost_event_log_makes_the_server_look_at_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeEngine(), durable=str(tmp_path / "state")) as server:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(Path, "write_bytes", full)
        server.on_loop(server.engine.observer.on_log_lost)
        eventually(lambda: not is_ready(server))
        monkeypatch.undo()
        wait_for_room(server)
        assert server.metric("tilework_log_losses_total") == 1


def test_an_end_that_could_not_be_written_is_what_became_of_it_since(tmp_path: Path) -> None:
    """Its key, its webhook and its record may change, or the server stop, before another call ends."""
    journal = Journal(tmp_path / "x.sqlite")
    for uid in "abcd":
        journal.begin(OpenCall(uid=uid, model="m", document=b"open"))
    fill(journal)
    for uid in "abcd":
        with pytest.raises(NotWritten):
            journal.end(Ended(uid=uid, has_key=True, document=b"x" * 100_000))
    journal.free_key("a")
    journal.change("b", b"told")
    journal.drop(["c"])
    make_room(journal)
    journal.close()
    with closing(Journal(tmp_path / "x.sqlite")) as after:
        assert after.open_calls() == []
        assert [(one.uid, one.has_key, one.document[:4]) for one in after.records()] == [
            ("a", False, b"xxxx"),
            ("b", True, b"told"),
            ("d", True, b"xxxx"),
        ]


def test_a_text_that_no_journal_can_hold_is_refused(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x", "user": "\ud800"})
    with serving(FakeEngine(), durable=str(tmp_path / "state")) as server:
        answer = server.http.post("/v1/images/generations", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")
        assert not server.engine.requests


def test_nothing_is_drawn_for_a_call_that_a_bug_keeps_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(held(), durable=str(tmp_path / "state"), drain_s=0.1) as server:
        monkeypatch.setattr(DurableJournal, "begin", Mock(side_effect=RuntimeError("a bug")))
        assert server.post({"prompt": "x", "n": 2}, headers=ASYNC).status_code == 500
        assert server.http.get("/ready").json()["open_requests"] == 0


def test_results_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits gets the picture; one that would fetch it later is told."""

    def write(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write", write)
    monkeypatch.setattr(finish, "PATIENCE_S", 0)
    with serving(FakeEngine(), durable=str(tmp_path / "state")) as server:
        waits = server.post({"prompt": "x"}, headers={"Idempotency-Key": "k"})
        assert waits.json()["data"][0]["b64_json"]
        wait_for_room(server)
        for later in (False, True):
            body = {"prompt": "x", "response_format": "b64_json" if later else "url"}
            answer = server.post(body, headers=ASYNC if later else {})
            uid = answer.headers.get("x-request-id") or answer.json()["error"]["message"].split()[4]
            eventually(lambda uid=uid: status(server, uid)["status"] == "failed")
            assert status(server, uid)["error"]["code"] == "result_unwritable"
            ready = server.http.get("/ready")
            assert (ready.status_code, ready.json()["error"]["status"]) == (503, "disk_unwritable")
            assert "No space left on device" in ready.json()["error"]["message"]
            wait_for_room(server)
    unwritten = asyncio.run(FileStore(tmp_path / "r", max_bytes=9, ttl_ns=9).put("a", b"x", "image/png", 0))
    assert isinstance(unwritten, Unwritten)
    assert "No space left" in unwritten.reason


def test_a_result_that_cannot_be_written_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while others have opened all files that the server may have."""
    refused, really = list[Path](), files._write

    def write(path: Path, *more: Any) -> None:
        if len(refused) < 2:
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        really(path, *more)

    monkeypatch.setattr(files, "_write", write)
    with serving(FakeEngine(), durable=str(tmp_path / "state")) as server:
        uid = server.post({"prompt": "x"}, headers=ASYNC).headers["x-request-id"]
        eventually(lambda: len(refused) == 1)
        assert status(server, uid)["status"] != "failed"
        server.skip(1)
        eventually(lambda: len(refused) == 2)
        server.skip(1)
        eventually(lambda: status(server, uid)["status"] == "done")
        assert server.http.get(f"/v1/requests/{uid}/content").status_code == 200


def test_open_calls_of_another_model_are_not_served(tmp_path: Path) -> None:
    with closing(DurableDirectory(tmp_path)) as directory:
        directory.journal.begin(opened(model="flux"))
        with pytest.raises(JournalUnusable, match=r"1 open calls for the model flux.*serve flux, or give another"):
            DurableJournal(directory.journal, directory.given_pictures()).serve("shapes")
        DurableJournal(directory.journal, directory.given_pictures()).serve("flux")
