"""Workloads by name: what each asks for, against its paper, and what its parameters may and may not change."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages import DIFFUSE, stage_of
from tilework.core.request import Shape
from tilework.core.time import s_from_ns
from tilework.cost.degrees import latency_ns, useful_degrees
from tilework.formats.json_lines import BadLine
from tilework.formats.workload import WorkloadRequest, read_workload, write_workload
from tilework.sim.workloads.family import BadParameter, RatedFamily, costs_of, diurnal, stream
from tilework.sim.workloads.registry import (
    UnknownWorkload,
    family,
    make_workload,
    parameters_of,
    values_of,
    workload_names,
)
from tilework.sim.workloads.requests import device_seconds

RATED = [name for name in workload_names() if issubclass(family(name), RatedFamily)]
COUNTS = {"num_requests": 24, "cycles": 3, "bursts": 5, "runs": 2, "to_hour": 15}
SLOS_S = {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}
TRACE_HEAD = "arrival_s,height,width,num_frames,num_inference_steps\n"


def made(name: str, seed: int = 0, **values: Any) -> tuple[WorkloadRequest, ...]:
    return make_workload(name, values).requests(seed)


def short(name: str, **values: Any) -> tuple[WorkloadRequest, ...]:
    """With a small number of requests and the defaults of everything else."""
    counts = {key: value for key, value in COUNTS.items() if key in parameters_of(family(name))}
    return made(name, **(counts | values))


def arrivals(requests: tuple[WorkloadRequest, ...]) -> list[float]:
    return [request.arrival_s for request in requests]


def items(requests: tuple[WorkloadRequest, ...]) -> list[tuple[str, Shape, int]]:
    return [(request.pipeline, request.shape, request.steps) for request in requests]


def slos(requests: tuple[WorkloadRequest, ...]) -> list[float | None]:
    return [request.slo_s for request in requests]


def sides(requests: tuple[WorkloadRequest, ...]) -> Counter[int]:
    return Counter(request.height for request in requests)


def alone_s(request: WorkloadRequest, degree: int, table: str = "flux1dev_h100_eager") -> float:
    return s_from_ns(latency_ns(costs_of(table), request.pipeline, request.shape, request.steps, degree))


def trace_file(path: Path, gaps_s: list[float], row: str = "512,512,1,28") -> Path:
    times_s = [sum(gaps_s[:index]) for index in range(len(gaps_s) + 1)]
    path.write_text(TRACE_HEAD + "".join(f"{time_s},{row}\n" for time_s in times_s))
    return path


# All of them.


@pytest.mark.parametrize("name", workload_names())
def test_the_seed_decides_everything(name: str) -> None:
    counts = {key: value for key, value in COUNTS.items() if key in parameters_of(family(name))}
    assert made(name, 3, **counts) == made(name, 3, **counts)
    assert made(name, 3, **counts) != made(name, 4, **counts)


@pytest.mark.parametrize("name", workload_names())
def test_requests_are_in_order_of_arrival_and_numbered(name: str) -> None:
    requests = short(name)
    assert all(earlier <= later for earlier, later in pairwise(arrivals(requests)))
    assert [request.id for request in requests] == list(range(len(requests)))


def test_requests_of_overlapping_cycles_are_in_order() -> None:
    late = made("wide-after-narrow", cycles=5, delay_s=100.0)
    assert arrivals(late) == sorted(arrivals(late))
    assert [request.id for request in late] == list(range(len(late)))
    assert [request.height for request in late[:18]] != [*[1024] * 8, 2048] * 2


def test_each_purpose_has_its_own_stream() -> None:
    purposes = ("arrivals", "items", "deadlines", "unreachable")
    assert len({stream(1, purpose).random() for purpose in purposes}) == len(purposes)


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_survives_its_file(name: str, tmp_path: Path) -> None:
    requests = short(name)
    write_workload(tmp_path / "r.jsonl", requests)
    assert read_workload(tmp_path / "r.jsonl") == requests


@pytest.mark.parametrize("name", workload_names())
def test_the_scale_of_deadlines_changes_deadlines_and_nothing_else(name: str) -> None:
    values = {"deadlines": True} if name == "ddit" else {"share": 0.0} if name == "unreachable" else {}
    once, twice = short(name, **values), short(name, scale=2.0, **values)
    assert arrivals(once) == arrivals(twice)
    assert items(once) == items(twice)
    assert any(slo_s is not None for slo_s in slos(once))
    assert [None if slo_s is None else 2 * slo_s for slo_s in slos(once)] == pytest.approx(slos(twice), abs=2e-6)


@pytest.mark.parametrize("name", RATED)
def test_the_rate_stretches_arrivals_and_changes_nothing_else(name: str) -> None:
    known = parameters_of(family(name))
    rate = known["rate_per_s"].default
    slow, fast = short(name, arrivals="poisson"), short(name, arrivals="poisson", rate_per_s=4 * rate)
    assert arrivals(slow) == pytest.approx([4 * at_s for at_s in arrivals(fast)], abs=1e-5)
    assert items(slow) == items(fast)
    assert slos(slow) == slos(fast)


@pytest.mark.parametrize("name", RATED)
def test_how_requests_arrive_changes_nothing_else(name: str) -> None:
    poisson, bursts = short(name, arrivals="poisson"), short(name, arrivals="bursts")
    assert arrivals(poisson) != arrivals(bursts)
    assert items(poisson) == items(bursts)
    assert slos(poisson) == slos(bursts)


def test_sizes_do_not_change_arrivals() -> None:
    uniform = arrivals(made("tetriserve"))
    assert uniform == arrivals(made("tetriserve", mix="skewed")) == arrivals(made("unreachable", rate_per_s=0.2))
    assert items(made("tetriserve")) == items(made("unreachable")) == items(made("flood"))


@pytest.mark.parametrize("name", workload_names())
def test_the_default_load_is_one_that_the_devices_can_carry_or_meant_not_to_be(name: str) -> None:
    kind, requests = family(name), made(name)
    costs = costs_of(make_workload(name).cost_table)
    load = sum(device_seconds(requests, costs)) / requests[-1].arrival_s / kind.num_devices
    over = {
        "flood": 1.5,
        "patchedserve-sd3": 1.5,
        "patchedserve-sdxl": 3.0,
    }  # One by one; the last two live on batches.
    assert 1 < load < over[name] if name in over else 0.1 < load < 0.8


@pytest.mark.parametrize("name", workload_names())
def test_every_workload_has_a_description_of_itself_and_its_parameters(name: str) -> None:
    kind = family(name)
    assert kind.about
    assert kind.source
    assert kind.__doc__ is not None
    assert all(one.metadata["about"].endswith(".") for one in parameters_of(kind).values())


# Arrivals.


def gaps(requests: tuple[WorkloadRequest, ...]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *arrivals(requests)])]


def test_poisson_arrivals_have_their_rate_and_the_spread_of_a_poisson_process() -> None:
    found = gaps(made("tetriserve", num_requests=4000, rate_per_s=0.25))
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in found) / len(found))
    assert mean == pytest.approx(4.0, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_bursts_are_in_the_last_fifth_of_each_period_and_keep_the_mean_rate() -> None:
    requests = made("tetriserve", num_requests=4000, rate_per_s=1.0, arrivals="bursts", period_s=50.0, peak=9.0)
    in_burst = sum(at_s % 50.0 >= 40.0 for at_s in arrivals(requests))
    assert requests[-1].arrival_s == pytest.approx(4000, rel=0.05)
    assert in_burst / len(requests) == pytest.approx(9 / 13, rel=0.05)


def test_a_day_has_its_trough_at_the_beginning_and_its_peak_in_the_middle() -> None:
    day = diurnal(4.0)
    assert min(day) == day[0]
    assert max(day) == day[len(day) // 2]
    assert max(day) / min(day) == pytest.approx(4.0, rel=0.01)
    requests = made("tetriserve", num_requests=4000, rate_per_s=1.0, arrivals="diurnal", period_s=400.0)
    middle = sum(100 <= at_s % 400 < 300 for at_s in arrivals(requests))
    assert middle / 4000 == pytest.approx(0.5 + 0.6 / math.pi, rel=0.03)


def test_a_trace_gives_the_pattern_and_the_rate_its_pace(tmp_path: Path) -> None:
    trace = trace_file(tmp_path / "t.csv", [1.0, 3.0, 2.0])
    requests = made("tetriserve", num_requests=4, rate_per_s=0.1, trace=trace)
    assert gaps(requests) == pytest.approx([0.0, 5.0, 15.0, 10.0])
    assert items(requests) == items(made("tetriserve", num_requests=4))


def test_a_trace_that_is_too_short_or_without_a_rate_is_refused(tmp_path: Path) -> None:
    trace = trace_file(tmp_path / "t.csv", [0.0, 0.0])
    with pytest.raises(BadParameter, match=r"tetriserve: trace is .*it has 3 requests; set num_requests to that"):
        made("tetriserve", trace=trace)
    with pytest.raises(BadParameter, match=r"all arrive at 0 s.*name another file"):
        made("tetriserve", trace=trace, num_requests=3)
    trace.write_text("when\n1\n")
    with pytest.raises(BadLine, match="when"):
        made("tetriserve", trace=trace)


# The published ones.


def test_tetriserve_has_equally_many_of_each_size_with_its_deadlines() -> None:
    requests = made("tetriserve")
    assert sides(requests) == {256: 75, 512: 75, 1024: 75, 2048: 75}
    assert all(request.slo_s == SLOS_S[request.height] and request.steps == 20 for request in requests)
    assert {request.slo_s for request in made("tetriserve", scale=1.5)} == {2.25, 3.0, 4.5, 7.5}


def test_tetriserve_skewed_draws_large_sizes_more_often() -> None:
    counts = sides(made("tetriserve", mix="skewed", num_requests=8000))
    weights = {side: math.exp((side / 2048) ** 2) for side in SLOS_S}
    for side, weight in weights.items():
        assert counts[side] / 8000 == pytest.approx(weight / sum(weights.values()), rel=0.06)


def test_tetriserve_can_be_homogeneous() -> None:
    assert sides(made("tetriserve", mix="512")) == {512: 300}


def test_ddit_has_its_mixes_of_51_frames_and_30_steps_without_deadlines() -> None:
    requests = made("ddit", mix="1:4:1", num_requests=60)
    assert sides(requests) == {144: 10, 240: 40, 360: 10}
    assert {(request.frames, request.steps, request.slo_s) for request in requests} == {(51, 30, None)}
    assert {request.slo_s for request in made("ddit", deadlines=True)} == {4.025, 5.875, 9.625}
    assert len(parameters_of(family("ddit"))["mix"].metadata["choices"]) == 10


def test_ddit_burst_arrives_at_once() -> None:
    assert set(arrivals(made("ddit", arrivals="at_once"))) == {0.0}


@pytest.mark.parametrize("model", ["sd3", "sdxl"])
def test_patchedserve_has_equal_shares_or_one_size_with_half_and_five_times_the_latency(model: str) -> None:
    name = f"patchedserve-{model}"
    assert sides(made(name, num_requests=99)) == {512: 33, 768: 33, 1024: 33}
    requests = made(name, mix="high", num_requests=100)
    assert sides(requests) == {512: 25, 768: 25, 1024: 50}
    table = f"{model}_h100"
    assert all(request.slo_s == pytest.approx(5 * alone_s(request, 1, table), abs=1e-3) for request in requests)


def test_skipped_steps_keep_the_deadlines_and_the_share_is_a_mean() -> None:
    """NIRVANA's 21% of 50 steps: none to 21 of them."""
    whole, less = (made("patchedserve-sd3", num_requests=2000, skipped=share) for share in (0.0, 0.21))
    assert (slos(whole), sides(whole), arrivals(whole)) == (slos(less), sides(less), arrivals(less))
    assert {request.steps for request in whole} == {50}
    assert {request.steps for request in less} == set(range(29, 51))
    assert sum(request.steps for request in less) / 2000 == pytest.approx(50 * 0.79, abs=0.3)


