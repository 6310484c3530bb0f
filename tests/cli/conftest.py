"""Fixtures for tests of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders import poisson, table
from cli.run_files import NUM_REQUESTS, workload_of, write_log
from tilework.cli import console as output
from tilework.cli import main
from tilework.cli.views.schedules import served_in
from tilework.cost.table_file import table_json
from tilework.formats.workload import write_workload


@pytest.fixture
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours and 100 columns, also where the environment of the tests asks for others."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)
    for console in (output.out, output.console):
        monkeypatch.setattr(console, "_force_terminal", False)
        monkeypatch.setattr(console, "_color_system", None)
        monkeypatch.setattr(console, "width", 100)


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run `tilework` with arguments that it must refuse; returns the one line that it says, without "error: "."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tilework", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        printed = capsys.readouterr()
        assert exit_info.value.code == 2
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with requests.jsonl, costs.json and the log of a run, events.jsonl."""
    directory = tmp_path_factory.mktemp("cli")
    requests = poisson(NUM_REQUESTS, 1.5, seed=2)
    trace = write_log(directory / "events.jsonl", requests)
    write_workload(directory / "requests.jsonl", workload_of(served_in(trace)))
    (directory / "costs.json").write_text(json.dumps(table_json(table())))
    return directory
