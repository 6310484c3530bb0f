"""What came of a comparison, as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from suite.decisions.compare import FUZZ_REPLAYED, Verdict

_MOST_TOLD = 50
_TITLES = {
    "workloads": "workloads: requests made",
    "schedules": "schedules: policies x cells",
    "failures": "schedules and scenarios that the old code fails in",
    "fuzz": "fuzz: scenarios with faults",
    FUZZ_REPLAYED: "fuzz: events of the old scenarios replayed",
    "live": "live logs replayed",
}


def summary(verdicts: Sequence[Verdict]) -> str:
    """A table of counts by part, and the first differences."""
    rows = [
        (_TITLES[part], len(some), len(some) - num_bad, num_bad, sum(one.num_events for one in some))
        for part in _TITLES
        if (some := [one for one in verdicts if one.part == part])
        for num_bad in (sum(bool(one.difference) for one in some),)
    ]
    return "\n".join([_table(("", "compared", "same", "different", "events alike"), rows), *_differences(verdicts)])


def result(verdicts: Sequence[Verdict], facts: Mapping[str, Any], deliberate: Mapping[str, str]) -> str:
    """The whole file: how it was made, the summary, and a row per cell, per policy of scenarios, per live log.

    `deliberate` says why logs of a part may differ.
    """
    told = [f"- {name}: {value}" for name, value in facts.items()]
    different = {one.part for one in verdicts if one.difference}
    told += [f"- deliberate difference, {part}: {why}" for part, why in deliberate.items() if part in different]
    tables = [
        text
        for part, title in (("schedules", "Cell"), ("fuzz", "Policy"), (FUZZ_REPLAYED, "Policy"), ("live", "Log"))
        if (text := _by_group(verdicts, part, title))
    ]
    return "\n".join(["# Decisions, old and new", "", *told, "", summary(verdicts), *tables, ""])


def _by_group(verdicts: Sequence[Verdict], part: str, title: str) -> str:
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for one in verdicts:
        if one.part == part:
            groups[one.group or one.name].append(one)
    rows = [
        (name, len(some), sum(not one.difference for one in some), sum(one.num_events for one in some))
        for name, some in groups.items()
    ]
    return (
        f"\n## {_TITLES[part].capitalize()}\n\n{_table((title, 'logs', 'same', 'events alike'), rows)}" if rows else ""
    )


def _differences(verdicts: Sequence[Verdict]) -> list[str]:
    bad = [one for one in verdicts if one.difference]
    if not bad:
        return ["", "Every action is the same, at the same time."]
    lines = [f"- {one.part} {'/'.join(filter(None, (one.group, one.name)))}: {one.difference}" for one in bad]
    more = [f"- and {len(bad) - _MOST_TOLD} more"] if len(bad) > _MOST_TOLD else []
    return ["", "The first difference of each:", "", *lines[:_MOST_TOLD], *more]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in line)} |" for line in lines
    )
