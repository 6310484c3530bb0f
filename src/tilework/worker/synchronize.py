"""The one place where a worker waits for its device."""

from collections.abc import Callable

import torch

from tilework.core.comm import Comm, GroupBroken

Wait = Callable[[], None]
Mark = Callable[[], Wait]
"""Marks the end of the work queued on a device so far; returns a function that waits for that point and no longer."""


def synchronize(device: torch.device, comm: Comm | None = None) -> None:
    """Wait until `device` has finished what is queued on the current stream; on a CPU this returns at once.

    Copies by a separate stream are not waited for: weights that come beside a run would hold up its steps.

    Raises:
        GroupBroken: what the group exchanged meanwhile may be wrong.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    if comm is not None and comm.has_aborted_calls:
        raise GroupBroken("the group was broken off while messages were under way")


def events_on(device: torch.device) -> Mark | None:
    """Return marks by events on the current stream of `device`; None for a CPU, which has no queue."""
    return (lambda: _recorded(device)) if device.type == "cuda" else None


def _recorded(device: torch.device) -> Wait:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
