"""The baselines of DDiT §6.1 beside fixed degrees: clusters for types of requests, isolated or not."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.request import Request
from tilework.policy.published.bucketed import bucket
from tilework.policy.registry import policy
from tilework.policy.toolkit.degrees import best_doubling
from tilework.policy.toolkit.demand import Speed
from tilework.policy.toolkit.partition import Census, Kind, Partition


@policy("spci")
def static_partition() -> Partition:
    """Static partition, cluster isolation: clusters by how many requests of each type come, all of one fixed degree.

    Source: DDiT §6.1, which leaves the degree open, but has more instances in a cluster than with `dpci`. Here it is
    one device, or as many as a request needs to fit. A type is a bucket of sizes (see `bucket`).
    """
    return Partition(kind_of=bucket, degree_of=_narrowest, weigh=_count)


@policy("dpci")
def dynamic_partition_isolated() -> Partition:
    """Dynamic partition, cluster isolation: as many groups for each type, each as wide as B of the type.

    Source: DDiT §6.1. B is that of `ddit` (see `best_doubling`); requests of one B are one type, as in the paper, where
    each type has another. What is left over, one of eight devices with B of 1, 2 and 4, is not idle but another group.
    """
    return Partition(kind_of=_by_degree, degree_of=best_doubling, weigh=None)


@policy("dp")
def dynamic_partition() -> Partition:
    """Dynamic partition: `dpci`, but a request whose cluster is busy goes to an idle group of a narrower one.

    Source: DDiT §6.1. It tells of downgrades only, so narrow requests do not go to wide groups.
    """
    return Partition(kind_of=_by_degree, degree_of=best_doubling, weigh=None, borrows=True)


def _by_degree(request: Request, speeds: Sequence[Speed]) -> Kind:
    return best_doubling(speeds), ""


def _narrowest(speeds: Sequence[Speed]) -> int:
    return speeds[0].degree


def _count(census: Census) -> int:
    return census.count
