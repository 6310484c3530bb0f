"""Tensors and samplers as bytes, from one worker's device to another's, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.serialization import default_restore_location


def pack(contents: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def unpack(blob: bytes, device: torch.device) -> Any:
    """Undo `pack`. What was on an accelerator lands on `device`; what a sampler keeps on the CPU stays there.

    Runs code from `blob` where it holds a sampler, so it must come from a worker.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    return torch.load(io.BytesIO(blob), map_location=place, weights_only=False)
