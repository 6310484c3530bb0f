"""`tilework simulate`: runs the controller that serves on simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

import tilework
from tilework.cli.console import UserError, out, print_json, progress, user_errors
from tilework.cli.logs import load_history
from tilework.cli.options.common import AsJson, DevicesPerNode, Jitter, SwitchMs, examples
from tilework.cli.views.charts import chart_of_history, check_timeline_files, draw_chart
from tilework.cli.views.schedules import ServedRequest, schedule_of_trace, served_in, served_live
from tilework.control.controller import ControllerConfig
from tilework.control.history_recorder import HistoryRecorder
from tilework.control.log import LogHeader, entry_line, header_line
from tilework.control.measured import dispatch_ns, profiled_table
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_MS
from tilework.cost.table import BadCostTable, CostTable, check_covers, check_devices
from tilework.cost.table_file import read_table
from tilework.formats.json_lines import BadLine, RequestId
from tilework.formats.schedule import write_schedule
from tilework.formats.trace import read_requests
from tilework.policy.registry import DEFAULT_POLICY, UnknownPolicy, make_policy
from tilework.report.tables import attainment_table, counted_devices, summary
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.sim.workloads.requests import BadRequests, check_requests, to_requests

Requests = Annotated[Path | None, typer.Argument(help="Requests as JSON lines or CSV (docs/formats.md).")]
Cost = Annotated[
    str | None, typer.Option(help="Cost table: a JSON file (docs/formats.md), or a name of `tilework cost list`.")
]
TrueCost = Annotated[
    str | None,
    typer.Option(
        metavar="COST",
        help="Cost table of the simulated devices, if they differ from the plan's; default --cost.",
    ),
]
Log = Annotated[Path | None, typer.Option(help="Take requests and measured costs from a live run's log.")]
Policy = Annotated[
    str | None,
    typer.Option(help=f"A name of docs/policies.md, or module:Class; default {DEFAULT_POLICY}, or the log's."),
]
MaxBatch = Annotated[
    int | None, typer.Option(min=1, help="Most requests in one forward pass; default 12, or the log's.")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Number of devices; default 1, or the log's.")]
CpuSlots = Annotated[
    int, typer.Option("--cpu-slots", min=1, help="CPU slots of each node, if a pipeline has stages for them.")
]
Seed = Annotated[int, typer.Option(help="Seed of the jitter.")]
Schedule = Annotated[Path | None, typer.Option(help="Write what ran when, as JSON lines.")]
Timeline = Annotated[
    list[Path] | None,
    typer.Option(help="Draw devices over time: .html, .png or .json (for Perfetto); repeatable."),
]
Events = Annotated[
    Path | None, typer.Option(help="Write the event log, for explain, timeline and replay, as serve --log does.")
]
EXAMPLE = examples(
    "tilework simulate requests.jsonl --cost flux.json --devices 8 \\\n  --policy edf --timeline plan.html",
    "tilework simulate requests.jsonl --cost flux.json --true-cost measured.json",
    "tilework simulate --log events.jsonl",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """One simulation: a controller that starts from `table`, on devices that take the times of `devices`.

    `live` has the same requests as they went before, if they come from a log: live, unless `log_is_simulated`.
    """

    requests: list[Request]
    ids: dict[str, RequestId]
    table: CostTable
    devices: CostTable
    controller: ControllerConfig
    config: SimConfig
    live: list[ServedRequest]
    log_is_simulated: bool = False


def command(
    requests: Requests = None,
    cost: Cost = None,
    true_cost: TrueCost = None,
    log: Log = None,
    policy: Policy = None,
    max_batch: MaxBatch = None,
    devices: Devices = None,
    devices_per_node: DevicesPerNode = None,
    cpu_slots: CpuSlots = 1,
    switch_ms: SwitchMs = 0.0,
    seed: Seed = 0,
    jitter: Jitter = 0.0,
    schedule: Schedule = None,
    timeline: Timeline = None,
    events: Events = None,
    json: AsJson = False,
) -> None:
    """Run the controller that serves on simulated devices. All times are simulated.

    With --log, the simulated devices take the times that the run measured, the controller starts from the costs that
    the run started from, and the result is set beside what really happened.
    """
    config = SimConfig(
        num_devices=devices or 1,
        seed=seed,
        jitter=jitter,
        switch_ns=round(switch_ms * NS_PER_MS),
        slots_per_node=cpu_slots,
    )
    with user_errors(BadLine, BadCostTable, BadRequests, UnknownPolicy, OSError):
        scenario = _scenario(requests, cost, log, policy, devices, config, quiet=json)
        if true_cost is not None:
            scenario = _on_devices(scenario, true_cost, log, str(cost))
        if devices_per_node is not None:
            scenario = replace(scenario, devices=replace(scenario.devices, devices_per_node=devices_per_node))
        if max_batch is not None:
            scenario = replace(scenario, controller=replace(scenario.controller, max_batch=max_batch))
        make_policy(scenario.controller.policy)
        check_devices(scenario.table, scenario.config.num_devices, str(cost or log))
        pictures = check_timeline_files(timeline or [])
        header = LogHeader(
            version=tilework.__version__, config=scenario.controller, table=scenario.table, is_simulated=True
        )
        recorder = HistoryRecorder(header) if pictures else None
        trace = _run(scenario, header, recorder, events, quiet=json)
        if schedule is not None:
            write_schedule(schedule, schedule_of_trace(trace, scenario.ids))
    if recorder is not None:
        chart = chart_of_history(recorder.history(), scenario.ids)
        for picture in pictures:
            title = f"{scenario.controller.policy} on {scenario.config.num_devices} simulated devices"
            draw_chart(picture, chart, title=title)
    served = served_in(trace)
    if json:
        print_json(_document(scenario, served))
    else:
        _print(scenario, served)


def _print(scenario: _Scenario, served: list[ServedRequest]) -> None:
    """Print how the requests ended, beside the live run if there is one."""
    out.print(
        attainment_table(
            served, title=f"{scenario.controller.policy}, {counted_devices(scenario.config.num_devices)}, simulated"
        )
    )
    if scenario.live:
        run = "simulation" if scenario.log_is_simulated else "live run"
        out.print(attainment_table(scenario.live, title=f"the {run} of the log"))
        ratio = _latency_ratio(served, scenario.live)
        other = "logged" if scenario.log_is_simulated else "live"
        out.print(f"simulated / {other} mean latency: {'-' if ratio is None else f'{ratio:.3f}'}")


def _scenario(
    requests: Path | None,
    cost: str | None,
    log: Path | None,
    policy: str | None,
    devices: int | None,
    config: SimConfig,
    quiet: bool,
) -> _Scenario:
    if log is not None:
        if requests is not None or cost is not None:
            raise UserError("--log brings its own requests and costs; leave out REQUESTS and --cost")
        return _from_log(log, policy, devices, config, quiet)
    if requests is None or cost is None:
        raise UserError("give REQUESTS and --cost, or --log; see tilework simulate --help")
    table = read_table(cost)
    workload = read_requests(requests, *table.pipelines)
    check_requests(workload, table, source=requests, costs=cost)
    return _Scenario(
        requests=to_requests(workload),
        ids={str(line.id): line.id for line in workload if line.id is not None},
        table=table,
        devices=table,
        controller=ControllerConfig(policy=policy or DEFAULT_POLICY),
        config=config,
        live=[],
    )


def _on_devices(scenario: _Scenario, true_cost: str, log: Path | None, cost: str) -> _Scenario:
    """Return the scenario on devices that take other times. Raises BadCostTable."""
    if log is not None:
        raise UserError("--log brings the times that the run measured; leave out --true-cost")
    devices = read_table(true_cost)
    check_covers(scenario.table, devices, planned_name=cost, devices_name=true_cost)
    return replace(scenario, devices=devices)


def _from_log(log: Path, policy: str | None, devices: int | None, config: SimConfig, quiet: bool) -> _Scenario:
    history = load_history(log, quiet)
    live = served_live(history)
    logged = history.header.config
    if not live:
        raise UserError(f"{log} holds no finished request; serve something first")
    return _Scenario(
        requests=[one.request for one in live],
        ids={one.request.uid: index for index, one in enumerate(live)},
        table=history.header.table,
        devices=profiled_table(history),
        controller=ControllerConfig(policy=policy or logged.policy, max_batch=logged.max_batch),
        config=replace(
            config,
            num_devices=devices or history.num_devices or 1,
            dispatch_ns=dispatch_ns(history),
            hosts_have_read=True,
        ),
        live=live,
        log_is_simulated=history.header.is_simulated,
    )


def _run(
    scenario: _Scenario, header: LogHeader, recorder: HistoryRecorder | None, events: Path | None, quiet: bool
) -> Trace:
    """Run the simulation. Raises OSError if the event log cannot be written."""
    simulation = Simulation(header.config, scenario.table, scenario.config, scenario.devices)
    observers: list[Callable[[Event, tuple[Action, ...], int], Any]] = [] if recorder is None else [recorder.add]
    with ExitStack() as stack:
        if events is not None:
            lines = stack.enter_context(events.open("w", encoding="utf-8"))
            lines.write(
                header_line(header.version, header.config, header.table, is_simulated=header.is_simulated) + "\n"
            )
            observers.append(lambda event, actions, now_ns: lines.write(entry_line(event, actions, now_ns) + "\n"))
        bar = stack.enter_context(progress(quiet))
        if not bar.disable:
            task = bar.add_task("simulating", total=len(scenario.requests))
            observers.append(lambda *_: bar.update(task, completed=simulation.num_ended))

        def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
            for observer in observers:
                observer(event, actions, now_ns)

        return simulation.run(scenario.requests, observe=observe if observers else None)


def _latency_ratio(served: list[ServedRequest], live: list[ServedRequest]) -> float | None:
    """Return the ratio of the mean latencies of the requests that were done in both; None if there is none."""
    pairs = [
        (one.latency_s, real.latency_s)
        for one, real in zip(served, live, strict=True)
        if one.status == real.status == Status.DONE and one.latency_s is not None and real.latency_s is not None
    ]
    return fmean(one for one, _ in pairs) / fmean(real for _, real in pairs) if pairs else None


def _document(scenario: _Scenario, served: list[ServedRequest]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "simulated": True,
        "policy": scenario.controller.policy,
        "config": {name: value for name, value in asdict(scenario.config).items() if name != "faults"},
        "result": summary(served),
    }
    if scenario.live:
        document["live"] = summary(scenario.live)
        document["log_is_simulated"] = scenario.log_is_simulated
        document["mean_latency_ratio"] = _latency_ratio(served, scenario.live)
    return document
