"""The works and exports that a worker has been given and that have not ended."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from tilework.core.wire import ExportState


@dataclass(slots=True)
class _Open:
    job_id: int
    stopped: bool = False


class OpenWorks:
    """Shared by the thread that receives commands and the one that executes them.

    Only an open work can be stopped, so a stop that comes after its work has ended leaves nothing behind.

    A job that moves away waits elsewhere for its state, so its export does not queue behind the works of others: it
    is handed out between two steps, unless works of the job itself are still open.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[int, _Open] = {}
        self._exports: dict[int, ExportState] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._exports)

    def open(self, work_id: int, job_id: int) -> None:
        with self._lock:
            self._open[work_id] = _Open(job_id)

    def stop(self, work_id: int) -> None:
        """Ask a work to end at its next step boundary; one that is not open is none of our business any more."""
        with self._lock:
            if work_id in self._open:
                self._open[work_id].stopped = True

    def stop_all(self) -> None:
        with self._lock:
            for work in self._open.values():
                work.stopped = True

    def is_stopped(self, work_id: int) -> bool:
        with self._lock:
            return work_id in self._open and self._open[work_id].stopped

    def close(self, work_id: int) -> None:
        with self._lock:
            self._open.pop(work_id, None)

    def ask_export(self, command: ExportState) -> None:
        with self._lock:
            self._exports[command.transfer_id] = command

    def take_export(self, transfer_id: int) -> bool:
        """Claim an export whose turn has come; False if it was handed out before."""
        with self._lock:
            return self._exports.pop(transfer_id, None) is not None

    def early_exports(self) -> list[ExportState]:
        """Claim the exports that need not wait for their turn, since their jobs have no open work here."""
        with self._lock:
            busy = {work.job_id for work in self._open.values()}
            early = [command for command in self._exports.values() if command.job_id not in busy]
            for command in early:
                del self._exports[command.transfer_id]
            return early