def test_coserving_has_its_share_of_videos_with_deadlines_of_their_own() -> None:
    requests = made("coserving", videos=0.1)
    assert Counter(request.pipeline for request in requests) == {"flux.1": 270, "hunyuanvideo": 30}
    assert min(r.slo_s or 0 for r in requests if r.frames > 1) > max(r.slo_s or 0 for r in requests if r.frames == 1)
    assert {r.pipeline for r in made("coserving", videos=0.0)} == {"flux.1"}


# Our own.


def test_heavy_tail_is_mostly_small_and_most_of_its_work_is_huge() -> None:
    requests = made("heavy-tail", num_requests=4000)
    seconds = sorted(device_seconds(requests, costs_of("flux1_l20")))
    assert seconds[2000] < 2.0
    assert sum(seconds[-400:]) > 0.5 * sum(seconds)
    lighter = device_seconds(made("heavy-tail", num_requests=4000, tail=2.0), costs_of("flux1_l20"))
    assert sum(lighter) < 0.2 * sum(seconds)


def test_wide_after_narrow_fills_the_devices_and_then_asks_for_all_of_them() -> None:
    requests = made("wide-after-narrow", cycles=5)
    for cycle in range(5):
        *narrow, wide = requests[9 * cycle : 9 * (cycle + 1)]
        assert {request.arrival_s for request in narrow} == {20.0 * cycle}
        assert 0 <= wide.arrival_s - 20.0 * cycle <= 1.0
        assert wide.slo_s is not None
        assert alone_s(wide, 8) < wide.slo_s < alone_s(wide, 4)
        assert all(request.slo_s is not None and request.slo_s > alone_s(request, 1) for request in narrow)
        assert alone_s(narrow[0], 1) > 1.0 + wide.slo_s - alone_s(wide, 8)


