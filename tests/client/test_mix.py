"""What the bench sends: arrivals, sizes, deadlines and traces, each against what can be counted."""

import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.client.mix import (
    PROMPTS,
    mixed_workload,
    parse_size,
    parse_sizes,
    parse_slo,
    read_prompts,
    with_slo,
)
from tilework.core.arrivals import constant_s, first_s, poisson_s, varying_s
from tilework.core.request import OnMiss, Shape
from tilework.core.shares import dealt, skewed
from tilework.formats.json_lines import BadLine
from tilework.formats.trace import paced, read_trace
from tilework.formats.workload import WorkloadRequest, write_workload

PAPER = {Shape(side, side): 1.0 for side in (256, 512, 1024, 2048)}


def workload(seed=0, count=40, shares=PAPER):
    arrivals_s = first_s(poisson_s(2.0, Random(seed)), count, None)
    return mixed_workload(arrivals_s, shares, pipeline="m", steps=5, prompts=PROMPTS, seed=seed)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    arrivals_s = first_s(poisson_s(4.0, Random(1)), 4000, None)
    gaps = [b - a for a, b in zip([0.0, *arrivals_s], arrivals_s, strict=False)]
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_a_seed_at_another_rate_is_the_same_pattern_stretched():
    slow, fast = (first_s(poisson_s(rate, Random(7)), 50, None) for rate in (1.0, 4.0))
    assert slow == pytest.approx([4 * at_s for at_s in fast])


def test_number_and_duration_end_the_arrivals_whichever_comes_first():
    assert first_s(constant_s(10.0), 3, None) == [0.0, 0.1, 0.2]
    assert first_s(constant_s(10.0), 100, 0.25) == [0.0, 0.1, 0.2]
    assert first_s(constant_s(10.0), 2, 0.25) == [0.0, 0.1]


def test_the_seed_decides_everything():
    assert workload(3) == workload(3)
    assert [(r.shape, r.prompt, r.seed) for r in workload(3)] != [(r.shape, r.prompt, r.seed) for r in workload(4)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 200), st.integers())
def test_sizes_are_dealt_in_proportion_to_within_one_request(weights, count, seed):
    shares = {Shape(index + 1, 1): weight for index, weight in enumerate(weights)}
    counts = Counter(dealt(shares, count, Random(seed)))
    assert counts.total() == count
    for shape, weight in shares.items():
        assert abs(counts[shape] - count * weight / math.fsum(weights)) < 1 + 1e-6


def test_the_skewed_mix_is_tetriserve_s():
    """Section 6.1: p_i in proportion to exp(L_i / L_max), so 2048 px weighs e, and 256 px exp(1/64)."""
    weights = skewed(PAPER)
    total = math.exp(1 / 64) + math.exp(1 / 16) + math.exp(1 / 4) + math.e
    counts = Counter(dealt(weights, 10_000, Random(0)))
    for side, share in ((256, 1 / 64), (512, 1 / 16), (1024, 1 / 4), (2048, 1.0)):
        assert counts[Shape(side, side)] / 10_000 == pytest.approx(math.exp(share) / total, abs=1e-4)
    assert skewed(PAPER, alpha=0.0) == PAPER


def test_sizes_are_read_as_width_by_height_with_weights():
    assert parse_sizes("256, 512x768:2,1024:0.5") == {Shape(256, 256): 1, Shape(768, 512): 2, Shape(1024, 1024): 0.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "size is ''"),
        ("256,", "size is ''"),
        ("0", "size is '0'"),
        ("512*768", "WIDTHxHEIGHT"),
        ("256:0", "the weight in sizes entry '256:0' is '0'"),
        ("256:nan", "above 0"),
        ("256,256x256", "'256x256' twice"),
    ],
)
def test_a_wrong_size_is_named(text, words):
    with pytest.raises(ValueError, match="size") as caught:
        parse_sizes(text)
    assert words in str(caught.value)


def test_deadlines_go_by_size_then_by_the_rest_then_by_the_idle_server():
    unloaded_s = dict.fromkeys(PAPER, 2.0)
    rule = parse_slo("256=1.5, 512=2, 7")
    assert [rule.slo_s(shape, {}) for shape in PAPER] == [1.5, 2.0, 7.0, 7.0]
    assert parse_slo("auto").slo_s(Shape(256, 256), unloaded_s) == 5.0
    assert parse_slo("auto:3").slo_s(Shape(256, 256), unloaded_s) == 6.0
    with pytest.raises(ValueError, match="nothing of size 1024x1024; add 1024x1024=SECONDS"):
        parse_slo("256=1,512=2").slo_s(Shape(1024, 1024), {})


@pytest.mark.parametrize("text", ["", "0", "256=", "256=-1", "auto:x", "fast", "256=inf", "=3"])
def test_a_wrong_deadline_is_named(text):
    with pytest.raises(ValueError, match=r"slo|size is"):
        parse_slo(text)


