"""Pictures of a case, as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from suite.modelled import LiveRun
from tilework.report.chart import chart_of_schedule
from tilework.report.palette import HUES, NEUTRAL
from tilework.report.stories import schedule_of_stories
from tilework.report.timeline import draw_timeline


def attainment_bars(attained: Mapping[str, Sequence[float]]) -> bytes:
    """One bar per policy, the mean over its runs, and a dot per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.2 * len(attained), 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, shares in enumerate(attained.values()):
        axes.bar(place, fmean(shares), width=0.62, color=HUES[place % len(HUES)], zorder=2)
        spread = [place + 0.12 * (index - (len(shares) - 1) / 2) for index in range(len(shares))]
        axes.plot(spread, shares, "o", color="white", markeredgecolor=NEUTRAL, markersize=6, zorder=3)
        axes.text(place, 0.02, f"{fmean(shares):.0%}", ha="center", va="bottom", fontsize=11, zorder=4)
    axes.set_xticks(range(len(attained)), list(attained))
    axes.set(ylim=(0, 1.02), ylabel="requests on time")
    axes.set_title("Attainment; a dot per seed", loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E3E3", zorder=0)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()


def timeline(run: LiveRun, num_devices: int) -> bytes:
    """Device x time of a live run."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.png"
        schedule = schedule_of_stories((record.index, record) for record in run.records)
        chart = chart_of_schedule(schedule, [record.request for record in run.records], num_devices)
        draw_timeline(path, chart, title=f"{run.policy}, seed {run.seed}: {run.seen['attainment']:.0%} on time")
        return path.read_bytes()
