"""Fixtures for tests of the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tilework.cli import console as output
from tilework.cli import main


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
