"""Decisions in words, where a request's time went, and `tilework explain`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from builders import PIPELINE, poisson, request, table
from recorded import SOON_NS, Recorded, lost_and_broken, recorded
from tilework.cli.app import app
from tilework.cli.output import UserError
from tilework.control.account import account_of, cause_of
from tilework.control.decisions import DecisionKind, gpus_text, span_text, tell, tell_all
from tilework.control.history import History, PastRequest, read_history
from tilework.core.actions import (
    Accept,
    Action,
    DropState,
    Finish,
    MoveState,
    Reject,
    RunStage,
    RunSteps,
    SetAside,
    Stop,
    WakeAt,
)
from tilework.core.request import OnMiss, RefusalCode, Request, Status
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.core.work import DECODE, DIFFUSE, StageId, Work
from tilework.cost.table import CostTable
from tilework.sim.device import Run
from tilework.sim.simulation import SimConfig


def work(stage: str = DIFFUSE, **changes: Any) -> Work:
    given: dict[str, Any] = {
        "work_id": 7,
        "stage": StageId(PIPELINE, stage),
        "job_ids": (5,),
        "attempts": (0,),
        "first_steps": (3,),
        "gpus": (0, 1),
        "num_steps": 6,
        "why": "with 1 it would finish 0.31 s late",
    }
    return Work(**(given | changes))


def slower(costs: CostTable, factor: float) -> CostTable:
    return replace(costs, rows=tuple(replace(row, seconds=row.seconds * factor) for row in costs.rows))


def of(history: History, uid: str) -> PastRequest:
    (past,) = [past for past in history.requests if past.request.uid == uid]
    return past


# Words.

ASKED = request("img-1", 10.0, steps=28, slo_s=2.0)


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (
            Accept(5, "img-1", ns_from_s(11.82), "it needs 1.5 s"),
            "accepted",
            "accepted; expected to be done 1.82 s after arrival, 0.18 s before its deadline: it needs 1.5 s",
        ),
        (
            Accept(5, "img-1", ns_from_s(12.5), ""),
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
            RunSteps(work()),
            "started",
            "steps 4-9 of 28 on GPUs 0-1 (degree 2): with 1 it would finish 0.31 s late",
        ),
        (RunSteps(work(num_steps=1, gpus=(3,), why="")), "started", "step 4 of 28 on GPU 3"),
        (RunStage(work(DECODE, gpus=(3,), why="must run now")), "started", "decode on GPU 3: must run now"),
        (MoveState(5, (2, 3, 6), True), "moved", "its state goes to GPUs 2-3, 6, with its conditioning"),
        (MoveState(5, (2,), False), "moved", "its state goes to GPU 2"),
        (Stop(7), "stopped", "work 7 is to end at its next step boundary"),
        (
            SetAside(5, "0.02 s late even on 8 GPUs"),
            "set aside",
            "set aside, behind those that can still be on time: 0.02 s late even on 8 GPUs",
        ),
        (
            Finish(5, "img-1", Status.FAILED, "out of memory"),
            "finished",
            "failed 0.21 s after arrival, 1.79 s before its deadline: out of memory",
        ),
    ],
)
def test_every_decision_is_a_sentence_with_numbers(action: Action, kind: str, text: str) -> None:
    decision = tell(ns_from_s(10.213), action, ASKED)
    assert decision is not None
    assert (decision.kind, decision.text, decision.uid) == (kind, text, "img-1")
    assert str(decision) == f"+0.213 s  {text}"


def test_what_decides_nothing_about_a_request_is_not_told() -> None:
    assert tell(0, WakeAt(5), ASKED) is None
    assert tell(0, DropState(5, (0,)), ASKED) is None
    told = [(0, WakeAt(5)), (1, Stop(7)), (2, DropState(5, (0,)))]
    assert [decision.kind for decision in tell_all(told, ASKED)] == [DecisionKind.STOPPED]


def test_a_decision_as_json() -> None:
    decision = tell(ns_from_s(10.5), RunSteps(work()), ASKED)
    assert decision is not None
    assert decision.to_json() == {
        "at_s": 0.5,
        "kind": "started",
        "text": "steps 4-9 of 28 on GPUs 0-1 (degree 2): with 1 it would finish 0.31 s late",
        "gpus": [0, 1],
        "degree": 2,
        "steps": [4, 9],
    }
    stopped = tell(ns_from_s(10.5), Stop(7), ASKED)
    assert stopped is not None
    assert {stopped.to_json()[name] for name in ("degree", "steps")} == {None}


def test_a_member_of_a_batch_has_its_own_steps() -> None:
    batch = RunSteps(work(job_ids=(5, 9, 11), attempts=(0, 0, 0), first_steps=(3, 0, 8), why=""))
    texts = [decision.text for job_id in (5, 9, 11) if (decision := tell(0, batch, ASKED, job_id)) is not None]
    ending = "of 28 on GPUs 0-1 (degree 2), together with 2 others"
    assert texts == [f"steps 4-9 {ending}", f"steps 1-6 {ending}", f"steps 9-14 {ending}"]


def test_short_words() -> None:
    assert [gpus_text(gpus) for gpus in ((3,), (0, 1, 2), (0, 2, 3, 7))] == ["GPU 3", "GPUs 0-2", "GPUs 0, 2-3, 7"]
    times_ns = (0, 4_000_000, 99_900_000, 100_000_000, 1_250_000_000)
    assert [span_text(time_ns) for time_ns in times_ns] == ["0.0 ms", "4.0 ms", "99.9 ms", "0.10 s", "1.25 s"]


# History: what was decided and expected.


@pytest.fixture(scope="module")
def mixed() -> Recorded:
    """Requests that are done, late, refused and cancelled."""
    requests = poisson(40, 1.6, seed=9, slo_s=2.0)
    requests += [request(f"strict{i}", 3 + i, slo_s=0.9, on_miss=OnMiss.REJECT) for i in range(6)]
    cancels = tuple((requests[i].arrival_ns + SOON_NS, requests[i].uid) for i in (3, 12))
    return recorded(requests, cancels=cancels, sim=SimConfig(num_gpus=2, jitter=0.1))


def runs_of(run: Recorded, past: PastRequest) -> list[Run]:
    return [one for one in run.trace.runs if past.job_id in one.work.job_ids]


def test_every_request_s_decisions_begin_with_the_answer_and_end_with_the_end(mixed: Recorded) -> None:
    for past in mixed.history.requests:
        kinds = [decision.kind.value for decision in tell_all(past.told, past.request, past.job_id)]
        if past.status is Status.REJECTED:
            assert kinds == ["refused"]
        else:
            assert (kinds[0], kinds[-1]) == ("accepted", "finished")
            assert kinds.count("accepted") == kinds.count("finished") == 1
            begun = [run.work.work_id for run in runs_of(mixed, past)]
            assert ("stopped" in kinds) >= any(run.stopped for run in runs_of(mixed, past))
            assert kinds.count("started") >= len(begun) > 0 or past.status is Status.CANCELLED
    assert sum(isinstance(action, SetAside) for past in mixed.history.requests for _, action in past.told) > 0


def test_a_stopped_work_begins_when_its_device_was_free(mixed: Recorded) -> None:
    stopped = {run.work.work_id: run for run in mixed.trace.runs if run.stopped}
    assert stopped
    for past in mixed.history.works:
        if past.work.work_id in stopped:
            run = stopped[past.work.work_id]
            assert (past.start_ns, past.end_ns, past.steps) == (run.start_ns, run.end_ns, run.steps)


def test_predictions_are_those_of_the_controller_which_learns() -> None:
    """The devices take twice what the table says."""
    requests = [request(str(i), 2.0 * i, steps=10) for i in range(30)]
    exact = recorded(requests).history
    assert all(past.predicted_ns == past.run_ns for past in exact.works)
    history = recorded(requests, devices=slower(table(), 2.0)).history
    diffuse = [past for past in history.works if past.work.stage.name == DIFFUSE]
    ratios = [(past.run_ns or 0) / (past.predicted_ns or 1) for past in diffuse]
    assert ratios[0] == 2.0
    assert ratios[-1] == pytest.approx(1.0, abs=0.01)


def test_what_was_lost_is_kept_with_its_reason() -> None:
    lines, work_lost = lost_and_broken()
    history = read_history(lines)
    (lost,) = history.lost
    assert (lost.work, lost.steps, lost.end_ns - lost.start_ns) == (work_lost, 1, 60 * NS_PER_MS)
    assert [(change.gpu, change.is_up) for change in history.gpus[4:]] == [(3, False), (3, True)]
    assert history.gpus[4].reason == "killed by signal 9"
    assert history.num_gpus == 4
    text = cause_of(account_of(history, of(history, "a")))
    assert text == "1 of its works was lost: a device of its group was lost"


# Accounts.


def test_who_waits_knows_for_whom() -> None:
    """One device; b and c come while a runs, and are due in this order."""
    one = SimConfig(num_gpus=1)
    requests = [request("a", steps=20, slo_s=9.0), request("b", 0.5, slo_s=9.0), request("c", 0.6, slo_s=9.5)]
    history = recorded(requests, "fixed-sp1", sim=one).history
    ends_ns = {past.request.uid: past.finish_ns or 0 for past in history.requests}
    account = account_of(history, of(history, "c"))
    assert dict(account.blockers) == {
        "a": ends_ns["a"] - requests[2].arrival_ns,
        "b": ends_ns["b"] - ends_ns["a"],
    }
    assert account.blockers[0][0] == "a"
    assert account.waited_ns == sum(duration_ns for _, duration_ns in account.blockers)
    assert account.idle_ns == 0
    assert account.waited_ns + account.ran_ns == ends_ns["c"] - requests[2].arrival_ns
    alone = account_of(history, of(history, "a"))
    assert (alone.waited_ns, alone.blockers, alone.overrun_ns) == (0, (), 0)
    assert alone.slack_ns == 9 * NS_PER_S - ends_ns["a"]


def test_works_on_other_devices_hold_nobody_up() -> None:
    """c comes when both devices are taken, and gets that of b, which is done first."""
    requests = [request("a", steps=20), request("b", steps=10), request("c", 0.3, steps=10)]
    history = recorded(requests, "fixed-sp1").history
    assert of(history, "a").job_id == 0
    account = account_of(history, of(history, "c"))
    assert account.blockers == (("b", (of(history, "b").finish_ns or 0) - requests[2].arrival_ns),)


def test_time_in_which_its_devices_had_no_work_is_idle() -> None:
    sim = SimConfig(num_gpus=1, dispatch_ns=20 * NS_PER_MS)
    history = recorded([request("a", steps=10)], "fixed-sp1", sim=sim).history
    account = account_of(history, of(history, "a"))
    assert account.idle_ns == account.waited_ns == 20 * NS_PER_MS * len(account.works)


@pytest.mark.parametrize(
    ("requests", "factor", "pattern"),
    [
        ([request("b", steps=10, slo_s=1.9)], 2.0, r"its works took 0\.\d\d s longer than predicted"),
        (
            [request("a", steps=20, slo_s=2.2), request("b", 0.5, steps=10, slo_s=2.0)],
            1.0,
            r"waited 1\.56 s beside 1\.06 s of work, longest for a \(1\.56 s\)",
        ),
        (
            [request("a", steps=20, slo_s=2.2), request("b", 0.5, side=64, steps=40, slo_s=1.5)],
            1.1,  # It was longer than predicted, but not by as much as it was late.
            r"waited 1\.\d\d s beside 1\.12 s of work, longest for a \(1\.\d\d s\)",
        ),
        (
            [request("b", steps=10, slo_s=0.5)],
            1.0,
            r"its works took 1\.06 s, and it had 0\.50 s",
        ),
    ],
)
def test_the_cause_is_the_first_reason_that_explains_it(requests: list[Request], factor: float, pattern: str) -> None:
    history = recorded(requests, "fixed-sp1", sim=SimConfig(num_gpus=1), devices=slower(table(), factor)).history
    past = of(history, "b")
    assert past.on_time is False
    assert re.fullmatch(pattern, cause_of(account_of(history, past)))


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
    timed = [e for e in endings if e.request.deadline_ns is not None]
    assert summary["attainment"] == pytest.approx(sum(e.on_time for e in timed) / len(timed))
    assert summary["refused"] == {"deadline_unreachable": rejected}
    errors = sorted(e.finish_ns - e.eta_ns for e in [*late, *done] if e.eta_ns is not None)
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    assert summary["eta_error_median_s"] == pytest.approx(middle / NS_PER_S, abs=1e-6)
    by_lateness = sorted(late, key=lambda e: e.finish_ns - (e.request.deadline_ns or 0), reverse=True)
    assert [one["uid"] for one in summary["latest"]] == [e.request.uid for e in by_lateness[:10]]
    text = explain(log).output
    assert f"tilework explain {log} {by_lateness[0].request.uid}" in " ".join(text.split())


def test_a_story_has_decisions_works_and_the_end(mixed: Recorded, log: Path) -> None:
    past = next(past for past in mixed.history.requests if past.on_time is False and past.status is Status.DONE)
    story = document(log, past.request.uid)
    runs = runs_of(mixed, past)
    assert [one["work"] for one in story["works"]] == [run.work.work_id for run in runs]
    assert [one["predicted_s"] is not None for one in story["works"]] == [True] * len(runs)
    assert story["slack_s"] < 0
    assert story["ran_s"] + story["waited_s"] == pytest.approx(story["finish_s"], abs=1e-5)
    assert story["decisions"] == [d.to_json() for d in tell_all(past.told, past.request, past.job_id)]
    text = explain(log, past.request.uid).output
    for decision in story["decisions"]:
        assert decision["text"] in text
    assert "late because: " in text


def test_a_request_is_found_by_its_name_or_near_ones_are_named(log: Path) -> None:
    assert document(log, "strict3")["uid"] == "strict3"
    assert document(log, "7")["uid"] == "7"
    assert "6 requests" in (said := refusal(log, "stri"))
    assert "strict0, strict1" in said
    assert "near ones: strict5" in refusal(log, "strct5")
    assert "names the latest ones" in refusal(log, "zzz")


def test_a_beginning_that_only_one_request_has_is_enough_and_so_is_the_job_number(tmp_path: Path) -> None:
    path = recorded([request("abc-1"), request("1bc-2"), request("0")]).write(tmp_path / "log.jsonl")
    assert document(path, "ab")["uid"] == "abc-1"
    assert document(path, "1b")["uid"] == "1bc-2"
    assert document(path, "1")["uid"] == "1bc-2"
    assert document(path, "2")["uid"] == "0"
    assert document(path, "0")["job"] == 2, "a name counts before a job number"


def test_a_log_without_requests_and_another_file_are_told(tmp_path: Path) -> None:
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
    decision = tell(ns_from_s(10.213), RunSteps(work()), ASKED)
    assert decision is not None
    told = {"uid": "a/b", "status": "running", "decisions": [decision.to_json()]}
    server.body = json.dumps(told).encode()
    result = explain("a/b", "--url", server.url + "/v1/", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "a/b: running" in result.output
    assert "+0.213 s  steps 4-9 of 28 on GPUs 0-1 (degree 2): with 1 it would finish 0.31 s late" in result.output
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
def test_what_a_server_answers_otherwise_is_told(server: Server, status: int, body: bytes, words: str) -> None:
    server.status, server.body = status, body
    assert words in refusal("x", "--url", server.url)


def test_a_server_that_is_not_there_is_told(server: Server) -> None:

    assert "does not answer" in refusal("x", "--url", "http://127.0.0.1:9")
    assert "leave out 'y'" in refusal("x", "y", "--url", server.url)
