"""Ray as the tests have it: `from live.ray_here import ray`. Tests are skipped where it is not installed."""

from __future__ import annotations

import os

import pytest

# Ray asks for a token on every address but loopback, which it avoids. It reads these when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
ray = pytest.importorskip("ray")
