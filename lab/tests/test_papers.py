"""The papers' worked examples, simulated: who runs when, on how many devices, and who is on time.

The figures give no numbers. Step times, deadlines and arrivals are ours, chosen so that what the prose says holds; each
test says what the figure shows. Encode takes no time.
"""

from __future__ import annotations

from functools import partial

import pytest

from builders import CLIP_STEPS_S, clip, finished, groups, profile, request, simulate
from stages import DECODE, DIFFUSE
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.work import Group
from tilework.cost.demand import Segment, min_device_allocation, step_speeds
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework.policy.published.tetriserve.policy import TetriServe
from tilework.sim.trace import Trace

# TetriServe, Figures 1 and 5.

SMALL, MEDIUM, LARGE = 64, 128, 192
# Seconds of a step by degree: the small one only loses by company, the others gain less than they are given.
IMAGES = profile(
    {
        SMALL: {1: 0.2, 2: 0.22, 4: 0.24},
        MEDIUM: {1: 0.38, 2: 0.21, 4: 0.12},
        LARGE: {1: 0.76, 2: 0.39, 4: 0.2},
    }
)
ROUND_NS = 420 * NS_PER_MS  # Holds two steps of the small one, or two of the large one on four devices.


def three(medium_due_s: float, large_due_s: float) -> list[Request]:
    """Three of five steps each that "arrive over time"; the small one is due at 1.25 s."""
    return [
        request("small", 0.0, side=SMALL, steps=5, slo_s=1.25),
        request("medium", 0.2, side=MEDIUM, steps=5, slo_s=medium_due_s - 0.2),
        request("large", 0.3, side=LARGE, steps=5, slo_s=large_due_s - 0.3),
    ]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of TetriServe with rounds of ROUND_NS."""
    monkeypatch.setitem(registry._GIVEN, "rounds", partial(TetriServe, round_ns=ROUND_NS))
    return "rounds"


def by_round(trace: Trace) -> list[dict[str, tuple[Group, int]]]:
    """For each round who runs in it: on which devices, and how many steps."""
    uids = [ending.request.uid for ending in trace.endings]
    found: list[dict[str, tuple[Group, int]]] = []
    for run in sorted((one for one in trace.runs if one.work.stage.name == DIFFUSE), key=lambda one: one.start_ns):
        found += [{} for _ in range(len(found), run.start_ns // ROUND_NS + 1)]
        found[-1][uids[run.work.job_ids[0]]] = run.devices, run.steps
    return found


def punctual(trace: Trace) -> list[str]:
    return [ending.request.uid for ending in trace.endings if ending.on_time]


def starts_s(trace: Trace) -> dict[str, float]:
    """When each request's first step began."""
    first = {run.work.job_ids[0]: run.start_ns for run in reversed(trace.runs) if run.work.stage.name == DIFFUSE}
    return {ending.request.uid: first[job_id] / NS_PER_S for job_id, ending in enumerate(trace.endings)}


def test_tetriserve_figure_1_no_fixed_degree_meets_all_deadlines() -> None:
    """(a) SP=1: "the small request meets its deadline, but the larger requests fail due to insufficient processing
    speed". (b) SP=4: the large one is quick, "but it still misses the deadline (along with the medium one) due to
    head-of-line blocking and inefficient resource use of the small request".
    """
    requests = three(1.75, 2.35)
    narrow, wide = (simulate(requests, policy, num_devices=4, costs=IMAGES) for policy in ("fixed-sp1", "fixed-sp4"))
    assert punctual(narrow) == punctual(wide) == ["small"]
    assert starts_s(narrow) == {"small": 0.0, "medium": 0.2, "large": 0.3}, "nobody waits: steps are too slow"
    assert starts_s(wide)["large"] > 1.8, "the others are in its way"
    large = wide.endings[2]
    assert large.finish_ns / NS_PER_S - starts_s(wide)["large"] < 1.01, "and it would have had time enough"
    assert (large.request.deadline_ns or 0) - large.request.arrival_ns > 2 * NS_PER_S


