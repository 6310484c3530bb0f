"""Gauges of what cards and allocators report. A value that one does not report has no series: it is not 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from tilework.core.wire.reports import SLOWDOWNS, AllocatorReading, CardReading, DeviceReading
from tilework.server.metrics import families
from tilework.server.metrics.families import MemoryUser, MetricFamily
from tilework.server.metrics.meters import level

_CARD: Sequence[tuple[MetricFamily, Callable[[CardReading], float | None]]] = (
    (families.CARD_BUSY_RATIO, lambda one: one.busy),
    (families.CARD_MEMORY_TOTAL_BYTES, lambda one: one.total_bytes),
    (families.CARD_TEMPERATURE_CELSIUS, lambda one: one.celsius),
    (families.CARD_POWER_WATTS, lambda one: one.watts),
    (families.CARD_POWER_LIMIT_WATTS, lambda one: one.limit_watts),
    (families.CARD_CLOCK_HERTZ, lambda one: one.hertz),
    (families.CARD_CLOCK_MAX_HERTZ, lambda one: one.most_hertz),
)
_ALLOCATOR: Sequence[tuple[MetricFamily, Callable[[AllocatorReading], float]]] = (
    (families.ALLOCATOR_RESERVED_BYTES, lambda one: one.reserved_bytes),
    (families.ALLOCATOR_ALLOCATED_BYTES, lambda one: one.allocated_bytes),
    (families.ALLOCATOR_PEAK_BYTES, lambda one: one.peak_bytes),
    (families.ALLOCATOR_SPLIT_BYTES, lambda one: one.split_bytes),
    (families.ALLOCATOR_RETRIES, lambda one: one.num_retries),
    (families.ALLOCATOR_FAILURES, lambda one: one.num_failures),
)


def readings_of(readings: Mapping[str, DeviceReading]) -> Iterator[Metric]:
    """Yield the gauges of these workers' devices, by their names: "0", in a cell "0.1"."""
    cards = {name: one.card for name, one in readings.items() if one.card is not None}
    for family, value in _CARD:
        yield _by_device(family, {name: value(card) for name, card in cards.items()})
    yield _memory(cards)
    yield _slowed(cards)
    allocators = {name: one.allocator for name, one in readings.items() if one.allocator is not None}
    for family, count in _ALLOCATOR:
        yield _by_device(family, {name: count(one) for name, one in allocators.items()})


def _by_device(family: MetricFamily, values: Mapping[str, float | None]) -> Metric:
    found = level(family)
    for device, value in values.items():
        if value is not None:
            found.add_metric((device,), value)
    return found


def _memory(cards: Mapping[str, CardReading]) -> Metric:
    """Return the memory of cards by its user."""
    found = level(families.CARD_MEMORY_BYTES)
    for name, card in cards.items():
        if card.used_bytes is None:
            continue
        if card.worker_bytes is None:
            found.add_metric((name, MemoryUser.ANY), card.used_bytes)
        else:
            found.add_metric((name, MemoryUser.WORKER), card.worker_bytes)
            found.add_metric((name, MemoryUser.OTHERS), max(0, card.used_bytes - card.worker_bytes))
    return found


def _slowed(cards: Mapping[str, CardReading]) -> Metric:
    found = level(families.CARD_SLOWED)
    for name, card in cards.items():
        for reason in SLOWDOWNS if card.slowed_by is not None else ():
            found.add_metric((name, reason), reason in (card.slowed_by or ()))
    return found
