"""How many devices each degree gets, and which groups these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from tilework.core.work import Group
from tilework.policy.toolkit.buddy_allocator import Allocator


def bucket_sizes(shares: Mapping[int, float], num_devices: int) -> dict[int, int]:
    """How many devices each degree gets: its share of them, to the nearest multiple of the degree; degree 1 the rest.

    `shares` are in proportion, those of requests by their optimal degree; degrees are at most `num_devices`. The widest
    is first.

    Source: TridentServe appendix D.2, "B2/B5", with ties down. Departures: each degree that has a share gets at least
    one group, since its requests may fit on no narrower one; and where the multiples are more than all devices,
    the degree with the most devices gives up a group.
    """
    total = sum(shares.values())
    wide = {
        degree: max(1, ceil(num_devices * share / total / degree - 0.5)) * degree
        for degree, share in sorted(shares.items(), reverse=True)
        if share > 0 and degree > 1
    }
    least = 1 if shares.get(1, 0) > 0 else 0
    while wide and sum(wide.values()) + least > num_devices:
        most = max(wide, key=lambda degree: (wide[degree] > degree, wide[degree]))
        wide[most] -= most
        if not wide[most]:
            del wide[most]
    rest = num_devices - sum(wide.values())
    return {**wide, 1: rest} if rest else wide


def cut_groups(sizes: Mapping[int, int], nodes: Iterable[Sequence[int]]) -> dict[int, tuple[Group, ...]]:
    """The groups of each degree, each on one node, the widest first; a degree for which no node has room has none.

    Devices that nodes leave over go to the widest degree that they are enough for, and are idle if there is none.
    """
    allocator = Allocator(nodes)
    found: dict[int, list[Group]] = {}
    for degree in sorted(sizes, reverse=True):
        for _ in range(sizes[degree] // degree):
            if (group := allocator.take(degree)) is not None:
                found.setdefault(degree, []).append(group)
    for degree in sorted(found, reverse=True):
        while (group := allocator.take(degree)) is not None:
            found[degree].append(group)
    return {degree: tuple(groups) for degree, groups in found.items()}
