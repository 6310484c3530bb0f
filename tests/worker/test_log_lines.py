"""Lines that repeat are counted, not written."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from tilework.worker.log_lines import LogHandler, log_to_stderr


class Log:
    """A logger of its own, whose records come at a time that the test gives."""

    def __init__(self) -> None:
        self.stream, self.now_s = io.StringIO(), 1000.0
        self.handler = LogHandler(self.stream)
        self.logger = logging.Logger("of a test")
        self.logger.addHandler(self.handler)
        self.logger.addFilter(self._at)

    def _at(self, record: logging.LogRecord) -> bool:
        record.created = self.now_s
        return True

    @property
    def lines(self) -> list[str]:
        return [line.partition(": ")[2] for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.handler.close()


def test_a_flood_of_one_kind_is_twenty_lines_and_a_count(log: Log) -> None:
    for number in range(3358):
        log.logger.warning("an agent was not admitted: %d is no token", number)
    assert len(log.lines) == 20
    log.now_s += 11
    log.logger.info("another")
    *_, counted, another = log.lines
    assert counted == "an agent was not admitted: 3357 is no token (and 3338 times more within 10 s)"
    assert another == "another"


def test_numbers_in_a_text_make_no_other_kind(log: Log) -> None:
    """asyncio writes which object it was into the text itself."""
    for number in range(50):
        log.logger.error(f"socket.accept() out of system resource\nsocket: <fd={number}, 0x{number:x}>")
    assert sum(line.startswith("socket.accept") for line in log.lines) == 20


def test_other_kinds_are_written(log: Log) -> None:
    for number in range(30):
        log.logger.warning("one")
        log.logger.error("one")
        log.logger.info("a call %d", number)
    assert log.lines.count("one") == 40
    assert sum(line.startswith("a call") for line in log.lines) == 30


def test_errors_of_other_types_are_other_kinds(log: Log) -> None:
    for _ in range(20):
        for error in (ValueError("a"), KeyError("b")):
            try:
                raise error
            except LookupError:
                log.logger.exception("failed")
            except ValueError:
                log.logger.exception("failed")
    assert log.lines.count("failed") == 40


def test_what_was_left_out_is_said_at_the_end(log: Log) -> None:
    for _ in range(21):
        log.logger.warning("x")
    log.handler.close()
    assert log.lines[-1] == "x (and 1 times more within 10 s)"


def test_kinds_are_not_kept_for_ever(log: Log) -> None:
    for number in range(5000):
        log.logger.warning("x" * (number % 2000))
    assert len(log.handler._windows) <= 500


def test_a_worker_logs_from_the_level_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_options: None)
    ours = logging.getLogger("tilework")
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    log_to_stderr(logging.DEBUG)
    assert logging.getLogger("tilework.worker").isEnabledFor(logging.DEBUG)
    log_to_stderr()
    assert ours.level == logging.NOTSET
