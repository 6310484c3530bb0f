"""The page of a demo: notes, clips that play, images, the timeline, and stages that took another time than measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import log
from pathlib import Path
from string import Template

from tilework.report.contact_sheet import Frame

TEMPLATE = "demo.html"


def write_demo_page(
    path: Path | str,
    clips: Sequence[tuple[str, Frame]],
    *,
    title: str,
    notes: Sequence[str] = (),
    times: Sequence[StageTime] = (),
) -> None:
    """Write the page, for a directory with contact_sheet.png, timeline.png, timeline.html and the files of `clips`.

    `notes` are sentences below the title, followed by a table of `times` if any is off. It loads nothing over the
    network. Raises OSError: it cannot be written.
    """
    template = Template(files("tilework.report.pages").joinpath(TEMPLATE).read_text("utf-8"))
    figures = "\n".join(_figure(name, frame) for name, frame in clips)
    section = f'<h2>Clips</h2>\n<div class="clips">\n{figures}\n</div>' if clips else ""
    listed = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    said = f"<ul>\n{listed}\n</ul>" if notes else ""
    Path(path).write_text(
        template.substitute(title=escape(title), notes=said, times=stage_times_table(times), clips=section), "utf-8"
    )


_VERDICTS = {True: '<span class="good">on time</span>', False: '<span class="bad">late</span>'}


def _figure(name: str, clip: Frame) -> str:
    shown = f'<video src="{escape(name)}" autoplay loop muted playsinline controls></video>'
    if clip.image is None:
        shown = f'<p class="bad">{escape(clip.note)}</p>'
    took = [] if clip.latency_s is None else [f"{clip.latency_s:.1f} s"]
    verdict = [] if clip.on_time is None else [_VERDICTS[clip.on_time]]
    below = f'{escape(clip.caption)}<br><span class="soft">{", ".join([escape(clip.size), *took, *verdict])}</span>'
    return f"<figure>{shown}<figcaption>{below}</figcaption></figure>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The median of runs, over the measured time; `is_off`: it is off by more than half, and the runs are not too few
    to say it.
    """

    model: str
    stage: str
    num_runs: int
    ratio: float
    is_off: bool


def stage_times_sentence(times: Sequence[StageTime]) -> str:
    """Say whether runs took as long as measured, and which stage differs most."""
    off = [one for one in times if one.is_off]
    if not off:
        return "runs took about as long as measured"
    longer, shorter = (any((one.ratio > 1) is is_longer for one in off) for is_longer in (True, False))
    what = "another time than" if longer and shorter else "longer than" if longer else "less time than"
    most = max(off, key=lambda one: abs(log(one.ratio)))
    return (
        f"runs took {what} measured: {len(off)} of {len(times)} stages by more than half, {most.stage} of {most.model} "
        f"{most.ratio:.2g} times as long. Other work has probably disturbed them, or the measuring, and deadlines are "
        "missed by that; run it again when the machine is idle"
    )


def stage_times_table(times: Sequence[StageTime]) -> str:
    """Return a table of all of them in HTML if any is off, else nothing."""
    if not any(one.is_off for one in times):
        return ""
    rows = ["<tr><th>model</th><th>stage</th><th>runs</th><th>time, over measured</th></tr>", *map(_row, times)]
    return "\n".join(["<table>", *rows, "</table>"])


def _row(one: StageTime) -> str:
    cells = (one.model, one.stage, str(one.num_runs), f"{one.ratio:.2g}")
    marked = ' class="bad"' if one.is_off else ""
    return f"<tr{marked}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
