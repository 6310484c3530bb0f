"""Pictures of a case, as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from suite.simulated_devices import LiveRun
from tilework.report.chart import Chart, chart_of_schedule
from tilework.report.palette import HUES, NEUTRAL
from tilework.report.panels import COLOURS, INK, BarPanel, Panel, draw_bars, draw_panels
from tilework.report.served import schedule_of_timelines
from tilework.report.timeline import draw_timeline

_COLOURS_IN_FILE = 128


def panels_png(panels: Sequence[Panel], policies: Sequence[str], title: str) -> bytes:
    """What `draw_panels` writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "panels.png"
        draw_panels(path, panels, policies, title=title)
        return _smaller(path.read_bytes())


def grouped_bars(panels: Sequence[BarPanel], policies: Sequence[str], title: str) -> bytes:
    """Panels below each other, with the colours that `draw_panels` gives to these policies."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 2.7 * len(panels) + 0.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    colours = dict(zip(policies, COLOURS, strict=False))
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        draw_bars(place, panel, colours)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=min(6, len(policies)),
        frameon=False,
        fontsize=9,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return _smaller(buffer.getvalue())


def _smaller(png: bytes) -> bytes:
    """The same picture in few colours, which take a third of the room."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS_IN_FILE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def attainment_bars(attained: Mapping[str, Sequence[float]]) -> bytes:
    """One bar per policy, the mean over its runs, and a dot per run if there are several."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.2 * len(attained), 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, shares in enumerate(attained.values()):
        axes.bar(place, fmean(shares), width=0.62, color=HUES[place % len(HUES)], zorder=2)
        spread = [place + 0.12 * (index - (len(shares) - 1) / 2) for index in range(len(shares))]
        if len(shares) > 1:
            axes.plot(spread, shares, "o", color="white", markeredgecolor=NEUTRAL, markersize=6, zorder=3)
        axes.text(place, 0.02, f"{fmean(shares):.0%}", ha="center", va="bottom", fontsize=11, zorder=4)
    axes.set_xticks(range(len(attained)), list(attained))
    axes.set(ylim=(0, 1.02))
    dots = "; a dot per seed" if any(len(shares) > 1 for shares in attained.values()) else ""
    axes.set_title(f"Requests on time{dots}", loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E3E3", zorder=0)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()


def chart_png(chart: Chart, title: str) -> bytes:
    """What `draw_timeline` writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.png"
        draw_timeline(path, chart, title=title)
        return _smaller(path.read_bytes())


def timeline(run: LiveRun, num_devices: int) -> bytes:
    """Device x time of a live run."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.png"
        schedule = schedule_of_timelines((record.index, record) for record in run.records)
        chart = chart_of_schedule(schedule, [record.request for record in run.records], num_devices)
        draw_timeline(path, chart, title=f"{run.policy}, seed {run.seed}: {run.seen['attainment']:.0%} on time")
        return path.read_bytes()