def test_unreachable_requests_cannot_be_on_time_even_alone_and_the_others_can() -> None:
    requests = made("unreachable", num_requests=2000)
    fastest = [min(alone_s(request, degree) for degree in (1, 2, 4, 8)) for request in requests]
    late = [(request.slo_s or 0) < least_s for request, least_s in zip(requests, fastest, strict=True)]
    assert sum(late) / 2000 == pytest.approx(0.5, rel=0.08)
    assert all(one or request.slo_s == SLOS_S[request.height] for one, request in zip(late, requests, strict=True))
    scaled = made("unreachable", num_requests=2000, scale=1.5)
    assert [r.slo_s for r, one in zip(scaled, late, strict=True) if one] == pytest.approx(
        [r.slo_s for r, one in zip(requests, late, strict=True) if one], abs=2e-6
    )
    assert not any(request.slo_s != SLOS_S[request.height] for request in made("unreachable", share=0.0))


def test_one_degree_leaves_no_narrower_one() -> None:
    chosen = Counter()
    for request in made("one-degree"):
        degrees = useful_degrees(costs_of("flux1dev_h100_eager"), stage_of("flux.1-dev", DIFFUSE), request.shape)
        assert request.slo_s is not None
        enough = [degree for degree in degrees if alone_s(request, degree) <= request.slo_s]
        assert request.slo_s == pytest.approx(1.08 * alone_s(request, enough[0]), abs=1e-5)
        chosen[request.height, enough[0]] += 1
    assert {degree for side, degree in chosen if side == 2048} == {1, 2, 4, 8}
    assert {degree for side, degree in chosen if side == 256} == {1}


