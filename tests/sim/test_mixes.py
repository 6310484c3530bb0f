"""Workloads of the mixes of a cost table: TridentServe's of the shipped tables, and those of a table of one's own."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tilework.core.request import Shape
from tilework.cost.mixes import MixBlock
from tilework.formats.workload import WorkloadRequest
from tilework.sim.workloads.family import BadParameter, costs_of, table_of
from tilework.sim.workloads.registry import family, make_workload
from tilework.sim.workloads.requests import device_seconds

TABLES = {
    "tridentserve-sd3": "sd3medium_l20",
    "tridentserve-flux": "flux1_l20",
    "tridentserve-cogvideox": "cogvideox15_l20",
    "tridentserve-hunyuanvideo": "hunyuanvideo_l20",
}
STEADY = ("light", "medium", "heavy")
OWN: dict[str, Any] = {
    "hardware": "a toy",
    "steps": 10,
    "slo_s": {"64x64": 3.0, "128x128": 9.0},
    "rows": [
        {"pipeline": "toy", "stage": "diffuse", "height": side, "width": side, "seconds": side * side / 1e5}
        for side in (64, 128)
    ],
    "mixes": {"calm": {"64x64": 3, "128x128": 1}, "wild": {"128x128": 1}},
    "dynamic": [
        {"from_min": 0, "to_min": 2, "rate_factor": 0.5, "calm": 1},
        {"from_min": 2, "to_min": 3, "rate_factor": 2, "calm": 0.2, "wild": 0.8},
    ],
    "diurnal": {"mix": "wild", "peak": 3.0},
}


def made(name: str, seed: int = 0, **values: Any) -> tuple[WorkloadRequest, ...]:
    return make_workload(name, values).requests(seed)


def own(path: Path, **changes: Any) -> str:
    """A table of one's own, in a file of its own."""
    file = path / f"{len(list(path.iterdir()))}.json"
    file.write_text(json.dumps({key: value for key, value in (OWN | changes).items() if value is not None}))
    return str(file)


def arrivals(requests: tuple[WorkloadRequest, ...]) -> list[float]:
    return [request.arrival_s for request in requests]


def shapes(requests: tuple[WorkloadRequest, ...]) -> list[Shape]:
    return [request.shape for request in requests]


def gaps(requests: tuple[WorkloadRequest, ...]) -> set[float]:
    return {round(later - earlier, 4) for earlier, later in pairwise(arrivals(requests))}


def between(requests: tuple[WorkloadRequest, ...], begin_s: float, end_s: float) -> tuple[WorkloadRequest, ...]:
    return tuple(request for request in requests if begin_s <= request.arrival_s < end_s)


def assert_shares(found: list[Shape], shares: dict[Shape, float], within: float = 1.0) -> None:
    """The counts are those of the shares, to within so many requests of each size."""
    counts, total = Counter(found), math.fsum(shares.values())
    assert set(counts) <= set(shares)
    for shape, share in shares.items():
        assert counts[shape] == pytest.approx(share / total * len(found), abs=within), shape


def blended(table: str, block: MixBlock) -> dict[Shape, float]:
    mixes = table_of(table).mixes.by_name
    found: dict[Shape, float] = {}
    for name, weight in block.weights.items():
        total = math.fsum(mixes[name].values())
        for shape, share in mixes[name].items():
            found[shape] = found.get(shape, 0.0) + weight * share / total
    return found


# Of the shipped tables.


@pytest.mark.parametrize("name", TABLES)
def test_tridentserve_has_half_an_hour_at_its_rate_evenly_spaced_with_the_slos_of_its_table(name: str) -> None:
    requests, table = made(name), table_of(TABLES[name])
    rate = family(name).__dataclass_fields__["rate_per_s"].default
    assert len(requests) == 1800 * rate
    assert requests[-1].arrival_s == pytest.approx(1800 - 1 / rate, abs=1e-3)
    assert max(gaps(requests)) - min(gaps(requests)) <= 1.01e-4
    assert all(request.slo_s == table.slo_s[str(request.shape)] for request in requests)
    assert {request.steps for request in requests} == {table.steps}


@pytest.mark.parametrize("load", STEADY)
@pytest.mark.parametrize("name", TABLES)
def test_a_steady_load_has_the_sizes_of_its_mix(name: str, load: str) -> None:
    requests = made(name, load=load, num_requests=1600)
    assert_shares(shapes(requests), dict(table_of(TABLES[name]).mixes.by_name[load]))
    halves = [shapes(requests[:800]), shapes(requests[800:])]
    for half in halves:  # In random order: hypergeometric, a standard deviation of at most sqrt(800) / 4 = 7.1.
        assert_shares(half, dict(table_of(TABLES[name]).mixes.by_name[load]), within=30)


