"""Messages from an engine to nodes about their state blobs, and the nodes' answers."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.ranges import Count, Duration, Name, Port, Text


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of files to fetch: the address of a node, in one session of it."""

    host: Name
    port: Port
    epoch: Count


@dataclass(frozen=True, slots=True)
class FetchBlobs:
    """Fetch blobs from another node. Imports that name one wait for it. Answered by `BlobsFetched`."""

    fetch_id: Count
    blobs: tuple[StateBlob, ...]
    origin: Origin
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BlobsFetched:
    """The answer to `FetchBlobs`: the blobs that are here now, after `run_ns`. `reason` says why others are not."""

    fetch_id: Count
    blobs: tuple[StateBlob, ...]
    run_ns: Duration
    reason: Text = ""


@dataclass(frozen=True, slots=True)
class LeaveOrigin:
    """Fail all that is being fetched from a node, which is lost."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class KeepBlobs:
    """Remove all blobs from before this connection but these. Sent once, before all else."""

    blobs: tuple[StateBlob, ...]


@dataclass(frozen=True, slots=True)
class CopyBlob:
    """Give a blob a second name."""

    blob: StateBlob
    name: str


@dataclass(frozen=True, slots=True)
class DiscardBlob:
    blob: StateBlob
