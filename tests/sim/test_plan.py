"""How many devices to buy: intervals, verdicts, the search against brute force, mixes of hardware, stages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from builders import poisson, request, table
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Finish, Reject
from tilework.core.events import Woke
from tilework.core.request import RefusalCode, Request, Shape, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.policy.placement.utilisation import proportional
from tilework.sim.config import SimConfig
from tilework.sim.plan.error import ComparedWith, PastRun, error_of_run, shipped_error
from tilework.sim.plan.interval import BLOCKS, Decided, DueBlock, Judge, num_to_show, share_of
from tilework.sim.plan.mix import cheapest
from tilework.sim.plan.search import Sized, Sizing, Verdict, fewest_devices, more_points, numbers_of
from tilework.sim.plan.stages import NoStages, stage_plan
from tilework.sim.plan.traffic import Resampled, Size, Traffic, WhatIf, sample_of, size_of
from tilework.sim.plan.trial import Question, Trial, TrialOutcome, trials_of, tried
from tilework.sim.simulation import Simulation
from tilework_lab.compare.figures import figures_of

ROOT = Path(__file__).parents[2]
RESULT = re.compile(r"^\| tilework, all \| ([\d.]+)% \| [\d.]+% \| ([\d.]+)% \|", re.M)


# Intervals.


def test_independent_requests_have_wilsons_interval() -> None:
    share = share_of([DueBlock(100, 90)])
    assert (share.value, share.num_due) == (0.9, 100)
    assert (share.low, share.high) == pytest.approx((0.8256, 0.9448), abs=1e-4)  # Published for 90 of 100.


def test_all_on_time_still_has_a_width() -> None:
    share = share_of([DueBlock(20, 20)] * 10)
    assert share.high == pytest.approx(1.0)
    assert 0.95 < share.low < 0.98


def test_a_share_is_inside_its_interval_whatever_is_rounded() -> None:
    for num in range(1, 400):
        for num_on_time in (0, 1, num - 1, num):
            share = share_of([DueBlock(num, num_on_time)] * 3)
            assert share.low <= share.value <= share.high


def test_misses_that_come_together_say_less() -> None:
    spread, together = share_of([DueBlock(20, 18)] * 10), share_of([*[DueBlock(20, 20)] * 9, DueBlock(20, 0)])
    assert spread.value == together.value == 0.9
    assert together.low < 0.7 < spread.low
    assert together.high > spread.high


# The judge.


def done(uid: str, at_s: float) -> tuple[Finish, int]:
    return Finish(0, uid, Status.DONE, ""), ns_from_s(at_s)


def judged(requests: Sequence[Request], *ends: tuple[Finish, int], target: float = 0.5) -> Judge:
    judge = Judge(requests, target)
    try:
        for action, at_ns in ends:
            judge(Woke(), (action,), at_ns)
        judge.end()
    except Decided:
        pass
    return judge


def test_a_deadline_is_kept_until_it_has_passed() -> None:
    asked = [request("a", arrival_s=0, slo_s=1), request("b", arrival_s=0, slo_s=2), request("c", arrival_s=0)]
    judge = judged(asked, done("a", 1.0), done("b", 2.000000001), done("c", 9))
    assert judge.blocks() == (DueBlock(1, 1), DueBlock(1, 0)), "one without a deadline is not counted"
    assert judge.is_whole


def test_what_never_ends_and_what_fails_is_missed() -> None:
    asked = [request(name, arrival_s=0, slo_s=slo_s) for name, slo_s in (("a", 1), ("b", 2))]
    failed = Finish(0, "b", Status.FAILED, "lost"), NS_PER_S // 2
    assert [one.num_on_time for one in judged(asked, failed).blocks()] == [0, 0]


def test_a_run_ends_with_the_last_request_and_not_with_its_deadline() -> None:
    asked = [request(name, arrival_s=0, slo_s=100) for name in "abc"]
    judge = Judge(asked, 0.5)
    judge(Woke(), (Reject("a", "no room", None, RefusalCode.QUEUE), done("b", 1)[0]), NS_PER_S)
    assert not judge.is_whole
    with pytest.raises(Decided):
        judge(Woke(), (done("c", 2)[0],), 2 * NS_PER_S)
    assert judge.is_whole
    assert judge.blocks() == (DueBlock(1, 0), DueBlock(1, 1), DueBlock(1, 1))


def test_a_run_ends_when_the_target_is_far_out_of_reach() -> None:
    asked = [request(f"{index:02}", arrival_s=index, slo_s=0.5) for index in range(40)]
    judge, late = Judge(asked, 0.9), [done(f"{index:02}", index + 0.9) for index in range(40)]
    for action, at_ns in late[:14]:
        judge(Woke(), (action,), at_ns)
    with pytest.raises(Decided):
        judge(Woke(), (), ns_from_s(15))
    assert not judge.is_whole
    blocks = judge.blocks()
    assert len(blocks) == BLOCKS
    assert sum(one.num_on_time for one in blocks) == 40 - 15, "35% may be missed; the rest counts as kept"


# Traffic.


def test_traffic_that_came_is_drawn_again_in_blocks() -> None:
    asked = poisson(120, rate_per_s=2.0, seed=1)
    drawn = Resampled(asked)
    assert drawn(0) is asked
    again = drawn(3)
    assert [one.uid for one in again] == [one.uid for one in drawn(3)] != [one.uid for one in drawn(4)]
    assert len({one.uid for one in again}) == len(again)
    arrivals = [one.arrival_ns for one in again]
    assert arrivals == sorted(arrivals)
    assert asked[0].arrival_ns <= arrivals[0]
    assert arrivals[-1] <= asked[-1].arrival_ns + NS_PER_S
    slos = {one.uid: None if one.deadline_ns is None else one.deadline_ns - one.arrival_ns for one in asked}
    for one in again:
        own = None if one.deadline_ns is None else one.deadline_ns - one.arrival_ns
        assert own == slos[one.uid.partition("/")[2]]


def test_what_ifs_change_deadlines_rate_and_the_heaviest_size() -> None:
    asked = [request(f"{n}", arrival_s=n, slo_s=4, side=256 if n % 4 == 0 else 128) for n in range(40)]
    traffic = Traffic(draw=lambda seed: asked)
    heavy = Shape(256, 256)

    def num_heavy(factor: float) -> int:
        return sum(one.shape == heavy for one in traffic.requests(0, WhatIf(heaviest=factor)))

    assert [num_heavy(factor) for factor in (0.5, 1, 2, 9)] == [5, 10, 20, 40]
    faster = traffic.requests(0, WhatIf(rate=2.0, slo=0.5))
    assert [one.arrival_ns for one in faster] == [one.arrival_ns // 2 for one in asked]
    assert {one.deadline_ns - one.arrival_ns for one in faster if one.deadline_ns} == {2 * NS_PER_S}
    uids = [one.uid for one in traffic.requests(0, WhatIf(heaviest=2))]
    assert uids == [one.uid for one in asked], "arrivals stay what they are"


def test_samples_are_windows_with_what_comes_before_and_after() -> None:
    asked = [request(f"{n}", arrival_s=n, slo_s=None if n % 5 == 0 else 7) for n in range(500)]
    due = [one.uid for one in asked if one.deadline_ns is not None]
    parts = [sample_of(asked, 100, number) for number in range(4)]
    judged = [[one.uid for one in part.judged if one.deadline_ns is not None] for part in parts]
    assert sorted(uid for uids in judged for uid in uids) == sorted(due), "each deadline is judged once"
    assert {len(uids) for uids in judged} == {100}
    assert judged[0] == due[200:300], "the middle first"
    first, last = int(parts[0].simulated[0].uid), int(parts[0].simulated[-1].uid)
    assert 60 <= int(judged[0][0]) - first <= 63, "half of the window before"
    assert 6 <= last - int(judged[0][-1]) <= 7, "and the longest deadline after"
    assert sample_of(asked, 400, 0).judged is asked, "a short workload is one sample"


# The search.


def asked_of(share: Callable[[int, int], float], num: int = 400) -> Callable[[Sequence[Trial]], list[TrialOutcome]]:
    """Trials whose share on time is a function of devices and seed."""

    def attempt(trials: Sequence[Trial]) -> list[TrialOutcome]:
        tries.extend((trial.num_devices, trial.sample) for trial in trials)
        return [_outcome(share(trial.num_devices, trial.sample), num) for trial in trials]

    tries: list[tuple[int, int]] = []
    attempt.tries = tries  # type: ignore[attr-defined]
    return attempt


def _outcome(share: float, num: int) -> TrialOutcome:
    each = num // BLOCKS
    left = round(share * num)
    blocks = [DueBlock(each, max(0, min(each, left // BLOCKS + (place < left % BLOCKS)))) for place in range(BLOCKS)]
    return TrialOutcome(blocks=tuple(blocks), is_whole=True, device_s={}, run_s=1.0)


REQUESTS = poisson(60, rate_per_s=4.0, seed=2, best_effort=0.0)
TRAFFIC = Traffic(draw=lambda seed: REQUESTS)


def search(share: Callable[[int, int], float], numbers: Sequence[int], target: float = 0.9) -> Sized:
    sizing = Sizing(hardware="toy", numbers=numbers, num_samples=3)
    return fewest_devices(sizing, TRAFFIC, table(), target, asked_of(share))


def is_met(sized: Sized, share: Callable[[int, int], float], number: int, target: float) -> bool:
    """Whether all seeds together say that a number is enough: brute force."""
    blocks = [block for seed in range(3) for block in _outcome(share(number, seed), 400).blocks]
    return share_of(blocks).low >= target


@pytest.mark.parametrize("knee", [3, 4, 7, 16, 23, 60, 61, 200])
@pytest.mark.parametrize("step", [1, 3])
def test_the_search_finds_what_brute_force_finds(knee: int, step: int) -> None:
    def share(num_devices: int, seed: int) -> float:
        return 0.99 if num_devices >= knee else 0.6

    numbers = numbers_of(8, step, 256)
    sized = search(share, numbers)
    wanted = next(number for number in numbers if number >= max(knee, sized.demand.least))
    assert sized.fewest == wanted
    below = [one for one in sized.points if one.num_devices < wanted]
    assert all(one.verdict is not Verdict.MEETS for one in below)
    if wanted - step >= max(sized.demand.least, step):
        one_fewer = sized.at(wanted - step)
        assert one_fewer is not None, "one fewer was tried"
        assert one_fewer.verdict is Verdict.MISSES
    assert len(sized.points) <= 24, "and few others"


def test_a_number_near_the_target_gets_more_seeds_and_is_unsure() -> None:
    def share(num_devices: int, seed: int) -> float:
        return 0.5 if num_devices < 20 else 0.91 if num_devices < 24 else 0.99

    sized = search(share, numbers_of(8, 1, 64))
    assert sized.fewest == 24
    assert not is_met(sized, share, 23, 0.9)
    assert sized.in_the_mean is not None
    assert 20 <= sized.in_the_mean < 24
    near = sized.at(sized.in_the_mean)
    assert near is not None
    assert (near.verdict, len(near.outcomes)) in ((Verdict.UNSURE, 3), (Verdict.OPEN, 1), (Verdict.OPEN, 2))
    sure = [one for one in sized.points if one.verdict in (Verdict.MEETS, Verdict.MISSES)]
    assert all(len(one.outcomes) <= 2 for one in sure), "an interval that excludes the target ends the seeds"


def test_a_number_that_more_samples_would_not_help_is_given_up() -> None:
    def share(num_devices: int, seed: int) -> float:
        return 0.88 if num_devices < 24 else 0.925 if num_devices < 32 else 0.99

    sizing = Sizing(hardware="toy", numbers=numbers_of(8, 1, 64), num_samples=8)
    sized = fewest_devices(sizing, TRAFFIC, table(), 0.9, asked_of(share))
    assert sized.fewest == 24, "and one that they would help gets them"
    tried_for = {one.num_devices: (one.verdict, len(one.outcomes)) for one in sized.points}
    assert tried_for[23][0] is Verdict.UNSURE
    assert tried_for[23][1] <= 3
    assert tried_for[24][0] is Verdict.MEETS
    assert 2 <= tried_for[24][1] <= 4


def test_the_interval_in_reach_is_that_of_more_requests_at_its_upper_end() -> None:
    share = share_of([DueBlock(40, 35), DueBlock(40, 36)] * 5)
    more = share_of([*[DueBlock(40, 35), DueBlock(40, 36)] * 5, *[DueBlock(400, round(400 * share.high))] * 3])
    assert share.low_at_most(4) == pytest.approx(more.low, abs=0.004)
    assert share.low < share.low_at_most(4) < share.high


@pytest.mark.parametrize("target", [0.5, 0.9, 0.95, 0.999])
def test_as_many_on_time_as_show_a_target_show_it(target: float) -> None:
    num = num_to_show(target)
    assert share_of([DueBlock(num, num)]).low >= target
    assert share_of([DueBlock(num - 1, num - 1)]).low < target


def test_a_search_begins_with_what_another_had_beyond_the_load() -> None:
    def share(num_devices: int, seed: int) -> float:
        return 0.99 if num_devices >= 30 else 0.6

    found = search(share, numbers_of(8, 1, 64))
    attempt = asked_of(share)
    sizing = Sizing(hardware="toy", numbers=numbers_of(8, 1, 64), num_samples=3, spare=found.spare)
    again = fewest_devices(sizing, TRAFFIC, table(), 0.9, attempt)
    assert again.fewest == found.fewest == 30
    assert {number for number, _ in attempt.tries} == {29, 30}  # type: ignore[attr-defined]


def test_nothing_is_enough_where_nothing_is() -> None:
    sized = search(lambda num_devices, seed: 0.4, numbers_of(8, None, 64))
    assert (sized.fewest, sized.in_the_mean) == (None, None)
    assert sized.points[-1].num_devices == 64


def test_no_simulation_is_made_where_too_many_are_late_even_alone() -> None:
    late = [replace(one, deadline_ns=one.arrival_ns + NS_PER_S // 5) for one in REQUESTS]
    sizing = Sizing(hardware="toy", numbers=numbers_of(8, 1, 64), num_samples=3)
    sized = fewest_devices(sizing, Traffic(draw=lambda seed: late), table(), 0.9, asked_of(lambda num, seed: 1.0))
    assert (sized.fewest, sized.points) == (None, ())
    assert sized.demand.reachable == 0.0, "64 px take 0.26 s"


def test_numbers_are_single_ones_on_a_node_and_then_nodes() -> None:
    assert numbers_of(4, None, 14) == (1, 2, 3, 4, 8, 12)
    assert numbers_of(8, 2, 7) == (2, 4, 6)
    assert numbers_of(8, None, 3) == (1, 2, 3)


def simulated(num_devices: int, costs: CostTable, requests: Sequence[Request]) -> float:
    """The share on time of a whole simulation, without the judge."""
    trace = Simulation(ControllerConfig(), costs, SimConfig(num_devices=num_devices)).run(requests)
    share = figures_of(trace).attainment
    assert share is not None
    return share


@pytest.mark.slow
def test_the_answer_holds_in_a_whole_simulation_and_one_fewer_does_not() -> None:
    asked = poisson(100, rate_per_s=3.0, seed=5, slo_s=6.0, best_effort=0.1)
    question = Question(traffic=Traffic(draw=Resampled(asked)), tables={"toy": table()}, target=0.8)
    sizing = Sizing(hardware="toy", numbers=numbers_of(8, 1, 32), num_samples=2)
    with trials_of(question, 1) as attempt:
        sized = fewest_devices(sizing, question.traffic, question.tables["toy"], 0.8, attempt)
        curve = more_points(sized, (0.5, 2.0), attempt)
    assert sized.fewest is not None
    assert simulated(sized.fewest, table(), asked) >= 0.8
    assert simulated(sized.fewest - 1, table(), asked) < simulated(sized.fewest, table(), asked)
    assert {sized.fewest * 2} <= {one.num_devices for one in curve.points}
    assert sized.fewest >= sized.demand.least


def test_a_trial_counts_as_the_whole_simulation_does() -> None:
    asked = poisson(40, rate_per_s=5.0, seed=7, slo_s=2.0, best_effort=0.1)
    question = Question(traffic=Traffic(draw=lambda seed: asked), tables={"toy": table()}, target=0.01)
    outcome = tried(question, Trial(hardware="toy", num_devices=5, sample=0))
    assert outcome.is_whole
    assert share_of(outcome.blocks).value == pytest.approx(simulated(5, table(), asked))
    busy = sum(outcome.device_s.values()) / outcome.run_s
    assert 2 < busy <= 5


# Hardware.


def scaled(costs: CostTable, small: float, large: float) -> CostTable:
    """A hardware that takes `small` times as long for pictures below 150 px, and `large` times for others."""
    rows = [replace(row, seconds=row.seconds * (small if row.height < 150 else large)) for row in costs.rows]
    return replace(costs, rows=tuple(rows))


def bought(small: float, large: float, prices: dict[str, float], slo_s: float = 60.0) -> tuple[float, dict[str, int]]:
    asked = [request(f"{n}", arrival_s=n / 8, slo_s=slo_s, side=128 if n % 2 else 192) for n in range(48)]
    tables = {"big": table(), "little": scaled(table(), small, large)}
    question = Question(traffic=Traffic(draw=Resampled(asked)), tables=tables, target=0.8)

    def sized(hardware: str, sizes: frozenset[Size] | None = None) -> Sized:
        sizing = Sizing(hardware=hardware, numbers=numbers_of(8, 1, 16), num_samples=1, sizes=sizes)
        with trials_of(question, 1) as attempt:
            return fewest_devices(sizing, question.traffic, tables[hardware], 0.8, attempt)

    found = cheapest(asked, tables, prices, [sized(name) for name in tables], sized)
    assert found is not None
    return found.usd_per_h, {part.sizing.hardware: part.fewest or 0 for part in found.parts}


@pytest.mark.slow
def test_the_cheaper_of_two_hardwares_is_bought() -> None:
    usd, parts = bought(small=2.0, large=2.0, prices={"big": 1.0, "little": 0.2})
    assert set(parts) == {"little"}
    assert usd == pytest.approx(0.2 * parts["little"])


@pytest.mark.slow
def test_each_size_goes_where_it_is_cheaper() -> None:
    # Large pictures miss their deadlines on the little one; small ones cost a tenth there.
    usd, parts = bought(small=1.0, large=30.0, prices={"big": 1.0, "little": 0.01}, slo_s=8.0)
    assert set(parts) == {"big", "little"}
    assert usd == pytest.approx(parts["big"] + 0.01 * parts["little"])
    alone, _ = bought(small=1.0, large=30.0, prices={"big": 1.0, "little": 9.0}, slo_s=8.0)
    assert usd <= alone + 0.011


# Stages.


def stages(num_devices: int, encode_s: float = 0.5) -> tuple[Question, int]:
    asked = [request(f"{n}", arrival_s=n / 2, slo_s=6, steps=10) for n in range(40)]
    costs = table(encode_s=encode_s, step_s=0.1, decode_s=0.25)
    question = Question(
        traffic=Traffic(draw=lambda seed: asked), tables={"toy": replace(costs, devices_per_node=1)}, target=0.9
    )
    return question, num_devices


def test_stages_are_divided_by_theorem_1_and_by_simulation() -> None:
    plan = stage_plan(stages(7)[0], "toy", 7)
    loads = {share.name: share.device_s for share in plan.shares}
    assert list(loads.values()) == pytest.approx([0.5, 1.0, 0.25], rel=1e-6)
    assert plan.theorem.counts == tuple(proportional(loads, 7).values())
    assert plan.theorem.rate_per_s == pytest.approx(min(n / t for n, t in zip((2, 4, 1), (0.5, 1, 0.25), strict=True)))
    assert sum(plan.best.counts) == 7
    assert plan.best.worth >= plan.theorem.worth
    assert plan.num_tried >= 2, "its neighbours were tried"
    assert plan.undivided.counts == ()


def test_a_division_that_starves_a_stage_is_worse() -> None:
    from tilework.sim.plan.stages import _Study, _taken

    question, num = stages(7)
    asked = tuple(question.traffic.requests(0))
    each_s = _taken(asked, question.tables["toy"], num).services.all()
    study = _Study(question, "toy", num, asked, dict.fromkeys(each_s, 1.0), 1, lambda one: None)
    good, starved = study.partition((2, 4, 1)), study.partition((4, 1, 2))
    assert good.mean_s < 0.7 * starved.mean_s, "the instances are those that were asked for"
    assert study.climbed(starved).worth > starved.worth


def test_too_few_devices_cannot_be_divided() -> None:
    with pytest.raises(NoStages, match="2 devices are 2 instances of 1"):
        stage_plan(stages(2)[0], "toy", 2)


# Its own error.


def test_the_shipped_error_is_that_of_the_result() -> None:
    error = shipped_error()
    found = RESULT.search((ROOT / error.source).read_text("utf-8").partition("## Attainment and mean latency")[2])
    assert found is not None
    what = f"src/tilework/data/plan_error.json is not what {error.source} says; write that there"
    assert (100 * error.live, 100 * error.simulated) == pytest.approx(tuple(map(float, found.groups()))), what
    document = json.loads((ROOT / "src/tilework/data/plan_error.json").read_text("utf-8"))
    assert document["policy"] == ControllerConfig().policy


def test_a_live_run_is_simulated_on_the_devices_that_it_had() -> None:
    asked = poisson(30, rate_per_s=5.0, seed=3, slo_s=2.0, best_effort=0.0)
    question = Question(traffic=Traffic(draw=lambda seed: asked), tables={"toy": table()}, target=0.99)
    error = error_of_run(question, "toy", asked, PastRun(num_devices=3, num_met=15, source="here"))
    assert (error.live, error.num_requests, error.compared_with) == (0.5, 30, ComparedWith.SERVER)
    assert error.simulated == pytest.approx(simulated(3, table(), asked))
    assert error.points == pytest.approx(100 * (error.simulated - 0.5))
    assert size_of(asked[0]).steps == asked[0].steps