def test_loads_grow_from_light_to_heavy() -> None:
    costs = costs_of("flux1_l20")
    light, medium, heavy = (sum(device_seconds(made("tridentserve-flux", load=load), costs)) for load in STEADY)
    assert light < medium / 1.1
    assert medium < heavy / 1.3


@pytest.mark.parametrize("name", TABLES)
def test_dynamic_has_the_rates_and_sizes_of_its_blocks(name: str) -> None:
    requests = made(name, load="dynamic", num_requests=3600)
    rate = family(name).__dataclass_fields__["rate_per_s"].default
    minute_s = 3600 / rate / 30
    for block in table_of(TABLES[name]).mixes.dynamic:
        inside = between(requests, block.from_min * minute_s, block.to_min * minute_s)
        expected = 120 * (block.to_min - block.from_min) * block.rate_factor
        assert len(inside) == pytest.approx(expected, abs=1.01)
        assert len(gaps(inside)) <= 2, "evenly spaced in each block"
        assert_shares(shapes(inside), blended(TABLES[name], block), within=1.01)
    assert len(between(requests, 0.0, 30 * minute_s)) == 3600


def test_diurnal_goes_through_one_day_of_the_medium_mix() -> None:
    requests = made("tridentserve-flux", load="diurnal")
    quarters = Counter(int(at_s // 450) for at_s in arrivals(requests))
    assert quarters[1] == pytest.approx(quarters[2], rel=0.02)
    assert quarters[1] / 2700 == pytest.approx(0.25 + 0.3 / math.pi, rel=0.02), "1 + 0.6 sin"
    assert requests[-1].arrival_s < 1800
    assert shapes(requests) == shapes(made("tridentserve-flux"))


@pytest.mark.parametrize("load", ["medium", "dynamic", "diurnal"])
def test_poisson_arrivals_have_the_same_mean_rate(load: str) -> None:
    requests = made("tridentserve-flux", load=load, arrivals="poisson", num_requests=4000, rate_per_s=2.0)
    assert requests[-1].arrival_s == pytest.approx(2000, rel=0.05)
    assert len(gaps(requests)) > 100


def test_a_trace_gives_sizes_and_steps_and_deadlines_grow_with_the_latency(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    head = "arrival_s,height,width,num_frames,num_inference_steps\n"
    trace.write_text(head + "".join(f"{at_s},1024,1024,1,{steps}\n" for at_s, steps in enumerate((4, 28, 28))))
    requests = made("tridentserve-flux", load="trace", trace=trace, num_requests=3)
    assert [(request.shape, request.steps) for request in requests] == [(Shape(1024, 1024), n) for n in (4, 28, 28)]
    step_s, others_s = 0.84034, 0.12 + 0.70
    scale = (others_s + 28 * step_s) / (others_s + 4 * step_s)
    assert [request.slo_s for request in requests] == pytest.approx([10.453, *[10.453 * scale] * 2], rel=1e-4)
    assert arrivals(requests) == pytest.approx([0.0, 1 / 1.5, 2 / 1.5], abs=1e-5)
    with pytest.raises(BadParameter, match="load is 'trace'; name the file as trace, too"):
        made("tridentserve-flux", load="trace")


def test_the_blocks_of_a_trace_are_those_of_its_own_arrivals(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,height,width,steps\n" + "".join(f"{at_s},64,64,1\n" for at_s in range(121)))
    table = own(tmp_path)
    requests = made("mixes", cost=table, load="dynamic", trace=trace, num_requests=121, rate_per_s=1.0)
    assert arrivals(requests) == pytest.approx(list(range(121)))
    assert_shares(shapes(requests[:81]), {Shape(64, 64): 3, Shape(128, 128): 1})


# Of a table of one's own.


def test_a_mix_of_ones_own_at_a_rate_for_half_an_hour(tmp_path: Path) -> None:
    requests = made("mixes", cost=own(tmp_path), load="calm", rate_per_s=0.2, arrivals="constant")
    assert arrivals(requests) == pytest.approx([5.0 * index for index in range(360)])
    assert_shares(shapes(requests), {Shape(64, 64): 3, Shape(128, 128): 1})
    assert {(request.pipeline, request.steps) for request in requests} == {("toy", 10)}
    assert {request.shape: request.slo_s for request in requests} == {Shape(64, 64): 3.0, Shape(128, 128): 9.0}


def test_the_length_is_in_minutes_or_in_requests(tmp_path: Path) -> None:
    common = {"cost": own(tmp_path), "load": "calm", "rate_per_s": 0.5}
    assert len(made("mixes", **common)) == 900
    assert len(made("mixes", **common, minutes=2.0)) == 60
    assert len(made("mixes", **common, minutes=2.0, num_requests=7)) == 7
    assert len(made("mixes", **common, minutes=0.001)) == 1


def test_poisson_arrivals_are_the_default(tmp_path: Path) -> None:
    assert len(gaps(made("mixes", cost=own(tmp_path), load="calm"))) > 100


def test_blocks_are_stretched_to_the_length_and_their_rates_are_relative(tmp_path: Path) -> None:
    """At half and twice the mean rate for 2 and 1 of 3 minutes: a third and two thirds of the requests."""
    common = {"cost": own(tmp_path), "load": "dynamic", "rate_per_s": 1.0, "arrivals": "constant"}
    requests = made("mixes", **common, minutes=6.0)
    first, second = between(requests, 0.0, 240.0), between(requests, 240.0, 360.0)
    assert (len(first), len(second)) == (120, 240)
    assert_shares(shapes(first), {Shape(64, 64): 3, Shape(128, 128): 1})
    assert_shares(shapes(second), {Shape(64, 64): 0.15, Shape(128, 128): 0.85})


def test_a_day_of_ones_own(tmp_path: Path) -> None:
    requests = made("mixes", cost=own(tmp_path), load="diurnal", rate_per_s=1.0, minutes=60.0, arrivals="constant")
    assert set(shapes(requests)) == {Shape(128, 128)}
    middle = between(requests, 900.0, 2700.0)
    assert len(middle) / 3600 == pytest.approx(0.5 + 0.5 / math.pi, rel=0.02), "a peak of 3 times: 1 + 0.5 sin"


def test_a_table_without_slos_gives_best_effort(tmp_path: Path) -> None:
    assert {request.slo_s for request in made("mixes", cost=own(tmp_path, slo_s=None), load="calm")} == {None}


def test_a_size_without_an_slo_has_one_like_that_of_the_nearest(tmp_path: Path) -> None:
    """96 x 96 is nearer to 64 x 64, and takes 2.25 times as long."""
    table = own(tmp_path, mixes={"calm": {"96x96": 1}}, dynamic=None, diurnal=None)
    (slo_s,) = {request.slo_s for request in made("mixes", cost=table, load="calm")}
    assert slo_s == pytest.approx(6.75)


@pytest.mark.parametrize(
    ("changes", "values", "message"),
    [
        (
            {},
            {"load": "clam"},
            "mixes: load is 'clam'; TABLE has calm, wild, dynamic, diurnal; use one of these",
        ),
        ({"dynamic": None}, {"load": "dynamic"}, "mixes: load is 'dynamic'; TABLE has calm, wild, diurnal; use one of"),
        ({"mixes": None, "dynamic": None, "diurnal": None}, {}, "mixes: cost is 'TABLE', which has no mixes; add them"),
        ({"steps": None}, {}, "mixes: cost is 'TABLE', which has no steps; add how many a request has"),
        (
            {"rows": [*OWN["rows"], OWN["rows"][0] | {"pipeline": "other"}]},
            {},
            "mixes: cost is 'TABLE', which has several pipelines; name a table of one",
        ),
        (
            {"mixes": {"calm": {"64x64": -1}}},
            {},
            "mixes: cost is 'TABLE'; TABLE: mixes.calm.64x64 is -1; expected a weight of at least 0",
        ),
        ({}, {"minutes": 0.0}, "mixes: minutes is 0.0; use a number above 0"),
        ({}, {"num_requests": 0}, "mixes: num_requests is 0; use a whole number of at least 1"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    changes: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    table = own(tmp_path, **changes)
    with pytest.raises(BadParameter) as caught:
        make_workload("mixes", {"cost": table, "load": "calm"} | values)
    assert str(caught.value).startswith(message.replace("TABLE", table))


def test_a_table_that_is_not_there_is_a_mistake_of_the_parameter() -> None:
    with pytest.raises(BadParameter, match=r"^mixes: cost is 'nowhere.json'; nowhere.json: "):
        make_workload("mixes", {"cost": "nowhere.json"})
