"""Simulated devices: they run works first in, first out, alone or in groups, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tilework.core.actions import DropComponents, LoadComponents
from tilework.core.component import HOST_SOURCES, Component, LoadSource, Memory, num_bytes
from tilework.core.graph.stage import Stage
from tilework.core.work import Group, Work
from tilework.sim.device import Device, Hosts, StateTransfer
from tilework.sim.runs import DROPS_STATES, LoadRun, OpenLoad, Run, RunEnd, State
from tilework.sim.timing import TimingModel

_NOTHING = State()


class Fleet:
    """The queues, runs and states of all devices.

    - A work begins when it is first in the queue of each of its devices, all of them are idle, and the states that it
      waits for have been sent. It occupies all its devices until its end.
    - The dispatch time passes before the run starts, while its states may still be on the way.
    - Like a worker, a device refuses a work whose state it lacks. A work of several members runs for those whose states
      the device has.
    - A work that was broken off ends on each of its devices separately.
    - Components are dropped in the order of the queue. A device loads while it has no run: first what the next work
      waits for. It pauses where a work can begin that needs none of it. A load for which there is no memory never ends,
      and a work whose components are neither there nor to be loaded never begins.

    The caller calls `begin_next` after each change, and `end` when the virtual clock reaches a run's `end_ns`. A stop
    or a loss replaces a run by a shorter one: a run that is not the current one (`is`) is out of date.
    """

    def __init__(
        self,
        timing: TimingModel,
        components: Callable[[Stage], Sequence[Component]],
        component: Callable[[str], Component],
        hosts: Hosts | None = None,
    ) -> None:
        """`components` returns those that a stage needs, `component` the one with a digest.

        `hosts` is what the hosts have read, nothing by default.
        """
        self._timing = timing
        self._components = components
        self._component = component
        self._hosts = hosts or Hosts(lambda _: 0)
        self.num_overloads = 0  # Loads without memory, and works without components.
        self._devices: dict[int, Device] = {}
        self._revoked: set[int] = set()
        self._broken: set[int] = set()

    def join(self, device_id: int, memory: Memory) -> None:
        self._devices[device_id] = Device(memory=memory)
        self._hosts.read(device_id, memory.components)

    def memory(self, device_id: int) -> Memory:
        """Return the components that a device has loaded."""
        return self._devices[device_id].memory

    def set_memory(self, device_id: int, memory: Memory) -> None:
        """Let a device have this at once, if it is up."""
        if (device := self._devices.get(device_id)) is not None:
            device.memory = memory

    def forget_works(self) -> None:
        """Forget revoked and broken works: the next server numbers its works from 1."""
        self._revoked.clear()
        self._broken.clear()

    def is_up(self, device_id: int) -> bool:
        return device_id in self._devices

    def running(self, device_id: int) -> Run | None:
        return self._devices[device_id].run

    def runs(self) -> list[Run]:
        """Return the current runs."""
        runs = {id(device.run): device.run for device in self._devices.values() if device.run is not None}
        return list(runs.values())

    def state(self, device_id: int, job_id: int) -> State | None:
        """Return the state of a job on a device."""
        return self._devices[device_id].states.get(job_id)

    def num_states(self, device_id: int) -> int:
        """Return the number of jobs whose state a device holds."""
        return len(self._devices[device_id].states)

    # Commands, each for one device.

    def enqueue(self, work: Work, devices: Iterable[int]) -> None:
        """Queue a work on those of these devices that are up."""
        for device_id in devices:
            device = self._devices.get(device_id)
            if device is None:
                continue
            device.queue.append(work)
            if device.transfers:
                transfers = [transfer for job_id in work.job_ids for transfer in device.transfers.pop(job_id, ())]
                if transfers:
                    device.awaited[work.work_id] = transfers

    def change_components(self, change: LoadComponents | DropComponents, device_id: int) -> None:
        """Queue a load, or what is dropped for it. A host keeps what it is to be loaded from."""
        if isinstance(change, LoadComponents):
            self._hosts.use(change)
        self._devices[device_id].queue.append(change)

    def expect(self, transfer: StateTransfer, device_id: int) -> None:
        """Announce a state: the job's next work on this device waits for it."""
        self._devices[device_id].transfers.setdefault(transfer.job_id, []).append(transfer)

    def forget(self, job_id: int, device_id: int) -> None:
        """Drop a job's state, after the works of the job that are queued here."""
        device = self._devices[device_id]
        queued = [one for one in device.queue if isinstance(one, Work)]
        works = [*([] if device.run is None else [device.run.work]), *queued]
        last = next((work for work in reversed(works) if job_id in work.job_ids), None)
        if last is None:
            device.states.pop(job_id, None)
        else:
            device.drops.setdefault(last.work_id, []).append(job_id)

    def stop(self, device_id: int, work: Work, now_ns: int) -> Run | None:
        """Stop a work at its next step boundary, or revoke it if queued; returns the run that replaces the current one.

        Stages without steps run to their end. Does nothing if the device does not have the work.
        """
        device = self._devices[device_id]
        if device.run is None or device.run.work is not work:
            if work in device.queue:
                self._revoked.add(work.work_id)
            return None
        run = device.run
        if not work.stage.has_steps or run.end is not RunEnd.DONE or run.hangs:
            return None
        steps = min(run.steps, run.steps_by(now_ns) + 1)
        end_ns = run.end_ns if steps == run.steps else run.start_ns + steps * run.step_ns
        return self._replace(run, replace(run, end_ns=end_ns, steps=steps, end=RunEnd.STOPPED))

    def break_off(self, work: Work, now_ns: int) -> Run | None:
        """End a group's work on the members that still respond; returns the run that replaces the current one, if any.

        Where the work is queued, or has not arrived yet, it ends when it is first in the queue.
        """
        self._broken.add(work.work_id)
        devices = [self._devices[device_id] for device_id in work.devices if device_id in self._devices]
        run = next((one.run for one in devices if one.run is not None and one.run.work is work), None)
        if run is None or run.end is RunEnd.BROKEN:
            return None
        others = self._responding(run)
        return self._replace(run, self._cut(run, others, now_ns)) if others else None

    def lose(self, device_id: int, now_ns: int) -> Run | None:
        """Remove a device and all that it holds; returns the run that replaces its current one on other members."""
        run = self._devices.pop(device_id).run
        if run is None:
            return None
        others = self._responding(run)
        if run.end is RunEnd.BROKEN:
            return self._replace(run, replace(run, devices=others))
        return self._replace(run, self._cut(run, others, now_ns)) if others else None

    def _responding(self, run: Run) -> Group:
        """Return the members of a run that are up and do not hang."""
        devices = {device_id: self._devices[device_id] for device_id in run.devices if device_id in self._devices}
        return tuple(device_id for device_id, device in devices.items() if not device.hangs)

    def hang(self, device_id: int) -> None:
        """Make a device hang. The work that it runs never ends, on any member."""
        device = self._devices[device_id]
        device.hangs = True
        if device.run is not None:
            self._replace(device.run, replace(device.run, hangs=True))

    def _cut(self, run: Run, devices: Group, now_ns: int) -> Run:
        """Return the run cut off now for these devices. A step in progress is lost: it needs all members."""
        steps = run.steps_by(now_ns) if run.work.stage.has_steps else 0
        self._broken.add(run.work.work_id)
        end_ns = max(run.start_ns, now_ns)
        return replace(run, devices=devices, end_ns=end_ns, steps=steps, end=RunEnd.BROKEN, hangs=False)

    def _replace(self, old: Run, new: Run) -> Run:
        """Make `new` the current run of its devices. The other devices of `old` hang in it, each alone."""
        for device_id in old.devices:
            if device_id in new.devices:
                self._devices[device_id].run = new
            elif device_id in self._devices:
                self._devices[device_id].run = replace(old, devices=(device_id,))
        return new

    # Begin and end of works.

    def begin_next(self, devices: Iterable[int], now_ns: int) -> list[Run | LoadRun]:
        """Begin what is first in the queues of these devices where possible; returns the new runs and loads."""
        begun: list[Run | LoadRun] = []
        for device_id in devices:
            device = self._devices.get(device_id)
            if device is None or device.is_busy:
                continue
            self._change_components(device)
            if device.hangs:
                continue
            work = device.queue[0] if device.queue else None
            assert work is None or isinstance(work, Work)
            if work is not None and work.work_id in self._broken:
                begun.append(self._begin(_empty_run(work, (device_id,), now_ns, RunEnd.BROKEN), now_ns))
            elif work is not None and self._may_begin(work):
                begun.append(self._begin(self._planned(work, now_ns), now_ns))
            elif not device.hangs and (load := self._load_next(device, work, now_ns)) is not None:
                begun.append(load)
        return begun

    def _change_components(self, device: Device) -> None:
        """Drop what is to be dropped, and note what is to be loaded, before the next work."""
        while device.queue and not device.hangs and not isinstance(change := device.queue[0], Work):
            device.queue.popleft()
            if isinstance(change, DropComponents):
                memory = device.memory
                left = tuple(one for one in memory.components if one.digest not in change.components)
                device.memory = Memory(memory.total_bytes, left)
                for load in device.loads:
                    load.drop(change.components)
            elif any(one.load is change for one in device.loads):
                continue  # The message came twice.
            elif device.free_bytes is not None and device.free_bytes < change.num_bytes:
                self.num_overloads += 1
                device.hangs = True
            else:
                wanted = map(self._component, change.components)
                new = tuple(one for one in wanted if one not in device.memory.components)
                device.loads.append(OpenLoad(load=change, left=new))

    def _load_next(self, device: Device, work: Work | None, now_ns: int) -> LoadRun | None:
        """Go on with a load: one of which nothing is left, or what the next work waits for, or else the first one.

        Returns it unless the device is doing it already.
        """
        needed = () if work is None else self._components(work.stage)
        load = min(device.loads, key=lambda one: bool(one.left) and set(one.left).isdisjoint(needed), default=None)
        if load is None or (device.load is not None and device.load.load is load.load and load.left):
            return None
        self._pause(device, now_ns)
        ready_ns = now_ns
        if load.source is None:
            load.source = self._source(load.load)
            load.left_ns = self._timing.load_ns(num_bytes(load.left), load.source)
        if load.left:
            ready_ns = max(now_ns, self._hosts.ready_ns(load.load))
        device.load = LoadRun(load=load.load, source=load.source, start_ns=now_ns, end_ns=ready_ns + load.left_ns)
        return device.load

    def _pause(self, device: Device, now_ns: int) -> None:
        """Pause the load that a device is doing, if any."""
        if device.load is not None:
            next(one for one in device.loads if one.load is device.load.load).pause(device.load, now_ns)
            device.load = None

    def _source(self, load: LoadComponents) -> LoadSource:
        """Return the real source of a load: the disk for what its host has forgotten."""
        if load.source in HOST_SOURCES and not self._hosts.has(load):
            return LoadSource.DISK
        return load.source

    def end_load(self, run: LoadRun) -> LoadRun | None:
        """End a load: its device has the components. Returns all of it; None if it was paused, or its device was lost
        or hangs.
        """
        device = self._devices.get(run.load.device_id)
        if device is None or device.load is not run or device.hangs:
            return None
        load = next(one for one in device.loads if one.load is run.load)
        self._hosts.read(run.load.device_id, load.left, run.load.forgets)
        device.loads.remove(load)
        device.load = None
        device.memory = Memory(device.memory.total_bytes, (*device.memory.components, *load.left))
        return replace(run, start_ns=run.start_ns - load.run_ns, dropped=load.dropped)

    def _may_begin(self, work: Work) -> bool:
        is_awaiting = False
        for device_id in work.devices:
            device = self._devices.get(device_id)
            if device is None or device.is_busy:
                return False
            if not device.queue or device.queue[0] is not work:
                return False
            wanted = () if work.work_id in self._revoked else self._components(work.stage)
            if not device.has(wanted, or_loads=True):
                self.num_overloads += 1
                device.hangs = True
            if not device.has(wanted, or_loads=False):
                return False
            if device.awaited:
                transfers = device.awaited.get(work.work_id, ())
                is_awaiting = is_awaiting or any(transfer.sent_ns is None for transfer in transfers)
        return not is_awaiting or work.work_id in self._revoked

    def _planned(self, work: Work, now_ns: int) -> Run:
        if work.work_id in self._revoked:
            self._revoked.remove(work.work_id)
            return _empty_run(work, work.devices, now_ns, RunEnd.STOPPED)
        start_ns = now_ns + self._timing.dispatch_ns(work)
        lost = list[int]()
        for transfer in self._receive_states(work):
            assert transfer.sent_ns is not None
            start_ns = max(start_ns, transfer.sent_ns + transfer.move_ns)
            if transfer.lost:
                lost.append(transfer.job_id)
        left_out = {job_id: job_id in lost for job_id in self._missing(work)}
        if len(left_out) == len(work.job_ids):
            return replace(_empty_run(work, work.devices, now_ns, RunEnd.REFUSED), left_out=left_out)
        duration_ns, steps, end = self._timing.run(work.without(left_out))
        end_ns = start_ns + duration_ns
        return Run(
            work=work, devices=work.devices, start_ns=start_ns, end_ns=end_ns, steps=steps, end=end, left_out=left_out
        )

    def _receive_states(self, work: Work) -> list[StateTransfer]:
        """Import the states that were sent ahead of a work; returns their transfers."""
        received: list[StateTransfer] = []
        for device_id in work.devices:
            device = self._devices[device_id]
            if device.awaited:
                for transfer in device.awaited.pop(work.work_id, ()):
                    received.append(transfer)
                    if transfer.lost:
                        device.states.pop(transfer.job_id, None)
                    elif transfer.state is not None:
                        device.states[transfer.job_id] = transfer.state
        return received

    def _missing(self, work: Work) -> list[int]:
        """Return the members whose state some device of the work lacks; at the start no member has one."""
        missing: list[int] = []
        for member in work.members:
            if not member.position:
                continue
            for device_id in work.devices:
                state = self._devices[device_id].states.get(member.job_id)
                if state is None or state.position != member.position:
                    missing.append(member.job_id)
                    break
        return missing

    def _begin(self, run: Run, now_ns: int) -> Run:
        for device_id in run.devices:
            device = self._devices[device_id]
            assert device.run is None, f"device {device_id} is busy"
            self._pause(device, now_ns)
            head = device.queue.popleft()
            assert head is run.work, f"device {device_id} begins a work that is not first in its queue"
            device.run = run
        return run

    def end(self, run: Run) -> bool:
        """End a run: its devices are free and have the new states. Returns False if the run is out of date."""
        devices = [
            device
            for device_id in run.devices
            if (device := self._devices.get(device_id)) is not None and device.run is run
        ]
        if len(devices) < len(run.devices):
            return False
        for device in devices:
            device.run = None
        for member in run.work.members if run.end in DROPS_STATES else run.members:
            _update_states(devices, member.job_id, member.position, run)
        return True

    def drop_after(self, run: Run) -> None:
        """Drop the states that were to be dropped after a run, whose blobs are written by now."""
        for device_id in run.devices:
            device = self._devices.get(device_id)
            if device is not None and device.drops:
                for job_id in device.drops.pop(run.work.work_id, ()):
                    device.states.pop(job_id, None)


def _update_states(devices: Iterable[Device], job_id: int, position: int, run: Run) -> None:
    """Update a job's state on the devices of an ended run. Devices that shared one object share the new one."""
    if run.end in DROPS_STATES:
        for device in devices:
            device.states.pop(job_id, None)
    elif run.steps:
        before, after = None, None
        for device in devices:
            found = device.states.get(job_id, _NOTHING) if position else _NOTHING
            if after is None or found is not before:
                before = found
                after = before.after(position, run.steps)
            device.states[job_id] = after


def _empty_run(work: Work, devices: Group, now_ns: int, end: RunEnd) -> Run:
    return Run(work=work, devices=devices, start_ns=now_ns, end_ns=now_ns, steps=0, end=end)
