"""Record of the devices that keep something of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.control.cluster.device_set import DeviceSet
from tilework.control.cluster.job import Job
from tilework.core.work import Group


class Residents:
    """The jobs of which each device keeps conditioning or state: `Device.residents` and `Job.holders`, in step."""

    def __init__(self, devices: DeviceSet) -> None:
        self._devices = devices

    def add(self, job: Job, devices: Group, num_stages: int) -> None:
        """Note that devices will have what a job needs of its first `num_stages` stages, after its next work."""
        job.holders.update(dict.fromkeys(devices, num_stages))
        for device_id in devices:
            residents = self._devices.by_id[device_id].residents
            residents.pop(job.job_id, None)
            residents[job.job_id] = job

    def remove(self, job: Job, device_id: int) -> None:
        """Note that a device keeps nothing of a job any more."""
        del self._devices.by_id[device_id].residents[job.job_id]
        job.remove_device(device_id)

    def evict(self, job: Job) -> None:
        """Note that no device keeps anything of a job any more."""
        for device_id in tuple(job.holders):
            self.remove(job, device_id)

    def beyond(self, device_id: int, most: int) -> Sequence[Job]:
        """Return the jobs without works that a device must drop to keep at most `most` residents, the oldest first."""
        residents = self._devices.by_id[device_id].residents
        if len(residents) <= most:
            return ()
        idle = [job for job in residents.values() if not job.works]
        return idle[: len(residents) - most]
