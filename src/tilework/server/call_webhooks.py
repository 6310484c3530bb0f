"""Tells the webhooks of calls that these have ended."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tilework.server.calls.records import Record
from tilework.server.calls.registry import CallRegistry
from tilework.server.webhooks.notice import notice
from tilework.server.webhooks.sender import WebhookSender


@dataclass(frozen=True, slots=True)
class CallWebhooks:
    """What is to be told is in the records of calls, so with a durable directory the next start goes on with it."""

    registry: CallRegistry
    sender: WebhookSender

    def on_record(self, record: Record) -> None:
        """A call has ended."""
        if record.webhook is None:
            return
        status = record.status()
        latencies_s = [one.timeline.latency_s for one in status.images if one.timeline is not None]
        ended_s = int(record.arrived_s + max(latencies_s, default=0.0))
        call = json.loads(record.status_json)
        self.sender.send(notice(record.uid, record.webhook, status.status, ended_s, call))

    def resume(self) -> None:
        """Go on with what the previous start has left."""
        for record in self.registry.untold():
            self.on_record(record)
