"""What a recording of a worker says of the gaps of its device: `bench/suite/gpu/idle_gaps.py`."""

from __future__ import annotations

from suite.gpu.idle_gaps import Gap, Recorded

MS = 1_000_000


def test_gaps_lie_between_events_that_overlap_and_have_what_the_host_did_in_their_middle() -> None:
    recorded = Recorded.read(
        {
            "device": [[0, 10, "a"], [5, 20, "b"], [8, 12, "inside"], [30, 40, "c"], [40, 50, "d"], [90, 100, "e"]],
            "host": [[0, 200, "outer"], [22, 28, "inner"], [60, 65, "too early"]],
            "samples": [],
        }
    )
    assert recorded.num_ns == 100
    assert recorded.num_events == 6
    assert recorded.gaps == (Gap(20, 30, "b", "c", "inner"), Gap(50, 90, "d", "e", "outer"))
    assert recorded.idle_ns == 50
    assert recorded.causes() == [("outer", 1, 40), ("inner", 1, 10)]


def test_where_the_host_ran_no_operator_the_nearest_sample_says_what_it_did() -> None:
    recorded = Recorded.read(
        {
            "device": [[0, 1, "a"], [4 * MS, 5 * MS, "b"], [95 * MS, 96 * MS, "c"]],
            "host": [],
            "samples": [[3 * MS, "get (queue.py)", "work (worker/process.py)"], [20 * MS, "x", "x"]],
        }
    )
    assert [gap.did for gap in recorded.gaps] == ["Python: get (queue.py) < work (worker/process.py)", "Python"]


def test_without_a_device_the_outermost_operators_are_one() -> None:
    recorded = Recorded.read(
        {"device": [], "host": [[0, 10, "linear"], [2, 5, "addmm"], [20, 30, "add"]], "samples": []}
    )
    assert recorded.gaps == (Gap(10, 20, "linear", "add", "Python"),)
    assert recorded.num_events == 2
