"""The number of devices of each bucket, and their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.work import Group
from tilework.policy.toolkit.buddy_allocator import Allocator

Bucket = tuple[int, str, bool]
"""Ordered: the requests of later buckets take more. Then the pipeline that it is of, or nothing if it is of all; and
whether its requests are exact, which take one device each."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of some buckets: `num_groups` groups of `degree` devices."""

    buckets: tuple[Bucket, ...]
    degree: int
    num_groups: int


def share(buckets: Sequence[Bucket], weights: Sequence[int], most: int) -> list[tuple[tuple[Bucket, ...], int]]:
    """Return buckets and their weights; neighbours are merged, the lightest first, until at most `most` are left."""
    shared: list[tuple[tuple[Bucket, ...], int]]
    shared = [((bucket,), max(1, weight)) for bucket, weight in zip(buckets, weights, strict=True)]
    while len(shared) > most:
        index = min(range(len(shared) - 1), key=lambda index: shared[index][1] + shared[index + 1][1])
        (one, weight), (other, more) = shared[index : index + 2]
        shared[index : index + 2] = [(one + other, weight + more)]
    return shared


def divide(weights: Sequence[int], total: int) -> list[int]:
    """Divide a number in proportion to weights, at least one for each; there must be enough for that.

    Each next one goes where the weight per part would then be highest (D'Hondt); ties to the first.
    """
    parts = [1] * len(weights)
    for _ in range(total - len(weights)):
        parts[max(range(len(parts)), key=lambda index: (weights[index] / (parts[index] + 1), -index))] += 1
    return parts


def clusters_by_weight(
    shared: Sequence[tuple[tuple[Bucket, ...], int]], degrees: Sequence[int], num_devices: int
) -> list[Cluster]:
    """Return clusters with devices in proportion to the weights, no group wider than its part."""
    parts = divide([weight for _, weight in shared], num_devices)
    narrowed = [min(degree, power_of_two(part)) for degree, part in zip(degrees, parts, strict=True)]
    counts = [part // degree for degree, part in zip(narrowed, parts, strict=True)]
    return _clusters(shared, narrowed, counts)


def equal_clusters(
    shared: Sequence[tuple[tuple[Bucket, ...], int]], degrees: Sequence[int], num_devices: int
) -> list[Cluster]:
    """Return clusters with the same number of groups each."""
    narrowed = list(degrees)
    while sum(narrowed) > num_devices:  # The first of the widest gives up half of its devices.
        index = max(range(len(narrowed)), key=lambda index: (narrowed[index], -index))
        narrowed[index] //= 2
    return _clusters(shared, narrowed, [num_devices // sum(narrowed)] * len(narrowed))


def _clusters(
    shared: Sequence[tuple[tuple[Bucket, ...], int]], degrees: Sequence[int], counts: Sequence[int]
) -> list[Cluster]:
    return [
        Cluster(buckets, degree, count) for (buckets, _), degree, count in zip(shared, degrees, counts, strict=True)
    ]


def cut_groups(clusters: Sequence[Cluster], allocator: Allocator) -> dict[Group, Cluster]:
    """Return the groups of each cluster, the widest first; remaining devices go to the widest cluster that they fit."""
    groups: dict[Group, Cluster] = {}
    by_width = sorted(clusters, key=lambda cluster: -cluster.degree)
    for cluster in by_width:
        for _ in range(cluster.num_groups):
            groups[_take(allocator, cluster.degree)] = cluster
    while allocator.num_free():
        fitting = (cluster for cluster in by_width if cluster.degree <= allocator.widest())
        cluster = next(fitting, by_width[-1])
        groups[_take(allocator, cluster.degree)] = cluster
    return groups


def _take(allocator: Allocator, width: int) -> Group:
    """Take a group of this width, or of half of it, and so on; a device must be free."""
    while (group := allocator.take(width)) is None:
        width //= 2
    return group


def power_of_two(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)
