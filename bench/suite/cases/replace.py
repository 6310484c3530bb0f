"""A live server that changes which stages its devices are for while the mix of requests shifts, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from suite.case import Check, Finding, Note, Picture, Table
from suite.pictures import chart_png
from suite.shifting_traffic import Dispatch, Phase, Shift, serve_shift
from suite.stats import bootstrap, exact, extremes
from suite.waiting_model import DENOISER_BYTES, VAE_BYTES, save_waiting_model
from tilework.cli.views.charts import chart_of_history
from tilework.control.history import PastPlacement
from tilework.core.time import s_from_ns
from tilework.report.chart import Chart

_MB = 1_000_000
_ROOM_BYTES = 450 * _MB
_COUNTED = {"ED": "encode", "C": "decode"}  # The stage that each request runs once on devices of a type.
_BEFORE_S, _AFTER_S = 8.0, 14.0  # Of the change that is drawn from near.


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Four CPU workers, each with room for the denoiser or the VAE, and traffic that shifts twice, under each policy.

    Small requests of few steps decode nearly as long as they denoise; large ones of many steps a quarter as long.
    `seconds` is the length of the first phase, and how long the others go on after a change of the placement, `most_s`
    at most; under the second policy each is as long as it was. `window_s` is how long something must be done in.
    """

    policies: tuple[str, ...] = ("tridentserve", "tilework")
    workers: int = 4
    seconds: tuple[float, float, float] = (45.0, 15.0, 15.0)
    most_s: float = 300.0
    small: tuple[int, int] = (16, 2)  # Pixels, steps.
    large: tuple[int, int] = (32, 8)
    window_s: float = 10.0
    most: float = 1.2

    @classmethod
    def make(cls, quick: bool) -> Replace:
        return cls(seconds=(15.0, 5.0, 5.0), most_s=10.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            model = Path(room) / "model"
            save_waiting_model(model)
            shifts, phases = list[Shift](), self._phases()
            for policy in self.policies:
                shifts.append(self._run(policy, model, phases, note))
                phases = [
                    replace(one, seconds=s, most_s=0.0) for one, s in zip(phases, shifts[0].lengths_s, strict=True)
                ]
        placed = [shift for shift in shifts if shift.past.placements]
        return Finding(
            checks=tuple(check for shift in shifts for check in self._checks(shift)),
            tables=(
                *(_changes_table(shift) for shift in placed),
                *(_loads_table(shift) for shift in placed),
                *(_monitor_table(shift) for shift in placed),
                self._runs_table(shifts),
            ),
            method=self._method(),
            pictures=tuple(picture for shift in shifts for picture in _pictures(shift)),
        )

    def _phases(self) -> list[Phase]:
        kinds = ((self.small, "decode", 1), (self.large, "diffuse", 2), (self.small, "decode", 1))
        return [
            Phase(seconds=seconds, side=side, steps=steps, short=short, devices=devices, most_s=most_s)
            for seconds, most_s, ((side, steps), short, devices) in zip(
                self.seconds, (0.0, self.most_s, self.most_s), kinds, strict=True
            )
        ]

    def _run(self, policy: str, model: Path, phases: Sequence[Phase], note: Note) -> Shift:
        shift = asyncio.run(serve_shift(policy, str(model), self.workers, _ROOM_BYTES, phases))
        note(f"{policy}: {len(shift.tickets)} requests, {len(shift.past.loads)} loads")
        for past in shift.past.placements:
            note(f"  {s_from_ns(past.at_ns - shift.begin_ns):.1f} s: {past.placement}")
        return shift

    def _checks(self, shift: Shift) -> list[Check]:
        typical_ns, policy = shift.typical_gap_ns(), shift.policy
        loaded = [one for one in shift.dispatches() if one.segment.load_ns]

        def delay(drawn: Sequence[float]) -> float:
            some = [loaded[int(index)] for index in drawn]
            return sum(one.gap_ns - typical_ns for one in some) / sum(one.segment.load_ns for one in some)

        progress = shift.progress(self.window_s)
        checks = [
            Check(what=f"{policy}: requests lost, of {len(shift.tickets)}", measured=exact(shift.num_lost), high=0),
            Check(
                what=f"{policy}: delay of a run that loads, over the bare load",
                measured=bootstrap(range(len(loaded)), 1, delay),
                high=self.most,
            ),
            Check(
                what=f"{policy}: steps and pictures in the worst {self.window_s:g} s",
                measured=extremes(progress, min),
                low=1,
            ),
            Check(what=f"{policy}: replays of the log that differ", measured=exact(not shift.same_again), high=0),
        ]
        if shift.past.placements:
            changes = len(shift.past.placements) - 1
            checks.append(Check(what=f"{policy}: changes of the first placement", measured=exact(changes), low=2))
        return checks

    def _runs_table(self, shifts: Sequence[Shift]) -> Table:
        rows = []
        for shift in shifts:
            loads = [past.end_ns - past.start_ns for past in shift.past.loads]
            seconds = s_from_ns(shift.segments[-1].end_ns - shift.begin_ns)
            rows.append(
                (
                    shift.policy,
                    str(len(shift.tickets)),
                    f"{seconds:.0f}",
                    f"{len(shift.tickets) / seconds:.2f}",
                    str(len(loads)),
                    f"{median(loads) / 1e6:.1f}",
                    f"{shift.typical_gap_ns() / 1e6:.1f}",
                    f"{shift.load_share():.2%}",
                )
            )
        return Table(
            title="Each run",
            columns=(
                "policy",
                "requests",
                "seconds",
                "per second",
                "loads",
                "a load, ms, median",
                "gap before a run without one, ms, median",
                "device time that loads take",
            ),
            rows=tuple(rows),
        )

    def _method(self) -> tuple[str, ...]:
        (side_small, steps_small), (side_large, steps_large) = self.small, self.large
        return (
            f"`shapes` with weights that nothing uses beside its own: denoiser {DENOISER_BYTES / _MB:.0f} MB, VAE "
            f"{VAE_BYTES / _MB:.0f} MB; {self.workers} CPU workers with room for {_ROOM_BYTES / _MB:.0f} MB each: text "
            "encoders and denoiser, or the VAE. The time of a step and of a decode is a sleep, in place of an "
            "accelerator that computes; everything else is real.",
            f"Requests that begin are of {side_small} px and {steps_small} steps for {self.seconds[0]:g} s, then of "
            f"{side_large} px and {steps_large} steps until {self.seconds[1]:g} s after the placement has changed, "
            "then small again until it has changed again; as many are open as one device decodes in 50 s, or two "
            "denoise. All are exact: each runs on one device, alone. The second policy has phases of the same length.",
            "The delay of a run counts from when it was decided and the runs before it, of its request and of its "
            "device, had ended, by the clocks of the workers; less the median of runs that waited for no load. The "
            "bare load is the time that the worker reports for it. On a CPU it maps the copy that the host keeps.",
        )


def _changes_table(shift: Shift) -> Table:
    rows = [
        (f"{s_from_ns(past.at_ns - shift.begin_ns):.1f}", _types(past), past.placement.why)
        for past in shift.past.placements
    ]
    return Table(title=f"Placements of {shift.policy}", columns=("s", "devices", "why"), rows=tuple(rows))


def _types(past: PastPlacement) -> str:
    return "; ".join(f"{name} on {', '.join(map(str, group))}" for group, name in past.placement.groups)


def _loads_table(shift: Shift) -> Table:
    """Each run that waited for a load."""
    typical_ns = shift.typical_gap_ns()

    def row(one: Dispatch) -> tuple[str, ...]:
        segment = one.segment
        return (
            f"{s_from_ns(segment.start_ns - shift.begin_ns):.1f}",
            str(segment.devices[0]),
            segment.stage,
            f"{segment.load_ns / 1e6:.1f}",
            f"{one.gap_ns / 1e6:.1f}",
            f"{(one.gap_ns - typical_ns) / segment.load_ns:.2f}",
        )

    loaded = [one for one in shift.dispatches() if one.segment.load_ns]
    return Table(
        title=f"Runs of {shift.policy} that waited for a load",
        columns=("s", "device", "stage", "load, ms", "gap before the run, ms", "delay / load"),
        rows=tuple(map(row, loaded)),
    )


def _monitor_table(shift: Shift) -> Table:
    """At the end of each whole minute, so that windows differ."""
    rows, last_s = list[tuple[str, ...]](), dict[str, float]()
    for at_ns, status, ended, busy_ns in shift.seen_and_measured(_COUNTED):
        at_s, devices_ns = s_from_ns(at_ns - shift.begin_ns), status.window_ns * max(1, status.num_devices)
        if at_s - last_s.get(status.name, 0.0) < 30:
            continue
        last_s[status.name] = at_s
        rows.append(
            (
                f"{at_s:.0f}",
                f"{status.num_devices} {status.name}",
                f"{s_from_ns(status.window_ns):.0f}",
                str(status.completions),
                str(ended),
                f"{status.busy_ns / devices_ns:.2f}",
                f"{busy_ns / devices_ns:.2f}",
                str(status.backlog),
            )
        )
    return Table(
        title=f"What {shift.policy} counts in its window, beside what workers reported",
        columns=("s", "devices", "window, s", "requests", "measured", "busy", "measured", "waiting"),
        rows=tuple(rows),
    )


def _pictures(shift: Shift) -> list[Picture]:
    chart = chart_of_history(shift.past)
    changes = len(shift.past.placements) - 1
    what = f"changes of the placement: {changes}" if shift.past.placements else f"{len(chart.loads)} loads"
    found = [Picture(name=shift.policy, png=chart_png(chart, f"{shift.policy}: the whole run, {what}"))]
    if len(shift.past.placements) > 1:
        at_s = s_from_ns(shift.past.placements[-1].at_ns)
        near = _between(chart, at_s - _BEFORE_S, at_s + _AFTER_S)
        found.append(Picture(name=f"{shift.policy}_change", png=chart_png(near, f"{shift.policy}: the last change")))
    return found


def _between(chart: Chart, start_s: float, end_s: float) -> Chart:
    """What ran in a part of a chart, without the ends of requests."""

    def inside(one: Any) -> bool:
        return bool(one.start_s < end_s and one.end_s > start_s)

    works = tuple(
        replace(work, start_s=max(work.start_s, start_s), end_s=min(work.end_s, end_s))
        for work in chart.works
        if inside(work)
    )
    shown = {request for work in works for request in work.requests}
    requests = tuple(
        replace(one, arrival_s=start_s, finish_s=None, on_time=None, deadline_s=None)
        for one in chart.requests
        if one.id in shown
    )
    placements = tuple(one for one in chart.placements if start_s < one.at_s < end_s)
    return Chart(
        works=works,
        requests=requests,
        loads=tuple(filter(inside, chart.loads)),
        placements=placements,
        nodes=chart.nodes,
    )
