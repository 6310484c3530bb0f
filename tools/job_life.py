"""The life of a job as a drawing: `python tools/job_life.py docs/job_life.svg` draws `control.cluster.life`."""

from __future__ import annotations

import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import NamedTuple

from tilework.control.cluster.life import TRANSITIONS, JobEvent, JobState

WIDTH, HEIGHT = 860, 330
BOX_WIDTH, BOX_HEIGHT = 120, 44
PLACES = {
    JobState.PARKED: (170, 230),
    JobState.WAITING: (170, 90),
    JobState.RUNNING: (490, 90),
    JobState.STOPPING: (490, 230),
    JobState.DONE: (770, 90),
    JobState.ENDED: (770, 230),
}
"""Centre of each state's box, in pixels."""
STYLE = (
    "text{font:13px sans-serif;fill:#1f2328;paint-order:stroke;stroke:#fff;stroke-width:4px}"
    ".state{font-weight:600;stroke:none}.note{fill:#59636e}"
    "rect{fill:#eef4ff;stroke:#3b6fd4;stroke-width:1.5}path{fill:none;stroke:#59636e;stroke-width:1.3}"
)


class Arrow(NamedTuple):
    """An arrow between two states, or from one to itself, and the events on it."""

    start: JobState
    end: JobState
    events: tuple[JobEvent, ...]


def arrows() -> list[Arrow]:
    """Return the arrows of the table; `END` is no arrow of its own where it leads from each state to `ENDED`."""
    found: dict[tuple[JobState, JobState], list[JobEvent]] = defaultdict(list)
    for start, following in TRANSITIONS.items():
        for event, end in following.items():
            if event is not JobEvent.END or start is JobState.DONE:
                found[start, end].append(event)
    return [Arrow(start, end, tuple(events)) for (start, end), events in found.items()]


def drawn() -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" style="fill:#fff;stroke:none"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#59636e;stroke:none"/></marker>',
        *map(_arrow, arrows()),
        *map(_state, PLACES),
        f'<text class="note" x="110" y="{HEIGHT - 18}">{JobEvent.END}: from each state to '
        f"{JobState.ENDED}, when the job is done, fails, expires or is cancelled</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _state(state: JobState) -> str:
    x, y = PLACES[state]
    return (
        f'<rect x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>'
        f'<text class="state" x="{x}" y="{y + 4}" text-anchor="middle">{state}</text>'
    )


def _arrow(arrow: Arrow) -> str:
    """Return an arrow with its label. Arrows of a pair of states run beside each other; one to itself is a loop."""
    (x, y), (to_x, to_y) = PLACES[arrow.start], PLACES[arrow.end]
    text = escape(" or ".join(arrow.events))
    if arrow.start is arrow.end:
        below = y > HEIGHT // 2
        edge, far = (y + BOX_HEIGHT // 2, y + 52) if below else (y - BOX_HEIGHT // 2, y - 52)
        curve = f"M{x - 24} {edge}C{x - 30} {far} {x + 30} {far} {x + 24} {edge}"
        return _path(curve) + _label(x, y + 62 if below else y - 50, text)
    side = 10 if (x, y) < (to_x, to_y) else -10
    if x == to_x:
        down = BOX_HEIGHT // 2 if to_y > y else -BOX_HEIGHT // 2
        line = f"M{x + side * 2} {y + down}L{to_x + side * 2} {to_y - down}"
        anchor = "start" if side > 0 else "end"
        return _path(line) + _label(x + side * 3, (y + to_y) // 2 + 4, text, anchor)
    right = BOX_WIDTH // 2 if to_x > x else -BOX_WIDTH // 2
    line = f"M{x + right} {y - side}L{to_x - right} {to_y - side}"
    middle_y = (y + to_y) // 2 - side + (-6 if side > 0 else 16)
    return _path(line) + _label((x + to_x) // 2, middle_y, text)


def _path(shape: str) -> str:
    return f'<path d="{shape}" marker-end="url(#tip)"/>'


def _label(x: int, y: int, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(drawn(), encoding="utf-8")