def test_tetriserve_figure_1_step_level_degrees_meet_all_deadlines(rounds: str) -> None:
    """(c) "meets all three deadlines [...]. It assigns fewer GPUs to the initial steps of the medium request, freeing
    up resources, and then scales up to meet the deadline." A letter is a step; its width is ours:

        device 0   s s | s s | s   | m m m | l l | l
               1       | m   | m   | m m m | l l | l
               2       | l   | l   | m m m | l l | l
               3       | l   | l   | m m m | l l | l
    """
    trace = simulate(three(1.75, 2.35), rounds, num_devices=4, costs=IMAGES)
    everything = (0, 1, 2, 3)
    assert by_round(trace) == [
        {"small": ((0,), 2)},
        {"small": ((0,), 2), "medium": ((1,), 1), "large": ((2, 3), 1)},
        {"small": ((0,), 1), "medium": ((1,), 1), "large": ((2, 3), 1)},
        {"medium": (everything, 3)},
        {"large": (everything, 2)},
        {"large": (everything, 1)},
    ]
    assert punctual(trace) == ["small", "medium", "large"]


@pytest.mark.parametrize("policy", ["tetriserve", "tetriserve-early", "tilework"])
def test_figure_1_is_no_matter_of_the_round(policy: str) -> None:
    """Rounds as long as TetriServe would have them, or none at all."""
    assert len(punctual(simulate(three(1.75, 2.35), policy, num_devices=4, costs=IMAGES))) == 3


def test_tetriserve_figure_5_two_degrees_that_just_meet_the_deadline() -> None:
    """Upper rows: "R1 has a small resolution and is fixed at SP=1 [...]. For R2 and R3, TetriServe identifies GPU
    allocations with two parallelism degrees that just meet their deadlines while minimizing overall GPU usage."

    From the second round on, when all three are there; R1 has three of its five steps left. The deadlines are ours.
    """
    parts = []
    for one, num_steps in zip(three(2.2, 2.85), (3, 5, 5), strict=True):
        speeds = {speed.degree: speed for speed in step_speeds(one, TableCosts(IMAGES), 4)}
        budget_ns = (one.deadline_ns or 0) - ROUND_NS
        found = min_device_allocation(list(speeds.values()), num_steps, budget_ns)
        parts.append(found)
        if len(found) > 1:
            slow, fast = found
            one_fewer = (slow.num_steps + 1) * speeds[slow.degree].step_ns
            one_fewer += (fast.num_steps - 1) * speeds[fast.degree].step_ns
            assert one_fewer > budget_ns, "just: with one more step at the lower degree it would be late"
    assert parts == [(Segment(3, 1),), (Segment(4, 1), Segment(1, 2)), (Segment(1, 1), Segment(4, 2))]


def test_tetriserve_figure_5_requests_stay_where_they_are_and_idle_devices_are_given_away(rounds: str) -> None:
    """Last row, "the actual GPU allocation": requests "continue on the same GPUs across consecutive rounds whenever
    possible", and "GPUs left idle after placement are reclaimed". Here in the fourth round, when R1 is done:

        device 0   1 1 | 1 1 | 1   | 2   | 2 2 | 3 3        R2 needs one device for four steps, and is given R1's;
               1       | 2   | 2   | 2   | 2 2 | 3 3        R3 does not have to move for that.
               2       | 3   | 3   | 3   | 2 2 | 3 3
               3       | 3   | 3   | 3   | 2 2 | 3 3
    """
    trace = simulate(three(2.2, 2.85), rounds, num_devices=4, costs=IMAGES)
    everything = (0, 1, 2, 3)
    assert by_round(trace) == [
        {"small": ((0,), 2)},
        {"small": ((0,), 2), "medium": ((1,), 1), "large": ((2, 3), 1)},
        {"small": ((0,), 1), "medium": ((1,), 1), "large": ((2, 3), 1)},
        {"medium": ((0, 1), 1), "large": ((2, 3), 1)},
        {"medium": (everything, 2)},
        {"large": (everything, 2)},
    ]
    assert punctual(trace) == ["small", "medium", "large"]


