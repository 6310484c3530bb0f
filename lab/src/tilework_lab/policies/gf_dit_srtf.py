"""GF-DiT's `srtf`: shortest remaining time first, on groups that are as wide as a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.cost.demand import Speed
from tilework_lab.policies.srtf import ShortestFirst


@dataclass(slots=True, kw_only=True)
class StaticShortestFirst(ShortestFirst):
    """`srtf` at the widest degree that a node has.

    Source: GF-DiT (arXiv 2606.13501), policy `srtf` of its published code, which by default runs on one group of all
    devices, whatever it gains by it. Departures: aging, without which a long request can starve; where there are
    several groups, a request goes to the one that is free, not to one that was chosen at its arrival.
    """

    def degree_of(self, speeds: Sequence[Speed]) -> int:
        return speeds[-1].degree
