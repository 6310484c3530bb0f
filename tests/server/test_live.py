"""What `/v1/live` says of a server: to which tenant, how often, of what. `tests/live/test_page.py` is of the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import select
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import clock
from builders import PIPELINE, request
from fake_engine import FakeEngine, Plan, Served, serving
from stages import DIFFUSE, stage_of
from tilework.core.component import LoadSource
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.wire.reports import Ending
from tilework.core.work import Group, Member, Work
from tilework.runtime.observer import EndedWork, Observer, Observers
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.live.attainment import SPAN_NS, WINDOW_NS, Attainment
from tilework.server.live.attainment import Group as Counted
from tilework.server.live.feed import MOST_KEPT, EndedRequest, Feed, Tile
from tilework.server.live.frames import MOST_PAST, MOST_REQUESTS, Viewer, frame
from tilework.server.live.watchers import MOST_WATCHERS, PERIOD_S, Watchers
from tilework.server.schema.live import LiveState
from waiting import eventually

KEYS = '[tenants.anna]\nkeys = ["anna"]\n\n[tenants.ben]\nkeys = ["ben"]\n'
HELD = Plan(is_held=True)
ASYNC = {"Prefer": "respond-async"}
STREAM = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("live") / "tenants.toml"
    file.write_text(KEYS)
    with serving(FakeEngine(), drain_s=0, tenants=str(file), admin_key="root") as served:
        yield served


def of(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def live(server: Served, key: str) -> dict[str, Any]:
    answer = server.http.get("/v1/live", headers=of(key))
    assert answer.status_code == 200, answer.text
    LiveState.model_validate_json(answer.text)
    state: dict[str, Any] = answer.json()
    return state


def begin(server: Served, key: str, plan: Plan = HELD, **fields: Any) -> str:
    server.engine.script = [plan]
    answer = server.post({"prompt": "x", **fields}, headers=of(key, **ASYNC))
    uid: str = answer.json()["uid"]
    return f"{uid}-0"


def test_a_tenant_sees_its_own_requests_and_an_admin_all(server: Served) -> None:
    anna, ben = begin(server, "anna", slo_s=9), begin(server, "ben")
    server.on_loop(server.engine.begin, ben)
    states = {key: live(server, key) for key in ("anna", "ben", "root")}
    uids = {key: [one["uid"] for one in state["requests"]] for key, state in states.items()}
    assert uids == {"anna": [anna], "ben": [ben], "root": [ben, anna]}, "what runs comes first"
    assert {state["num_open"] for state in states.values()} == {2}
    assert [states[key]["num_own"] for key in ("anna", "root")] == [1, 2]
    (row,) = states["anna"]["requests"]
    assert (row["deadline_s"] - row["arrival_s"], row["eta_s"] - row["arrival_s"]) == pytest.approx((9, 0.25), abs=1e-3)
    numbers = [one["number"] for one in states["root"]["requests"]]
    assert row["number"] == numbers[1] != numbers[0]
    server.on_loop(server.engine.finish, anna)
    server.on_loop(server.engine.finish, ben)
    ended = live(server, "root")
    assert [(one["uid"], one["status"], one["on_time"]) for one in ended["ended"]] == [
        (anna, "done", True),
        (ben, "done", None),
    ]
    assert [one["uid"] for one in live(server, "ben")["ended"]] == [ben]
    assert ended["requests"] == []
    assert [one["number"] for one in ended["ended"]] == numbers[::-1], "a request keeps its number"
    tenants = {one["name"]: one for one in ended["attainment"] if one["by"] == "tenant"}
    assert [tenants[name]["on_time"] for name in ("anna", "ben")] == [1, 0]
    assert tenants["ben"]["others"] == 1
    assert {one["name"] for one in live(server, "ben")["attainment"] if one["by"] == "tenant"} == {"ben"}


def test_what_was_decided_is_told_to_its_tenant_and_to_an_admin(server: Served) -> None:
    uid = begin(server, "anna")
    path = f"/v1/requests/{uid}/decisions"
    for is_open in (True, False):
        told = {key: server.http.get(path, headers=of(key)) for key in ("anna", "ben", "root")}
        assert {key: answer.status_code for key, answer in told.items()} == {"anna": 200, "ben": 404, "root": 200}
        assert told["root"].text == told["anna"].text
        assert [one["kind"] for one in told["root"].json()["decisions"]] == ["accepted"] + ["finished"] * (not is_open)
        if is_open:
            assert server.http.delete(f"/v1/requests/{uid}", headers=of("root")).status_code == 404, "it is no owner"
            server.on_loop(server.engine.finish, uid)
            eventually(lambda: server.http.get(f"/v1/requests/{uid}", headers=of("anna")).json()["status"] == "done")


def test_devices_come_with_their_weights(server: Served) -> None:
    devices = live(server, "anna")["devices"]
    assert [one["device"] for one in devices] == [0, 1]
    assert devices[0]["components"] == [{"models": ["tiny-shapes"], "name": "transformer", "bytes": 3_000_000}]
    first, second = (one["cards"] for one in devices)
    assert second == []
    assert first == [
        {
            "busy": 0.5,
            "used_bytes": None,
            "worker_bytes": None,
            "celsius": 61,
            "watts": None,
            "limit_watts": None,
            "hertz": None,
            "slowed_by": ["temperature"],
        }
    ]


def test_it_needs_a_key(server: Served) -> None:
    assert server.http.get("/v1/live").status_code == 401
    assert server.http.get("/v1/live", headers=STREAM).status_code == 401


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            state = json.loads(line.removeprefix("data: "))
            assert state.pop("type") == "tilework.live"
            LiveState.model_validate(state)
            yield state


def test_a_stream_has_the_past_first_and_then_what_is_new(server: Served) -> None:
    first = begin(server, "anna", Plan())
    eventually(lambda: first in {one["uid"] for one in live(server, "anna")["ended"]})
    with server.http.stream("GET", "/v1/live", headers=of("anna", **STREAM)) as answer:
        told = events(answer.iter_lines())
        whole = next(told)
        assert first in {one["uid"] for one in whole["ended"]}
        assert len(whole["devices"]) == 2
        second = begin(server, "anna")
        server.on_loop(server.engine.finish, second)
        server.skip(PERIOD_S)
        later = next(state for state in told if state["ended"])
        assert [one["uid"] for one in later["ended"]] == [second], "nothing twice"
        assert later["devices"] is None, "nothing has changed there"
        server.engine.devices_up = 1
        server.skip(2 * PERIOD_S)
        changed = next(state for state in told if state["devices"] is not None)
        assert [one["device"] for one in changed["devices"]] == [0]
        server.engine.devices_up = 2


def test_so_many_may_watch_and_one_that_leaves_makes_room(server: Served) -> None:
    def status() -> int:
        with server.http.stream("GET", "/v1/live", headers=of("ben", **STREAM)) as answer:
            return answer.status_code

    with httpx.Client(base_url=server.url, headers=of("anna", **STREAM), limits=httpx.Limits()) as http:
        streams = [http.stream("GET", "/v1/live") for _ in range(MOST_WATCHERS)]
        answers = [stream.__enter__() for stream in streams]
        assert {answer.status_code for answer in answers} == {200}
        refused = server.http.get("/v1/live", headers=of("ben", **STREAM))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_watchers")
        assert live(server, "ben")["num_open"] >= 0, "the state alone is for any number"
        answers[0].close()
        eventually(lambda: status() == 200)
        for answer in answers[1:]:
            answer.close()


def test_a_stop_ends_streams() -> None:
    with serving(FakeEngine(), drain_s=0) as served, served.http.stream("GET", "/v1/live", headers=STREAM) as answer:
        told = events(answer.iter_lines())
        next(told)
        served.stop()
        list(told)  # Raises if the connection is cut off instead.


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_and_delays_no_other() -> None:
    with serving(FakeEngine(plan=HELD), drain_s=0, send_timeout_s=5) as served, closing(socket.socket()) as deaf:
        for _ in range(20):
            assert served.post({"prompt": "x", "n": 10}, headers=ASYNC).status_code == 202
        parts = urlsplit(served.url)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        alone = served.tasks()
        deaf.sendall(b"GET /v1/live HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        eventually(lambda: served.tasks() - alone)
        with served.http.stream("GET", "/v1/live", headers=STREAM) as answer:
            told = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(told)
            for _ in range(1000):  # Frames until no buffer of the kernel takes any more, and then its time.
                served.skip(PERIOD_S)
                assert '"num_open": 200' in next(told)
                if _is_cut_off(deaf):
                    break
            else:
                raise AssertionError("who does not read is not cut off")
        eventually(lambda: alone.issuperset(served.tasks()))


def _is_cut_off(connection: socket.socket) -> bool:
    """Whether the other end has aborted a connection of which nothing is read."""
    watched = select.poll()
    watched.register(connection, 0)  # Errors and ends are always told.
    return bool(watched.poll(0))


# The feed, as an engine tells it.


def work(work_id: int, devices: Group, *job_ids: int, steps: int = 2) -> Work:
    return Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, DIFFUSE),
        members=tuple(Member(job_id, 1, 1, 3) for job_id in job_ids),
        devices=devices,
        num_steps=steps,
        why="",
    )


def ended(one: Work, requests: tuple[Request, ...], start_s: float, end_s: float, **more: Any) -> EndedWork:
    fields: dict[str, Any] = {"ending": Ending.DONE, "steps_done": one.num_steps, "predicted_ns": 0, "correction": 1.0}
    span = {"start_ns": ns_from_s(start_s), "end_ns": ns_from_s(end_s)}
    return EndedWork(work=one, requests=requests, **(fields | span | more))


def spans(tiles: list[Tile]) -> list[tuple[float, float]]:
    return [(tile.start_ns / NS_PER_S, tile.end_ns / NS_PER_S) for tile in tiles]


def test_queued_works_are_planned_behind_each_other() -> None:
    feed = Feed(lambda: 0)
    a, b = request("a"), request("b")
    sent = [(work(1, (0,), 1), (a,), 2.0), (work(2, (0, 1), 2), (b,), 1.0), (work(3, (1,), 1), (a,), 4.0)]
    for one, requests, predicted_s in sent:
        feed.on_work_sent(one, requests, ns_from_s(predicted_s), ns_from_s(10))
    assert spans(feed.planned(ns_from_s(10.5))) == [(10, 12), (12, 13), (13, 17)]
    assert [tile.requests for tile in feed.planned(0)] == [(1,), (2,), (1,)]
    assert spans(feed.planned(ns_from_s(12.5))) == [(10, 12.5), (12.5, 13.5), (13.5, 17.5)], "one that is late ends now"
    feed.on_work_ended(ended(sent[0][0], (a,), 10.0, 11.0))
    assert spans(feed.planned(ns_from_s(11))) == [(11, 12), (12, 16)]
    (past,) = feed.since(0)
    assert isinstance(past, Tile)
    assert (past.first_step, past.steps, past.ending, past.requests) == (3, 2, "done", (1,))


def test_a_lost_work_is_a_tile_from_when_it_was_sent() -> None:
    """Its start is not known."""
    feed = Feed(lambda: 0)
    feed.on_work_sent(work(1, (0,), 1), (request("a"),), NS_PER_S, ns_from_s(3))
    feed.on_work_ended(ended(work(1, (0,), 1), (request("a"),), 5.0, 5.0, ending=Ending.LOST, steps_done=0))
    assert spans(list(feed.since(0))) == [(3, 5)]  # type: ignore[arg-type]
    assert feed.planned(ns_from_s(6)) == []


def test_loads_are_tiles_without_requests() -> None:
    feed = Feed(lambda: ns_from_s(8))
    feed.on_weights_loaded(4, LoadSource.DISK, 1000, ns_from_s(2))
    (tile,) = feed.since(0)
    assert isinstance(tile, Tile)
    assert (tile.devices, tile.requests, tile.ending) == ((4,), (), "disk")
    assert spans([tile]) == [(6, 8)]


def test_the_past_is_bounded_and_says_how_much_is_missed() -> None:
    engine = FakeEngine()
    feed = Feed(lambda: 0)
    for number in range(MOST_KEPT + 7):
        feed.now_ns = lambda number=number: ns_from_s(number + 1.0)  # type: ignore[misc]
        feed.on_weights_loaded(0, LoadSource.HOST, 1, NS_PER_S)
    assert feed.num_past == MOST_KEPT + 7
    assert len(list(feed.since(0))) == MOST_KEPT
    assert spans(list(feed.since(MOST_KEPT + 5))) == [(MOST_KEPT + 5, MOST_KEPT + 6), (MOST_KEPT + 6, MOST_KEPT + 7)]  # type: ignore[arg-type]
    fields = frame(engine, feed, Viewer(), 5).fields
    assert fields["missed"] == MOST_KEPT + 2 - MOST_PAST
    assert len(fields["tiles"]) == MOST_PAST  # type: ignore[arg-type]


def test_an_end_is_kept_without_its_picture() -> None:
    """Pictures of thousands of requests would be gigabytes."""
    assert set(EndedRequest.__slots__) == {"number", "request", "status", "finished_ns", "eta_ns", "steps_done"}


def test_watchers_share_frames_and_a_slow_one_misses_nothing() -> None:
    async def scenario(loop: clock.ManualLoop) -> None:
        engine = CountingEngine(loop=loop)
        feed = Feed(engine.now_ns)
        watchers = Watchers(engine, feed)
        fast, also_fast, slow = (watchers.events(Viewer(), lambda: True) for _ in range(3))
        for one in (fast, also_fast, slow):
            await anext(one)
        engine.num_frames = 0
        for number in range(4):
            feed.on_weights_loaded(number, LoadSource.HOST, 1, 1)
            both = await asleep(loop, fast, also_fast)
            loop.advance(PERIOD_S)
            first, second = [_state(await one) for one in both]
            assert first == second
            assert [tile["devices"] for tile in first["tiles"]] == [[number]]
        assert engine.num_frames == 4, "one for both each time"
        quick, late = await asleep(loop, fast, slow)
        loop.advance(PERIOD_S)
        assert _state(await quick)["tiles"] == []
        assert [tile["devices"] for tile in _state(await late)["tiles"]] == [[0], [1], [2], [3]]
        watchers.close()
        assert [one async for one in fast] == []

    clock.run(scenario)


async def asleep(loop: clock.ManualLoop, *streams: AsyncGenerator[bytes, None]) -> list[asyncio.Task[bytes]]:
    """The next event of each stream, which waits for its time."""

    async def following(stream: AsyncGenerator[bytes, None]) -> bytes:
        return await anext(stream)

    tasks = [asyncio.create_task(following(stream)) for stream in streams]
    await loop.until_idle()
    return tasks


class CountingEngine(FakeEngine):
    """Counts how often it is asked for its devices, which is once per frame."""

    num_frames = 0

    def holdings(self) -> Any:
        self.num_frames += 1
        return super().holdings()


def _state(event: bytes) -> dict[str, Any]:
    (state,) = events(iter(event.decode().splitlines()))
    return state


def test_the_most_urgent_requests_are_listed() -> None:
    engine = FakeEngine()
    tickets = [
        Ticket(request=request(f"{number}", slo_s=1000.0 - number), eta_ns=0, eta_p90_ns=0, outcome=_open())
        for number in range(MOST_REQUESTS + 50)
    ]
    tickets[3].is_running = True
    engine.tickets = {ticket.request.uid: ticket for ticket in tickets}
    fields = frame(engine, Feed(engine.now_ns), Viewer(), 0).fields
    listed = [int(one["uid"]) for one in fields["requests"]]  # type: ignore[attr-defined]
    assert listed == [3, *reversed(range(51, MOST_REQUESTS + 50))], "what runs is listed whatever its deadline"
    assert fields["num_open"] == MOST_REQUESTS + 50


def _open() -> asyncio.Future[Outcome]:
    return asyncio.Future(loop=asyncio.new_event_loop())


# Deadlines that were kept.


def test_attainment_counts_by_class_tenant_and_model_also_of_late() -> None:
    told = Attainment()
    told.ended(request("a", tenant="anna"), True, 0)
    told.ended(request("b", tenant="ben"), False, WINDOW_NS // 2)
    told.ended(request("c", tenant="anna"), None, WINDOW_NS // 2)
    told.refused(request("d", tenant="ben"), WINDOW_NS // 2)

    def rows(now_ns: int) -> dict[str, tuple[int, ...]]:
        return {
            group.name: (one.on_time, one.late, one.others, one.refused, one.recent_on_time, one.recent_late)
            for group, one in told.rows(now_ns)
        }

    assert rows(WINDOW_NS - 1) == {
        "standard": (1, 1, 1, 1, 1, 1),
        "anna": (1, 0, 1, 0, 1, 0),
        "ben": (0, 1, 0, 1, 0, 1),
        PIPELINE: (1, 1, 1, 1, 1, 1),
    }
    assert rows(WINDOW_NS)["anna"] == (1, 0, 1, 0, 0, 0), "its end has left the window"
    assert rows(2 * WINDOW_NS)[PIPELINE] == (1, 1, 1, 1, 0, 0)


def test_the_memory_of_the_window_does_not_grow_with_the_ends_in_it() -> None:
    told, num_ends = Attainment(), 2_000
    told.ended(request("a"), True, 0)
    tracemalloc.start()
    for number in range(1, num_ends):
        told.ended(request("a"), True, number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 10 * num_ends, "they are counted, not kept"
    counts = told.counts[Counted("class", "standard")]
    assert (counts.recent_on_time, counts.on_time) == (num_ends, num_ends)
    told.ended(request("b"), False, SPAN_NS)
    list(told.rows(WINDOW_NS))
    assert (counts.recent_on_time, counts.recent_late) == (0, 1), "the ends of a span leave together"


# Several observers.


def test_observers_tell_those_that_listen_in_order() -> None:
    told: list[str] = []

    class Loud(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_lost(self, device_id: int) -> None:
            told.append(f"{self.name} {device_id}")

    class Deaf(Observer):
        def on_joined(self, device_id: int, now_ns: int) -> None:
            told.append(f"joined {device_id}")

    one, deaf, two = Loud("one"), Deaf(), Loud("two")
    observers = Observers(one, deaf, two)
    observers.on_lost(7)
    observers.on_joined(3, 0)
    observers.on_previewed(1)
    assert told == ["one 7", "two 7", "joined 3"]
    assert observers.on_joined == deaf.on_joined, "one alone is called directly"


# The page, and what a browser may open with a key.


def test_the_page_needs_no_key_and_nothing_from_elsewhere(server: Served) -> None:
    page = server.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    paths = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(paths) == 3
    for path in paths:
        file = server.http.get(path)
        assert (file.status_code, path[0]) == (200, "/")
        again = server.http.get(path, headers={"If-None-Match": file.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert server.http.head("/").status_code == 200


def test_docs_take_the_key_as_a_browser_sends_it_and_nothing_else_does(server: Served) -> None:
    def status(path: str, name_and_key: str | None) -> int:
        headers = {}
        if name_and_key is not None:
            headers["Authorization"] = f"Basic {base64.b64encode(name_and_key.encode()).decode()}"
        return server.http.get(path, headers=headers).status_code

    for path in ("/docs", "/openapi.json", "/docs-assets/swagger-ui.css"):
        assert [status(path, one) for one in ("me:anna", "anna", "me:wrong", None)] == [200, 401, 401, 401]
        assert server.http.get(path).headers["www-authenticate"].startswith("Basic")
        assert server.http.get(path, headers={"Authorization": "Basic ???"}).status_code == 401
        assert server.http.get(path, headers=of("ben")).status_code == 200
    for path in ("/v1/models", "/v1/live", "/metrics"):
        assert status(path, "me:anna") == 401, "another site could make a browser send it"
        assert server.http.get(path).headers["www-authenticate"] == "Bearer"


def test_built_files_are_those_of_the_sources() -> None:
    web = Path(__file__).parents[2] / "web"
    names = sorted([*(f"src/{path.name}" for path in (web / "src").iterdir()), "index.html", "package-lock.json"])
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update((web / name).read_bytes())
    built = files("tilework.server.page") / "built" / "sources.sha256"
    assert built.read_text().strip() == digest.hexdigest(), "run npm ci and npm run build in web/"