# DDiT, Figures 6 and 9.

VIDEO = profile(CLIP_STEPS_S, decode_s=0.5)


def test_ddit_figure_6_a_fixed_deployment_waits_or_crawls() -> None:
    """(a) Four devices, 240p and then 360p, which suit two and four. With two of them idle "the scheduler then faces
    two choices": to wait for the other two, or to run "with insufficient resources until completion".

    The first is what `rssp` does, the second `fixed-sp2`.
    """
    requests = [clip("240p", 0.0, 2), clip("360p", 0.1, 4)]
    waits, crawls = (simulate(requests, policy, num_devices=4, costs=VIDEO) for policy in ("rssp", "fixed-sp2"))
    assert groups(waits) == {"240p": [(0, 1)], "360p": [(0, 1, 2, 3)]}
    assert starts_s(waits)["360p"] > waits.endings[0].finish_ns / NS_PER_S
    assert groups(crawls) == {"240p": [(0, 1)], "360p": [(2, 3)]}
    assert starts_s(crawls)["360p"] == pytest.approx(0.1, abs=0.01)


def test_ddit_figure_6_a_request_gets_the_devices_that_another_releases() -> None:
    """(b) Step by step it does neither: 360p begins on the two that are free, and ends on four.

    device 0, 1   240p ......... | 360p .......
           2, 3     | 360p ......... | ........
    """
    requests = [clip("240p", 0.0, 2), clip("360p", 0.1, 4)]
    trace = simulate(requests, "ddit", num_devices=4, costs=VIDEO)
    assert groups(trace) == {"240p": [(0, 1)], "360p": [(2, 3), (0, 1, 2, 3)]}
    for policy in ("rssp", "fixed-sp2"):
        static = simulate(requests, policy, num_devices=4, costs=VIDEO)
        assert trace.endings[1].finish_ns < static.endings[1].finish_ns - 0.3 * NS_PER_S
        assert trace.endings[0].finish_ns <= static.endings[0].finish_ns, "and nobody pays for it"


def test_ddit_figure_9_the_lifecycle_of_a_request() -> None:
    """b begins "hungry", is promoted when a completes, and when its steps are done it "releases partial GPUs": "the
    remaining GPUs", here one, decode. c, which is ours, waits, and begins on what is released.

        device 0   a a a a | b b b b | decode b
               1   a a a a | b b b b |
               2     b b b b b b b b | c c c c
               3     b b b b b b b b | c c c c
    """
    requests = [clip("a", 0.0, 2, steps=20), clip("b", 0.1, 4), clip("c", 2.0, 2)]
    trace = simulate(requests, "ddit", num_devices=4, costs=VIDEO)
    assert groups(trace) == {"a": [(0, 1)], "b": [(2, 3), (0, 1, 2, 3)], "c": [(2, 3)]}
    of_b = [run for run in trace.runs if run.work.job_ids == (1,)]
    (decode,) = (run for run in of_b if run.work.stage.name == DECODE)
    first_wide = next(run for run in of_b if len(run.devices) == 4)
    released_ns = max(run.end_ns for run in trace.runs if run.work.job_ids == (0,) and run.work.stage.name == DIFFUSE)
    step_ns = round(0.212 * NS_PER_S)
    assert released_ns <= first_wide.start_ns <= trace.endings[0].finish_ns + step_ns, "as soon as its step ends"
    first_of_c = min(run.start_ns for run in trace.runs if run.work.job_ids == (2,))
    assert (decode.devices, first_of_c) == ((0,), decode.start_ns)
    assert finished(trace) == ["a", "b", "c"]
