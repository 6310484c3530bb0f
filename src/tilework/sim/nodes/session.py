"""One session of a simulated node with the server, seen from both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tilework.control.nodes.clock import ClockOffset
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.node_blobs import FetchBlobs, Origin


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """What a node is fetching, and what of it the session of its `origin` has; `waiting` is called at its end."""

    message: FetchBlobs
    found: tuple[StateBlob, ...]
    origin: NodeSession | None
    begin_ns: int
    waiting: list[Callable[[], None]] = field(default_factory=list)


class NodeSession:
    """The agent of a node from its greeting on, and a `BlobNode` of the server.

    Of the server are `fetches`, `clock`, and how far it is with leaving. Of the agent are `files`, the names of its
    blobs; `coming`, what it fetches, by the name of the blob; and `ahead_ns`, how far its clock is ahead of that of the
    server. It `has_ended` when its workers have; the server learns that later, or gave it up before.
    """

    def __init__(
        self, node: int, epoch: int, ahead_ns: int, tell: Callable[[NodeSession, object], None], files: Iterable[str]
    ) -> None:
        self.node, self.origin = node, Origin(f"node {node}", 0, epoch)
        self.has_started = True
        self.fetches: dict[int, FetchBlobs] = {}
        self.is_cordoned = self.is_handing_over = False
        self.clock = ClockOffset()
        self.files = set(files)
        self.coming: dict[str, Fetch] = {}
        self.ahead_ns = ahead_ns
        self.has_ended = False
        self.is_given_up = False
        self._tell = tell

    @property
    def stays(self) -> bool:
        return not self.is_cordoned

    def tell(self, message: object) -> None:
        self._tell(self, message)

    def when_there(self, blobs: Iterable[StateBlob], call: Callable[[], None]) -> None:
        """Call when none of these blobs is on its way any more, now or later; not if the session ends before."""
        awaited = {id(fetch): fetch for blob in blobs if (fetch := self.coming.get(blob.name)) is not None}
        if not awaited:
            call()
            return
        missing = len(awaited)

        def one_ended() -> None:
            nonlocal missing
            missing -= 1
            if not missing and not self.has_ended:
                call()

        for fetch in awaited.values():
            fetch.waiting.append(one_ended)
