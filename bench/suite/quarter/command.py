"""The command line of `bench/gpu/quarter.py`."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from suite.children import Signalled, leave_on
from suite.gpu.parts import PARTS, Part
from suite.quarter import status
from suite.quarter.course import BEGUN, Course, Ending, Outcome, UnknownPart, parts_from
from suite.quarter.kept import ARCHIVE, Kept, UnusableFolder
from suite.quarter.machine import cards
from suite.quarter.measuring import Measuring
from suite.quarter.rehearsal import RehearsalFailed, rehearse
from suite.quarter.wheels import PYTHON, ROOT, PackFailed, alone_with_wheels, folder_for, install, pack

_WITHOUT_CARD = 4
"""Limits are those of a host with a card. Two cores that others use, too, take as many times as long."""
_EPILOG = """\
examples:
  python bench/gpu/quarter.py pack                     # where there is a network: wheels into bench/gpu/wheels
  python bench/gpu/quarter.py --minutes 11 --out DIR   # on the machine with the card: what has never been measured
  python bench/gpu/quarter.py --from live --out DIR    # the next time
  python bench/gpu/quarter.py --rehearse               # without a card, from an empty environment to files
  python bench/gpu/quarter.py --status --json          # what has run on a card

parts, in their order, with the limit of each:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a goal is missed, 2 if a part failed or was ended, or the call cannot be carried out.

    128 and its number for a signal that ends it.
    """
    start_s = time.monotonic()
    asked = _asked(arguments)
    leave_on(signal.SIGTERM, signal.SIGINT)  # So that the part that runs is ended, too.
    try:
        if asked.status:
            return _status(asked.json)
        if asked.action == "pack":
            return _pack(asked.python or PYTHON)
        if asked.rehearse:
            return _rehearse(asked.python or sys.executable)
        with alone_with_wheels():
            return _measure(asked, start_s)
    except (PackFailed, RehearsalFailed, UnknownPart, UnusableFolder) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Signalled as signalled:
        print(f"ended by {signal.Signals(signalled.number).name}; parts that had ended are kept", file=sys.stderr)
        return 128 + signalled.number


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    asked = parser.parse_args(arguments)
    modes = {"pack": asked.action == "pack", "--rehearse": asked.rehearse, "--status": asked.status}
    if sum(modes.values()) > 1:
        parser.error(f"{' and '.join(name for name, is_asked in modes.items() if is_asked)}: choose one of them")
    if asked.json and not asked.status:
        parser.error("--json: it goes with --status")
    return asked


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {part.name:<11}{part.limit_s:>4} s  {part.answers}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="quarter.py",
        description="Measure on a bare machine with one card, without a network, in the minutes that there are.",
        epilog=_EPILOG + listed,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("pack",), help="fetch the wheels that the machine lacks")
    parser.add_argument("--minutes", type=_minutes, default=11.0, help="end by then (default: 11)")
    parser.add_argument("--from", dest="first", default="", metavar="PART", help="begin with this one")
    parser.add_argument("--again", action="store_true", help="measure, too, what has a result already")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "out" / "quarter",
        metavar="DIR",
        help="where files go (default: out/quarter)",
    )
    parser.add_argument("--rehearse", action="store_true", help="all but the card; makes out/rehearsal anew")
    parser.add_argument("--status", action="store_true", help="print which parts have run on a card")
    parser.add_argument("--json", action="store_true", help="with --status: one JSON object")
    parser.add_argument(
        "--python", metavar="PYTHON", help=f"pack: a version (default: {PYTHON}); --rehearse: an interpreter"
    )
    return parser


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0 < (minutes := float(text)) < float("inf"):
            return minutes
    raise argparse.ArgumentTypeError(f"{text}: give minutes above 0, such as 11")


def _status(as_json: bool) -> int:
    found = status.measured()
    print(json.dumps({"parts": status.as_json(found)}) if as_json else status.table(found))
    return 0


def _pack(python: str) -> int:
    done = pack(python)
    native = "with" if done.native else "WITHOUT (no C compiler)"
    print(f"{folder_for(python)}: {done.num_bytes / 1e6:.1f} MB, {len(done.versions)} wheels, {native} the extension")
    return 0


def _rehearse(python: str) -> int:
    done = rehearse(ROOT / "out" / "rehearsal", python)
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in done.seconds.items())
    print(f"{sum(done.seconds.values()):.0f} s: {phases}; wheels {done.packed_bytes / 1e6:.1f} MB")
    print(f"files: {', '.join(done.files)}")
    return done.code


def _measure(asked: argparse.Namespace, start_s: float) -> int:
    parts, kept, there = parts_from(PARTS, asked.first), Kept(folder=asked.out), cards()
    kept.check()
    before = set() if asked.again else _measured_before(parts, kept, bool(there))
    if not there:
        parts = [replace(part, limit_s=_WITHOUT_CARD * part.limit_s) for part in parts]
    measuring = Measuring(kept=kept, packed=install())
    if not there:
        print("no card: all parts run small, as a rehearsal", flush=True)
    course = Course(
        end_s=start_s + 60 * asked.minutes,
        measure=measuring.measure,
        before=before,
        num_cards=len(there) or max(part.num_cards for part in PARTS),
    )
    outcomes = list[Outcome]()
    for one in course.run(parts):
        outcomes.append(one)
        kept.write_page(measuring.page(outcomes))
        print(f"{time.monotonic() - start_s:6.1f} s  {one.part.name}: {one.ending} ({one.seconds:.1f} s)", flush=True)
    if kept.result_names():
        print(f"to keep the results: tar xzf {shlex.quote(str(asked.out / ARCHIVE))} -C bench/results", flush=True)
    return _exit_status([one.ending for one in outcomes if one.ending in BEGUN])


def _measured_before(parts: Sequence[Part], kept: Kept, on_card: bool) -> set[str]:
    """Those with a result of a card, if there is one here, and else of a machine without."""
    pages = kept.documents()
    before = {part.name for part in parts if any(bool(one.card) is on_card for one in status.read(part.name, pages))}
    return before | set(status.measured()) if on_card else before


def _exit_status(endings: Sequence[Ending]) -> int:
    if {Ending.FAILED, Ending.PAST_LIMIT} & set(endings):
        return 2
    return 1 if Ending.MISSED in endings else 0
