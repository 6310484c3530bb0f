"""The works that a worker has received and not ended."""

from __future__ import annotations

from collections.abc import Iterable, Set
from threading import Lock


class OpenWorks:
    """Open works, shared by the thread that receives commands and the one that executes them.

    Only an open work can be stopped, so a stop that comes after its work has ended has no effect.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stopped: dict[int, bool] = {}
        self._jobs: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._stopped)

    def open(self, work_id: int, job_ids: Iterable[int], is_stopped: bool = False) -> None:
        with self._lock:
            self._stopped[work_id] = is_stopped
            self._jobs[work_id] = tuple(job_ids)

    @property
    def job_ids(self) -> Set[int]:
        """The jobs of all open works."""
        with self._lock:
            return {job_id for job_ids in self._jobs.values() for job_id in job_ids}

    def stop(self, work_id: int) -> None:
        """Ask a work to end after the step that is launched by then; do nothing if the work is not open."""
        with self._lock:
            if work_id in self._stopped:
                self._stopped[work_id] = True

    def stop_all(self) -> None:
        with self._lock:
            self._stopped = dict.fromkeys(self._stopped, True)

    def is_stopped(self, work_id: int) -> bool:
        with self._lock:
            return self._stopped.get(work_id, False)

    def close(self, work_id: int) -> None:
        with self._lock:
            self._stopped.pop(work_id, None)
            self._jobs.pop(work_id, None)
