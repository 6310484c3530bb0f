"""The open requests of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilework.core.wire.spec import File, Image, Spec
from tilework.runtime.ticket import Ticket


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    """An open request. `image` or `file` is the latest one that a work has reported."""

    spec: Spec
    ticket: Ticket
    image: Image | None = None
    file: File | None = None

    def use_cache(self) -> None:
        """Let further works use its spare cache."""
        self.spec = self.spec.with_spare_cache
        self.ticket.request = self.ticket.request.with_spare_cache


class RequestTable:
    """Open requests by job id and by uid."""

    def __init__(self) -> None:
        self._entries: dict[int, RequestEntry] = {}
        self._job_ids: dict[str, int] = {}

    def __getitem__(self, job_id: int) -> RequestEntry:
        return self._entries[job_id]

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._entries.values())

    @property
    def uids(self) -> list[str]:
        return list(self._job_ids)

    def get(self, job_id: int) -> RequestEntry | None:
        return self._entries.get(job_id)

    def job_id(self, uid: str) -> int | None:
        """Return the job id of a request; None if it is not open."""
        return self._job_ids.get(uid)

    def add(self, job_id: int, spec: Spec, ticket: Ticket) -> None:
        self._entries[job_id] = RequestEntry(spec=spec, ticket=ticket)
        self._job_ids[ticket.request.uid] = job_id

    def remove(self, job_id: int) -> RequestEntry:
        entry = self._entries.pop(job_id)
        del self._job_ids[entry.ticket.request.uid]
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._job_ids.clear()
