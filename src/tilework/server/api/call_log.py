"""The lines of the server's log about calls: one at the end of each, of `key=value` pairs. They hold no prompts."""

from __future__ import annotations

import logging

from tilework.server.calls.records import CallRecord
from tilework.server.text import shown

_log = logging.getLogger("tilework.server.calls")


def log_ended(record: CallRecord) -> None:
    """Log the end of a call."""
    if not _log.isEnabledFor(logging.INFO):
        return
    status = record.status()
    ask = record.ask
    values: dict[str, object] = {"uid": record.uid, "status": status.status}
    if status.error is not None:
        values["reason"] = status.error.code
    values["latency_s"] = f"{record.latency_s:.3f}"
    if status.slo_s is not None:
        is_on_time = all(one.timeline is not None and one.timeline.on_time for one in status.images)
        values |= {"deadline_s": f"{status.slo_s:.3f}", "on_time": str(is_on_time).lower()}
    values |= {"tenant": record.tenant, "model": ask.model, "size": status.size, "images": len(status.images)}
    _write(values)


def log_refused(tenant: str, http_status: int, reason: str | None, uid: object) -> None:
    """Log that a call was refused; `uid` is that of the refusal, if the event log has the call."""
    if not _log.isEnabledFor(logging.INFO):
        return
    values: dict[str, object] = {} if uid is None else {"uid": uid}
    _write(values | {"status": "refused", "reason": reason or "invalid", "http": http_status, "tenant": tenant})


def _write(values: dict[str, object]) -> None:
    _log.info("call %s", " ".join(f"{name}={_plain(str(value))}" for name, value in values.items()))


def _plain(text: str) -> str:
    """Return a value as it is, or as JSON if something in it would break the line."""
    return text if text.isascii() and text.isprintable() and not set(text) & set(' "=') else shown(text)
