"""Gauges of what engine, store and processes hold at the moment of a scrape."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import tilework
from tilework.core.interfaces import PlacementStatus
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.time import s_from_ns
from tilework.core.wire.reports import KeptStates
from tilework.runtime.worker_process import resident_bytes
from tilework.server.engine_protocol import Engine
from tilework.server.metrics.meters import Names
from tilework.server.metrics.readings import readings_of
from tilework.store.results import ResultStore


class Levels(Collector):
    """Gauges whose values are read at a scrape; the engine must have started."""

    def __init__(self, engine: Engine, store: ResultStore) -> None:
        self._engine = engine
        self._store = store
        self._begun_ns = engine.now_ns()
        self._classes = Names(tuple(DEFAULT_CLASSES))

    def collect(self) -> Iterable[Metric]:
        health, usage, store = self._engine.health(), self._engine.usage(), self._store
        yield self._build()
        yield _gauge("uptime_seconds", "Since the engine was made", s_from_ns(self._engine.now_ns() - self._begun_ns))
        yield _gauge("devices", "Devices that were asked for", health.num_devices)
        yield _gauge("devices_up", "Devices that take work", health.num_devices_up)
        yield self._by_class("jobs_queued", "Images that wait for a device, before or between works", usage.waiting)
        yield self._by_class("jobs_running", "Images that a device works on", usage.running)
        yield _gauge("backlog_device_seconds", "Device time that open images will take", s_from_ns(usage.backlog_ns))
        yield _gauge("store_bytes", "Bytes of results kept for fetching", store.num_bytes)
        yield _gauge("store_entries", "Results kept for fetching", len(store))
        yield _gauge("state_blob_bytes", "Bytes of states in memory that the workers share", usage.state_blob_bytes)
        cache = usage.encode_cache
        yield _gauge("encode_cache_bytes", "Bytes of encoded prompts that are kept", cache.num_bytes)
        yield _gauge("encode_cache_hits", "Images whose prompt was encoded before, since the start", cache.num_hits)
        yield _gauge("encode_cache_misses", "Images whose prompt was not, since the start", cache.num_misses)
        yield self._by_device("device_memory_bytes", "Memory in use on a device, by any process", usage.memory_bytes)
        yield self._by_device("weights_free_bytes", "Room for weights on a device", usage.weights_free_bytes)
        yield from _by_placement(usage.placements)
        yield from self._kept(usage.kept)
        yield self._resident(usage.resident_bytes)
        yield from readings_of(usage.readings)

    def _build(self) -> Metric:
        family = GaugeMetricFamily(
            "tilework_build_info", "What is running; always 1", labels=("version", "policy", "model")
        )
        for model in self._engine.models:
            family.add_metric((tilework.__version__, self._engine.policy, model), 1)
        return family

    def _by_class(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        family = GaugeMetricFamily(f"tilework_{name}", text, labels=("class",))
        shown = dict.fromkeys(DEFAULT_CLASSES, 0)
        for priority, count in counts.items():
            label = self._classes.of(priority)
            shown[label] = shown.get(label, 0) + count
        for label, count in shown.items():
            family.add_metric((label,), count)
        return family

    def _by_device(self, name: str, text: str, values: Mapping[int, int]) -> Metric:
        family = GaugeMetricFamily(f"tilework_{name}", text, labels=("device",))
        for device_id, value in values.items():
            family.add_metric((str(device_id),), value)
        return family

    def _kept(self, kept: Mapping[int, KeptStates]) -> Iterator[Metric]:
        for name, text, field in (
            ("device_kept_bytes", "What a device keeps of images that have no work there", "num_bytes"),
            ("device_spills", "States that a device has dropped, since its worker's start", "num_spills"),
            ("device_returns", "States that a device has read again after that", "num_returns"),
        ):
            yield self._by_device(name, text, {device_id: getattr(one, field) for device_id, one in kept.items()})

    def _resident(self, workers: Mapping[str, int]) -> Metric:
        """Only where there is /proc."""
        family = GaugeMetricFamily(
            "tilework_resident_bytes", "Memory of a process, shared pages included", labels=("process",)
        )
        if (own := resident_bytes(os.getpid())) is not None:
            family.add_metric(("server",), own)
        for name, num_bytes in workers.items():
            family.add_metric((f"worker-{name}",), num_bytes)
        return family


def _by_placement(placements: Iterable[PlacementStatus]) -> Iterator[Metric]:
    """What the policy counts for the devices of each placement type in its window."""
    values: Sequence[tuple[str, str, Callable[[PlacementStatus], float]]] = (
        ("devices", "Devices that are for a placement type", lambda one: one.num_devices),
        ("backlog", "Images that wait for devices of a placement type", lambda one: one.backlog),
        (
            "completions_per_second",
            "Images whose stages devices of a placement type have ended, in the policy's window",
            lambda one: one.completions / s_from_ns(one.window_ns),
        ),
        (
            "busy_ratio",
            "Share of the policy's window in which devices of a placement type ran these",
            lambda one: one.busy_ns / (one.window_ns * one.num_devices) if one.num_devices else 0.0,
        ),
    )
    placements = list(placements)
    for name, text, value in values:
        family = GaugeMetricFamily(f"tilework_placement_{name}", text, labels=("placement",))
        for one in placements:
            family.add_metric((one.name,), value(one))
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tilework_{name}", text, value=value)
