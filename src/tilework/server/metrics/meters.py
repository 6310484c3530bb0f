"""The parts of metrics: the library's counters, gauges and histograms, and labels with a limit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily

from tilework.server.metrics.families import Kind, MetricFamily

disable_created_metrics()  # type: ignore[no-untyped-call]  # A second series for each counter, which no dashboard uses.

MOST_VALUES = 32
OTHER = "other"


class Names:
    """Values of a label, limited so that clients cannot add any number: the first ones, then "other"."""

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
    """Makes metrics in one registry. One with labels whose values are not all known shows nothing until one is used."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, family: MetricFamily) -> Counter:
        """Make a counter; the library appends `_total` to the name that it is given."""
        assert family.kind is Kind.COUNTER, family
        name = family.name.removesuffix("_total")
        counter = Counter(name, family.text, family.label_names, registry=self.registry)
        if len(family.labels) == 1:
            for value in family.labels[0].values:
                counter.labels(value)
        return counter

    def gauge(self, family: MetricFamily) -> Gauge:
        assert family.kind is Kind.GAUGE, family
        return Gauge(family.name, family.text, family.label_names, registry=self.registry)

    def histogram(self, family: MetricFamily) -> Histogram:
        """Make a histogram. With negative bounds no sum is shown: Prometheus takes sums for counters."""
        assert family.kind is Kind.HISTOGRAM, family
        return Histogram(family.name, family.text, family.label_names, buckets=family.bounds, registry=self.registry)


def level(family: MetricFamily) -> GaugeMetricFamily:
    """Make a gauge that is read at a scrape, without values yet."""
    assert family.kind is Kind.GAUGE, family
    return GaugeMetricFamily(family.name, family.text, labels=family.label_names)
