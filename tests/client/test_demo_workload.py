"""The demo's workload: deterministic, mixed, as busy as asked for, and every deadline within reach."""

import re

import pytest

from tilework.client.demo_workload import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SIDES,
    demo_clips,
    demo_workload,
    linear_service,
)

SERVICE = linear_service(0.1, 2e-5)
PROMPT = re.compile(
    rf"a (small|large) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) on an? ({'|'.join(COLOURS)}) background"
)


def test_the_seed_decides_everything():
    assert demo_workload(3, SERVICE) == demo_workload(3, SERVICE)
    assert demo_workload(3, SERVICE) != demo_workload(4, SERVICE)


@pytest.mark.parametrize("seed", range(5))
def test_the_mix_is_what_the_demo_promises(seed):
    workload = demo_workload(seed, SERVICE)
    assert len(workload) == 24
    assert {(r.height, r.width) for r in workload} == set(SIDES)
    assert sum(r.slo_s is None for r in workload) == 3
    prompts = [PROMPT.fullmatch(r.prompt or "") for r in workload]
    assert all(match is not None and match[2] != match[4] for match in prompts)
    assert not any(" on a orange" in (r.prompt or "") for r in workload)
    arrivals_s = [r.arrival_s for r in workload]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[0] == 0


@pytest.mark.parametrize(("devices", "load"), [(1, 0.5), (2, 0.8), (4, 1.5)])
def test_the_offered_load_is_what_was_asked_for(devices, load):
    """Over many requests the work per second of arrivals is `load` devices' worth per device."""
    workload = demo_workload(0, SERVICE, num_requests=600, num_devices=devices, load=load)
    offered = sum(SERVICE(r.shape) for r in workload) / workload[-1].arrival_s
    assert offered == pytest.approx(devices * load, rel=0.02)


def test_deadlines_follow_service_time():
    workload = demo_workload(1, SERVICE, floor_s=0.25)
    slack = {round((r.slo_s - 0.25) / SERVICE(r.shape), 2) for r in workload if r.slo_s is not None}
    assert slack == {2.0, 3.0, 4.0}


@pytest.mark.parametrize("name", ["num_requests", "num_devices", "load"])
def test_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        demo_workload(0, SERVICE, **{name: 0})


def test_clips_move_in_each_direction_in_colours_of_their_own():
    clips = demo_clips(1)
    assert clips == demo_clips(1)
    words = [clip.prompt.split() for clip in clips]
    assert [of_clip[4] for of_clip in words] == list(DIRECTIONS)
    assert len({of_clip[1] for of_clip in words}) == len(DIRECTIONS)
    assert {of_clip[2] for of_clip in words} == {"circle", "square", "triangle"}
    assert all(clip.is_clip and clip.slo_s is None for clip in clips)
