"""Which margins the works of a server lead to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import promise_mix, table
from tilework.admission.margins import MarginEstimator
from tilework.control.controller import ControllerConfig
from tilework.control.log import entry_line, header_line, replay
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.core.time import NS_PER_MS, START_MARGINS, Margin, Margins
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

FLOOR = Margins(Margin(fixed_ns=10 * NS_PER_MS, permille=10), Margin(fixed_ns=5 * NS_PER_MS, permille=5))
TWO_MEMORIES = 2000

Learned = tuple[tuple[int, ...], int, int]
"""A work: its devices, its overrun and its predicted time, in nanoseconds."""


def after(works: Sequence[Learned], estimator: MarginEstimator | None = None) -> MarginEstimator:
    estimator = estimator or MarginEstimator()
    for work in works:
        estimator.learn(*work)
    return estimator


def calm(num: int) -> list[Learned]:
    return [((0,), 0, 100 * NS_PER_MS)] * num


def late(by_ms: int, devices: tuple[int, ...] = (0,)) -> Learned:
    return devices, by_ms * NS_PER_MS, 100 * NS_PER_MS


def test_a_calm_server_gets_the_least_margins_once_it_has_seen_some_hundred_works() -> None:
    assert after(calm(200)).margins == START_MARGINS
    assert after(calm(TWO_MEMORIES)).margins == FLOOR


def test_a_noisy_server_gets_larger_margins_than_at_the_start_at_once() -> None:
    assert after([late(75)]).margins.guard == Margin(fixed_ns=80 * NS_PER_MS, permille=30)


def test_one_late_work_in_a_hundred_keeps_the_margin_up() -> None:
    estimator = MarginEstimator()
    for number in range(50):
        after([late(50), *calm(99)], estimator)
        assert number < 3 or estimator.margins.guard.fixed_ns == 60 * NS_PER_MS


def test_a_margin_stays_for_long_after_a_late_work_and_then_goes_down_again() -> None:
    estimator = after(calm(TWO_MEMORIES))
    after([late(50)], estimator)
    raised = estimator.margins
    assert raised.guard.fixed_ns == 60 * NS_PER_MS
    assert after(calm(1000), estimator).margins == raised
    assert after(calm(1000), estimator).margins == FLOOR


def test_late_works_one_after_another_add_up_and_those_of_other_devices_do_not() -> None:
    apart = after([*calm(TWO_MEMORIES), late(12, (0,)), late(12, (1,))]).margins.guard
    together = after([*calm(TWO_MEMORIES), late(12, (0,)), late(12, (0, 1)), late(12, (1,))]).margins.guard
    assert (apart.fixed_ns, together.fixed_ns) == (15 * NS_PER_MS, 40 * NS_PER_MS)


def test_works_that_are_all_a_little_late_need_a_share_and_no_fixed_part() -> None:
    assert after([late(3)] * TWO_MEMORIES).margins.guard == Margin(fixed_ns=5 * NS_PER_MS, permille=30)


def test_early_works_make_up_for_late_ones() -> None:
    assert after([late(4), late(-4)] * TWO_MEMORIES).margins == FLOOR


def test_no_fault_leads_to_margins_that_leave_no_room_for_promises() -> None:
    largest = after([late(60_000)] * 20).margins
    assert largest.guard == Margin(fixed_ns=320 * NS_PER_MS, permille=120)
    assert after([*calm(TWO_MEMORIES), late(60_000)]).margins.guard.due_ns(0, 0) <= 240 * NS_PER_MS
    assert after(calm(2 * TWO_MEMORIES), after([late(60_000)] * 20)).margins == FLOOR


def works(rng: Random) -> Iterator[Learned]:
    """Works of a server with hiccups: some noise, and now and then one that is much later."""
    noise, rarity = rng.choice((0.0, 0.01, 0.05)), rng.choice((20, 100, 200, 10_000))
    while True:
        predicted_ns = rng.choice((5, 50, 400, 1500)) * NS_PER_MS
        overrun_ns = round(predicted_ns * rng.gauss(0, noise)) + rng.choice((0, 0, NS_PER_MS))
        if rng.randrange(rarity) == 0:
            overrun_ns += rng.randrange(120 * NS_PER_MS)
        yield rng.choice(((0,), (1,), (2,), (0, 1), (0, 1, 2, 3))), overrun_ns, predicted_ns


@settings(max_examples=10)
@given(st.integers(0, 1 << 32).map(Random))
def test_the_margin_would_have_been_enough_for_the_recent_chains_of_works(rng: Random) -> None:
    """A chain: up to ten works of one device, one after another. No overrun is larger than what counts of one."""
    estimator, recent = MarginEstimator(), dict[int, list[tuple[int, int]]]()
    for number, (devices, overrun_ns, predicted_ns) in enumerate(islice(works(rng), 4000)):
        before = estimator.margins
        estimator.learn(devices, overrun_ns, predicted_ns)
        for device_id in devices:
            recent.setdefault(device_id, []).append((overrun_ns, predicted_ns))
            if number >= 1000 or estimator.margins != before:
                assert is_enough(estimator.margins.guard, recent[device_id][-10:])
        if number % 1000 == 999:
            for of_device in recent.values():
                ends = range(10, len(of_device))
                assert all(is_enough(estimator.margins.guard, of_device[end - 10 : end]) for end in ends)
            recent.clear()


def is_enough(margin: Margin, chain: Sequence[tuple[int, int]]) -> bool:
    predicted_ns = sum(predicted_ns for _, predicted_ns in chain)
    return sum(overrun_ns for overrun_ns, _ in chain) <= margin.due_ns(predicted_ns, 0) - predicted_ns


# In a simulation.


class Served(NamedTuple):
    """What a simulated server did: its log, all margins that it had, and how many promises it gave and broke."""

    lines: list[str]
    seen: set[Margins]
    num_given: int
    num_broken: int
    margins: Margins


def served(*, dispatch_ms: int = 0, slower: float = 1.0, margins: Margins | None = None) -> Served:
    """A simulated server with two devices after a mix of promises.

    Its works take `slower` times what its table says. It has these `margins` if there are any; else it learns them.
    """
    config, costs = ControllerConfig(policy="edf"), table(degrees=(1, 2))
    devices = replace(costs, rows=tuple(replace(row, seconds=slower * row.seconds) for row in costs.rows))
    simulation = Simulation(config, costs, SimConfig(num_devices=2, dispatch_ns=dispatch_ms * NS_PER_MS), devices)
    lines, seen = [header_line("1.0", config, costs)], set[Margins]()

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        lines.append(entry_line(event, actions, now_ns))
        seen.add(simulation.controller.tracker.margins)

    with pytest.MonkeyPatch.context() as patch:
        if margins is not None:
            patch.setattr(
                MarginEstimator, "margins", property(lambda _: margins, lambda _, learned: None), raising=False
            )
        trace = simulation.run(promise_mix(400, 1.6, seed=0, share=0.5), (), observe)
    given = [one for one in trace.endings if one.request.is_promise and one.job_id is not None]
    num_broken = sum(not one.on_time for one in given)
    return Served(lines, seen, len(given), num_broken, simulation.controller.tracker.margins)


def test_a_noisy_server_breaks_no_promise_where_one_with_the_least_margins_does() -> None:
    noisy = served(dispatch_ms=20)
    assert noisy.num_given > 100
    assert noisy.num_broken == 0
    assert noisy.margins.guard.permille > START_MARGINS.guard.permille
    assert served(dispatch_ms=20, margins=FLOOR).num_broken > 5


def test_a_calm_server_gives_more_promises_than_with_the_margins_that_it_begins_with() -> None:
    calm_one = served()
    assert calm_one.margins == FLOOR
    assert calm_one.num_broken == 0
    assert calm_one.num_given > served(margins=START_MARGINS).num_given


def test_a_table_that_is_wrong_does_not_count_as_it_is_corrected() -> None:
    assert served(slower=1.3).seen == {START_MARGINS, FLOOR}


def test_margins_are_learned_again_from_a_log() -> None:
    noisy = served(dispatch_ms=20)
    assert len(noisy.seen) > 3
    assert replay(noisy.lines) == (len(noisy.lines) - 1, None)
