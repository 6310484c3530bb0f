"""`tilework timeline`: draws what ran where and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilework.cli.console import UserError, out, print_json, user_errors
from tilework.cli.logs import is_log, load_history
from tilework.cli.options.common import AsJson, examples
from tilework.cli.views.charts import chart_of_history, check_timeline_files, draw_chart
from tilework.formats.json_lines import BadLine
from tilework.formats.schedule import read_schedule
from tilework.formats.trace import read_requests
from tilework.report.chart import Chart, busy_shares, chart_of_schedule
from tilework.report.tables import counted_devices

EXAMPLE = examples(
    "tilework timeline events.jsonl --out run.html --out run.png",
    "tilework timeline schedule.jsonl --requests requests.jsonl \\\n  --out run.json",
)


def command(
    file: Annotated[Path, typer.Argument(help="An event log (serve --log, simulate --events), or a schedule.")],
    out_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            help="File to write: .html (a page to zoom in), .png, or .json (for Perfetto); repeatable.",
        ),
    ] = None,
    requests: Annotated[
        Path | None, typer.Option(help="Requests of a schedule, for their sizes, arrivals and deadlines.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title; default the policy of a log, or the file's name.")] = None,
    json: AsJson = False,
) -> None:
    """Draw what ran where and when, from the event log of a server or a simulation, or from a schedule.

    Open .html in a browser, .json at https://ui.perfetto.dev. An event log has more than a schedule: the reason and
    predicted time of each run, and the decisions about each request.
    """
    files = check_timeline_files(out_files or [])
    if not files:
        raise UserError("nothing to write; give --out FILE.html, FILE.png or FILE.json")
    chart, default_title = _read(file, requests, quiet=json)
    if not chart.works and not chart.requests:
        raise UserError(f"{file} holds no work and no request; was anything served?")
    for target in files:
        draw_chart(target, chart, title=title or default_title)
    summary = _summary(chart, files)
    if json:
        print_json(summary)
        return
    out.print(
        f"{summary['requests']} requests, {summary['works']} runs, {summary['seconds']:.1f} s, "
        f"devices {summary['busy']:.0%} busy: {', '.join(summary['files'])}",
        markup=False,
        soft_wrap=True,
    )


def _read(file: Path, requests: Path | None, quiet: bool) -> tuple[Chart, str]:
    """Return the chart of a file, and what to call it."""
    with user_errors(OSError):
        from_log = is_log(file)
    if from_log:
        if requests is not None:
            raise UserError("an event log knows its requests; leave out --requests")
        history = load_history(file, quiet)
        return chart_of_history(history), f"{history.header.config.policy} on {counted_devices(history.num_devices)}"
    with user_errors(BadLine, OSError):
        workload = () if requests is None else read_requests(requests, "")
        return chart_of_schedule(read_schedule(file), workload), file.name


def _summary(chart: Chart, files: list[Path]) -> dict[str, Any]:
    """Sum up a chart: `busy` is the mean over all devices, `busy_by_device` the share of the time each was at work."""
    shares = busy_shares(chart.works, chart.start_s, chart.end_s)
    by_device = {str(device_id): round(shares.get(device_id, 0.0), 6) for device_id in sorted({*chart.nodes, *shares})}
    return {
        "works": len(chart.works),
        "requests": len(chart.requests),
        "late": sum(request.is_late for request in chart.requests),
        "seconds": round(chart.end_s - chart.start_s, 6),
        "busy": round(sum(by_device.values()) / max(1, len(by_device)), 6),
        "busy_by_device": by_device,
        "files": [str(target) for target in files],
    }
