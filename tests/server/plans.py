"""Answers of `tilework plan` that tests give in place of its process."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from tilework.server.planning import planner

POINT = {"devices": 3, "share": 0.9, "low": 0.8, "high": 0.95, "verdict": "meets", "is_whole": True, "samples": 1}
DOCUMENT = {
    "hardware": [
        {
            "hardware": "costs.json",
            "devices": 3,
            "devices_in_the_mean": 2,
            "load": 1.5,
            "least": 1,
            "points": [POINT],
            "uses": [{"pipeline": "tiny-shapes", "stage": "diffuse", "devices": 1.2, "degrees": {"1": 0.9, "2": 0.1}}],
        }
    ],
    "error": {"points": -1.5, "simulated": 0.5, "live": 0.515, "num_requests": 20, "source": "requests.jsonl"},
    "wall_s": 1.25,
}


def says(document: Any) -> str:
    """A program that answers this document after two simulations."""
    progress = json.dumps({"simulations": 2, "now": "3 devices"})
    return f"import sys; print({progress!r}, file=sys.stderr, flush=True); print({json.dumps(document)!r})"


def running(program: str) -> Any:
    """While this lasts, plans are made by a program."""
    return patch.object(planner, "command_of", lambda folder, job, policy: [sys.executable, "-c", program])
