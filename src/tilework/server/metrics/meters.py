"""What metrics are made of: the library's counters, gauges and histograms under our prefix, and labels with a limit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each counter, which no dashboard uses.

MOST_VALUES = 32
OTHER = "other"

LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120, 300, 600)
SLACK_S = (-600, -120, -60, -20, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
ERROR_S = (-60, -20, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 20, 60)
WORK_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DEVICE_S = (0.1, 0.3, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120, 300, 1000)
DECISION_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2, 1)
RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)
ERROR_SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2)


class Names:
    """Values of a label, so that no client can add as many as it likes: those that come first, then "other"."""

    def __init__(self, first: Sequence[str] = ()) -> None:
        self._names: dict[Hashable, str] = {name: name for name in first}

    def of(self, value: Hashable) -> str:
        name = self._names.get(value)
        if name is None:
            if len(self._names) >= MOST_VALUES:
                return OTHER
            name = self._names[value] = str(value)
        return name


class Meters:
    """Makes metrics in one registry. One with labels shows nothing until values of them are used."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """The name that is shown has `_total` behind it."""
        return Counter(f"tilework_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"tilework_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        """`bounds` ascend. With negative ones no sum is shown: Prometheus takes sums for counters."""
        return Histogram(f"tilework_{name}", text, labels, buckets=bounds, registry=self.registry)
