"""`tilework bound`: what it prints, and how it tells a mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from builders import PIPELINE, table
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest, write_workload


def line(arrival_s: float, slo_s: float | None, side: int = 128) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=arrival_s, pipeline=PIPELINE, height=side, width=side, steps=10, slo_s=slo_s)


def files(directory: Path, *lines: WorkloadRequest) -> list[str]:
    """The arguments of `bound` for these requests by `table`, where one of 128 px takes 1.06 s."""
    write_workload(directory / "requests.jsonl", lines)
    (directory / "costs.json").write_text(json.dumps(table_json(table())))
    return ["bound", "--requests", str(directory / "requests.jsonl"), "--cost", str(directory / "costs.json")]


TWO_OF_FOUR = (line(0.0, 1.2), line(0.1, 1.2), line(0.2, 1.2, side=192), line(5.0, 3.0), line(6.0, None))


def test_the_bound_is_printed_in_total_and_by_size(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, files(tmp_path, *TWO_OF_FOUR))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "4 requests with a deadline on 1 device: at most 2 on time, 50.0%" in words
    assert "128x128 3 0 2.0 1.0" in words
    assert "192x192 1 1 0.0 1.0" in words


def test_json_has_the_same_bound_and_more_devices_raise_it(tmp_path: Path) -> None:
    arguments = [*files(tmp_path, *TWO_OF_FOUR), "--json"]
    alone, pair = (json.loads(CliRunner().invoke(app, [*arguments, "--devices", n]).stdout) for n in ("1", "2"))
    assert (alone["num_due"], alone["most_on_time"], alone["share"], alone["num_unreachable"]) == (4, 2, 0.5, 1)
    assert (pair["devices"], pair["most_on_time"]) == (2, 3)
    assert [size["size"] for size in alone["by_size"]] == ["128x128", "192x192"]


def test_with_batches_it_notes_that_more_may_be_on_time(tmp_path: Path) -> None:
    arguments, alone = files(tmp_path, *TWO_OF_FOUR), table()
    assert "batches" not in CliRunner().invoke(app, arguments).stdout
    pair = replace(alone, rows=(*alone.rows, replace(alone.rows[1], batch=2)))
    (tmp_path / "costs.json").write_text(json.dumps(table_json(pair)))
    assert "has batches" in CliRunner().invoke(app, arguments).stdout


def told(arguments: list[str]) -> str:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UserError)
    return str(error)


def test_mistakes_are_reported_with_the_remedy(tmp_path: Path) -> None:
    assert "add slo_s" in told(files(tmp_path, line(0.0, None)))
    assert "No such file" in told(["bound", "--requests", str(tmp_path / "none"), "--cost", "flux1dev_h100_eager"])
    foreign = files(tmp_path, line(0.0, 1.0))[:-1]
    assert "pipeline 'toy' is not in the cost table" in told([*foreign, "flux1dev_h100_eager"])


def test_help_has_an_example() -> None:
    assert "--requests requests.jsonl" in " ".join(CliRunner().invoke(app, ["bound", "--help"]).stdout.split())
