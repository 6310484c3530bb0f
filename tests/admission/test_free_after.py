"""When devices are free after the jobs ahead, against placing every job on every device."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.admission.contract import Ahead, Running
from tilework.admission.free_after import FreeAfterAhead, FreeAfterRunning, FreeDevices
from tilework.admission.list_schedule import FreeTimes, place
from tilework.core.block import Demand

TIMES = st.integers(0, 60)
FLAT = st.tuples(st.integers(1, 6), st.integers(0, 30)).map(lambda pair: Demand(*pair))
SHAPED = st.builds(
    lambda width, parts: Demand(width, sum(parts), parts[0], parts[2]),
    st.integers(2, 6),
    st.tuples(*[st.integers(0, 9)] * 3),
)
BLOCKS = st.one_of(FLAT, SHAPED)
RUNNING = st.tuples(st.integers(0, 9), TIMES, BLOCKS)
DEVICES = st.lists(TIMES, min_size=1, max_size=12).map(sorted)


def level(free_ns: FreeTimes, volume_ns: int) -> int:
    """The highest level to which the volume raises the devices: each takes what it lacks of it."""
    return max(level for level in range(volume_ns + 62) if sum(max(0, level - one) for one in free_ns) <= volume_ns)


def naive_end(free_ns: FreeTimes, ahead: Ahead, block: Demand, ready_ns: int) -> int:
    after = list(free_ns)
    if ahead.volume_ns:
        after = sorted(max(one, level(free_ns, ahead.volume_ns)) for one in free_ns)
    for demand in ahead.demands:
        place(after, demand)
    return place(after, block, ready_ns)


@given(
    free_ns=DEVICES,
    volume_ns=st.one_of(st.just(0), st.integers(1, 400)),
    demands=st.lists(BLOCKS, max_size=10),
    block=BLOCKS,
    ready_ns=TIMES,
)
def test_it_ends_when_it_would_after_all_jobs_were_placed_on_all_devices(
    free_ns: FreeTimes, volume_ns: int, demands: list[Demand], block: Demand, ready_ns: int
) -> None:
    before, ahead = list(free_ns), Ahead(volume_ns, demands)
    devices = FreeDevices(free_ns)
    for _ in range(2):
        assert FreeAfterAhead(devices, ahead).end_ns(block, ready_ns) == naive_end(before, ahead, block, ready_ns)
        assert devices.free_ns == before, "the next request begins with the same devices"


@settings(max_examples=50)
@given(
    free_ns=st.integers(0, 60),
    num_devices=st.integers(1, 100),
    demands=st.lists(BLOCKS, max_size=10),
    block=BLOCKS,
)
def test_devices_that_are_free_at_the_same_time_are_no_exception(
    free_ns: int, num_devices: int, demands: list[Demand], block: Demand
) -> None:
    """As idle ones are, and those that a long queue fills to one level."""
    same, ahead = [free_ns] * num_devices, Ahead(0, demands)
    assert FreeAfterAhead(FreeDevices(same), ahead).end_ns(block) == naive_end(same, ahead, block, 0)


@settings(max_examples=50)
@given(
    free_ns=DEVICES,
    running=st.one_of(st.lists(RUNNING, max_size=80), st.lists(RUNNING, min_size=70, max_size=80)),
    keys=st.lists(st.integers(0, 10), min_size=1, max_size=6),
)
def test_running_jobs_are_placed_in_order_of_service_up_to_any_place(
    free_ns: FreeTimes, running: list[tuple[int, int, Demand]], keys: list[int]
) -> None:
    jobs = sorted(Running((urgency_ns, index), *rest) for index, (urgency_ns, *rest) in enumerate(running))
    after = FreeAfterRunning(list(free_ns), jobs)
    for urgency_ns in keys:
        expected = list(free_ns)
        for place_, ready_ns, demand in jobs:
            if place_ < (urgency_ns, 40):
                place(expected, demand, ready_ns)
        assert after.before((urgency_ns, 40)).free_ns == expected


def test_the_remaining_work_of_running_jobs_waits_for_their_works() -> None:
    """It is ready at 9 and takes the device that is free last by then; the last block takes the other at once."""
    after = FreeAfterRunning([0, 7], [Running((1, 0), 9, Demand(1, 5))]).before((2, -1))
    assert FreeAfterAhead(after, Ahead(0, [])).end_ns(Demand(1, 3)) == 3
    assert FreeAfterAhead(after, Ahead(0, [Demand(1, 20)])).end_ns(Demand(1, 3)) == 17


def test_pouring_fills_devices_in_the_order_in_which_they_are_free() -> None:
    last = Demand(1, 0)
    assert FreeAfterAhead(FreeDevices([0, 1000]), Ahead(200, [])).end_ns(last) == 200
    assert FreeAfterAhead(FreeDevices([0, 100]), Ahead(300, [])).end_ns(last) == 200
    assert FreeAfterAhead(FreeDevices([0, 100]), Ahead(300, [Demand(2, 5)])).end_ns(Demand(1, 1)) == 206, (
        "blocks that are known one by one come after it"
    )


@given(
    free=st.lists(st.integers(0, 1000), min_size=1, max_size=8).map(sorted),
    ahead=st.lists(st.integers(1, 50), min_size=129, max_size=400),
)
def test_pouring_many_jobs_is_close_to_placing_each(free: list[int], ahead: list[int]) -> None:
    exact = list(free)
    for job_ns in ahead:
        exact[exact.index(min(exact))] += job_ns
    waiting = Ahead(sum(ahead[:-128]), [Demand(1, job_ns) for job_ns in ahead[-128:]])
    end_ns = FreeAfterAhead(FreeDevices(free), waiting).end_ns(Demand(1, 0))
    assert abs(end_ns - min(exact)) <= 2 * max(ahead)
