"""Records of calls that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.server.calls.idempotency import Key
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.schema.answers import Decisions, RequestStatus

# Rough size of a record beside its texts.
_OVERHEAD_BYTES = 1024
_IMAGE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A call that has ended. Status and decisions are kept as JSON: small, and of known size.

    `ask` is the call without its texts: it says how to answer a repeat. `latency_s` is how long it took until its files
    were made and kept. `fresh_until_ns` is when its images expire, and its key with them; the record itself stays
    longer, to say so. `unfetched` holds the images of a detached call that its client has not fetched yet, each with a
    frame (0 if it is no clip). A notice to `webhook` is still due.
    """

    uid: str
    key: Key | None
    ask: ImageCall
    arrived_s: float
    fresh_until_ns: int
    status_json: bytes = field(repr=False)
    decisions_json: bytes = field(repr=False)
    unfetched: set[tuple[int, int]] = field(default_factory=set)
    webhook: str | None = None
    latency_s: float = 0.0  # 0 in records that earlier versions have kept.

    @property
    def tenant(self) -> str:
        return self.ask.terms.tenant

    @property
    def num_images(self) -> int:
        return len(self.ask.specs)

    @property
    def num_bytes(self) -> int:
        texts = len(self.status_json) + len(self.decisions_json)
        return texts + _OVERHEAD_BYTES + self.num_images * _IMAGE_BYTES

    def status(self) -> RequestStatus:
        return RequestStatus.model_validate_json(self.status_json)

    def decisions(self) -> Decisions:
        return Decisions.model_validate_json(self.decisions_json)
