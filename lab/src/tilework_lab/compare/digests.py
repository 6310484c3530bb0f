"""Digests by which results are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tilework.formats.workload import WorkloadRequest


def digest_of_requests(requests: Sequence[WorkloadRequest]) -> str:
    return digest([asdict(one) for one in requests])


def digest(value: Any) -> str:
    """The same for equal values of plain JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
