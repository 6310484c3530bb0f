"""Gauges of what cards and allocators say of themselves. What one does not tell has no series: it is not 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tilework.core.wire.reports import SLOWDOWNS, AllocatorReading, CardReading, DeviceReading

_CARD: Sequence[tuple[str, str, Callable[[CardReading], float | None]]] = (
    ("busy_ratio", "Share of the last moments in which a kernel ran on the card", lambda one: one.busy),
    ("memory_total_bytes", "Memory of the card", lambda one: one.total_bytes),
    ("temperature_celsius", "Temperature of the card", lambda one: one.celsius),
    ("power_watts", "Power that the card takes", lambda one: one.watts),
    ("power_limit_watts", "Power that it may take", lambda one: one.limit_watts),
    ("clock_hertz", "Clock of its multiprocessors", lambda one: one.hertz),
    ("clock_max_hertz", "The fastest that clock can be", lambda one: one.most_hertz),
)
_ALLOCATOR: Sequence[tuple[str, str, Callable[[AllocatorReading], float]]] = (
    ("reserved_bytes", "CUDA memory that torch's allocator has", lambda one: one.reserved_bytes),
    ("allocated_bytes", "What tensors take of it", lambda one: one.allocated_bytes),
    ("peak_bytes", "The most that tensors took since the device was measured", lambda one: one.peak_bytes),
    ("split_bytes", "Free pieces of blocks that tensors have a part of", lambda one: one.split_bytes),
    ("retries", "Allocations that first had to give back what was kept, since the start", lambda one: one.num_retries),
    ("failures", "Allocations that failed, since the start", lambda one: one.num_failures),
)


def readings_of(readings: Mapping[str, DeviceReading]) -> Iterator[Metric]:
    """The gauges of these workers' devices, by their names: "0", in a cell "0.1"."""
    cards = {name: one.card for name, one in readings.items() if one.card is not None}
    for metric, text, value in _CARD:
        yield _by_device(f"card_{metric}", text, {name: value(card) for name, card in cards.items()})
    yield _memory(cards)
    yield _slowed(cards)
    allocators = {name: one.allocator for name, one in readings.items() if one.allocator is not None}
    for metric, text, count in _ALLOCATOR:
        yield _by_device(f"allocator_{metric}", text, {name: count(one) for name, one in allocators.items()})


def _by_device(name: str, text: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(f"tilework_{name}", text, labels=("device",))
    for device, value in values.items():
        if value is not None:
            family.add_metric((device,), value)
    return family


def _memory(cards: Mapping[str, CardReading]) -> Metric:
    """By who uses it. Where the card does not say what the worker has, all of it is by "any"."""
    text = "Memory of the card in use: by its worker and by others, or by any if the card does not tell whose it is"
    family = GaugeMetricFamily("tilework_card_memory_bytes", text, labels=("device", "user"))
    for name, card in cards.items():
        if card.used_bytes is None:
            continue
        if card.worker_bytes is None:
            family.add_metric((name, "any"), card.used_bytes)
        else:
            family.add_metric((name, "worker"), card.worker_bytes)
            family.add_metric((name, "others"), max(0, card.used_bytes - card.worker_bytes))
    return family


def _slowed(cards: Mapping[str, CardReading]) -> Metric:
    family = GaugeMetricFamily(
        "tilework_card_slowed", "Whether this keeps the clock of the card down", labels=("device", "reason")
    )
    for name, card in cards.items():
        for reason in SLOWDOWNS if card.slowed_by is not None else ():
            family.add_metric((name, reason), reason in (card.slowed_by or ()))
    return family
