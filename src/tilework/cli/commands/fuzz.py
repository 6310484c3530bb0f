"""`tilework fuzz`: break the controller in simulation, from seeds."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import tilework
from tilework.cli.console import UserError, console, out, print_json, progress, user_errors
from tilework.control.log import entry_line, header_line
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.policy.registry import UnknownPolicy, make_policy, policy_names
from tilework.sim.faults import KINDS, BadFault, Faults, parse_faults
from tilework.sim.fuzz import Verdict, judge, judge_many, shrink
from tilework.sim.scenarios import Scenario, scenario

EXAMPLE = (
    "Examples: tilework fuzz --seeds 1000  |  tilework fuzz --minutes 10 --policy tetriserve --fault crash=0.1:2  |  "
    "tilework fuzz --seed 7 --log events.jsonl"
)
_MOST_SHRUNK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What the seeds leave open is None."""

    policy: str | None
    faults: Faults | None
    given: tuple[str, ...]

    def scenario(self, seed: int) -> Scenario:
        return scenario(seed, self.policy, self.faults)

    def replay(self, smaller: Scenario) -> str:
        """The command that runs it again."""
        whole = self.scenario(smaller.seed)
        words = ["tilework fuzz --seed", str(smaller.seed)]
        words += [f"--policy {self.policy}"] if self.policy else []
        words += [f"--fault {text}" for text in self.given]
        without = [kind for kind in whole.faults.by_kind if kind not in smaller.faults]
        words += [f"--without {','.join(without)}"] if without else []
        kept = [request.uid for request in smaller.requests]
        words += [f"--keep {','.join(kept)}"] if len(kept) < len(whole.requests) else []
        return " ".join(words)


@dataclass(slots=True, kw_only=True)
class _Tally:
    num_seeds: int = 0
    num_events: int = 0
    seconds: float = 0.0
    strikes: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    bad: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.num_seeds += 1
        self.num_events += verdict.num_events
        self.strikes.update(verdict.strikes)
        self.endings.update(verdict.endings)
        if verdict.violation:
            self.bad.append(verdict)


