"""The one place where a worker waits for its device."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all queued operations; on a CPU this returns at once.

    Between steps this keeps the host from running ahead of an accelerator, so that a stop takes effect in time.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
