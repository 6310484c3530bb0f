"""Connecting on a thread of its own, since a backend's constructor cannot be interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Thread

from tilework.comm.exchange import ExchangeComm
from tilework.core.comm import GroupBroken

CONNECT_S = 60.0
"""How long all members of a node may take to connect once all are present: NCCL looks at the host's links meanwhile,
which takes seconds with eight cards. A member that is lost ends it at once, since the runtime breaks the node off;
where this limit does, no group of the node can form.
"""


class Connecting:
    """Runs `connect` on a thread, which `wait` can leave behind.

    NCCL's waits for all members, also for one that was killed between coming and connecting. A thread that was left
    behind closes what it has made, if it ever ends.
    """

    def __init__(self, connect: Callable[[], ExchangeComm], changed: Condition) -> None:
        self._connect, self._changed = connect, changed
        self._comm: ExchangeComm | None = None
        self._error: Exception | None = None
        self._is_left = False
        Thread(target=self._run, name="connecting", daemon=True).start()

    def wait(self, check: Callable[[], None]) -> ExchangeComm:
        """The communicator.

        `check` is called when `changed` is notified, and may raise GroupBroken.

        Raises:
            GroupBroken: by `check`, by the connecting, or after CONNECT_S.
        """
        end_s = time.monotonic() + CONNECT_S
        with self._changed:
            try:
                while self._comm is None and self._error is None:
                    check()
                    left_s = end_s - time.monotonic()
                    if left_s <= 0:
                        raise GroupBroken(f"its members have not connected within {CONNECT_S:g} s")
                    self._changed.wait(left_s)
            except GroupBroken:
                self._is_left = True
                raise
        if self._error is not None:
            raise self._error
        assert self._comm is not None
        return self._comm

    def _run(self) -> None:
        comm, error = None, None
        try:
            comm = self._connect()
        except Exception as raised:
            error = raised
        with self._changed:
            self._comm, self._error = comm, error
            self._changed.notify_all()
            is_left = self._is_left
        if is_left and comm is not None:
            comm.close()