def command(
    seeds: Annotated[int | None, typer.Option(min=1, help="Run so many seeds.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Run seeds for so long.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The first of these seeds.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run this one seed only.")] = None,
    without: Annotated[str | None, typer.Option(help="With --seed: faults to leave out, separated by commas.")] = None,
    keep: Annotated[str | None, typer.Option(help="With --seed: the requests to keep, separated by commas.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="With --seed: write the event log, for explain, timeline and replay.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(policy_names())}; else each seed chooses.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="KIND, KIND=PROBABILITY or KIND=PROBABILITY:SIZE, as often as you like; else seeds choose."),
    ] = None,
    kinds: Annotated[bool, typer.Option("--kinds", help="List the kinds of faults, and do nothing else.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one per core.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Run the controller on modelled clusters where things go wrong, and check after every event what must hold.

    Each seed is one scenario: a cluster, a policy, a workload, and which faults strike how often. One that fails is
    made smaller, and printed with the command that runs it again. Exit status 1 if there is one.
    """
    if kinds:
        _show_kinds(json)
        return
    with user_errors(BadFault, UnknownPolicy, OSError):
        if policy is not None:
            make_policy(policy)
        wish = _Wish(policy=policy, faults=parse_faults(fault) if fault else None, given=tuple(fault or ()))
        if seed is not None:
            _run_one(_chosen(wish, seed, without, keep), wish, log, json)
            return
        if without or keep or log:
            raise UserError("--without, --keep and --log are for one scenario; give its --seed")
        if (seeds is None) == (minutes is None):
            raise UserError("give either --seeds N, --minutes M or --seed S")
        tally = _run_many(wish, first, seeds, minutes, processes or os.cpu_count() or 1, quiet=json)
    _report(tally, wish, first, json)
    if tally.bad:
        raise typer.Exit(1)


def _chosen(wish: _Wish, seed: int, without: str | None, keep: str | None) -> Scenario:
    one = wish.scenario(seed)
    for kind in (without or "").split(",") if without else []:
        if kind not in one.faults:
            names = ", ".join(one.faults.by_kind) or "none"
            raise UserError(f"--without {kind}: seed {seed} does not have this fault; it has {names}")
        one = one.with_faults(one.faults.without(kind))
    if keep is not None:
        uids = set(keep.split(","))
        strangers = uids - {request.uid for request in one.requests}
        if strangers:
            raise UserError(f"--keep {min(strangers)}: seed {seed} has the requests 0 to {len(one.requests) - 1}")
        one = one.keeping(uids)
    return one


def _run_one(one: Scenario, wish: _Wish, log: Path | None, json: bool) -> None:
    lines: list[str] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if log is not None:
            lines.append(entry_line(event, actions, now_ns))

    verdict = judge(one, observe)
    if log is not None:
        head = header_line(tilework.__version__, one.controller, one.table)
        log.write_text("\n".join([head, *lines]) + "\n", "utf-8")
    tally = _Tally()
    tally.add(verdict)
    if json:
        print_json(_document(tally, []))
    else:
        about = f"policy {one.controller.policy}, {one.config.num_devices} GPUs, {len(one.requests)} requests"
        out.print(f"seed {one.seed}: {about}; faults {' '.join(map(str, one.faults.by_kind.values())) or 'none'}")
        _print_tally(tally)
        if verdict.violation:
            out.print(f"[red]violation[/red] at {verdict.where}")
            out.print(verdict.violation, markup=False, soft_wrap=True)
    if verdict.violation:
        raise typer.Exit(1)


def _run_many(
    wish: _Wish, first: int, seeds: int | None, minutes: float | None, num_processes: int, *, quiet: bool
) -> _Tally:
    tally, started_s = _Tally(), time.monotonic()

    def wanted() -> Iterator[int]:
        for seed in count(first) if seeds is None else range(first, first + seeds):
            if minutes is not None and time.monotonic() - started_s > 60 * minutes:
                return
            yield seed

    with progress(quiet) as bar:
        task = bar.add_task("fuzzing", total=seeds)
        for verdict in judge_many(wanted(), wish.policy, wish.faults, num_processes):
            tally.add(verdict)
            failed = f", [red]{len(tally.bad)} bad[/red]" if tally.bad else ""
            bar.update(task, advance=1, description=f"fuzzing, {tally.num_events} events{failed}")
    tally.seconds = time.monotonic() - started_s
    return tally


def _report(tally: _Tally, wish: _Wish, first: int, json: bool) -> None:
    with console.status("making what failed smaller") if tally.bad else console.status(""):
        shrunk = [shrink(wish.scenario(verdict.seed)) for verdict in tally.bad[:_MOST_SHRUNK]]
    if json:
        print_json(_document(tally, [wish.replay(one) for one in shrunk]))
        return
    rate = f"{tally.num_events / max(tally.seconds, 1e-9):.0f} per second"
    out.print(
        f"seeds {first} to {first + tally.num_seeds - 1}: {tally.num_events} events in {tally.seconds:.0f} s ({rate})"
    )
    _print_tally(tally)
    if not tally.bad:
        out.print("Everything held that must hold.")
        return
    out.print(f"[red]{len(tally.bad)} scenarios fail[/red]: {', '.join(str(bad.seed) for bad in tally.bad[:20])}")
    for one in shrunk:
        verdict = judge(one)
        out.print(f"{verdict.where}: {verdict.violation}", markup=False, soft_wrap=True)
        out.print(f"  {wish.replay(one)}", markup=False, soft_wrap=True)


def _print_tally(tally: _Tally) -> None:
    for title, counts in (("requests", tally.endings), ("faults", tally.strikes)):
        if counts:
            told = ", ".join(f"{number} {name}" for name, number in counts.most_common())
            out.print(f"{title}: {told}", soft_wrap=True)


def _document(tally: _Tally, commands: list[str]) -> dict[str, Any]:
    return {
        "simulated": True,
        "seeds": tally.num_seeds,
        "events": tally.num_events,
        "seconds": round(tally.seconds, 3),
        "requests": tally.endings,
        "faults": tally.strikes,
        "violations": [{"seed": bad.seed, "where": bad.where, "violation": bad.violation} for bad in tally.bad],
        "commands": commands,
    }


def _show_kinds(json: bool) -> None:
    if json:
        kinds = {
            name: {
                "text": kind.text,
                "per": kind.per,
                "size": kind.size,
                "default": [kind.probability, kind.usual_size],
            }
            for name, kind in KINDS.items()
        }
        print_json(kinds)
        return
    table = Table("fault", "what happens", "probability per", "size", "default")
    for name, kind in KINDS.items():
        table.add_row(name, kind.text, kind.per, kind.size, f"{kind.probability:g}:{kind.usual_size:g}")
    out.print(table)
