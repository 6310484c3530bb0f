"""The partitions by name: `bucketed`, and the baselines of DDiT §6.1 beside fixed degrees."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.request import Request
from tilework.cost.demand import Speed
from tilework.policy.toolkit.degrees import best_doubling, efficient_degree
from tilework_lab.policies.partition.division import Bucket
from tilework_lab.policies.partition.policy import BucketStats, Partition


def by_size(request: Request, speeds: Sequence[Speed]) -> Bucket:
    """Return the octave of the side (512 to 1023 pixels are one bucket), the pipeline, and whether it is exact."""
    return (request.shape.pixels.bit_length() - 1) // 2, request.pipeline, request.exact


def bucketed() -> Partition:
    """Give each bucket of sizes devices in proportion to the device time that its requests take.

    What servers do that shard by resolution: it is simple, no large request delays a small one, and devices idle when
    the mix changes. Groups are as wide as is efficient for the largest size of the bucket (see `efficient_degree`).
    """
    return Partition(bucket_of=by_size, degree_of=efficient_degree, weigh=_device_ns)


def _device_ns(stats: BucketStats) -> int:
    return stats.device_ns


def static_partition() -> Partition:
    """Build the static partition with cluster isolation: clusters of one degree, by the requests of each type.

    Source: DDiT §6.1, which leaves the degree open, but has more instances in a cluster than with `dpci`. Here it is
    one device, or as many as a request needs to fit. A type is a bucket of sizes (see `by_size`).
    """
    return Partition(bucket_of=by_size, degree_of=_narrowest, weigh=_count)


def dynamic_partition_isolated() -> Partition:
    """Build the dynamic partition with cluster isolation: as many groups for each type, each as wide as B of the type.

    Source: DDiT §6.1. B is that of `ddit` (see `best_doubling`). Requests with one B are one type here; in the paper
    each type has a B of its own. A remaining device, one of eight with B of 1, 2 and 4, is not idle but another group.
    """
    return Partition(bucket_of=_by_best_degree, degree_of=best_doubling, weigh=None)


def dynamic_partition() -> Partition:
    """Build the dynamic partition: `dpci`, but a request whose cluster is busy goes to an idle group of a narrower one.

    Source: DDiT §6.1. It describes downgrades only, so narrow requests do not go to wide groups.
    """
    return Partition(bucket_of=_by_best_degree, degree_of=best_doubling, weigh=None, borrows=True)


def _by_best_degree(request: Request, speeds: Sequence[Speed]) -> Bucket:
    return best_doubling(speeds), "", False


def _narrowest(speeds: Sequence[Speed]) -> int:
    return speeds[0].degree


def _count(stats: BucketStats) -> int:
    return stats.count
