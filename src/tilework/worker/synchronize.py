"""The one place where a worker waits for its device."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what it was told; the CPU always has.

    Between steps this keeps the host from running ahead of an accelerator, where a stop would come too late.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
