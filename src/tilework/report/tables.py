"""Attainment and latency of served requests, by size and in total, as numbers and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich import box
from rich.table import Table

from tilework.core.request import Shape

DONE = "done"


class Served(Protocol):
    """A served request as the reports read it, live or simulated.

    `status` is "done", or another word for a request that got no image. `latency_s` counts from the planned
    arrival to the end. `on_time` is read only where `slo_s` is set.
    """

    @property
    def shape(self) -> Shape: ...
    @property
    def status(self) -> str: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def slo_s(self) -> float | None: ...
    @property
    def latency_s(self) -> float | None: ...
    @property
    def on_time(self) -> bool | None: ...


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of `values` that at least `percent` per cent of them do not exceed (nearest rank).

    Always one of the values, never a mean of two; `percent` in (0, 100]. Raises ValueError if there is no value.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent}; use a number above 0, at most 100")
    place = math.ceil(percent * len(values) / 100)
    return sorted(values)[place - 1]


def attainment(records: Sequence[Served]) -> float | None:
    """Return the share on time of all with a deadline; refused and failed ones are misses. None without deadlines."""
    due = [record for record in records if record.slo_s is not None]
    return sum(_is_on_time(record) for record in due) / len(due) if due else None


def latencies_s(records: Sequence[Served]) -> list[float]:
    """Return the latencies of the requests that got their image."""
    return [record.latency_s for record in records if record.status == DONE and record.latency_s is not None]


def summary(records: Sequence[Served]) -> dict[str, Any]:
    """Return all figures as plain JSON: counts, attainment, latency, rates, and the same `by_size`.

    `latency_s` is None without an image, else {"mean", "p50", "p95", "p99"}; see `percentile`. Rates, also those of
    one size, are per second of the whole run, from its first arrival to its last image: `throughput_per_s` and
    `megapixels_per_s` of all images, `goodput_per_s` of those on time (None without deadlines).
    """
    length_s = _length_s(records)
    by_size = {size: _figures(members) | _rates(members, length_s) for size, members in _by_size(records).items()}
    return _figures(records) | _rates(records, length_s) | {"by_size": by_size}


def attainment_table(records: Sequence[Served], title: str = "") -> Table:
    """Return one row per size, smallest first, and a total; times in seconds. Fits 80 columns."""
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="latency in seconds",
        caption_justify="left",
    )
    table.add_column("size")
    for heading in ("requests", "done", "on time", "attained", "mean", "p50", "p95", "p99"):
        table.add_column(heading, justify="right")
    for size, members in _by_size(records).items():
        table.add_row(size, *_cells(_figures(members)))
    table.add_section()
    table.add_row("all", *_cells(_figures(records)), style="bold")
    return table


def throughput_table(records: Sequence[Served]) -> Table:
    """Return one row per size, smallest first, and a total: images per minute, those on time, megapixels per second."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="good: on time", caption_justify="left")
    table.add_column("size")
    for heading in ("images/min", "good/min", "megapixels/s"):
        table.add_column(heading, justify="right")
    length_s = _length_s(records)
    for size, members in _by_size(records).items():
        table.add_row(size, *_rate_cells(_rates(members, length_s)))
    table.add_section()
    table.add_row("all", *_rate_cells(_rates(records, length_s)), style="bold")
    return table


def _by_size(records: Sequence[Served]) -> dict[str, list[Served]]:
    groups: dict[str, list[Served]] = {}
    for record in sorted(records, key=lambda record: (record.shape.pixels, record.shape)):
        groups.setdefault(str(record.shape), []).append(record)
    return groups


def _figures(records: Sequence[Served]) -> dict[str, Any]:
    statuses = sorted({record.status for record in records} - {DONE})
    return {
        "requests": len(records),
        "done": sum(record.status == DONE for record in records),
        "not_done": {status: sum(record.status == status for record in records) for status in statuses},
        "with_deadline": sum(record.slo_s is not None for record in records),
        "on_time": sum(_is_on_time(record) for record in records),
        "attainment": attainment(records),
        "latency_s": _latency(latencies_s(records)),
    }


def _length_s(records: Sequence[Served]) -> float:
    """Return the time from the first arrival to the last image; 0 without an image."""
    ends_s = [r.arrival_s + r.latency_s for r in records if r.status == DONE and r.latency_s is not None]
    return max(ends_s) - min(record.arrival_s for record in records) if ends_s else 0.0


def _rates(records: Sequence[Served], length_s: float) -> dict[str, float | None]:
    done = [record for record in records if record.status == DONE]
    due = any(record.slo_s is not None for record in records)
    amounts = {
        "throughput_per_s": len(done),
        "goodput_per_s": sum(_is_on_time(record) for record in records) if due else None,
        "megapixels_per_s": sum(record.shape.pixels for record in done) / 1e6,
    }
    return {
        name: amount / length_s if amount is not None and length_s > 0 else None for name, amount in amounts.items()
    }


def _latency(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": math.fsum(values) / len(values)} | {f"p{p}": percentile(values, p) for p in (50, 95, 99)}


def _is_on_time(record: Served) -> bool:
    return record.slo_s is not None and record.status == DONE and record.on_time is True


def _cells(figures: dict[str, Any]) -> list[str]:
    share = figures["attainment"]
    latency = figures["latency_s"]
    return [
        str(figures["requests"]),
        str(figures["done"]),
        f"{figures['on_time']}/{figures['with_deadline']}" if figures["with_deadline"] else "-",
        "-" if share is None else f"{share:.1%}",
        *(["-"] * 4 if latency is None else [f"{value:.2f}" for value in latency.values()]),
    ]


def _rate_cells(rates: dict[str, float | None]) -> list[str]:
    scales = {"throughput_per_s": 60, "goodput_per_s": 60, "megapixels_per_s": 1}
    return ["-" if (rate := rates[name]) is None else f"{scale * rate:.2f}" for name, scale in scales.items()]


def counted_devices(number: int) -> str:
    """Return the number in words: "1 device", "8 devices"."""
    return "1 device" if number == 1 else f"{number} devices"
