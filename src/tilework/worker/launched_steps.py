"""The steps that a host has launched on its device: how far it runs ahead, and which of them are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tilework.core.time import NS_PER_MS
from tilework.worker.synchronize import Mark, Wait

SHORT_STEP_NS = 100 * NS_PER_MS
"""Duration below which the host runs ahead of steps. A stop then takes effect one step later."""


class LaunchedSteps:
    """The steps of a work, which the device does one after another.

    A host that waits for each step before it launches the next leaves the device idle meanwhile. With `mark` it *runs
    ahead* of short steps, by one: it launches the next, and then waits for the previous one by its mark. The duration
    of steps is that of the latest one that was waited for, so nothing is launched beside the first. Without `mark` the
    host waits for each step by `synchronize`.

    A step that waits in the device's queue takes no memory of its own: torch's allocator reuses memory in the order of
    the one stream, so the step gets what the previous one has freed.
    """

    def __init__(self, synchronize: Wait, mark: Mark | None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._synchronize = synchronize
        self._mark = mark
        self._now_ns = now_ns
        self._waits: deque[Wait] = deque()
        self._step_ns: int | None = None  # Of the latest step that is done.
        self._done_ns = now_ns()
        self.num_done = 0

    @property
    def most_ahead(self) -> int:
        """Largest number of steps that the device may still have to do when the next one is launched."""
        is_short = self._step_ns is not None and self._step_ns < SHORT_STEP_NS
        return 1 if is_short and self._mark is not None else 0

    def add(self) -> None:
        """Note that a step was launched just now."""
        self._waits.append(self._synchronize if self._mark is None else self._mark())

    def wait(self, most_left: int) -> None:
        """Wait until the device has at most `most_left` steps to do. Raises the error of the device or its group."""
        while len(self._waits) > most_left:
            self._waits.popleft()()
            now_ns = self._now_ns()
            self._step_ns, self._done_ns = now_ns - self._done_ns, now_ns
            self.num_done += 1
