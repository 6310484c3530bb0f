"""The offset of a node's clock: within its stated error for any delays, and the best of the latest samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilework.control.nodes.clock import ClockOffset

DELAYS = st.integers(0, 10**9)


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=100))
def test_the_true_offset_is_within_the_stated_error(offset_ns: int, delays: list[tuple[int, int]]) -> None:
    """Each ping takes one time there and another back; the clocks run at the same speed."""
    clock, now_ns = ClockOffset(), 0
    for there, back in delays:
        clock.add(now_ns, now_ns + there + offset_ns, now_ns + there + back)
        now_ns += there + back + 1
    assert clock.error_ns is not None
    assert abs(clock.offset_ns - offset_ns) <= clock.error_ns
    assert clock.error_ns <= (min(there + back for there, back in delays[-32:]) + 1) // 2
    assert abs(clock.engine_ns(500 + offset_ns) - 500) <= clock.error_ns


def test_old_samples_are_forgotten_since_clocks_drift() -> None:
    clock = ClockOffset()
    clock.add(0, 1000, 0)
    for _ in range(32):
        clock.add(0, 3000, 4000)
    assert (clock.offset_ns, clock.error_ns) == (1000, 2000)
    clock.add(0, 7000, 2000)
    assert (clock.offset_ns, clock.error_ns) == (6000, 1000)


def test_without_a_sample_the_error_is_unknown() -> None:
    assert (ClockOffset().offset_ns, ClockOffset().error_ns) == (0, None)
