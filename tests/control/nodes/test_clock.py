"""The offset of a node's clock: within its stated error for any delays, and the best of the latest samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilework.control.nodes.clock import ClockOffset

DELAYS = st.integers(0, 10**9)


@given(
    st.integers(-(10**12), 10**12), st.integers(-30, 30), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=100)
)
def test_the_true_offset_is_within_the_stated_error(
    offset_ns: int, drift_ppm: int, delays: list[tuple[int, int]]
) -> None:
    """Each ping takes one time there and another back, and the node's clock runs a little faster or slower."""

    def ahead_ns(at_ns: int) -> int:
        return offset_ns + at_ns * drift_ppm // 1_000_000

    clock, now_ns = ClockOffset(), 0
    for there, back in delays:
        read_ns = now_ns + there
        clock.add(now_ns, read_ns + ahead_ns(read_ns), read_ns + back)
        now_ns = read_ns + back + 1
    assert clock.error_ns is not None
    latest_ns = now_ns - 1
    assert abs(clock.offset_ns - ahead_ns(latest_ns)) <= clock.error_ns + 1, "1 ns is rounded off"
    there, back = delays[-1]
    assert clock.error_ns <= (there + back + 1) // 2 + (there + back) * 30 // 1_000_000 + 1


def test_an_old_sample_is_worth_less_since_clocks_drift() -> None:
    clock = ClockOffset()
    clock.add(0, 1000, 0)
    assert (clock.offset_ns, clock.error_ns) == (1000, 0)
    clock.add(10_000_000, 10_003_200, 10_000_400)
    assert (clock.offset_ns, clock.error_ns) == (3000, 201), "of the first sample 301 ns would not be known"
    for _ in range(32):
        clock.add(20_000_000, 20_005_000, 20_002_000)
    assert (clock.offset_ns, clock.error_ns) == (4000, 1001)


def test_without_a_sample_the_error_is_unknown() -> None:
    assert (ClockOffset().offset_ns, ClockOffset().error_ns) == (0, None)
