"""The driver of simulated devices: connects the driver core to a fleet over a network, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from tilework.control.controller import Controller
from tilework.control.driver.core import DriverCore
from tilework.control.driver.effects import BreakOff, Discard, Effects, HandleEvent, Kill, Resolve, in_turn
from tilework.control.driver.result import WorkResult, end_event
from tilework.control.driver.state_registry import StateMove
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import Action, DropComponents, LoadComponents, ReadComponents
from tilework.core.checkpoint import Checkpoint
from tilework.core.component import Component, LoadSource, Memory
from tilework.core.events import (
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    Event,
    LeftOut,
    NodeCordoned,
    NodesSilent,
    StatesFetched,
    WorkFailed,
)
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget, StopWork
from tilework.core.wire.reports import Ended, Ending, Failed
from tilework.core.work import Group, Work
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.clock import Clock
from tilework.sim.config import DeviceLayout, SimConfig
from tilework.sim.device import Hosts
from tilework.sim.faults import FaultInjector
from tilework.sim.fleet import Fleet
from tilework.sim.network import Network
from tilework.sim.nodes.nodes import NodeSession, SimLinks, SimNodes
from tilework.sim.nodes.transfers import StateTransfers
from tilework.sim.reports import CUT_OFF, report_of, serialize
from tilework.sim.runs import LoadRun, Run, State
from tilework.sim.timing import TimingModel
from tilework.sim.workers import Workers

_DOWN_S = 1.0  # Downtime of a worker that was killed because it made no progress.


class Cluster:
    """Performs the driver core's messages and effects on a fleet, and passes reports of the fleet to the core.

    `on_event` passes an event to the controller. `on_image` receives the final state of a finished image.
    `on_given_up` is called when a device is given up (see `Workers`).

    On a reliable network messages are delivered at once, and only the leader of a group reports unless the group was
    cut off. Both save time and change no decision.
    """

    def __init__(
        self,
        clock: Clock,
        timing: TimingModel,
        costs: TableCosts,
        injector: FaultInjector,
        controller: Controller,
        config: SimConfig,
        *,
        on_event: Callable[[Event], None],
        on_image: Callable[[int, State], None],
        on_given_up: Callable[[Collection[int]], None],
    ) -> None:
        self._clock = clock
        self._injector = injector
        self._has_faults = bool(injector.faults)
        self._layout = layout = DeviceLayout(
            num_devices=config.num_devices,
            devices_per_node=costs.table.devices_per_node,
            slots_per_node=config.slots_per_node if costs.table.needs_slots else 0,
        )
        self._on_event = on_event
        self._on_image = on_image
        self._controller = controller
        self._core = DriverCore(controller, WatchdogConfig())
        self._costs = costs
        self._known = {component.digest: component for component in costs.weights.all}
        self._gone: frozenset[str] = frozenset()  # Digests of components that nothing needs any more.
        self._read = costs.weights.all if config.hosts_have_read else ()
        self._timing = timing
        self._hosts = Hosts(layout.node, costs.weights.host_bytes, self._read)
        self.fleet = Fleet(timing, costs.weights.components, self._component, self._hosts)
        self.runs: list[Run] = []
        self.loads: list[LoadRun] = []
        self.num_reads_ahead = 0
        self.num_refused = 0  # Members refused for a missing state although no earlier work failed.
        self._workers = Workers(
            clock,
            injector,
            self.fleet,
            layout=layout,
            memory=self._first_memory,
            on_joined=self._join,
            on_dead=self._on_dead,
            on_node_dead=self._on_node_dead,
            on_cut_off=self._cut_off,
            on_leaving=self._leave,
            lets_go=self._lets_go,
            on_given_up=on_given_up,
            on_cut=self._schedule,
        )
        self._links = SimLinks(self._workers.after, on_event)
        self._network = Network(clock, injector, layout.node)
        told = self._on_fetched, self._on_unheard
        self.nodes = SimNodes(layout.num_nodes, clock, injector, self._network, config.state_copies, *told)
        self._transfers = StateTransfers(clock, self.nodes, layout, self._begin_next)
        self._seen_steps: dict[int, int] = {}
        self._is_ticking = False
        self._late_s = self._draw_late()

    # Server and jobs.

    def start(self) -> None:
        """Start all nodes and workers, but for those that come late."""
        self._begin_nodes()
        self._workers.start_all(self._late_s)

    def _begin_nodes(self) -> None:
        for node in range(self._layout.num_nodes):
            if node not in self._late_s:
                self.nodes.begin(node)

    def _on_fetched(self, origin: int, node: int, num_bytes: int, run_ns: int) -> None:
        self._on_event(StatesFetched(origin, node, num_bytes, run_ns))

    def _on_unheard(self, nodes: tuple[int, ...]) -> None:
        self._on_event(NodesSilent(nodes))

    def _draw_late(self) -> dict[int, float]:
        """Draw the delays of nodes behind the server, in seconds."""
        late = [node for node in range(1, self._layout.num_nodes) if self._injector.injects("late")]
        return {node: self._injector.magnitude("late") for node in late}

    def attach(self, controller: Controller) -> None:
        """Use a controller that was rebuilt from its log. Devices and works in flight stay."""
        self._controller = controller
        self._core.attach(controller)

    def restart(self, controller: Controller) -> None:
        """Begin as the next server, with the blobs that jobs can continue from and no device.

        As in `Engine.restore`, nodes have their blobs before any job is restored, since one may end at once.
        """
        self._controller = controller
        self._core = DriverCore(controller, WatchdogConfig())
        self.nodes.begin_server()
        self._links.restart()
        self._begin_nodes()

    def lose_all(self) -> dict[int, Checkpoint]:
        """End the server and its works; returns the checkpoints that its nodes have, by job.

        Messages of its nodes may still come.
        """
        self._late_s = self._draw_late()
        self._workers.lose_all()
        self.nodes.end_server(self._late_s.keys())
        self.fleet.forget_works()
        self._hosts.reading.clear()
        left = {job_id: self._remaining_checkpoint(job_id) for job_id in self._core.states.job_ids}
        self.nodes.keep_only([blob for checkpoint in left.values() for blob in checkpoint.blobs])
        self._transfers.clear()
        self._seen_steps.clear()
        self._is_ticking = False
        return {job_id: checkpoint for job_id, checkpoint in left.items() if checkpoint.blobs}

    def _remaining_checkpoint(self, job_id: int) -> Checkpoint:
        """Return a job's latest checkpoint without lost blobs."""
        checkpoint = self._core.states.checkpoint(job_id)
        return checkpoint.among([blob for blob in checkpoint.blobs if self.nodes.has(blob)])

    def change_models(self, part: CostTable | None) -> None:
        """Serve another model by these costs, other LoRAs of one, or one model less.

        Devices still know how long works for what has gone take: some may be on their way or run.
        """
        if part is not None:
            (pipeline,) = part.pipelines
            loras = {**self._costs.table.loras.get(pipeline, {}), **part.loras.get(pipeline, {})}
            self._costs.serve(replace(part, loras={pipeline: loras} if loras else {}))
            self._known |= {component.digest: component for component in part.all_components}
            for node in range(self._layout.num_nodes):
                self._hosts.keep(node, part.all_components)
        served = {component.digest for component in self._controller.costs.weights.all}
        self._gone = frozenset(self._known.keys() - served)
        for device_id in self._layout.ids:
            if self._layout.kind(device_id) is DeviceKind.CPU:
                self.fleet.set_memory(device_id, self._first_memory(device_id))

    def begin(self, job_id: int, request: Request, checkpoint: Checkpoint) -> None:
        """Begin a job from a checkpoint, which may be empty."""
        self._core.begin_job(job_id, request, checkpoint)

    def end(self, job_id: int) -> None:
        """End a job: discard its blobs."""
        self._core.end_job(job_id)
        self.nodes.discard(self._core.states.end(job_id))

    @property
    def leftovers(self) -> str:
        """Everything that the driver still keeps after every job has ended, in words; empty if nothing."""
        num_blobs = self.nodes.num_files, self.nodes.blobs.num_kept
        if self._core.is_idle and num_blobs == (0, 0):
            return ""
        return f"works {self._core.work_ids}, jobs {self._core.states.job_ids}, {num_blobs} blobs on and of nodes"

    # Actions of the controller.

    def perform(self, action: Action) -> None:
        """Send the messages of an action to devices."""
        if isinstance(action, ReadComponents):
            self._read_ahead(action)
        for devices, message in self._core.perform(action):
            match message:
                case Work():
                    self._run(message)
                case StateMove():
                    self._move(message)
                case StopWork(work_id):
                    work = self._core.work(work_id)
                    assert work is not None, f"work {work_id} is to stop but is not in flight"
                    self._send(devices, partial(self._stop, work))
                case Forget(job_id):
                    self._send(devices, partial(self.fleet.forget, job_id))
                case LoadComponents() | DropComponents():
                    self._send(devices, partial(self._change_components, message))
                    self._begin_ticking()

    def _change_components(self, change: LoadComponents | DropComponents, device_id: int) -> None:
        self.fleet.change_components(change, device_id)
        self._begin_next((device_id,))

    def _read_ahead(self, read: ReadComponents) -> None:
        """Let a host read. The next server knows nothing of it, and its host only what was read before."""
        end_ns = self._clock.now_ns + self._timing.load_ns(read.num_bytes, LoadSource.DISK)
        self._hosts.reading[read.node] = frozenset(read.components), end_ns
        self._clock.at(end_ns, self._workers.unless_restarted(partial(self._end_read, read)), is_device_event=True)

    @property
    def num_reads(self) -> int:
        """Loads from the disk and reads ahead of need, so far."""
        return self.num_reads_ahead + sum(load.source is LoadSource.DISK for load in self.loads)

    def _end_read(self, read: ReadComponents) -> None:
        self.num_reads_ahead += 1
        del self._hosts.reading[read.node]
        is_kept = not self._injector.injects("read")
        if is_kept:
            components = [self._component(digest) for digest in read.components]
            self._hosts.keep(read.node, components, read.forgets)
        self._on_event(ComponentsRead(read.read_id, is_kept))

    def _run(self, work: Work) -> None:
        if self._has_faults:
            self.nodes.send_work(work.work_id, self._layout.node(work.devices[0]))
        if self._network.is_instant:  # No other work can begin, and this one only after its last device has it.
            self.fleet.enqueue(work, work.devices)
            self._begin_next(work.devices[-1:])
        else:
            self._send(work.devices, partial(self._enqueue, work))
        self._begin_ticking()

    def _begin_ticking(self) -> None:
        if self._has_faults and not self._is_ticking:
            self._is_ticking = True
            self._workers.after(NS_PER_S, self._tick)

    def _enqueue(self, work: Work, device_id: int) -> None:
        self.fleet.enqueue(work, (device_id,))
        self._begin_next((device_id,))

    def _stop(self, work: Work, device_id: int) -> None:
        self._schedule(self.fleet.stop(device_id, work, self._clock.now_ns))
        self._begin_next(work.devices)  # A revoked work need not wait for its job's state.

    def _move(self, move: StateMove) -> None:
        for target, transfer in self._transfers.begin(move, self._move_times_ns(move)):
            self._send((target,), partial(self.fleet.expect, transfer))

    def _move_times_ns(self, move: StateMove) -> dict[int, int]:
        """Return the time of a move to each target. The job's next work, not sent yet, begins at its position."""
        if not move.source:
            return dict.fromkeys(move.targets, 0)
        job = self._controller.tracker.jobs[move.job_id]
        work = next(work for work in job.works if self._core.work(work.work_id) is None)
        progress = job.committed.itinerary.at[work.member(move.job_id).position]
        node = self._layout.node(move.source[0])
        return {
            target: 0
            if target in move.source
            else self._costs.move_ns(job.request, progress, (node, self._layout.node(target)))
            for target in move.targets
        }

    def _send(self, devices: Iterable[int], deliver: Callable[[int], None]) -> None:
        """Send a message to each device; `deliver` is called on arrival. A dead worker receives nothing."""
        is_instant = self._network.is_instant
        for device_id in devices:
            if not is_instant:
                on_arrival = self._workers.unless_dead(device_id, partial(deliver, device_id))
                self._network.send(("to", device_id), on_arrival)
            elif self.fleet.is_up(device_id):
                deliver(device_id)

    # Reports of devices.

    def _begin_next(self, devices: Iterable[int]) -> None:
        for begun in self.fleet.begin_next(devices, self._clock.now_ns):
            if isinstance(begun, LoadRun):
                self._schedule_load(begun)
                continue
            self._schedule(begun)
            if self._has_faults:
                self.nodes.begin_work(begun.work.work_id, self._layout.node(begun.work.devices[0]))
                self._workers.inject_faults(begun)

    def _schedule_load(self, load: LoadRun) -> None:
        self._clock.at(load.end_ns, partial(self._end_load, load), is_device_event=True)

    def _component(self, digest: str) -> Component:
        return self._known[digest]

    def _end_load(self, run: LoadRun) -> None:
        done = self.fleet.end_load(run)
        if done is None:
            return
        load = done.load
        if not done.dropped:
            self.loads.append(done)
        event = ComponentsLoaded(load.load_id, load.device_id, done.end_ns - done.start_ns, done.dropped)
        self._begin_next((load.device_id,))
        if self._network.is_instant:
            self._on_event(event)
        else:
            session = self.nodes.session(self._layout.node(load.device_id))
            on_arrival = partial(self.nodes.receive, session, partial(self._on_event, event))
            self._network.send(("from", load.device_id), on_arrival)

    def _schedule(self, run: Run | None) -> None:
        if run is not None and not run.hangs:
            self._clock.at(run.end_ns, partial(self._end, run), is_device_event=True)

    def _end(self, run: Run) -> None:
        if not self.fleet.end(run):
            return
        if run.steps:
            self.runs.append(run)
        reporters = run.devices[:1] if self._network.is_reliable and run.end not in CUT_OFF else run.devices
        reports = [(device_id, report_of(run, self._serialize(device_id, run))) for device_id in reporters]
        self.fleet.drop_after(run)
        session = self.nodes.session(self._layout.node(run.work.devices[0]))
        self._begin_next(run.devices)
        for device_id, report in reports:
            handle = partial(self._receive, session, device_id, run, report)
            if self._network.is_instant:
                handle()
            else:
                self._network.send(("from", device_id), partial(self.nodes.receive, session, handle))

    def _serialize(self, device_id: int, run: Run) -> dict[int, StateBlob]:
        return serialize(device_id, run, self.fleet, self.nodes, self._layout.node(device_id))

    def _receive(self, session: NodeSession, device_id: int, run: Run, report: Ended | Failed) -> None:
        work = run.work
        if isinstance(report, Ended):
            self.nodes.dated(session, run, report)
            self.nodes.blobs.written(report.blobs.values(), session)
        if device_id == work.devices[0]:
            if self._core.work(work.work_id) is None:
                self._handle_late(work, report)
            elif run.left_out:
                self.num_refused += self._num_refused(run)
        self._apply(self._core.on_report(device_id, report))
        if isinstance(report, Ended):
            self.nodes.blobs.copy_to_others(report.blobs.values(), session)

    def _handle_late(self, work: Work, report: Ended | Failed) -> None:
        """Pass a late or repeated report to the controller, which must ignore it. The core would drop the report."""
        if isinstance(report, Failed):
            self._on_event(WorkFailed(work.work_id, report.reason, report.state_lost))
            return
        for one in report.absent:
            self._on_event(LeftOut(work.work_id, one.job_id, one.reason, one.state_lost))
        self._on_event(end_event(work, report.ending, report))

    def _num_refused(self, run: Run) -> int:
        """Return the number of members left out of a run although no earlier work of theirs failed."""
        if self._controller.tracker.awaited(run.work) is not None:
            return 0
        return len(run.left_out.keys() & self._core.members(run.work.work_id).keys())

    def _apply(self, effects: Effects) -> None:
        for effect in in_turn(effects):
            match effect:
                case WorkResult():
                    self._end_work(effect)
                case Discard(blobs):
                    self.nodes.discard(blobs)
                case HandleEvent(event):
                    self._on_event(event)
                case Resolve(move):
                    self._transfers.resolve(move)
                    self._begin_next(move.targets)
                case BreakOff(work):
                    self._break_off(work)
                case Kill(device_id):
                    self._workers.kill(device_id, "it made no progress", _DOWN_S)

    def _break_off(self, work: Work) -> None:
        self._schedule(self.fleet.break_off(work, self._clock.now_ns))
        self._begin_next(work.devices)

    def _end_work(self, result: WorkResult) -> None:
        """Deliver the images of an ended work, then pass its event to the controller."""
        report = result.report
        if result.ending in (Ending.FAILED, Ending.OUT_OF_MEMORY):  # A second copy of its command must not begin.
            self._break_off(result.work)
        if report is not None:
            for job_id in result.members:
                if (blob := report.blobs.get(job_id)) is None:
                    continue
                if not self._core.is_result(job_id, result):
                    if self._injector.injects("checkpoint"):
                        self.nodes.forget(blob)
                elif result.ending is Ending.DONE:
                    image = self.nodes.state(blob)
                    assert image is not None
                    self._on_image(job_id, image)
        if result.event is not None:
            self._on_event(result.event)

    # Workers.

    def _first_memory(self, device_id: int) -> Memory:
        """Return the components of a device at its start: all if they fit; a CPU slot has all."""
        total_bytes = None if self._layout.kind(device_id) is DeviceKind.CPU else self._costs.table.memory_bytes
        memory = Memory(total_bytes)
        components = tuple(one for one in self._costs.weights.all if one.digest not in self._gone)
        return Memory(total_bytes, components) if memory.can_hold(components) else memory

    def _join(self, device_id: int) -> None:
        """Let the server learn from a node that a worker is up."""
        node = self._layout.node(device_id)
        memory = self.fleet.memory(device_id)
        self.nodes.begin(node)
        self.nodes.to_server(self.nodes.session(node), partial(self._joined, device_id, memory))

    def _joined(self, device_id: int, memory: Memory) -> None:
        """Tell a worker what has come and gone while it began; it must load weights that have come."""
        node = self._layout.node(device_id)
        kind = self._layout.kind(device_id)
        if kind is DeviceKind.CPU:
            memory = self._first_memory(device_id)
        memory = Memory(memory.total_bytes, tuple(one for one in memory.components if one.digest not in self._gone))
        self.fleet.set_memory(device_id, memory)
        digests = tuple(one.digest for one in memory.components)
        read = tuple(component.digest for component in self._read)
        self._on_event(DeviceJoined(device_id, node, kind, digests, memory.total_bytes, read))

    def _on_dead(self, device_id: int, why: str) -> Callable[[], None]:
        """Let a worker die; return what its node tells the server when it notices."""
        session = self.nodes.session(self._layout.node(device_id))
        return partial(self.nodes.to_server, session, partial(self._lose, device_id, why))

    def _lose(self, device_id: int, why: str) -> None:
        if self._injector.injects("links"):
            node = self._layout.node(device_id)
            accelerators = [one for one in self._layout.all_of(node) if one < self._layout.num_devices]
            self._links.cut(accelerators, round(self._injector.magnitude("links") * NS_PER_S))
        self._apply(self._core.on_device_lost(device_id, why))

    def _on_node_dead(self, node: int, devices: Group, why: str) -> Callable[[], None]:
        """Let a node die with its states; return what the server does when it notices."""
        session = self.nodes.session(node)
        self.nodes.end(session)
        return partial(self._lose_node, session, devices, why)

    def _cut_off(self, node: int, length_ns: int, end_workers: Callable[[], None]) -> None:
        session = self.nodes.session(node)
        devices = self._layout.all_of(node)

        def on_back() -> None:
            self.nodes.end(session)
            end_workers()

        self.nodes.cut(session, length_ns, partial(self._lose_node, session, devices, "it said nothing"), on_back)

    def _lose_node(self, session: NodeSession, devices: Group, why: str) -> None:
        """Give a node up, unless the server has done so before."""
        gone = self.nodes.lose(session)
        if gone is not None:
            self._apply(self._core.on_node_lost(session.node, devices, gone, why))

    def _leave(self, node: int, devices: Group) -> None:
        """Let a node that is about to leave tell the server."""
        session = self.nodes.session(node)
        self.nodes.to_server(session, partial(self._cordon, session, devices))

    def _cordon(self, session: NodeSession, devices: Group) -> None:
        session.is_cordoned = True
        self._on_event(NodeCordoned(session.node, devices, "it was asked to leave"))

    def _lets_go(self, node: int, devices: Group) -> bool:
        """Return whether a leaving node may go: its devices have no works, and others have fetched what only it has."""
        session = self.nodes.session(node)
        if session.has_ended or session.is_given_up:
            return True
        return session.is_cordoned and not self._core.has_works(devices) and self.nodes.hands_over(session)

    def _tick(self) -> None:
        """Note the progress of runs and check for what is stuck, once per second while there are works or loads."""
        for run in self.fleet.runs():
            steps = run.steps_by(self._clock.now_ns)
            if steps > self._seen_steps.get(run.work.work_id, 0):
                self._seen_steps[run.work.work_id] = steps
                self._core.on_progress(run.work.work_id)
        self._apply(self._core.check_stuck())
        is_loading = any(device.is_loading for device in self._controller.tracker.up.values())
        self._is_ticking = is_loading or bool(self._controller.num_in_flight)
        if self._is_ticking:
            self._workers.after(NS_PER_S, self._tick)
