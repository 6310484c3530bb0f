"""`GET /v1/plan`: what a server tells a plan of its traffic, who may ask, one at a time, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import request
from fake_engine import FakeEngine, Plan, Served, serving
from server.plans import DOCUMENT, POINT, running, says
from tilework.core.lora import UsedLora
from tilework.core.request import OnMiss, RefusalCode, Status
from tilework.core.time import NS_PER_S
from tilework.formats.workload import read_workload
from tilework.runtime.ticket import Outcome, Ticket
from tilework.server.planning.planner import LEAST_DUE
from tilework.server.planning.recent import WINDOW_NS, RecentTraffic
from tilework.server.schema.plan import PlanState
from waiting import eventually

ENDLESS = "import signal; signal.pause()"
FAILS = "import sys; sys.exit('error: the table has no rows')"


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeEngine(plan=Plan()), drain_s=0) as served:
        yield served


def asked(server: Served, target: object = 0.9, **headers: str) -> Any:
    return server.http.get("/v1/plan", params={"target": str(target)}, headers=headers)


def serve_some(server: Served, num: int = LEAST_DUE) -> None:
    for _ in range(num):
        assert server.post({"prompt": "x", "slo_s": 9}).status_code == 200


def settled(server: Served, target: float = 0.9) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []

    def is_done() -> bool:
        answers.append(asked(server, target).json())
        return bool(answers[-1]["status"] != "running")

    eventually(is_done)
    PlanState.model_validate(answers[-1])
    return answers[-1]


def test_the_answer_of_the_process_is_told_and_kept(server: Served) -> None:
    serve_some(server)
    with running(says(DOCUMENT)):
        state = settled(server)
    assert (state["status"], state["target"], state["num_due"], state["devices_now"]) == ("done", 0.9, LEAST_DUE, 2)
    assert (state["result"]["devices"], state["simulations"], state["error"]) == (3, 2, None)
    assert state["result"]["points"] == [{name: POINT[name] for name in POINT if name != "samples"}]
    with running(FAILS):
        assert asked(server).json() == state, "for a while the same answer"
        failed = settled(server, 0.8)
    assert (failed["status"], failed["error"], failed["result"]) == ("failed", "the table has no rows", None)


def test_one_plan_at_a_time_and_none_outlives_the_server() -> None:
    """The server does not wait for it: it has no end."""
    with serving(FakeEngine(), drain_s=0) as server:
        serve_some(server)
        with running(ENDLESS):
            assert asked(server, 0.9).json()["status"] == "running"
            assert asked(server, 0.9).json()["status"] == "running"
            busy = asked(server, 0.8)
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "planner_busy")
        assert busy.headers["Retry-After"] == "10"


@pytest.mark.parametrize("target", ["0", "1", "95", "nan", "half"])
def test_a_wrong_target_is_refused_by_name(server: Served, target: str) -> None:
    answer = asked(server, target)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "target")
    assert "from 0.01 to 0.999" in answer.json()["error"]["message"]


def test_too_little_traffic_is_told(server: Served) -> None:
    serve_some(server, 2)
    answer = asked(server)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "too_little_traffic")
    assert answer.json()["error"]["message"].startswith("2 requests with a deadline")


def test_with_keys_it_needs_the_scope_admin() -> None:
    with serving(FakeEngine(), drain_s=0, api_key="user", admin_key="root") as server:
        assert asked(server).status_code == 401
        refused = asked(server, Authorization="Bearer user")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert asked(server, Authorization="Bearer root").status_code == 409


def test_the_traffic_is_a_workload_of_the_latest_hour(tmp_path: Path) -> None:
    now_ns = WINDOW_NS + 100 * NS_PER_S
    recent, loop = RecentTraffic(lambda: now_ns), asyncio.new_event_loop()

    def end(uid: str, arrival_s: float, end_s: float, status: Status = Status.DONE, **more: Any) -> None:
        one = request(uid, arrival_s, **more)
        finished_ns = round(end_s * NS_PER_S)
        outcome = Outcome(uid=uid, status=status, reason="", finished_ns=finished_ns, image=None, segments=())
        recent.on_ended(Ticket(request=one, eta_ns=0, eta_p90_ns=0, outcome=loop.create_future()), outcome)

    end("old", 90, 91, slo_s=5)
    end("late", 120.5, 130, slo_s=5, on_miss=OnMiss.DROP, tenant="anna")
    end("cancelled", 130, 131, Status.CANCELLED, slo_s=5)
    end("kept", 110, 112, slo_s=2.5, side=192, loras=(UsedLora("ink", 0.5),), exact=True, priority="interactive")
    end("free", 140, 200)
    recent.on_refused(request("refused", 150, slo_s=1), RefusalCode.QUEUE)
    loop.close()
    traffic = recent.traffic()
    assert (traffic.num_requests, traffic.num_due, traffic.num_met, traffic.span_s) == (4, 3, 1, 40.0)
    (tmp_path / "requests.jsonl").write_text(traffic.lines)
    lines = read_workload(tmp_path / "requests.jsonl")
    assert [(one.arrival_s, one.slo_s, one.height) for one in lines] == [
        (0.0, 2.5, 192),
        (10.5, 5.0, 128),
        (30.0, None, 128),
        (40.0, 1.0, 128),
    ]
    assert (lines[0].exact, lines[0].priority, lines[0].loras) == (True, "interactive", (UsedLora("ink", 0.5),))
    assert (lines[1].on_miss, lines[1].tenant) == (OnMiss.DROP, "anna")
