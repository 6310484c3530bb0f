"""Starts stages on CPU slots: jobs in order, each on the slot that is free first. Policies do not see these stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilework.control.cluster.device import Device
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.core.work import Start

_MOST_WORKS = 2  # Works of a slot: the running one, and the next, so that the slot does not idle between them.


def slot_starts(tracker: Tracker) -> Iterator[Start]:
    """Yield the next start on a CPU slot, as long as a job waits for one and a slot has room.

    Jobs whose deadline is promised come first, by deadline; the others in the policy's order. Of slots that are free at
    the same time, one on the node that has the job's state is taken. The caller commits each start before it asks for
    the next one.
    """
    for job in sorted(tracker.for_slots, key=_order):
        slots = [slot for slot in tracker.slots if len(slot.works) < _MOST_WORKS]
        if not slots:
            return
        slot = min(slots, key=lambda one: (one.free_ns, one.node not in _nodes(job, tracker), one.device_id))
        stage = job.committed.stage
        assert stage is not None
        why = "it is next for a CPU slot" if job.promised is None else "its deadline is promised"
        yield Start(stage=stage, job_ids=(job.job_id,), devices=(slot.device_id,), num_steps=1, why=why)


def _order(job: Job) -> tuple[bool, int]:
    """Return the key of the order. Sorting is stable, so jobs that are not promised keep their order."""
    return (True, 0) if job.promised is None else (False, job.promised.due_ns)


def _nodes(job: Job, tracker: Tracker) -> Sequence[int]:
    devices: list[Device | None] = [tracker.device(device_id) for device_id in job.last_devices]
    return [device.node for device in devices if device is not None]
