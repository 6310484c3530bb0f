"""Devices divided statically among sizes, first in first out within each."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.request import Request
from tilework.policy.registry import policy
from tilework.policy.toolkit.degrees import efficient_degree
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.partition import Census, Kind, Partition


def bucket(request: Request, speeds: Sequence[Speed]) -> Kind:
    """The pipeline, and the octave of the side: 512 to 1023 pixels of a square one are one bucket."""
    return (request.shape.pixels.bit_length() - 1) // 2, request.pipeline


@policy("bucketed")
def bucketed() -> Partition:
    """Give each bucket of sizes devices in proportion to the GPU-time that its requests take.

    What servers do that shard by resolution: simple, no big request delays a small one, and devices idle when the mix
    is not as it was. Groups are as wide as is efficient for the largest size of the bucket (see `efficient_degree`).
    """
    return Partition(kind_of=bucket, degree_of=efficient_degree, weigh=_device_ns)


def _device_ns(census: Census) -> int:
    return census.device_ns
