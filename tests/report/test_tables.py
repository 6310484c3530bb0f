"""Attainment, percentiles and throughput against what can be counted by hand or by brute force."""

import io
import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tilework.core.request import Shape
from tilework.report.tables import attainment, attainment_table, percentile, summary

SMALL = Shape(64, 64)


@dataclass(frozen=True, kw_only=True)
class Seen:
    shape: Shape = SMALL
    status: str = "done"
    arrival_s: float = 0.0
    slo_s: float | None = 2.0
    latency_s: float | None = 1.0
    on_time: bool | None = True


SEEN = [
    Seen(),
    Seen(arrival_s=1.0, latency_s=3.0, on_time=False),
    Seen(shape=Shape(96, 64), latency_s=2.0, slo_s=None, on_time=None),
    Seen(shape=Shape(96, 64), status="rejected", latency_s=0.01, on_time=True),
    Seen(shape=Shape(192, 192), status="failed", latency_s=None, slo_s=None, on_time=None),
]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 100))
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(values, percent):
    enough = [v for v in values if 100 * sum(other <= v for other in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)


def test_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="above 0"):
        percentile([1.0], 0)


def test_refusals_are_misses_and_best_effort_does_not_count():
    assert attainment(SEEN) == pytest.approx(1 / 3)
    assert attainment(SEEN[-1:]) is None


def test_summary_counts_everything_once():
    told = json.loads(json.dumps(summary(SEEN)))
    assert (told["requests"], told["done"], told["with_deadline"], told["on_time"]) == (5, 3, 3, 1)
    assert told["not_done"] == {"failed": 1, "rejected": 1}
    assert told["latency_s"] == {"mean": 2.0, "p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert told["throughput_per_s"] == pytest.approx(3 / 4)
    assert list(told["by_size"]) == ["64x64", "64x96", "192x192"]
    assert told["by_size"]["64x96"]["attainment"] == 0.0
    assert told["by_size"]["192x192"]["latency_s"] is None


def test_summary_of_nothing():
    assert summary([])["attainment"] is None
    assert summary([])["throughput_per_s"] is None


def test_the_table_shows_the_summary():
    out = io.StringIO()
    Console(file=out, width=80).print(attainment_table(SEEN, "Demo"))
    rows = {words[0]: words[1:] for line in out.getvalue().splitlines() if (words := line.split())}
    assert {"requests", "attained"} <= set(rows["size"])
    assert rows["all"] == ["5", "3", "1/3", "33.3%", "2.00", "2.00", "3.00", "3.00"]
    assert rows["192x192"] == ["1", "0", "-", "-", "-", "-", "-", "-"]


def test_the_table_of_large_sizes_fits_80_columns():
    seen = [
        replace(record, shape=Shape(4096, 4096), latency_s=100.0) for record in SEEN if record.status == "done"
    ] * 99
    out = io.StringIO()
    Console(file=out, width=80).print(attainment_table(seen))
    assert "…" not in out.getvalue()
    assert "4096x4096" in out.getvalue()
