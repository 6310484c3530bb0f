"""A state with each form of value, and its head as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from tilework.pipelines.serialization import (
    SerializedState,
    serialize,
)

CPU = torch.device("cpu")


patient = settings(deadline=None, suppress_health_check=list(HealthCheck))


def encoded(head: Any, buffers: Sequence[memoryview]) -> SerializedState:
    return SerializedState(json.dumps(head).encode(), buffers)


def state() -> tuple[dict[str, Any], list[memoryview]]:
    """The head and the buffers of a state with each form of value."""
    serialized = serialize(
        {
            "large": torch.arange(2000.0),
            "small": torch.arange(3),
            "numbers": np.arange(1000.0),
            "number": np.float32(1),
            "tree": {"list": [1, (2.5, float("inf"), 1j)], 7: None},
            "size": torch.Size([1, 2]),
            "dtype": torch.float16,
            "device": CPU,
        }
    )
    return json.loads(serialized.head), list(serialized.buffers)
