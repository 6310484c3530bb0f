"""Gauges of what engine, store and processes hold at the moment of a scrape."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import tilework
from tilework.admission.reservation_guard import GuardCounts
from tilework.core.priority import DEFAULT_CLASSES
from tilework.core.time import s_from_ns
from tilework.core.wire.reports import KeptStates
from tilework.cost.corrections import Deviations
from tilework.policy.traits import PlacementStatus
from tilework.runtime.engine import Engine
from tilework.runtime.worker_process import resident_bytes
from tilework.server.metrics import families
from tilework.server.metrics.families import Intervention, MetricFamily
from tilework.server.metrics.meters import Names, level
from tilework.server.metrics.readings import readings_of
from tilework.server.schema.answers import Unready
from tilework.store.disk import Disk
from tilework.store.results import ResultStore


class Levels(Collector):
    """Gauges whose values are read at a scrape.

    `unready` returns why no call is taken; `disk` is that of the durable directory.
    """

    def __init__(
        self, engine: Engine, store: ResultStore, unready: Callable[[], Unready | None], disk: Disk | None
    ) -> None:
        self._engine = engine
        self._store = store
        self._unready = unready
        self._disk = disk
        self._begun_ns = engine.now_ns()
        self._classes = Names(tuple(DEFAULT_CLASSES))

    def collect(self) -> Iterable[Metric]:
        health = self._engine.status.health()
        usage = self._engine.status.usage()
        store = self._store
        yield self._build()
        yield _gauge(families.UPTIME_SECONDS, s_from_ns(self._engine.now_ns() - self._begun_ns))
        yield self._reasons()
        yield _gauge(families.DEVICES, health.num_devices)
        yield _gauge(families.DEVICES_UP, health.num_devices_up)
        yield self._by_class(families.JOBS_QUEUED, usage.waiting)
        yield self._by_class(families.JOBS_RUNNING, usage.running)
        yield _gauge(families.BACKLOG_DEVICE_SECONDS, s_from_ns(usage.backlog_ns))
        yield _interventions(usage.guard)
        yield from self._room()
        yield _gauge(families.STORE_BYTES, store.num_bytes)
        yield _gauge(families.STORE_ENTRIES, len(store))
        yield from self._backlog()
        yield _gauge(families.STATE_BLOB_BYTES, usage.state_blob_bytes)
        cache = usage.encode_cache
        yield _gauge(families.ENCODE_CACHE_BYTES, cache.num_bytes)
        yield _gauge(families.ENCODE_CACHE_HITS, cache.num_hits)
        yield _gauge(families.ENCODE_CACHE_MISSES, cache.num_misses)
        yield self._by_number(families.DEVICE_MEMORY_BYTES, usage.memory_bytes)
        yield self._by_number(families.WEIGHTS_FREE_BYTES, usage.weights_free_bytes)
        yield from _by_placement(usage.placements)
        yield self._by_number(families.BAD_REPORTS, usage.bad_reports)
        yield from self._kept(usage.kept)
        yield self._resident(usage.resident_bytes)
        yield self._deviations(usage.cost_deviations)
        yield _gauge(families.PROMISE_MARGIN_SECONDS, s_from_ns(usage.margins.admission.fixed_ns))
        yield _gauge(families.PROMISE_MARGIN_RATIO, usage.margins.admission.permille / 1000)
        yield from readings_of(usage.readings)

    def _build(self) -> Metric:
        found = level(families.BUILD_INFO)
        for model in self._engine.models:
            found.add_metric((tilework.__version__, self._engine.policy, model), 1)
        return found

    def _reasons(self) -> Metric:
        found = level(families.UNREADY)
        unready = self._unready()
        for reason in Unready:
            found.add_metric((reason,), reason is unready)
        return found

    def _room(self) -> Iterator[Metric]:
        """Yield the free disk space, without a value if there is no durable directory, or its disk does not answer."""
        found = level(families.DISK_FREE_BYTES)
        with suppress(OSError):
            if self._disk is not None:
                found.add_metric((), self._disk.free_bytes)
        yield found

    def _backlog(self) -> Iterator[Metric]:
        backlog = self._store.backlog()
        yield _gauge(families.SPOOL_BYTES, backlog.num_bytes)
        yield _gauge(families.SPOOL_ENTRIES, backlog.num_results)
        yield _gauge(families.STORE_UNWRITTEN_SECONDS, s_from_ns(backlog.unwritten_ns))

    def _by_class(self, family: MetricFamily, counts: Mapping[str, int]) -> Metric:
        found = level(family)
        shown = dict.fromkeys(DEFAULT_CLASSES, 0)
        for priority, count in counts.items():
            label = self._classes.of(priority)
            shown[label] = shown.get(label, 0) + count
        for label, count in shown.items():
            found.add_metric((label,), count)
        return found

    def _by_number(self, family: MetricFamily, values: Mapping[int, int]) -> Metric:
        found = level(family)
        for number, value in values.items():
            found.add_metric((str(number),), value)
        return found

    def _deviations(self, deviations: Deviations) -> Metric:
        found = level(families.COST_DEVIATION_RATIO)
        for place, ratio in deviations.items():
            found.add_metric(place, ratio)
        return found

    def _kept(self, kept: Mapping[int, KeptStates]) -> Iterator[Metric]:
        for family, field in (
            (families.DEVICE_KEPT_BYTES, "num_bytes"),
            (families.DEVICE_SPILLS, "num_spills"),
            (families.DEVICE_RETURNS, "num_returns"),
        ):
            yield self._by_number(family, {device_id: getattr(one, field) for device_id, one in kept.items()})

    def _resident(self, workers: Mapping[str, int]) -> Metric:
        """Return the memory of processes; only where there is /proc."""
        found = level(families.RESIDENT_BYTES)
        if (own := resident_bytes(os.getpid())) is not None:
            found.add_metric(("server",), own)
        for name, num_bytes in workers.items():
            found.add_metric((f"worker-{name}",), num_bytes)
        return found


def _by_placement(placements: Iterable[PlacementStatus]) -> Iterator[Metric]:
    """Yield what the policy counts for the devices of each placement type in its window."""
    values: Sequence[tuple[MetricFamily, Callable[[PlacementStatus], float]]] = (
        (families.PLACEMENT_DEVICES, lambda one: one.num_devices),
        (families.PLACEMENT_BACKLOG, lambda one: one.backlog),
        (families.PLACEMENT_COMPLETIONS_PER_SECOND, lambda one: one.completions / s_from_ns(one.window_ns)),
        (
            families.PLACEMENT_BUSY_RATIO,
            lambda one: one.busy_ns / (one.window_ns * one.num_devices) if one.num_devices else 0.0,
        ),
    )
    placements = list(placements)
    for family, value in values:
        found = level(family)
        for one in placements:
            found.add_metric((one.name,), value(one))
        yield found


def _interventions(counts: GuardCounts) -> Metric:
    found = level(families.PROMISE_INTERVENTIONS)
    found.add_metric((Intervention.START_VETOED,), counts.starts_vetoed)
    found.add_metric((Intervention.STOP_VETOED,), counts.stops_vetoed)
    found.add_metric((Intervention.START_FORCED,), counts.starts_forced)
    return found


def _gauge(family: MetricFamily, value: float) -> Metric:
    found = level(family)
    found.add_metric((), value)
    return found
