"""Devices divided statically among sizes, first in first out within each."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.request import Request
from tilework.cost.demand import Speed
from tilework.policy.toolkit.degrees import efficient_degree
from tilework_lab.policies.partition.division import Bucket
from tilework_lab.policies.partition.policy import BucketStats, Partition


def by_size(request: Request, speeds: Sequence[Speed]) -> Bucket:
    """The octave of the side (squares of 512 to 1023 pixels are one bucket), the pipeline, and whether it is exact."""
    return (request.shape.pixels.bit_length() - 1) // 2, request.pipeline, request.exact


def bucketed() -> Partition:
    """Give each bucket of sizes devices in proportion to the device time that its requests take.

    What servers do that shard by resolution: it is simple, no large request delays a small one, and devices idle when
    the mix changes. Groups are as wide as is efficient for the largest size of the bucket (see `efficient_degree`).
    """
    return Partition(bucket_of=by_size, degree_of=efficient_degree, weigh=_device_ns)


def _device_ns(stats: BucketStats) -> int:
    return stats.device_ns
