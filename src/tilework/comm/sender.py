"""Sending of messages in order. Messages that take long to make and to send leave by a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Sender(Generic[_T]):
    """Sends messages for one thread, which does other work meanwhile.

    `send` writes a message at once if none waits, else queues it. `send_made` leaves both making and writing a message
    to the sender's own thread. That thread enters `entered` first, such as a stream of a device. If that or a message
    fails, nothing more is written, and `failed` is called with the error, on that thread.
    """

    def __init__(
        self,
        write: Callable[[_T], None],
        failed: Callable[[Exception], object],
        entered: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._write = write
        self._failed = failed
        self._entered = entered
        self._waiting: SimpleQueue[Callable[[], _T] | None] = SimpleQueue()
        self._num_waiting = 0
        self._lock = Lock()
        self._thread: Thread | None = None

    def send(self, message: _T) -> None:
        with self._lock:
            if not self._num_waiting:
                self._write(message)
                return
            self._num_waiting += 1
        self._waiting.put(lambda: message)

    def send_made(self, make: Callable[[], _T]) -> None:
        """Send what `make` returns; it is called on another thread, and must not raise."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="sender", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_waiting += 1
        self._waiting.put(make)

    def finish(self) -> None:
        """Wait until all messages are written. `send_made` must not be called after this."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._entered():
                self._write_all()
        except Exception as error:
            self._failed(error)

    def _write_all(self) -> None:
        while (make := self._waiting.get()) is not None:
            self._write(make())
            del make  # The message may hold memory of a device.
            with self._lock:
                self._num_waiting -= 1