@pytest.mark.parametrize(("steps", "last"), [(28, 0.0), (4, 2.0)])
def test_deadlines_of_promises_are_drawn_between_two_multiples_of_the_best_latency(steps: int, last: float) -> None:
    workload = make_workload("promises", {"steps": steps, "last": last, "num_requests": 400})
    requests, costs = workload.requests(0), costs_of(workload.cost_table)
    due = [one for one in requests if one.slo_s is not None]
    assert 0.05 < 1 - len(due) / len(requests) < 0.15
    factors = []
    for one in due:
        latencies_ns = [latency_ns(costs, one.pipeline, one.shape, one.steps, degree) for degree in (1, 2, 4, 8)]
        factors.append((one.slo_s or 0) / s_from_ns(min(latencies_ns)))
    assert 1.39 < min(factors) < 1.5
    assert 4.4 < max(factors) < 4.51
    assert sum(factors) / len(factors) == pytest.approx(2.95, abs=0.2)
    assert {one.steps for one in requests} == {steps}


def test_flood_is_mostly_best_effort_and_more_than_the_devices_can_do() -> None:
    requests = made("flood", num_requests=2000)
    urgent = [request for request in requests if request.slo_s is not None]
    assert len(urgent) / 2000 == pytest.approx(0.1, rel=0.15)
    assert all(request.slo_s == SLOS_S[request.height] for request in urgent)
    load = sum(device_seconds(requests, costs_of("flux1dev_h100_eager"))) / requests[-1].arrival_s / 8
    assert load > 1.2
    assert sum(device_seconds(urgent, costs_of("flux1dev_h100_eager"))) / requests[-1].arrival_s / 8 < 0.3


