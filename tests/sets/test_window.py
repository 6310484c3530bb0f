"""How busy devices were, in a window that moves on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.sets.window import UseWindow

WINDOW_NS, PART_NS = 6000, 100


def test_a_share_is_the_busy_time_of_what_is_there() -> None:
    window = UseWindow(WINDOW_NS)
    for device_id in (0, 1, 2):
        window.joined(device_id, 0)
    window.ran("diffuse", (0, 1), 0, 2000)
    window.ran("decode", (1,), 2000, 3000)
    window.ran("export", (2,), 0, 4000)  # A CPU slot: it is not asked for.
    use = window.use(4000, (0, 1))
    assert use.share == 5000 / 8000
    assert use.by_stage == {"diffuse": 4000 / 8000, "decode": 1000 / 8000}
    assert use.by_device == {0: 0.5, 1: 0.75}
    assert use.measured_ns == 4000


def test_what_is_before_the_window_is_forgotten() -> None:
    window = UseWindow(WINDOW_NS)
    window.joined(0, 0)
    window.ran("diffuse", (0,), 0, 3000)
    use = window.use(8000 - 1, (0,))  # Its last part has just ended.
    assert use.share == pytest.approx(1000 / 6000, abs=0.001)
    assert use.measured_ns == WINDOW_NS
    assert window.use(20_000, (0,)).share == 0


def test_a_lost_device_does_not_count() -> None:
    window = UseWindow(WINDOW_NS)
    window.joined(0, 0)
    window.joined(1, 0)
    window.ran("diffuse", (0, 1), 0, 1000)
    window.lost(1)
    window.ran("diffuse", (0, 1), 1000, 2000)
    assert window.use(4000, (0, 1)).share == 0.5
    window.joined(1, 4000)
    assert window.use(6000 - 1, (0, 1)).by_device[1] == 0


def test_nothing_is_there() -> None:
    use = UseWindow(WINDOW_NS).use(50, (0,))
    assert (use.share, use.measured_ns, use.by_device) == (0, 0, {})


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 900)), max_size=30), st.integers(0, 900))
def test_works_one_after_another(works: list[tuple[int, int]], idle_ns: int) -> None:
    """The share is that of the parts of the window, however long works are."""
    window = UseWindow(WINDOW_NS)
    window.joined(0, 0)
    now_ns, busy = 0, set[int]()
    for gap_ns, run_ns in works:
        window.ran("diffuse", (0,), now_ns + gap_ns, now_ns + gap_ns + run_ns)
        busy |= set(range(now_ns + gap_ns, now_ns + gap_ns + run_ns))
        now_ns += gap_ns + run_ns
    now_ns += idle_ns + 1
    begin_ns = max(0, now_ns - now_ns % PART_NS - WINDOW_NS + PART_NS)
    expected = len([at_ns for at_ns in busy if begin_ns <= at_ns]) / (now_ns - begin_ns)
    assert window.use(now_ns, (0,)).share == pytest.approx(expected)
