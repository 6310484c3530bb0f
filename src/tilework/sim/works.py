"""How long works take on modelled devices, and what goes wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tilework.core.request import Request
from tilework.core.work import DECODE, DIFFUSE, Group, Work
from tilework.cost.table_costs import TableCosts
from tilework.sim.faults import Dice
from tilework.sim.runs import RunEnd

_SLICED = 0.5  # What a sliced decode needs of the memory of a whole one.


class SimulatedWorks:
    """A `Nature` of table times, jitter and faults.

    `requests` gives those of some jobs; `dispatch_ns` what a work on so many devices loses before it runs, `switch_ns`
    what steps lose besides if they do not go on from where their devices are; `jitter` is the relative standard
    deviation of each duration.
    """

    def __init__(
        self,
        costs: TableCosts,
        requests: Callable[[Sequence[int]], list[Request]],
        dispatch_ns: Callable[[int], int],
        switch_ns: int,
        dice: Dice,
        jitter: float,
        seed: int,
    ) -> None:
        self._costs = costs
        self._requests = requests
        self._dispatch_ns = dispatch_ns
        self._switch_ns = switch_ns
        self._latest: dict[int, tuple[tuple[int, ...], Group]] = {}
        self._dice = dice
        self._jitter = jitter
        self._random = Random(seed)
        self._largest_pixels = 0
        self._is_small = dice.strikes("memory")

    def dispatch_ns(self, work: Work) -> int:
        lost_ns = self._dispatch_ns(len(work.devices))
        if self._switch_ns and work.stage.name == DIFFUSE:
            now = work.job_ids, work.devices
            if any(self._latest.get(device_id) != now for device_id in work.devices):
                lost_ns += self._switch_ns
            self._latest.update(dict.fromkeys(work.devices, now))
        return lost_ns

    def run(self, work: Work) -> tuple[int, int, RunEnd]:
        requests = self._requests(work.job_ids)
        duration_ns = self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        if self._jitter:
            duration_ns = round(duration_ns * max(0.2, self._random.gauss(1.0, self._jitter)))
        if not self._dice.faults:
            return duration_ns, work.num_steps, RunEnd.DONE
        if self._dice.strikes("slow"):
            duration_ns = round(duration_ns * self._dice.extent("slow"))
        if not self.fits(work, requests):
            self._dice.strikes_by_name["memory"] += 1
            return self._part(work, duration_ns, 0.0, RunEnd.OUT_OF_MEMORY)
        for kind, end in (("error", RunEnd.FAILED), ("oom", RunEnd.OUT_OF_MEMORY)):
            if self._dice.strikes(kind):
                return self._part(work, duration_ns, self._dice.share(kind), end)
        return duration_ns, work.num_steps, RunEnd.DONE

    def _part(self, work: Work, duration_ns: int, share: float, end: RunEnd) -> tuple[int, int, RunEnd]:
        """A work that ends before its time. Of steps, what it has done counts."""
        steps = int(share * work.num_steps) if work.stage.name == DIFFUSE else 0
        return round(share * duration_ns), steps, end

    def fits(self, work: Work, requests: Sequence[Request]) -> bool:
        """Whether the devices have the memory for it: in proportion to pixels, shared by the members of a group.

        What one device has is a share of what the largest request so far needs alone. Encodes always fit.
        """
        if not self._is_small or work.stage.name not in (DIFFUSE, DECODE):
            return True
        pixels = sum(request.shape.pixels for request in requests)
        need = pixels * (_SLICED if work.sliced else 1.0) / len(work.devices)
        return need <= self._dice.faults.size("memory") * self._largest_pixels

    def expect(self, request: Request) -> None:
        """This one is asked for."""
        self._largest_pixels = max(self._largest_pixels, request.shape.pixels)
