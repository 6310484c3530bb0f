"""The reason for a start in words, for the decision log and for clients."""

from __future__ import annotations

from tilework.core.interfaces import Demand, JobView
from tilework.core.time import s_from_ns


def explain(job: JobView, verb: str, now_ns: int) -> str:
    """`verb` says what happens to the job; how urgent the job is follows."""
    if job.request.deadline_ns is None:
        return f"{verb}; no deadline"
    if job.dropped_to_best_effort:
        return f"{verb}; it cannot be on time any more"
    left_s = s_from_ns(job.request.deadline_ns - now_ns)
    due = f"due in {left_s:.2f} s" if left_s >= 0 else f"{-left_s:.2f} s late already"
    return f"{verb}; {due}, needs {needs(job.demand)}"


def needs(demand: Demand) -> str:
    return f"{s_from_ns(demand.run_ns):.2f} s of {devices_text(demand.width)}"


def devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def others_text(count: int) -> str:
    return {0: "no other requests", 1: "1 other request"}.get(count, f"{count} other requests")
