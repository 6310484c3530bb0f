"""First come, first served, on any free device: it loads what it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.interfaces import DeviceView, JobView
from tilework_lab.policies.residency.to_the_end import Choice, Moment, OneToTheEnd


class FifoLoad(OneToTheEnd):
    """The oldest request goes to the first free device, whatever that has.

    Source: "FIFO, any GPU" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    __slots__ = ()

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        return waiting[0], idle[0], "has waited longest"
