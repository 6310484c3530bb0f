"""Tells the webhooks of calls that these have ended."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tilework.server.calls.records import CallRecord
from tilework.server.calls.registry import CallRegistry
from tilework.server.webhooks.notice import notice
from tilework.server.webhooks.sender import WebhookSender


@dataclass(frozen=True, slots=True)
class CallWebhooks:
    """Sends notices. Those that are due are in the records of calls: after a restart the next start sends them."""

    registry: CallRegistry
    sender: WebhookSender

    def on_record(self, record: CallRecord) -> None:
        """Send the notice of a call that has ended, if it has a webhook."""
        if record.webhook is None:
            return
        status = record.status()
        latencies_s = [one.timeline.latency_s for one in status.images if one.timeline is not None]
        ended_s = int(record.arrived_s + max(latencies_s, default=0.0))
        call = json.loads(record.status_json)
        self.sender.send(notice(record.uid, record.webhook, status.status, ended_s, call))

    def resume(self) -> None:
        """Send the notices that the previous start has left."""
        for record in self.registry.untold():
            self.on_record(record)
