"""Each pipeline on one device, as where a router hashes models to servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import CostModel, DeviceView, JobView
from tilework_lab.policies.residency.to_the_end import Choice, Moment, OneToTheEnd


@dataclass(slots=True)
class Sticky(OneToTheEnd):
    """Each pipeline has one device as its home, where its requests run in order of arrival; others never run them.

    A pipeline that comes for the first time, or whose home was lost, gets the device that is home to the fewest
    pipelines, the lowest id of equals.

    Source: "sticky: one home per checkpoint" of our reference simulation of GenTD26 (lab/docs/workloads.md).
    """

    _homes: dict[str, int] = field(default_factory=dict, init=False)

    def choose(self, moment: Moment, waiting: Sequence[JobView], idle: Sequence[DeviceView]) -> Choice | None:
        up = [device.device_id for device in moment.view.devices]
        by_id = {device.device_id: device for device in idle}
        for job in waiting:
            home = by_id.get(self._home(job.request.pipeline, up))
            if home is not None:
                return job, home, "its pipeline has its home here"
        return None

    def forget(self, pipeline: str, costs: CostModel) -> None:
        self._homes.pop(pipeline, None)

    def _home(self, pipeline: str, up: Sequence[int]) -> int:
        home = self._homes.get(pipeline)
        if home is None or home not in up:
            num_homes = Counter(self._homes.values())
            home = self._homes[pipeline] = min(up, key=lambda device_id: (num_homes[device_id], device_id))
        return home
