"""Simulated devices that tests command directly: works by hand, and times that are given."""

from __future__ import annotations

from builders import PIPELINE
from stages import DIFFUSE, ENCODE, stage_of
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.work import Member, Work
from tilework.sim.device import Hosts, StateTransfer
from tilework.sim.fleet import Fleet
from tilework.sim.runs import Run, RunEnd, State

ENCODED = State().after(0, 1)


def work(
    work_id: int,
    job_id: int = 0,
    stage: str = DIFFUSE,
    num_steps: int = 4,
    devices: tuple[int, ...] = (0,),
    first_step: int = 0,
) -> Work:
    return Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, stage),
        members=(Member(job_id, 1, 0 if stage == ENCODE else first_step + 1, first_step),),
        devices=devices,
        num_steps=num_steps,
        why="a test",
    )


class GivenTimes:
    """A `TimingModel` with a given duration and dispatch time for each work."""

    def __init__(self) -> None:
        self.durations_ns: dict[int, int] = {}
        self.dispatches_ns: dict[int, int] = {}
        self.ran: list[tuple[int, ...]] = []
        self.sources: list[str] = []

    def dispatch_ns(self, work: Work) -> int:
        return self.dispatches_ns.get(work.work_id, 0)

    def run(self, work: Work) -> tuple[int, int, RunEnd]:
        self.ran.append(work.job_ids)
        return self.durations_ns[work.work_id], work.num_steps, RunEnd.DONE

    def load_ns(self, num_bytes: int, source: LoadSource) -> int:
        self.sources.append(source.value)
        return num_bytes


ENCODER, DENOISER, SMALL = Component("encoder", 6), Component("denoiser", 8), Component("small", 2)


class Devices(Fleet):
    """Devices that are up."""

    def __init__(self, num_devices: int = 3, hosts: Hosts | None = None) -> None:
        self.timing = GivenTimes()
        self.needed: dict[str, tuple[Component, ...]] = {}
        self.named = {one.digest: one for one in (ENCODER, DENOISER, SMALL)}
        super().__init__(
            self.timing, lambda stage: self.needed.get(stage.name, ()), lambda digest: self.named[digest], hosts
        )
        for device_id in range(num_devices):
            self.join(device_id, Memory(total_bytes=10))

    def command(self, one: Work, duration_ns: int, dispatch_ns: int = 0, *, knows: bool = True) -> None:
        """Queue a work. Its devices have its first state, unless `knows` is False."""
        self.timing.durations_ns[one.work_id] = duration_ns
        self.timing.dispatches_ns[one.work_id] = dispatch_ns
        for device_id in one.devices:
            if knows and self.state(device_id, one.job_ids[0]) is None:
                self._devices[device_id].states[one.job_ids[0]] = ENCODED
            self.enqueue(one, (device_id,))

    def send(self, job_id: int, target: int, move_ns: int, sent_ns: int | None = 0, *steps: int) -> StateTransfer:
        transfer = StateTransfer(job_id=job_id, move_ns=move_ns)
        if sent_ns is not None:
            transfer.send(state_after(*steps), sent_ns)
        self.expect(transfer, target)
        return transfer


def state_after(*chunks: int) -> State:
    state = ENCODED
    for num_steps in chunks:
        state = state.after(state.position, num_steps)
    return state


def begun(fleet: Fleet, now_ns: int, devices: tuple[int, ...] = (0,)) -> Run:
    (run,) = fleet.begin_next(devices, now_ns)
    assert isinstance(run, Run)
    return run
