"""`tilework fuzz`: looks for violations of the invariants in simulated scenarios, from seeds."""

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
from tilework.cli.options.common import AsJson, Processes, examples
from tilework.control.log import entry_line, header_line
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.policy.registry import UnknownPolicy, make_policy
from tilework.server.text import counted
from tilework.sim.faults import FAULTS, BadFault, parse_faults
from tilework.sim.fuzz import Choice, ScenarioResult, run_scenario, run_seeds, shrink
from tilework.sim.scenarios.scenario import Scenario

EXAMPLE = examples(
    "tilework fuzz --seeds 1000",
    "tilework fuzz --minutes 10 --policy tetriserve --fault crash=0.1:2",
    "tilework fuzz --faultless --seeds 1000",
    "tilework fuzz --seed 7 --log events.jsonl",
)
_MOST_SHRUNK = 1
Faultless = Annotated[
    bool,
    typer.Option(
        "--faultless",
        help="Run scenarios without faults whose steps take 1 ms to 2 s: each promise must be kept.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FuzzOptions:
    """Options that hold for every seed. `faults` keeps their text."""

    choice: Choice
    faults: tuple[str, ...]

    def replay(self, smaller: Scenario) -> str:
        """Return the command that runs a scenario again."""
        choice = self.choice
        whole = self.choice.scenario(smaller.seed)
        words = ["tilework fuzz --seed", str(smaller.seed)]
        words += ["--faultless"] if choice.is_faultless else []
        words += [f"--policy {choice.policy}"] if choice.policy else []
        words += [f"--fault {text}" for text in self.faults]
        words += [] if choice.changes is None else ["--changes" if choice.changes else "--no-changes"]
        without = [name for name in whole.faults.by_name if name not in smaller.faults]
        words += [f"--without {','.join(without)}"] if without else []
        kept = [request.uid for request in smaller.requests]
        words += [f"--keep {','.join(kept)}"] if len(kept) < len(whole.requests) else []
        left = [str(one.number) for one in smaller.changes]
        words += [f"--keep-changes {','.join(left)}"] if len(left) < len(whole.changes) else []
        return " ".join(words)


def command(
    seeds: Annotated[int | None, typer.Option(min=1, help="Run this many seeds.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Run seeds for this many minutes.")] = None,
    first: Annotated[int, typer.Option(min=0, help="First of these seeds.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run only this seed.")] = None,
    without: Annotated[str | None, typer.Option(help="With --seed: faults to leave out, separated by commas.")] = None,
    keep: Annotated[str | None, typer.Option(help="With --seed: the requests to keep, separated by commas.")] = None,
    keep_changes: Annotated[
        str | None,
        typer.Option(help="With --seed: the numbers of the changes of models to keep, separated by commas."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="With --seed: write the event log, for explain, timeline and replay.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="A name of docs/policies.md, or module:Class; by default each seed chooses one that ships."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="NAME, NAME=PROBABILITY or NAME=PROBABILITY:SIZE; repeatable; by default seeds choose."),
    ] = None,
    changes: Annotated[
        bool | None,
        typer.Option(
            "--changes/--no-changes",
            help="Let models and LoRAs come and go, or not; by default each seed chooses.",
            show_default=False,
        ),
    ] = None,
    faultless: Faultless = False,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="List the faults and do nothing else.")] = False,
    processes: Processes = None,
    json: AsJson = False,
) -> None:
    """Run the controller on simulated clusters where things go wrong, and check the invariants after every event.

    Each seed is one scenario: a cluster, a policy, a workload, and how often each fault happens. A scenario that
    violates an invariant is made smaller and printed with the command that runs it again; the exit status is then 1.
    """
    if list_faults:
        print_faults(json)
        return
    with user_errors(BadFault, UnknownPolicy, OSError):
        if policy is not None:
            make_policy(policy)
        if faultless and fault:
            raise UserError(f"--fault {fault[0]} is for scenarios with faults; leave out --faultless")
        faults = parse_faults(fault) if fault else None
        choice = Choice(policy=policy, faults=faults, changes=changes, is_faultless=faultless)
        if seed is not None:
            _run_one(_chosen(choice, seed, without, keep, keep_changes), log, json)
            return
        if without or keep or keep_changes or log:
            raise UserError("--without, --keep, --keep-changes and --log are for one scenario; give its --seed")
        if (seeds is None) == (minutes is None):
            raise UserError("give either --seeds N, --minutes M or --seed S")
        tally = _run_many(choice, first, seeds, minutes, processes or os.cpu_count() or 1, quiet=json)
    _report(tally, _FuzzOptions(choice=choice, faults=tuple(fault or ())), first, json)
    if tally.bad:
        raise typer.Exit(1)


def _chosen(choice: Choice, seed: int, without: str | None, keep: str | None, keep_changes: str | None) -> Scenario:
    """Return the scenario of a seed without some faults, requests and changes of models. Raises UserError."""
    one = choice.scenario(seed)
    for name in (without or "").split(",") if without else []:
        if name not in one.faults:
            names = ", ".join(one.faults.by_name) or "none"
            raise UserError(f"--without {name}: seed {seed} does not have this fault; it has {names}")
        one = one.with_faults(one.faults.without(name))
    if keep is not None:
        uids = set(keep.split(","))
        strangers = uids - {request.uid for request in one.requests}
        if strangers:
            raise UserError(f"--keep {min(strangers)}: seed {seed} has the requests 0 to {len(one.requests) - 1}")
        one = one.keeping(uids)
    return one if keep_changes is None else _with_changes(one, seed, keep_changes)


def _with_changes(one: Scenario, seed: int, keep: str) -> Scenario:
    known = {str(change.number): change.number for change in one.changes}
    strangers = set(filter(None, keep.split(","))) - known.keys()
    if strangers:
        raise UserError(f"--keep-changes {min(strangers)}: seed {seed} has {len(known)} changes of models, from 0")
    return one.keeping_changes({known[text] for text in keep.split(",") if text})


def _run_one(one: Scenario, log: Path | None, json: bool) -> None:
    """Run and print one scenario. Exit status 1 if it violates an invariant."""
    lines: list[str] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        if log is not None:
            lines.append(entry_line(event, actions, now_ns))

    verdict = run_scenario(one, observe)
    if log is not None:
        head = header_line(tilework.__version__, one.controller, one.table)
        log.write_text("\n".join([head, *lines]) + "\n", "utf-8")
    tally = Tally()
    tally.add(verdict)
    if json:
        print_json(tally.document([]))
    else:
        size = f"{counted(one.config.num_devices, 'device')}, {counted(len(one.requests), 'request')}"
        if one.changes:
            size += f", {counted(len(one.changes), 'change')} of models"
        about = f"policy {one.controller.policy}, {size}"
        out.print(f"seed {one.seed}: {about}; faults {' '.join(map(str, one.faults.by_name.values())) or 'none'}")
        print_tally(tally)
        if verdict.violation:
            out.print(f"[red]violation[/red] at {verdict.where}")
            out.print(verdict.violation, markup=False, soft_wrap=True)
    if verdict.violation:
        raise typer.Exit(1)


def _run_many(
    choice: Choice, first: int, seeds: int | None, minutes: float | None, num_processes: int, *, quiet: bool
) -> Tally:
    tally = Tally()
    started_s = time.monotonic()

    def wanted() -> Iterator[int]:
        for seed in count(first) if seeds is None else range(first, first + seeds):
            if minutes is not None and time.monotonic() - started_s > 60 * minutes:
                return
            yield seed

    with progress(quiet) as bar:
        task = bar.add_task("fuzzing", total=seeds)
        for verdict in run_seeds(wanted(), choice, num_processes):
            tally.add(verdict)
            failed = f", [red]{len(tally.bad)} bad[/red]" if tally.bad else ""
            bar.update(task, advance=1, description=f"fuzzing, {tally.num_events} events{failed}")
    tally.seconds = time.monotonic() - started_s
    return tally


def _report(tally: Tally, asked: _FuzzOptions, first: int, json: bool) -> None:
    """Print what the seeds came to, with the first violation made smaller."""
    with console.status("making what failed smaller") if tally.bad else console.status(""):
        shrunk = [shrink(asked.choice.scenario(verdict.seed)) for verdict in tally.bad[:_MOST_SHRUNK]]
    if json:
        print_json(tally.document([asked.replay(one) for one in shrunk]))
    else:
        print_many(tally, first, [(run_scenario(one), asked.replay(one)) for one in shrunk])


@dataclass(slots=True, kw_only=True)
class Tally:
    """The verdicts so far, added up. `bad` has those with a violation."""

    num_seeds: int = 0
    num_events: int = 0
    seconds: float = 0.0
    fault_counts: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    num_promised: int = 0
    num_kept: int = 0
    bad: list[ScenarioResult] = field(default_factory=list)

    def add(self, verdict: ScenarioResult) -> None:
        self.num_seeds += 1
        self.num_events += verdict.num_events
        self.fault_counts.update(verdict.fault_counts)
        self.endings.update(verdict.endings)
        self.num_promised += verdict.num_promised
        self.num_kept += verdict.num_kept
        if verdict.violation:
            self.bad.append(verdict)

    def document(self, commands: list[str]) -> dict[str, Any]:
        """Return the tally as plain JSON, with the commands that run the violations again."""
        return {
            "simulated": True,
            "seeds": self.num_seeds,
            "events": self.num_events,
            "seconds": round(self.seconds, 3),
            "requests": self.endings,
            "promises": {"accepted": self.num_promised, "kept": self.num_kept},
            "faults": self.fault_counts,
            "violations": [{"seed": bad.seed, "where": bad.where, "violation": bad.violation} for bad in self.bad],
            "commands": commands,
        }


def print_tally(tally: Tally) -> None:
    """List how requests ended, how many promises were kept, and how often each fault happened, a line each."""
    for title, counts in (("requests", tally.endings), ("faults", tally.fault_counts)):
        if counts:
            listed = ", ".join(f"{number} {name}" for name, number in counts.most_common())
            out.print(f"{title}: {listed}", soft_wrap=True)
        if title == "requests" and tally.num_promised:
            broken = "" if tally.num_kept == tally.num_promised else "; faults took the others' devices or time"
            out.print(f"promises: {tally.num_kept} of {tally.num_promised} kept{broken}")


def print_many(tally: Tally, first: int, failures: list[tuple[ScenarioResult, str]]) -> None:
    """Print the result of many seeds; `failures` are violations made smaller, with the commands to run them."""
    rate = f"{tally.num_events / max(tally.seconds, 1e-9):.0f} per second"
    last = first + tally.num_seeds - 1
    out.print(f"seeds {first} to {last}: {tally.num_events} events in {tally.seconds:.0f} s ({rate})")
    print_tally(tally)
    if not tally.bad:
        out.print("No invariant was violated.")
        return
    out.print(f"[red]{len(tally.bad)} scenarios fail[/red]: {', '.join(str(bad.seed) for bad in tally.bad[:20])}")
    for verdict, command in failures:
        out.print(f"{verdict.where}: {verdict.violation}", markup=False, soft_wrap=True)
        out.print(f"  {command}", markup=False, soft_wrap=True)


def print_faults(json: bool) -> None:
    """Print the faults by name, with their meaning, unit and defaults."""
    if json:
        print_json(
            {
                name: {
                    "text": fault.text,
                    "per": fault.per,
                    "size": fault.size,
                    "default": [fault.probability, fault.usual_size],
                }
                for name, fault in FAULTS.items()
            }
        )
        return
    table = Table("fault", "what happens", "probability per", "size", "default")
    for name, fault in FAULTS.items():
        table.add_row(name, fault.text, fault.per, fault.size, f"{fault.probability:g}:{fault.usual_size:g}")
    out.print(table)
