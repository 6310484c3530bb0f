"""The page of a demo: what is to say about it, its clips, which play, its pictures, and its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from tilework.report.contact_sheet import Frame
from tilework.report.pages.stage_times import StageTime, stage_times_table

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
