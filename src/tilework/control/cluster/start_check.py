"""Check that a start is legal. An illegal start is a bug of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.control.cluster.device import Device
from tilework.control.cluster.job import Job
from tilework.core.graph.stage import DeviceKind
from tilework.core.pools import Pools
from tilework.core.work import Start


def check_start(jobs: Sequence[Job], start: Start, devices: Sequence[Device], pools: Pools) -> None:
    """Assert that a start of these jobs on these devices is legal."""
    assert devices, f"jobs {start.job_ids} are started on no device"
    node = devices[0].node
    kind = start.stage.kind
    for device in devices:
        assert device.node == node, f"{start.devices} spans nodes"
        assert device.pool == devices[0].pool or device.kind is DeviceKind.CPU, f"{start.devices} spans pools"
        assert device.kind is kind, f"{start.stage} runs on {kind} devices, and is started on {start.devices}"
        is_served = kind is DeviceKind.CPU or pools.serves(device.device_id, start.stage.pipeline)
        assert is_served, f"{start.stage} is started on device {device.device_id}, which does not serve it"
    for job in jobs:
        _check_job(job, start)
    if len(jobs) > 1:
        _check_members(jobs, start)


def _check_job(job: Job, start: Start) -> None:
    committed = job.committed
    assert committed.stage == start.stage, f"job {job.job_id} is at {committed.stage}, not at {start.stage}"
    limit = committed.num_left_here
    assert 1 <= start.num_steps <= limit, f"job {job.job_id} has {limit} steps left, not {start.num_steps}"
    if len(start.devices) > 1:
        assert list(start.devices) == sorted(set(start.devices)), f"the group {start.devices} is not sorted"
        is_allowed = start.stage.allows(len(start.devices))
        assert is_allowed, f"{start.stage} of job {job.job_id} is started on {len(start.devices)} devices"
    if job.request.exact:
        assert len(start.devices) == 1, f"job {job.job_id} is exact, and is started on {len(start.devices)} devices"
    assert not job.is_stopping, f"job {job.job_id} is started while its stopped works have not all ended"


def _check_members(jobs: Sequence[Job], start: Start) -> None:
    assert len(set(start.job_ids)) == len(jobs), f"a job is twice among {start.job_ids}"
    assert start.stage.spec.batchable, f"{start.stage} is started for {len(jobs)} jobs, but cannot be shared"
    assert len(start.devices) == 1, f"{len(jobs)} jobs share a work on {len(start.devices)} devices; they share one"
    shapes = {job.request.shape for job in jobs}
    assert len(shapes) == 1 or not start.stage.spec.one_shape, f"{start.stage} is started for jobs of several shapes"
    for job in jobs:
        assert not job.request.exact, f"job {job.job_id} shares a work although it is exact"
        assert job.may_share, f"job {job.job_id} shares a work although its works fail"
