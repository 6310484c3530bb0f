"""Decisions in words, and `tilework explain`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from builders import PIPELINE, poisson, request, table
from recorded import SOON_NS, Recorded, recorded
from stages import DECODE, DIFFUSE, stage_of
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.cli.views import explanation as request_names
from tilework.cli.views.explanation import RequestNames
from tilework.control.decisions import DecisionKind, describe, describe_all, devices_text, span_text
from tilework.control.history import PastRequest
from tilework.core.actions import (
    Accept,
    Action,
    DropState,
    DropToBestEffort,
    Finish,
    HoldBack,
    MoveState,
    Reject,
    RunWork,
    Stop,
    WakeAt,
)
from tilework.core.request import OnMiss, RefusalCode, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Member, Work
from tilework.sim.config import SimConfig
from tilework.sim.runs import Run, RunEnd


def work(stage: str = DIFFUSE, **changes: Any) -> Work:
    given: dict[str, Any] = {
        "work_id": 7,
        "stage": stage_of(PIPELINE, stage),
        "members": (Member(5, 0, 4, 3),),
        "devices": (0, 1),
        "num_steps": 6,
        "why": "with 1 it would finish 0.31 s late",
    }
    return Work(**(given | changes))


# Words.

ASKED = request("img-1", 10.0, steps=28, slo_s=2.0)


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (
            Accept(5, "img-1", ns_from_s(11.82), ns_from_s(12), "it needs 1.5 s"),
            "accepted",
            "accepted; expected to be done 1.82 s after arrival, 0.18 s before its deadline: it needs 1.5 s",
        ),
        (
            Accept(5, "img-1", ns_from_s(12.5), ns_from_s(13), ""),
            "accepted",
            "accepted; expected to be done 2.50 s after arrival, 0.50 s after its deadline",
        ),
        (
            Reject("img-1", "it would be 0.50 s late", ns_from_s(12.5), RefusalCode.DEADLINE),
            "refused",
            "refused (deadline_unreachable): it would be 0.50 s late; it could be done 2.50 s after arrival",
        ),
        (
            Reject("img-1", "no device is up", None, RefusalCode.NO_DEVICE),
            "refused",
            "refused (no_device): no device is up",
        ),
        (
            RunWork(work()),
            "started",
            "steps 4-9 of 28 on devices 0-1 (degree 2): with 1 it would finish 0.31 s late",
        ),
        (RunWork(work(num_steps=1, devices=(3,), why="")), "started", "step 4 of 28 on device 3"),
        (RunWork(work(DECODE, devices=(3,), why="must run now")), "started", "decode on device 3: must run now"),
        (MoveState(5, (2, 3, 6), (0,)), "moved", "its state moves to devices 2-3, 6, with all that later stages need"),
        (MoveState(5, (2,), ()), "moved", "its state moves to device 2"),
        (Stop(7), "stopped", "work 7 is told to stop at its next step boundary"),
        (
            DropToBestEffort(5, "0.02 s late even on 8 devices"),
            "dropped to best effort",
            "dropped to best effort, after those that can still be on time: 0.02 s late even on 8 devices",
        ),
        (HoldBack(5, is_start=True), "held back", "waits: to start it now could break a promise"),
        (HoldBack(5, is_start=False), "held back", "runs on: to stop it now could break a promise"),
        (
            Finish(5, "img-1", Status.FAILED, "out of memory"),
            "finished",
            "failed 0.21 s after arrival, 1.79 s before its deadline: out of memory",
        ),
    ],
)
def test_every_decision_is_a_sentence_with_numbers(action: Action, kind: str, text: str) -> None:
    decision = describe(ns_from_s(10.213), action, ASKED)
    assert decision is not None
    assert (decision.kind, decision.text, decision.uid) == (kind, text, "img-1")
    assert str(decision) == f"+0.213 s  {text}"


def test_actions_that_decide_nothing_about_a_request_are_not_described() -> None:
    assert describe(0, WakeAt(5), ASKED) is None
    assert describe(0, DropState(5, (0,)), ASKED) is None
    told = [(0, WakeAt(5)), (1, Stop(7)), (2, DropState(5, (0,)))]
    assert [decision.kind for decision in describe_all(told, ASKED)] == [DecisionKind.STOPPED]


def test_a_decision_as_json() -> None:
    decision = describe(ns_from_s(10.5), RunWork(work()), ASKED)
    assert decision is not None
    assert decision.to_json() == {
        "at_s": 0.5,
        "kind": "started",
        "text": "steps 4-9 of 28 on devices 0-1 (degree 2): with 1 it would finish 0.31 s late",
        "devices": [0, 1],
        "degree": 2,
        "steps": [4, 9],
    }
    stopped = describe(ns_from_s(10.5), Stop(7), ASKED)
    assert stopped is not None
    assert {stopped.to_json()[name] for name in ("degree", "steps")} == {None}


def test_a_member_of_a_batch_has_its_own_steps() -> None:
    batch = RunWork(work(members=(Member(5, 0, 4, 3), Member(9, 0, 1, 0), Member(11, 0, 9, 8)), why=""))
    texts = [decision.text for job_id in (5, 9, 11) if (decision := describe(0, batch, ASKED, job_id)) is not None]
    ending = "of 28 on devices 0-1 (degree 2), together with 2 others"
    assert texts == [f"steps 4-9 {ending}", f"steps 1-6 {ending}", f"steps 9-14 {ending}"]


def test_short_words() -> None:
    assert [devices_text(devices) for devices in ((3,), (0, 1, 2), (0, 2, 3, 7))] == [
        "device 3",
        "devices 0-2",
        "devices 0, 2-3, 7",
    ]
    times_ns = (0, 4_000_000, 99_900_000, 100_000_000, 1_250_000_000)
    assert [span_text(time_ns) for time_ns in times_ns] == ["0.0 ms", "4.0 ms", "99.9 ms", "0.10 s", "1.25 s"]


# History: what was decided and expected.


@pytest.fixture(scope="module")
def mixed() -> Recorded:
    """Requests that are done, late, refused and cancelled; one promise is kept."""
    requests = poisson(40, 1.6, seed=9, slo_s=2.0)
    requests.append(request("promised", 2.0, slo_s=20.0, on_miss=OnMiss.REJECT))
    requests += [request(f"strict{i}", 3 + i, slo_s=0.9, on_miss=OnMiss.REJECT) for i in range(6)]
    cancels = tuple((requests[i].arrival_ns + SOON_NS, requests[i].uid) for i in (3, 12))
    return recorded(requests, cancels=cancels, sim=SimConfig(num_devices=2, jitter=0.1))


def runs_of(run: Recorded, past: PastRequest) -> list[Run]:
    return [one for one in run.trace.runs if past.job_id in one.work.job_ids]


def texts_of(past: PastRequest) -> list[str]:
    return [decision.text for decision in describe_all(past.actions, past.request, past.job_id)]


def test_every_request_s_decisions_begin_with_the_answer_and_end_with_the_end(mixed: Recorded) -> None:
    for past in mixed.history.requests:
        kinds = [decision.kind.value for decision in describe_all(past.actions, past.request, past.job_id)]
        if past.status is Status.REJECTED:
            assert kinds == ["refused"]
        else:
            assert (kinds[0], kinds[-1]) == ("accepted", "finished")
            assert kinds.count("accepted") == kinds.count("finished") == 1
            begun = [run.work.work_id for run in runs_of(mixed, past)]
            assert ("stopped" in kinds) >= any(run.end is RunEnd.STOPPED for run in runs_of(mixed, past))
            assert kinds.count("started") >= len(begun) > 0 or past.status is Status.CANCELLED
    assert (
        sum(isinstance(action, DropToBestEffort) for past in mixed.history.requests for _, action in past.actions) > 0
    )


@pytest.mark.parametrize("policy", ["edf", "tetriserve", "fixed-sp2"])
def test_no_decision_names_another_request(policy: str) -> None:
    """A tenant reads those about its own requests."""
    requests = [replace(one, uid=f"uid{one.uid}") for one in poisson(40, 2.0, seed=4, slo_s=3.0)]
    history = recorded(requests, policy, costs=table(degrees=(1, 2))).history
    told = [(past, text) for past in history.requests for text in texts_of(past)]
    assert any("goes before" in text for _, text in told) == (policy == "edf")
    for past, text in told:
        assert not re.search(r"\bjob\b|\buid\d", text.replace(past.request.uid, ""))


def test_a_stopped_work_begins_when_its_device_was_free(mixed: Recorded) -> None:
    stopped = {run.work.work_id: run for run in mixed.trace.runs if run.end is RunEnd.STOPPED}
    assert stopped
    for past in mixed.history.works:
        if past.work.work_id in stopped:
            run = stopped[past.work.work_id]
            assert (past.start_ns, past.end_ns, past.steps) == (run.start_ns, run.end_ns, run.steps)


# The command.


@pytest.fixture
def log(mixed: Recorded, tmp_path: Path) -> Path:
    return mixed.write(tmp_path / "events.jsonl")


def explain(*arguments: object) -> Result:
    """The command, at its own exit status."""
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def document(*arguments: object) -> Any:
    result = explain(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refusal(*arguments: object) -> str:
    result = explain(*arguments)
    assert isinstance(result.exception, UserError)
    return str(result.exception)


def test_the_summary_counts_what_the_run_did(mixed: Recorded, log: Path) -> None:
    summary = document(log)
    endings = mixed.trace.endings
    late = [e for e in endings if e.status is Status.DONE and not e.on_time]
    done = [e for e in endings if e.status is Status.DONE and e.on_time]
    rejected = sum(e.status is Status.REJECTED for e in endings)
    cancelled = sum(e.status is Status.CANCELLED for e in endings)
    counts = {"done": len(done), "late": len(late), "rejected": rejected, "cancelled": cancelled}
    assert summary["by_outcome"] == counts
    assert min(summary["by_outcome"].values()) > 0
    timed = [e for e in [*late, *done] if e.request.deadline_ns is not None]
    assert summary["attainment"] == pytest.approx(sum(e.on_time for e in timed) / len(timed))
    assert summary["refused"] == {"deadline_unreachable": rejected}
    errors = sorted(e.finish_ns - e.eta_ns for e in [*late, *done] if e.eta_ns is not None)
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    assert summary["eta_error_median_s"] == pytest.approx(middle / NS_PER_S, abs=1e-6)
    by_lateness = sorted(late, key=lambda e: e.finish_ns - (e.request.deadline_ns or 0), reverse=True)
    assert [one["uid"] for one in summary["latest"]] == [e.request.uid for e in by_lateness[:10]]
    text = explain(log).output
    assert f"tilework explain {log} {by_lateness[0].request.uid}" in " ".join(text.split())
    kept = sum(e.request.is_promise for e in done)
    assert summary["promises"] == {"kept": kept, "broken": 0} == {"kept": 1, "broken": 0}
    assert summary["starts_forced"] == 0
    held = sum(isinstance(action, HoldBack) for past in mixed.history.requests for _, action in past.actions)
    assert summary["held_back"] == held
    forced = f"the guard started 0 of {summary['works']} runs for them"
    assert f"promises: 1 kept, 0 broken; {forced}; it held back {held} starts and stops\n" in text
    later = "later" if middle >= 0 else "earlier"
    error = span_text(ns_from_s(abs(summary["eta_error_median_s"])))
    assert f"predicted finishes: requests ended {error} {later} than predicted (median; " in text
    assert f", {summary['attainment']:.1%} of deadlines kept\n" in text


def test_a_request_has_decisions_works_and_the_end(mixed: Recorded, log: Path) -> None:
    past = next(past for past in mixed.history.requests if past.on_time is False and past.status is Status.DONE)
    found = document(log, past.request.uid)
    runs = runs_of(mixed, past)
    assert [one["work"] for one in found["works"]] == [run.work.work_id for run in runs]
    assert [one["predicted_s"] is not None for one in found["works"]] == [True] * len(runs)
    assert found["slack_s"] < 0
    assert found["ran_s"] + found["waited_s"] == pytest.approx(found["finish_s"], abs=1e-5)
    assert found["decisions"] == [d.to_json() for d in describe_all(past.actions, past.request, past.job_id)]
    text = explain(log, past.request.uid).output
    for decision in found["decisions"]:
        assert decision["text"] in text
    assert "late because: " in text
    assert " than predicted\n" in text
    assert "promise" not in text, "it has none"


def test_a_request_without_a_picture_has_a_reason(mixed: Recorded, log: Path) -> None:
    ends = {past.status: past.request.uid for past in mixed.history.requests}
    for status, words in ((Status.REJECTED, "refused (deadline_unreachable): "), (Status.CANCELLED, "cancelled: ")):
        text = explain(log, ends[status]).output
        assert f"not served because: {words}" in text
        assert "late because" not in text
        assert document(log, ends[status])["on_time"] is None


def test_a_request_is_found_by_its_name_or_near_ones_are_named(log: Path) -> None:
    assert document(log, "strict3")["uid"] == "strict3"
    assert document(log, "7")["uid"] == "7"
    assert "6 requests" in (said := refusal(log, "stri"))
    assert "strict0, strict1" in said
    assert "near ones: strict5" in refusal(log, "strct5")
    assert "lists those late by the most" in refusal(log, "zzz")


def test_a_beginning_that_only_one_request_has_is_enough_and_so_is_the_job_number(tmp_path: Path) -> None:
    path = recorded([request("abc-1"), request("1bc-2"), request("0")]).write(tmp_path / "log.jsonl")
    assert document(path, "ab")["uid"] == "abc-1"
    assert document(path, "1b")["uid"] == "1bc-2"
    assert document(path, "1")["uid"] == "1bc-2"
    assert document(path, "2")["uid"] == "0"
    assert document(path, "0")["job"] == 2, "a name counts before a job number"


def test_a_call_is_all_its_images(tmp_path: Path) -> None:
    uids = ["abc-0", "abc-1", "abc-10", "abd-0", "abd-1", "xyz-0", "xyz-1", "xyz-20", "xyz-21"]
    others = [request(f"img-{index}", 1 + index) for index in range(3)]
    path = recorded([*(request(uid) for uid in uids), *others]).write(tmp_path / "log.jsonl")
    told = document(path, "abc")
    assert told["uid"] == "abc"
    assert [found["uid"] for found in told["images"]] == uids[:3]
    text = explain(path, "abc").output
    assert [line.split()[0] for line in text.splitlines() if "(job " in line] == uids[:3]
    assert [found["uid"] for found in document(path, "x")["images"]] == uids[5:], "the only call that begins so"
    assert document(path, "abc-1")["uid"] == "abc-1", "an image of its own"
    assert document(path, "x-20")["uid"] == "xyz-20", "an image of the only call that begins so"
    assert "2 requests" in refusal(path, "xyz-2")
    assert "5 requests" in refusal(path, "ab")
    assert "3 requests" in refusal(path, "img"), "they came one after another"


HEX = ("cfe419fb622e4e58ac62e6468c488387", "cfe419fa622e4e58ac62e6468c488387", "00000001622e4e58ac62e6468c488387")


def test_a_summary_shows_beginnings_that_name_one_request_and_no_name_takes_two_lines(tmp_path: Path) -> None:
    uids = [f"{HEX[0]}-0", f"{HEX[1]}-0", f"{HEX[1]}-1", f"{HEX[2]}-0", "mine"]
    path = recorded([request(uid, slo_s=0.01) for uid in uids]).write(tmp_path / "log.jsonl")
    lines = explain(path).output.splitlines()
    shown = [line.split()[0] for line in lines if line.split()[1:2] == ["128x128"]]
    wanted = ["cfe419fb", "cfe419fa-0", "cfe419fa-1", "00000001", "mine"]
    assert sorted(shown) == sorted(wanted)
    assert [document(path, one)["uid"] for one in wanted] == uids
    assert lines[-1].endswith(f"tilework explain {path} {shown[0]}")
    waited = explain(path, shown[0]).output
    assert any(f"its devices ran {one} " in waited for one in shown[1:])
    assert sum(uid in waited for uid in uids) == 1, "in full it names itself alone"
    assert "3 requests" in (said := refusal(path, "cfe4"))
    assert said.endswith("cfe419fa-0, cfe419fa-1, cfe419fb")


@settings(max_examples=60)
@given(st.lists(st.text("01a-", min_size=1, max_size=12), min_size=1, max_size=12, unique=True))
def test_each_short_name_is_found_as_its_request(uids: list[str]) -> None:
    """Also where beginnings are job numbers, or look like images of a call."""
    history = recorded([request(uid, arrival_s=index // 3) for index, uid in enumerate(uids)]).history
    names = RequestNames(history.requests)
    for past in history.requests:
        with mock.patch.object(request_names, "_LEAST_CHARS", 1):
            short = names.short(past.request.uid)
        assert len(short) <= len(past.request.uid)
        assert names.named(short) == [past]


def test_a_log_without_requests_and_another_file_are_refused(tmp_path: Path) -> None:
    path = recorded([]).write(tmp_path / "log.jsonl")
    assert "holds no requests" in refusal(path)
    path.write_text('{"work": 7}\n')
    assert "is no event log" in refusal(path)
    assert "No such file" in refusal(tmp_path / "absent")


def test_names_of_clients_are_shown_but_not_obeyed(tmp_path: Path) -> None:
    name = "[red]\x1b[2Jx"
    path = recorded([request(name, slo_s=0.1)]).write(tmp_path / "log.jsonl")
    for text in (explain(path).output, explain(path, name).output):
        assert "[red]" in text
        assert "\x1b" not in text


# A running server.


class Server:
    """Answers every GET with `status` and `body`, and keeps the path and key of each."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str | None]] = []
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mine.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(mine.status)
                self.send_header("Content-Length", str(len(mine.body)))
                self.end_headers()
                self.wfile.write(mine.body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "TILEWORK_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    one = Server()
    thread = threading.Thread(target=one.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield one
    one.http.shutdown()
    thread.join()
    one.http.server_close()


def test_a_running_server_is_asked(server: Server) -> None:
    decision = describe(ns_from_s(10.213), RunWork(work()), ASKED)
    assert decision is not None
    told = {"uid": "a/b", "status": "running", "decisions": [decision.to_json()]}
    server.body = json.dumps(told).encode()
    result = explain("a/b", "--url", server.url + "/v1/", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "a/b: running" in result.output
    assert "+0.213 s  steps 4-9 of 28 on devices 0-1 (degree 2): with 1 it would finish 0.31 s late" in result.output
    assert server.asked == [("/v1/requests/a%2Fb/decisions", "Bearer secret")]
    assert document("a/b", "--url", server.url) == told
    both = [{**decision.to_json(), "uid": uid} for uid in ("a/b-0", "a/b-1")]
    server.body = json.dumps({**told, "decisions": both}).encode()
    lines = explain("a/b", "--url", server.url).output.splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["a/b-0", "a/b-1"]
    assert server.asked[-1][1] is None


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b'{"error": {"message": "no request is called x; near ones: y"}}', "404: no request is called x; near"),
        (502, b"<html>bad gateway</html>", "502: <html>bad gateway"),
        (200, b'{"data": []}', "is it a tilework server?"),
        (200, b"hello", "is it a tilework server?"),
    ],
)
def test_other_answers_of_a_server_are_reported(server: Server, status: int, body: bytes, words: str) -> None:
    server.status, server.body = status, body
    assert words in refusal("x", "--url", server.url)


def test_a_server_that_does_not_answer_is_reported(server: Server) -> None:

    assert "does not answer" in refusal("x", "--url", "http://127.0.0.1:9")
    assert "leave out 'y'" in refusal("x", "y", "--url", server.url)


def test_an_exact_request_is_called_so(tmp_path: Path) -> None:
    log = recorded([request("a", exact=True), request("b")]).write(tmp_path / "events.jsonl")
    assert "on miss best_effort, exact;" in explain(log, "a").output
    assert [document(log, uid)["request"]["exact"] for uid in "ab"] == [True, False]
