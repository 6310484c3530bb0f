"""A chart as one self-contained page: lanes to zoom and move in, the decisions about each request, and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from tilework.formats.json_lines import RequestId
from tilework.report.chart import Chart, ChartLoad, ChartRequest, ChartWork, busy_shares
from tilework.report.palette import Rgb, class_hues, darker, ink_on, request_colours
from tilework.report.tables import percentile

TEMPLATE = "timeline.html"


def write_page(path: Path | str, chart: Chart, *, title: str = "") -> None:
    """Write the page. It loads nothing over the network, and shows texts from clients as text only.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(chart, title or "Devices over time"), "utf-8")


def page(chart: Chart, title: str) -> str:
    template = Template(files("tilework.report.pages").joinpath(TEMPLATE).read_text("utf-8"))
    return template.substitute(title=escape(title), data=_script_safe(_document(chart, title)))


def _script_safe(document: dict[str, Any]) -> str:
    """Return JSON in which no text can end the script element around it."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _document(chart: Chart, title: str) -> dict[str, Any]:
    shapes = {request.id: request.shape for request in chart.requests if request.shape is not None}
    colours = request_colours([request.id for request in chart.requests], shapes)
    places = {request.id: place for place, request in enumerate(chart.requests)}
    shares = busy_shares(chart.works, chart.start_s, chart.end_s)
    devices = sorted({device_id for work in chart.works for device_id in work.devices} | set(chart.nodes))
    return {
        "title": title,
        "summary": _summary(chart, list(shares.values()), len(devices)),
        "start": _rounded(chart.start_s),
        "end": _rounded(chart.end_s),
        "nodes": len(set(chart.nodes.values())),
        "devices": [
            {
                "device_id": device_id,
                "name": chart.name_of(device_id),
                "node": chart.nodes.get(device_id, 0),
                "busy": round(shares.get(device_id, 0.0), 4),
            }
            for device_id in devices
        ],
        "classes": list(class_hues(shapes.values()).items()),
        "works": [_work(work, places) for work in chart.works],
        "requests": [_request(request, colours[request.id]) for request in chart.requests],
        "outages": [
            {"device_id": o.device_id, "start": _rounded(o.start_s), "end": _rounded(o.end_s), "reason": o.reason}
            for o in chart.outages
        ],
        "loads": [
            {
                "device_id": load.device_id,
                "start": _rounded(load.start_s),
                "end": _rounded(load.end_s),
                "text": _load_text(load),
                "ahead": load.is_read_ahead,
            }
            for load in chart.loads
        ],
        "placements": [
            {
                "at": _rounded(placement.at_s),
                "why": placement.why,
                "uses": list(uses.items()),
                "text": _uses_text(uses),
            }
            for placement, uses in chart.new_uses()
        ],
    }


def _uses_text(uses: Mapping[int, str]) -> str:
    """Say the uses in words: "ED on devices 0, 1; C on device 2"."""
    devices: dict[str, list[str]] = {}
    for device_id, name in uses.items():
        devices.setdefault(name, []).append(str(device_id))
    return "; ".join(
        f"{name} on {'device' if len(ids) == 1 else 'devices'} {', '.join(ids)}" for name, ids in devices.items()
    )


def _load_text(load: ChartLoad) -> str:
    if load.is_read_ahead:
        return f"the host of device {load.device_id} reads the weights of {load.stage} ahead of need"
    return f"device {load.device_id} loads the weights of {load.stage}" + (
        f" from {load.source}" if load.source else ""
    )


def _summary(chart: Chart, shares: list[float], num_devices: int) -> str:
    timed = [request.on_time for request in chart.requests if request.on_time is not None]
    parts = [f"{len(chart.requests)} requests", f"{len(chart.works)} runs", f"{chart.end_s - chart.start_s:.1f} s"]
    if timed:
        parts.insert(1, f"{sum(timed) / len(timed):.0%} on time")
    if shares:
        parts.append(f"devices {sum(shares) / num_devices:.0%} busy")
    latencies_s = [request.finish_s - request.arrival_s for request in chart.requests if request.finish_s is not None]
    if latencies_s:
        parts.append(f"latency p50 {percentile(latencies_s, 50):.2f} s, p99 {percentile(latencies_s, 99):.2f} s")
    return "  \u00b7  ".join(parts)


def _work(work: ChartWork, places: dict[RequestId, int]) -> dict[str, Any]:
    return {
        "id": work.work,
        "start": _rounded(work.start_s),
        "end": _rounded(work.end_s),
        "devices": work.devices,
        "stage": work.stage,
        "steps": work.steps,
        "first": work.first_step,
        "requests": [places[request] for request in work.requests],
        "why": work.why,
        "predicted": _rounded(work.predicted_s),
        "lost": work.lost,
    }


def _request(request: ChartRequest, colour: Rgb) -> dict[str, Any]:
    dark = darker(colour)
    return {
        "id": str(request.id),
        "size": "" if request.shape is None else str(request.shape),
        "pixels": None if request.shape is None else request.shape.pixels,
        "steps": request.steps,
        "pipeline": request.pipeline,
        "tenant": request.tenant,
        "priority": request.priority,
        "arrival": _rounded(request.arrival_s),
        "deadline": _rounded(request.deadline_s),
        "eta": _rounded(request.eta_s),
        "finish": _rounded(request.finish_s),
        "status": request.status,
        "on_time": request.on_time,
        "colour": _hex(colour),
        "dark": _hex(dark),
        "ink": ink_on(colour),
        "decisions": [{"at": _rounded(d.at_s), "text": d.text} for d in request.decisions],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _hex(colour: Rgb) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)
