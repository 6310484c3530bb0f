"""The one place where a worker waits for its device."""

import torch

from tilework.core.comm import Comm, GroupBroken


def synchronize(device: torch.device, comm: Comm | None = None) -> None:
    """Wait until `device` has finished what is queued on the current stream; on a CPU this returns at once.

    Between steps this keeps the host from running ahead of an accelerator, so that a stop takes effect in time. Copies
    by a stream of their own are not waited for: weights that come beside a run would hold up its steps.

    Raises:
        GroupBroken: what the group exchanged meanwhile may be wrong.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    if comm is not None and comm.has_aborted_calls:
        raise GroupBroken("the group was broken off while messages were under way")
