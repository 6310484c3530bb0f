"""How tests wait: for a state that they name, with one limit, which is far beyond what a busy machine takes.

`test_clocks.py` finds other waits. What runs on a loop whose time a test moves waits by `clock.ManualLoop`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = float(os.environ.get("TESTS_PATIENCE_S", "240"))
"""What has not come by then will not. Below the time limit of a test, so that the test says what it waited for.

Less where code is known to be wrong, as in `bench/suite/mutant_trials.py`.
"""
POLL_S = 0.002


def eventually(condition: Callable[[], T]) -> T:
    """Wait until the condition holds, on a thread; returns what it returned then."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        _check_patience(end_s)
        time.sleep(POLL_S)
    return found


async def until(condition: Callable[[], Any], pause_s: float = POLL_S) -> None:
    """Wait on an event loop until the condition holds, which may be a coroutine function."""
    end_s = time.monotonic() + PATIENCE_S
    while not (await found if isawaitable(found := condition()) else found):
        _check_patience(end_s)
        await asyncio.sleep(pause_s)


def _check_patience(end_s: float) -> None:
    assert time.monotonic() < end_s, f"the condition did not come true within {PATIENCE_S:g} s"