def test_in_phase_bursts_arrive_just_after_the_start_of_a_round() -> None:
    requests = made("in-phase", round_s=0.5, rounds=3, size=2, bursts=4)
    assert arrivals(requests) == pytest.approx([0.001, 0.001, 1.501, 1.501, 3.001, 3.001, 4.501, 4.501])
    assert len(sides(made("in-phase"))) == 4


def test_each_request_of_a_ladder_is_due_before_those_that_came_earlier() -> None:
    requests = made("ladder", runs=3, length=5)
    for run in range(3):
        members = requests[5 * run : 5 * (run + 1)]
        due_s = [member.deadline_s or 0.0 for member in members]
        assert [earlier - later for earlier, later in pairwise(due_s)] == pytest.approx([0.3] * 4, abs=1e-5)
        assert members[-1].slo_s == 3.0


# Parameters.


def test_an_unknown_workload_or_parameter_names_the_nearest() -> None:
    with pytest.raises(UnknownWorkload, match=r"no workload 'tetriserver'; did you mean tetriserve\?"):
        family("tetriserver")
    with pytest.raises(UnknownWorkload, match="use one of mixes, coserving, heavy-tail, ddit, "):
        family("xyz")
    with pytest.raises(BadParameter, match=r"tetriserve: alfa is not a parameter .*; did you mean alpha\?"):
        make_workload("tetriserve", {"alfa": 1.0})
    with pytest.raises(BadParameter, match="in-phase: q is not a parameter of this workload; it has scale, round_s, "):
        values_of("in-phase", {"q": "1"})


@pytest.mark.parametrize(
    ("name", "parameter", "value", "remedy"),
    [
        ("tetriserve", "rate_per_s", 0.0, "use a number above 0"),
        ("tetriserve", "rate_per_s", math.inf, "use a number above 0"),
        ("tetriserve", "num_requests", 0, "use a whole number of at least 1"),
        ("tetriserve", "num_requests", 2.5, "use a whole number of at least 1"),
        ("tetriserve", "num_requests", True, "use a whole number of at least 1"),
        ("tetriserve", "mix", "skewd", "did you mean skewed? use one of uniform, skewed, 256, 512, 1024, 2048"),
        ("tetriserve", "trace", "t.csv", "use the path of a file"),
        ("coserving", "videos", 1.5, "use a number of at least 0 and at most 1"),
        ("ddit", "deadlines", 1, "use true or false"),
        ("ladder", "scale", -1, "use a number above 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(name: str, parameter: str, value: Any, remedy: str) -> None:
    with pytest.raises(BadParameter) as caught:
        make_workload(name, {parameter: value})
    assert str(caught.value) == f"{name}: {parameter} is {value!r}; {remedy}"


def test_texts_become_the_type_of_the_parameter() -> None:
    texts = {"scale": "1.5", "num_requests": "7", "deadlines": "true", "mix": "2:1:1", "trace": "t.csv"}
    expected = {"scale": 1.5, "num_requests": 7, "deadlines": True, "mix": "2:1:1", "trace": Path("t.csv")}
    assert values_of("ddit", texts) == expected
    for parameter, text in (("num_requests", "1.5"), ("scale", "much"), ("deadlines", "yes")):
        with pytest.raises(BadParameter, match=f"ddit: {parameter} is '{text}'; use "):
            values_of("ddit", {parameter: text})


def test_the_requests_of_a_cycle_do_not_depend_on_how_many_cycles_there_are() -> None:
    assert made("wide-after-narrow", cycles=6)[:27] == made("wide-after-narrow", cycles=3)
