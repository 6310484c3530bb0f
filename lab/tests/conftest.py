"""Fixtures for tests of the lab's commands; those of all commands come from the product's tests."""

from __future__ import annotations

from typing import Any

import pytest

from cli.conftest import files, mistake, plain_output  # noqa: F401
from tilework.cli import console as output
from tilework_lab.cli import compare_run
from tilework_lab.compare.runs import Task


@pytest.fixture
def wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours and 160 columns, so that tables of comparisons are whole."""
    for console in (output.out, output.console):
        monkeypatch.setattr(console, "_force_terminal", False)
        monkeypatch.setattr(console, "_color_system", None)
        monkeypatch.setattr(console, "width", 160)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """The tasks of comparisons that are run rather than found."""
    tasks: list[Task] = []
    begin = compare_run._RunProgress.begin

    def noted(course: Any, task: Task) -> None:
        tasks.append(task)
        begin(course, task)

    monkeypatch.setattr(compare_run._RunProgress, "begin", noted)
    return tasks