def test_scale_and_on_miss_are_laid_over_deadlines_of_either_source():
    given_s = WorkloadRequest(arrival_s=0.0, pipeline="m", height=64, width=64, steps=1, slo_s=2.0)
    none_s = WorkloadRequest(arrival_s=0.0, pipeline="m", height=64, width=64, steps=1)
    asked = {"unloaded_s": {}, "scale": 1.5, "on_miss": OnMiss.REJECT}
    kept = with_slo([given_s, none_s], None, **asked)
    assert [(r.slo_s, r.on_miss) for r in kept] == [(3.0, OnMiss.REJECT), (None, OnMiss.REJECT)]
    assert [r.slo_s for r in with_slo([given_s, none_s], parse_slo("4"), **asked)] == [6.0, 6.0]


def test_a_csv_trace_reads_under_both_spellings_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.CSV"
    path.write_text("arrival_s,height,width,num_frames,num_inference_steps\n3.5,768,512,1,28\n0.5,64,64,1,4\n")
    first, second = read_trace(path, "flux")
    assert (first.arrival_s, first.shape, first.steps, first.pipeline) == (0.5, Shape(64, 64), 4, "flux")
    assert (second.arrival_s, second.shape, second.slo_s) == (3.5, Shape(768, 512), None)
    path.write_text("\ufeffsteps,width,height,arrival_s,slo_s,prompt\n4,64,32,0,1.5,a cat\n")  # As Excel writes it.
    (only,) = read_trace(path, "flux")
    assert (only.shape, only.slo_s, only.prompt) == (Shape(32, 64), 1.5, "a cat")


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("arrival_s,height,width\n", 1, "steps"),
        ("arrival_s,height,width,steps,colour\n", 1, "colour"),
        ("arrival_s,height,width,steps\n0,64,64,4\n0,64,6.5,4\n", 3, "width"),
        ("arrival_s,height,width,steps\n-1,64,64,4\n", 2, "arrival_s"),
        ("arrival_s,height,width,steps\n0,64,64,\n", 2, "steps"),
        ("arrival_s,height,width,steps,slo_s\n0,64,64,4,0\n", 2, "slo_s"),
        ("", 1, "arrival_s"),
        ("arrival_s,height,width,steps,prompt\n0,64,64,4,a cat, red\n", 2, " red"),
        ("arrival_s,height,width,steps,prompt\n0,64,64,4,\xe4\n", 1, ""),
        (f"arrival_s,height,width,steps,prompt\n0,64,64,4,{'x' * (1 << 18)}\n", 2, ""),
    ],
    ids=lambda part: str(part)[:60],
)
def test_a_wrong_csv_names_line_and_field(tmp_path, text, line, field):
    path = tmp_path / "trace.csv"
    path.write_text(text, "latin-1")
    with pytest.raises(BadLine) as caught:
        read_trace(path, "m")
    assert (caught.value.line, caught.value.field) == (line, field)


def test_a_trace_s_pace_is_changed_and_its_pattern_kept(tmp_path):
    write_workload(tmp_path / "w.jsonl", workload(count=11))
    trace = read_trace(tmp_path / "w.jsonl", "other")
    faster = paced(trace, 5.0)
    assert faster[0].arrival_s == 0
    assert faster[-1].arrival_s == pytest.approx(2.0)
    gaps = [[b.arrival_s - a.arrival_s for a, b in pairwise(r)] for r in (trace, faster)]
    ratios = [slow / fast for slow, fast in zip(*gaps, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * 10)
    with pytest.raises(ValueError, match="all arrive at"):
        paced(trace[:1], 5.0)


def test_prompts_come_from_lines_that_are_not_blank(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two  \n")
    assert read_prompts(path) == ("one", "two")
    path.write_text("\n")
    with pytest.raises(ValueError, match="one prompt per line"):
        read_prompts(path)


def test_a_square_may_be_written_by_its_side():
    assert parse_size("512") == parse_size("512x512") == Shape(512, 512)
    assert parse_size("832x480x81") == Shape(480, 832, 81)


def test_a_varying_rate_goes_through_its_profile_each_period_and_keeps_its_mean():
    arrivals_s = first_s(varying_s(2.0, [1.0, 0.0, 3.0], 30.0, Random(5)), 6000, None)
    thirds = Counter(int(at_s % 30.0 // 10) for at_s in arrivals_s)
    assert arrivals_s[-1] == pytest.approx(3000, rel=0.05)
    assert thirds[1] == 0
    assert thirds[2] / 6000 == pytest.approx(0.75, rel=0.05)


def test_a_flat_profile_changes_nothing():
    flat = first_s(varying_s(2.0, [5.0] * 3, 4.0, Random(7)), 50, None)
    assert flat == pytest.approx(first_s(poisson_s(2.0, Random(7)), 50, None))
