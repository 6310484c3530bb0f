"""No test has an idea of "now": each waits for a state that it names, by `waiting.py`, and compares no times.

`ALLOWED` lists the few that must. An entry that is not needed any more is red, too.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from clock_uses import uses

ROOT = Path(__file__).parent
LAB = ROOT.parent / "lab"

DATE = "a date, which is compared with others of this machine"
RANDOM = "the moment of a kill is random: that is what is tested"
SHOWS_LESS = "nothing shows that the others wait; on a busy machine the test shows less, and is not red"
OWN = "of a process or loop that the test has for itself"
ALLOWED = {
    "waiting.py eventually": {"clock": "the one wait", "sleep": "the one wait"},
    "waiting.py until": {"clock": "the one wait", "sleep": "the one wait"},
    "waiting.py _check_patience": {"clock": "the one wait"},
    "conftest.py _sleep_shorter": {"sleep": "a pause of uvicorn's, cut short"},
    "clock.py sleep": {"sleep": "its loop has a clock of the test's"},
    "cli/test_profile.py test_a_profile_is_printed_kept_and_exported": {"clock": DATE},
    "server/worst_bodies.py batched": {"sleep": "a program of its own, which asks until its batch has ended"},
    "client/test_drive.py test_waiting_ends_at_the_timeout_counted_from_the_planned_arrival.scenario": {
        "limit": "by the test's own clock"
    },
    "comm/ring/check.py _explore": {"clock": "a tool that prints how long it took"},
    "comm/ring/check.py _spin": {"clock": "a tool that prints how long it took"},
    "comm/ring/team.py Hesitating._pause": {"sleep": "a producer that is random slow: that is what is tested"},
    "comm/ring/team.py Checker.receive": {"clock": "takes what comes meanwhile, and expects nothing of it"},
    "comm/ring/test_restart.py test_a_new_consumer_wakes_for_a_producer_that_rings_the_old_bell": {"sleep": SHOWS_LESS},
    "comm/ring/test_restart.py test_60_rounds_of_killed_consumers_and_producers": {"sleep": RANDOM},
    "comm/ring/test_restart.py consume_for_ever": {"limit": "goes on when nothing has come"},
    "comm/ring/ucx/test_verbs.py soon": {"clock": "the time of a verb's end is one of this clock"},
    "comm_team.py let_them_wait": {"sleep": SHOWS_LESS},
    "comm_team.py talk_late": {"sleep": SHOWS_LESS},
    "comm_team.py open_and_close": {"count": OWN},
    "fake_engine.py FakeEngine.now_ns": {"clock": "that of an engine which runs on no loop yet"},
    "fake_engine.py Served.tasks.found": {"count": "tells which there are, to be compared one by one"},
    "live/test_chaos.py test_workers_killed_while_every_state_spills_cost_no_picture": {
        "sleep": "requests come one after another; nothing is expected of when"
    },
    "live/test_chaos.py test_a_suspended_watchdog_reports_no_stuck_work": {
        "sleep": "the watchdog's clock is that of the machine, and must go on while it stands still"
    },
    "live/test_chaos.py test_clients_that_drop_their_connections_leave_nothing_behind": {"sleep": SHOWS_LESS},
    "live/test_page.py still_pixels.stands_still": {"sleep": "a view stands still while time passes in the browser"},
    "live/test_replacement.py test_devices_change_their_stages_under_traffic_and_no_request_is_lost.scenario": {
        "fall": "none but this loop adds to them"
    },
    "live/test_siege.py Flood._connect": {"limit": "of an attack: it goes on with another connection"},
    "live/test_siege.py seconds_of": {"clock": "measures, and is printed"},
    "sets/unsteady.py Unsteady.watch": {"limit": "by the test's own clock"},
    "live/test_siege.py besiege": {"clock": "how long an attack lasts; all that is expected of it is a state"},
    "live/test_siege.py test_a_flood_of_connections": {"fall": "memory comes back with the last connection"},
    "live/test_theorem.py served": {"sleep": "requests come at the rate of the theorem"},
    "runtime/nodes/siege.py Agent._listen": {"clock": "an agent tells the time of its node"},
    "runtime/nodes/siege.py Agent.end_of": {"clock": "an agent tells the time of its node"},
    "runtime/nodes/test_agent_port.py test_wrong_greetings_hold_nothing.test": {"fall": OWN},
    "runtime/nodes/test_executor.py test_times_of_a_node_are_converted_to_our_clock.test": {
        "clock": "the time of a node is checked against this one"
    },
    "runtime/test_worker_process.py test_a_worker_that_was_lost_leaves_no_open_file_and_no_timer.scenario": {
        "count": "all files of this process that are opened meanwhile are the executor's"
    },
    "server/test_loop_pauses.py Ticker.run": {
        "clock": "how long the loop is held is what is tested",
        "sleep": "a round of the loop",
    },
    "server/test_api.py test_openai_client_gets_an_image_and_its_timeline": {"clock": DATE},
    "server/test_api.py test_waiting_leaves_no_task_behind.waited": {"count": OWN},
    "server/test_batch_limits.py later": {"clock": DATE},
    "server/test_batches.py test_a_batch_that_takes_too_long_ends_with_what_it_has": {"clock": DATE},
    "server/test_idempotency.py Later.now": {"clock": DATE},
    "server/test_idempotency.py test_repeat_is_not_measured_against_the_clock_again": {"clock": DATE},
    "server/test_requests.py test_async_call_is_accepted_with_an_eta_and_outlives_its_connection": {"clock": DATE},
    "server/test_requests.py test_deadline_may_be_a_time_of_day": {"clock": DATE},
    "server/test_requests.py test_refusal_names_the_field_that_was_sent_and_what_to_send_instead": {"clock": DATE},
    "server/test_limits.py test_memory_does_not_grow_with_what_clients_send_or_leave": {
        "fall": "the memory of another process, which frees some when it will"
    },
    "server/test_webhooks.py test_a_notice_is_signed_when_it_is_sent": {"clock": DATE},
    "sim/test_fuzz.py test_the_seeds_of_the_hour_keep_the_invariants": {"clock": "the hour is the seed"},
    "store/test_s3.py Later.now": {"clock": DATE},
    "worker/test_reader.py test_a_worker_waits_for_what_is_being_read": {"limit": SHOWS_LESS},
    "worker/test_shared_weights.py test_workers_that_start_together_write_one_file.counted": {"limit": SHOWS_LESS},
}
"""By file and function: kinds of uses that it must have, each with the reason."""


@cache
def found() -> dict[str, dict[str, list[str]]]:
    """The uses of all files, as `ALLOWED` names them; each with its line and code."""
    by_place: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted([*ROOT.rglob("*.py"), *(LAB / "tests").rglob("*.py"), ROOT.parent / "conftest.py"]):
        if path != Path(__file__):
            name = path.relative_to(ROOT if ROOT in path.parents else ROOT.parent).as_posix()
            for one in uses(path.read_text("utf-8")):
                by_place[f"{name} {one.where}".strip()][one.kind].append(f"{name}:{one.line}: {one.kind}: {one.code}")
    return by_place


def test_tests_wait_for_states_and_read_no_clock() -> None:
    strays = [
        f"{line}  ({place!r})"
        for place, kinds in found().items()
        for kind, lines in kinds.items()
        if kind not in ALLOWED.get(place, {})
        for line in lines
    ]
    remedy = (
        "wait for a state (tests/README.md); if it must be, name the place and the kind in ALLOWED, with the reason"
    )
    assert not strays, f"{remedy}:\n" + "\n".join(strays)


def test_each_exception_is_needed() -> None:
    there = found()
    unused = [f"{place}: {kind}" for place, kinds in ALLOWED.items() for kind in kinds if kind not in there[place]]
    assert not unused, "take out of ALLOWED:\n" + "\n".join(unused)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("sleep", "import time\ntime.sleep(0.1)"),
        ("sleep", "import time as clock\nclock.sleep(x)"),
        ("sleep", "from time import sleep\nsleep(1)"),
        ("sleep", "import asyncio\nasync def f():\n    await asyncio.sleep(delay_s)"),
        ("sleep", "import time\ncall(time.sleep, 3)"),
        ("sleep", "page.wait_for_timeout(300)"),
        ("sleep", "PROGRAM = 'import time; time.sleep(60)'"),
        ("limit", "asyncio.wait_for(task, 0.5)"),
        ("limit", "asyncio.wait_for(task, timeout=0.5)"),
        ("limit", "assert event.wait(0.2)"),
        ("limit", "thread.join(1)"),
        ("limit", "future.result(5)"),
        ("limit", "queue.get(timeout=20)"),
        ("limit", "select.select([one], [], [], 0.1)"),
        ("limit", "SOON_S = 8.0\nanswer(within_s=SOON_S)"),
        ("limit", "def f(timeout_s: float = 20.0):\n    pass"),
        ("limit", "def f(*, timeout_s: float = 20.0):\n    pass"),
        ("limit", "async def f():\n    async with asyncio.timeout(10):\n        pass"),
        ("limit", "with serving():\n    thread.join(1)"),
        ("clock", "import time\nassert time.monotonic() - begin_s < 5"),
        ("clock", "from time import perf_counter\nbegin_s = perf_counter()"),
        ("clock", "import time\ntime.process_time_ns()"),
        ("clock", "from datetime import datetime\ndatetime.now(UTC)"),
        ("count", "import asyncio\nlen(asyncio.all_tasks())"),
        ("count", "import threading\nthreading.active_count()"),
        ("count", "import psutil\npsutil.Process().num_fds()"),
        ("count", "import os\nlen(os.listdir('/proc/self/fd'))"),
        ("turns", "async def f():\n    for _ in range(20):\n        await asyncio.sleep(0)"),
        ("fall", "eventually(lambda: num_open() < 3)"),
        ("fall", "async def f():\n    await until(lambda: num_open() <= before)"),
    ],
)
def test_each_kind_is_found(kind: str, code: str) -> None:
    assert {one.kind for one in uses(code)} == {kind}


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "import clock\nasync def f():\n    await clock.sleep(5)",
        "async def f():\n    while not done:\n        await asyncio.sleep(0)",
        "with pytest.raises(RingFull):\n    ring.send(b'', timeout_s=0.01)",
        "assert ring.recv(timeout_s=0.01) is None",
        "thread.join(PATIENCE_S)",
        "queue.get(timeout=240)",
        "selector.poll(0)",
        "', '.join(parts)",
        "eventually(lambda: num_done() >= 3)",
        "eventually(lambda: status() == 'done')",
        '"""On the import of time."""',
    ],
)
def test_what_has_no_idea_of_now_is_not_found(code: str) -> None:
    assert uses(code) == []


def test_a_use_says_where_it_is() -> None:
    (one,) = uses("import time\nclass A:\n    def f(self):\n        def g():\n            time.sleep(1)")
    assert (one.line, one.where, one.code) == (5, "A.f.g", "time.sleep(1)")
