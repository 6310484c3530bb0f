"""Settings for all tests.

Hypothesis sets no time limit per example, since test machines are shared and slow. Servers that tests start keep what
they measure in a place of this run, not in the user's cache; the processes of a run share it. They run on CPUs, also
where there are other devices. httpx waits as long as tests do, not its own 5 s, and reads the certificates of the
machine once (20 ms); uvicorn looks ten times as often whether it is to stop. Ctrl-C works as in a terminal, also if the
tests were started in the background of a shell, which ignores it.
"""

import asyncio
import gc
import os
import signal
import tempfile
from functools import cache
from types import SimpleNamespace

import httpx
import pytest
import uvicorn.server
from hypothesis import settings

import sampling
from waiting import PATIENCE_S

settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")
for _wait in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _wait, PATIENCE_S)
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)


async def _sleep_shorter(seconds: float) -> None:
    await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": _sleep_shorter})
os.environ["TILEWORK_DEVICE"] = "cpu"
signal.signal(signal.SIGINT, signal.default_int_handler)
_cache: tempfile.TemporaryDirectory[str] | None = None  # Of the process that has the run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="tilework-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = f"of the tests marked exhaustive: {sampling.ALL}, {sampling.BY_COMMIT} (its turn), or a number below"
    parser.addoption("--part", default=sampling.ALL, help=f"{help_text} {sampling.PARTS}")


def pytest_configure(config: pytest.Config) -> None:
    """xdist hands the options on: its workers get the number, and ask no git."""
    part = sampling.part_from(config.option.part, sampling.git)
    config.option.part = sampling.ALL if part is None else str(part)


def pytest_report_header(config: pytest.Config) -> str:
    return f"tests marked exhaustive: {_part_in_words(config)}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part != sampling.ALL:
        items[:], others = sampling.split(items, int(config.option.part))
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays until the end: no full collection goes through it again, neither ours nor a test's."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it go: nanobind, of Triton, prints a page of what it calls leaks about modules that are there at the exit.

    The place of the run is removed here: a process that was forked for a run has no exit at which Python would do it.
    """
    gc.unfreeze()
    if _cache is not None:
        _cache.cleanup()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    part = None if config.option.part == sampling.ALL else int(config.option.part)
    if part is not None:
        terminalreporter.write_line(f"tests marked exhaustive: {_part_in_words(config)}")
    failed = [one.nodeid for what in ("failed", "error") for one in terminalreporter.getreports(what)]
    for line in sampling.how_to_repeat(part, failed):
        terminalreporter.write_line(line)


def _part_in_words(config: pytest.Config) -> str:
    part = config.option.part
    return "all cases" if part == sampling.ALL else f"part {part} of 0 to {sampling.PARTS - 1}"
