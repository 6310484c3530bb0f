"""Invariants that hold after every event of a simulation and at its end, whatever faults happen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from tilework.admission.loads import load_bound_ns
from tilework.control.cluster.life import HAS_WORKS, JobState
from tilework.control.cluster.tracker import Tracker
from tilework.control.controller import ControllerConfig
from tilework.core.actions import (
    Accept,
    Action,
    DropComponents,
    Finish,
    LoadComponents,
    MoveState,
    Place,
    ReadComponents,
    Reject,
    RunWork,
    UseCache,
    jobs_of,
)
from tilework.core.events import (
    Broken,
    Cancelled,
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    DeviceLost,
    Event,
    LeftOut,
    LinksChanged,
    ModelRemoved,
    ModelServed,
    NodeCordoned,
    NodeLost,
    NodesSilent,
    OutOfMemory,
    Restored,
    Stopped,
    Submitted,
    WorkFailed,
    WorkFinished,
)
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_MS, NS_PER_S, s_from_ns
from tilework.core.work import Work
from tilework.cost.demand import demand_at
from tilework.cost.memory import FORGET_NS
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table
from tilework.policy.registry import downtime_ns, may_fail
from tilework.sim.faults import Faults
from tilework.sim.network import LATE_FAULTS, MESSAGE_FAULTS
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace, TraceEnding, Violation, check_image, check_no_overlap, require

# The most time that an interruption costs a request: detecting a stuck worker, a restart, and steps that run again.
INTERRUPTION_NS = 120 * NS_PER_S
# Time for which a placement may close devices, by policy.
_FULL_CHECK_EVERY = 64
# Works of steps that are sent ahead to a device, for one job and for each further one; and all stages without steps.
_MAX_STEPPED_WORKS = 3
_MAX_STEPPED_WORKS_PER_OTHER = 1
# After these a device may lack a state.
_STATE_FAULTS = LATE_FAULTS | {"checkpoint", "node", "fetch", "restart", "replay"}

_StageKey = tuple[str, str, int]
"""Key of a work's memory beside its size: pipeline, name of the stage, number of LoRAs."""


class Invariants:
    """Checks one simulation: pass `check` as its observer, and its trace to `finish`. Both raise Violation.

    It keeps its own records of requests and answers, and compares them with the controller's.
    """

    def __init__(self, simulation: Simulation, config: ControllerConfig, faults: Faults, costs: TableCosts) -> None:
        self._simulation = simulation
        self._config = config
        self._faults = faults
        self._costs = costs
        self._requests: dict[str, Request] = {}
        self._job_ids: dict[str, int] = {}
        self._uids: dict[int, str] = {}
        self._ended: set[str] = set()
        self._up: dict[int, int] = {}
        self._cordoned: set[int] = set()
        self._alone: frozenset[int] = frozenset()
        self._silent: tuple[int, ...] = ()
        self._kinds: dict[int, DeviceKind] = {}
        self._weights: dict[int, set[str]] = {}  # Digests of the components of each device, at the end of its queue.
        self._memory_bytes: dict[int, int | None] = {}
        self._reading: dict[int, int] = {}  # The read ahead of need that has not ended, by node.
        self._ahead: dict[int, dict[int, set[str]]] = {}  # Open loads ahead of need, by device.
        self._joined_after: dict[int, int] = {}  # The last work before each device joined.
        self._sizes = {component.digest: component.num_bytes for component in costs.weights.all}
        self._works: dict[int, Work] = {}
        self._last_work_id = 0
        self._attempts: dict[int, int] = {}
        self._interruptions: Counter[int] = Counter()
        self._num_interruptions = 0
        self._num_placements = 0
        self._urgency_ns: dict[str, int] = {}
        self._alone_ns: dict[str, int] = {}  # Time of each request alone.
        self._lengths: dict[str, int] = {}  # Number of positions of each request.
        self._first_start_ns: dict[str, int] = {}
        self._too_large: dict[tuple[_StageKey, int], int] = {}  # Also by pixels.
        self._num_events = 0
        self._num_servers = simulation.num_servers

    # After each event.

    def check(self, event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        self._num_events += 1
        if self._simulation.num_servers != self._num_servers:
            self._reset()
        if isinstance(event, ModelServed | ModelRemoved):
            self._change_models(event)
        else:
            self._record(event, actions, now_ns)
        for action in actions:
            self._check_action(action, event, now_ns)
        self._check_loads(actions)
        if isinstance(event, ModelServed | ModelRemoved):
            self._check_what_is_left()
        self._check_nodes()
        if isinstance(event, Cancelled):
            require(
                event.uid in self._ended or event.uid not in self._job_ids, f"{event.uid} is cancelled, and goes on"
            )
        if not isinstance(event, Restored):  # Other requests may not be restored yet.
            self._compare_with_tracker(now_ns)

    def _reset(self) -> None:
        """Start the records of a new server: its controller numbers works and jobs from 1, and no device is up."""
        self._num_servers = self._simulation.num_servers
        self._num_interruptions += 1
        self._last_work_id = 0
        for table in (self._uids, self._works, self._attempts, self._interruptions, self._up, self._too_large):
            table.clear()
        self._reading.clear()
        self._cordoned.clear()
        self._alone = frozenset()
        self._silent = ()

    def _record(self, event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        match event:
            case Submitted() as submitted:
                self._requests |= {request.uid: request for request in submitted.requests}
            case Restored(request):
                self._requests[request.uid] = request
            case DeviceJoined(device_id, node, kind, components, memory_bytes):
                require(device_id not in self._up, f"device {device_id} joins twice")
                self._up[device_id] = node
                self._kinds[device_id] = kind
                self._weights[device_id] = set(components)
                self._memory_bytes[device_id] = memory_bytes
                self._ahead[device_id] = {}
                self._joined_after[device_id] = self._last_work_id
            case ComponentsLoaded(load_id, device_id):
                self._ahead[device_id].pop(load_id, None)
            case ComponentsRead(read_id):
                node = next(node for node, one in self._reading.items() if one == read_id)
                del self._reading[node]
            case DeviceLost() | NodeLost() | NodeCordoned() | NodesSilent() | LinksChanged():
                self._change_devices(event)
            case LeftOut(work_id, job_id):
                self._num_interruptions += 1
                self._interruptions[job_id] += 1
            case WorkFailed(work_id) | Broken(work_id) | OutOfMemory(work_id):
                self._num_interruptions += 1
                work = self._works.pop(work_id, None)
                self._count_interruptions([] if work is None else [work])
                if work is not None and isinstance(event, OutOfMemory):
                    self._note_out_of_memory(work, actions, now_ns)
            case WorkFinished(work_id) | Stopped(work_id):
                if (ended := self._works.pop(work_id, None)) is not None and isinstance(event, WorkFinished):
                    self._note_whole(ended)
                    self._end_loads(ended)
            case _:
                pass

    def _change_models(self, event: ModelServed | ModelRemoved) -> None:
        """Check that no request for what goes is open, and that the controller knows only what is served."""
        costs = self._costs
        before = self._costs.table
        if isinstance(event, ModelRemoved):
            for uid in self._job_ids.keys() - self._ended:
                require(self._requests[uid].pipeline != event.pipeline, f"{uid} is open, and its model is removed")
            costs.remove(event.pipeline)
            for one in [one for one in self._too_large if one[0][0] == event.pipeline]:
                del self._too_large[one]
        else:
            costs.serve(parse_table(json.loads(event.costs)))
            self._sizes |= {component.digest: component.num_bytes for component in costs.weights.all}
        for device_id, kind in self._kinds.items():
            if kind is DeviceKind.CPU:  # Such a device has what is served.
                self._weights[device_id] = {component.digest for component in costs.weights.all}
        known = self._simulation.controller.costs
        require(known.table == costs.table, f"the controller does not serve what it should after {event}")
        new = set(costs.table.pipelines).difference(before.pipelines)
        for row in (one for one in costs.table.rows if one.pipeline in new and one.batch == 1 and one.cache is None):
            stage = costs.graph(row.pipeline).stage(row.stage)
            expected, found = (one.run_ns(stage, (row.shape,), row.degree) for one in (TableCosts(costs.table), known))
            require(found == expected, f"{stage} of a new model is believed to take {found} ns, and has {expected}")
            fits = known.fits(stage, row.shape, row.degree) or not costs.fits(stage, row.shape, row.degree)
            require(fits, f"{stage} of a new model is believed not to fit")

    def _change_devices(self, event: DeviceLost | NodeLost | NodeCordoned | NodesSilent | LinksChanged) -> None:
        if isinstance(event, NodesSilent):
            self._silent = event.nodes
            return
        if isinstance(event, LinksChanged):
            self._alone = frozenset(event.alone)
            return
        if isinstance(event, NodeCordoned):
            self._cordoned.update(event.device_ids)
            return
        for device_id in event.device_ids:
            self._up.pop(device_id, None)
            self._cordoned.discard(device_id)
        self._num_interruptions += 1
        self._count_interruptions(
            work for work in self._works.values() if not set(event.device_ids).isdisjoint(work.devices)
        )

    def _note_out_of_memory(self, work: Work, actions: tuple[Action, ...], now_ns: int) -> None:
        """Remember that works of this size must run in slices, if a job of the work has not ended."""
        is_open = any(set(work.job_ids) & set(jobs_of(action)) for action in actions)
        if work.stage.spec.sliceable and not work.sliced and is_open:
            self._too_large[_key(work.stage), self._pixels(work)] = now_ns + FORGET_NS

    def _note_whole(self, work: Work) -> None:
        if work.stage.spec.sliceable and not work.sliced:
            pixels = self._pixels(work)
            fitted = [one for one in self._too_large if one[0] == _key(work.stage) and one[1] <= pixels]
            for one in fitted:
                del self._too_large[one]

    def _end_loads(self, work: Work) -> None:
        """Note that the components of a work are loaded, also if the message that says so was lost."""
        used = {one.digest for one in self._costs.weights.components(work.stage)}
        for device_id in self._up.keys() & set(work.devices):
            loads = self._ahead[device_id]
            self._ahead[device_id] = {number: digests for number, digests in loads.items() if not digests <= used}

    def _pixels(self, work: Work) -> int:
        return self._requests[self._uids[work.job_ids[0]]].shape.pixels

    def _count_interruptions(self, works: Iterable[Work]) -> None:
        for work in works:
            self._interruptions.update(work.job_ids)

    def _use_cache(self, job_id: int, uid: str) -> None:
        require(self._job_ids.get(uid) == job_id, f"{uid} gets a cache as job {job_id}, which is another request")
        require(uid not in self._ended, f"{uid} gets a cache after its end")
        require(self._requests[uid].spare_cache is not None, f"{uid} gets a cache that it has not asked for")
        self._requests[uid] = self._requests[uid].with_spare_cache
        self._lengths[uid] = self._costs.start(self._requests[uid]).itinerary.length

    def _check_action(self, action: Action, event: Event, now_ns: int) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                self._requests[uid] = action.accepted(self._requests[uid])
                self._accept(job_id, uid, eta_ns, event, now_ns)
            case UseCache(job_id, uid):
                self._use_cache(job_id, uid)
            case Reject(uid):
                require(uid in self._requests and uid not in self._job_ids, f"{uid} is refused after it was accepted")
                self._end(uid)
            case Finish(job_id, uid, status):
                require(self._job_ids.get(uid) == job_id, f"{uid} ends as job {job_id}, which is another request")
                if status is Status.FAILED:
                    self._check_failure(uid, job_id)
                self._end(uid)
            case RunWork(work):
                self._run(work, now_ns)
            case LoadComponents() | DropComponents():
                self._change_components(action)
            case ReadComponents():
                self._begin_read(action)
            case MoveState(job_id, targets):
                require(self._uids.get(job_id) not in self._ended, f"a state of the ended job {job_id} moves")
                require(set(targets) <= self._up.keys(), f"a state of job {job_id} moves to a device that is down")
                self._check_open(targets, f"a state of job {job_id} moves")
            case Place():
                self._num_placements += 1
            case _:
                pass

    def _accept(self, job_id: int, uid: str, eta_ns: int, event: Event, now_ns: int) -> None:
        is_restored = isinstance(event, Restored)
        require(uid not in self._ended, f"{uid} is accepted after its end")
        require(is_restored or uid not in self._job_ids, f"{uid} is accepted twice")
        require(job_id not in self._uids, f"job {job_id} belongs to two requests")
        require(eta_ns >= now_ns or "skew" in self._faults, f"the predicted finish of {uid} is in the past")
        self._job_ids[uid] = job_id
        self._uids[job_id] = uid
        self._alone_ns[uid] = self._takes_alone_ns(self._requests[uid])
        self._lengths[uid] = self._costs.start(self._requests[uid]).itinerary.length
        job = self._simulation.controller.tracker.job(job_id)
        if job is not None:  # It has not expired at once.
            self._urgency_ns.setdefault(uid, job.urgency_ns)
        if job is not None and job.promised is not None and not is_restored:
            unheard = {one for one in job.promised.devices if self._up.get(one) in self._silent}
            require(not unheard, f"{uid} is promised on the devices {unheard}, whose nodes say nothing")

    def _check_failure(self, uid: str, job_id: int) -> None:
        count = self._interruptions[job_id]
        least = 0 if may_fail(self._config.policy) else self._config.max_attempts
        require(count >= least, f"{uid} fails after {count} interruptions; it may fail after {least}")

    def _end(self, uid: str) -> None:
        require(uid not in self._ended, f"{uid} ends twice")
        self._ended.add(uid)

    def _run(self, work: Work, now_ns: int) -> None:
        number = work.work_id
        require(number > self._last_work_id, f"work {number} comes after work {self._last_work_id}")
        self._last_work_id = number
        nodes = {self._up.get(device_id, -1) for device_id in work.devices}
        require(-1 not in nodes, f"work {number} is for a device that is down: {work.devices}")
        self._check_open(work.devices, f"work {number} is sent")
        kinds = {self._kinds[device_id] for device_id in work.devices}
        require(kinds == {work.stage.kind}, f"{work.stage} runs on {work.stage.kind} devices, not on {work.devices}")
        require(
            len(work.devices) == 1 or self._alone.isdisjoint(work.devices), f"work {number} needs links that are cut"
        )
        require(len(nodes) == 1, f"the group {work.devices} of work {number} spans nodes")
        require(len(work.devices) == 1 or len(work.job_ids) == 1, f"work {number} has several jobs and several devices")
        for job_id, attempt, *_ in work.members:
            uid = self._uids.get(job_id)
            require(uid is not None and uid not in self._ended, f"work {number} is for job {job_id}, which has ended")
            require(attempt >= self._attempts.get(job_id, 1), f"work {number} goes back to attempt {attempt}")
            if uid is not None and self._requests[uid].exact:
                is_alone = len(work.devices) == len(work.job_ids) == 1 and not work.sliced
                require(is_alone, f"work {number} of the exact {uid} has several jobs or devices, or is sliced")
            self._attempts[job_id] = attempt
            if uid is not None:
                self._first_start_ns.setdefault(uid, now_ns)
        self._works[number] = work
        self._check_pool(work)
        self._check_loras(work)
        self._check_components(work)
        self._check_residents(work)
        self._check_memory(work, now_ns)

    def _check_open(self, device_ids: Iterable[int], what: str) -> None:
        cordoned = self._cordoned.intersection(device_ids)
        require(not cordoned, f"{what} on the cordoned devices {cordoned}")

    def _check_pool(self, work: Work) -> None:
        """Check that a work runs on accelerators that serve its pipeline, all of one pool."""
        pools = self._costs.pools
        numbers = set[int]()
        for device_id in work.devices if work.stage.kind is DeviceKind.ACCELERATOR else ():
            is_served = pools.serves(device_id, work.stage.pipeline)
            require(
                is_served, f"work {work.work_id} of {work.stage} runs on device {device_id}, which does not serve it"
            )
            numbers.add(pools.number(0, device_id))
        require(len(numbers) <= 1, f"the group {work.devices} of work {work.work_id} spans pools")

    def _change_components(self, action: LoadComponents | DropComponents) -> None:
        """Check that a device that is up holds no more components than fit its memory, and drops only what it has."""
        device_id = action.device_id
        named = set(action.components)
        require(device_id in self._up, f"components of device {device_id} change, which is down")
        self._check_open((device_id,), "components change")
        weights = self._weights[device_id]
        limit = self._memory_bytes[device_id]
        if isinstance(action, DropComponents):
            require(named <= weights, f"device {device_id} drops {named - weights}, which it does not have")
            weights -= named
            return
        is_served = self._costs.pools.serves(device_id, action.stage.pipeline)
        require(is_served, f"device {device_id} loads for {action.stage}, which it does not serve")
        weights |= named
        total = sum(self._sizes[digest] for digest in weights)
        require(limit is None or total <= limit, f"device {device_id} has {total} bytes of components, and {limit} fit")

    def _check_what_is_left(self) -> None:
        """Check that no device keeps unneeded weights after a change of models, unless it is about to leave."""
        known = {component.digest for component in self._costs.weights.all}
        for device_id in self._up.keys() - self._cordoned:
            left = self._weights[device_id] - known
            require(not left, f"device {device_id} keeps {left}, which nothing needs any more")

    def _begin_read(self, read: ReadComponents) -> None:
        """Check that a host reads ahead once at a time, and nothing that a device of its node has."""
        require(read.node not in self._reading, f"node {read.node} reads {read.components}, and reads already")
        self._reading[read.node] = read.read_id
        require(bool(read.components), f"node {read.node} is to read nothing")
        is_there = {one: node == read.node and self._kinds[one] is read.stage.kind for one, node in self._up.items()}
        for device_id in (one for one, there in is_there.items() if there):
            twice = self._weights[device_id].intersection(read.components)
            require(not twice, f"node {read.node} reads {twice}, which device {device_id} has")

    def _check_loads(self, actions: Iterable[Action]) -> None:
        """Check that a load ahead is for a device without works or such loads, others for a work that comes next."""
        awaited: set[int] = set()
        for action in actions:
            match action:
                case LoadComponents(device_id=device_id, is_ahead=True):
                    since = self._joined_after[device_id]
                    works = [one.work_id for one in self._works.values() if device_id in one.devices]
                    works = [work_id for work_id in works if work_id > since]
                    require(not works, f"device {device_id} loads ahead of need, and has the works {works}")
                case LoadComponents(device_id=device_id):
                    awaited.add(device_id)
                case RunWork(work):
                    awaited -= set(work.devices)
                case _:
                    pass
        require(not awaited, f"the devices {awaited} load for no work")
        ahead = [one for one in actions if isinstance(one, LoadComponents) and one.is_ahead]
        for device_id in {one.device_id for one in ahead}:
            begun = self._ahead[device_id]
            require(not begun, f"device {device_id} loads ahead of need, and the loads {set(begun)} have not ended")
            begun |= {one.load_id: set(one.components) for one in ahead if one.device_id == device_id}

    def _check_loras(self, work: Work) -> None:
        """Check that a work computes with the LoRAs of its members that change the stage, all where these are."""
        known = self._costs.table.loras.get(work.stage.pipeline, {})
        components = set(work.stage.spec.components)
        members = [self._requests[self._uids[job_id]] for job_id in work.job_ids]
        for request in members:
            used = tuple(one for one in request.loras if known[one.name].changes & components)
            require(work.stage.loras == used, f"{work.stage} runs for {request.uid}, which uses {used}")
        for lora in (known[one.name].component for one in work.stage.loras):
            lacking = [one for one in work.devices if lora is not None and lora.digest not in self._weights[one]]
            require(not lacking, f"work {work.work_id} of {work.stage} runs on {lacking} without {lora}")
        shapes = {request.shape for request in members}
        require(not work.stage.loras or len(shapes) == 1, f"{work.stage} runs for several sizes, {shapes}")

    def _check_components(self, work: Work) -> None:
        """Check that a work runs only where its components are and its activations fit beside all that is there."""
        needed = {component.digest for component in self._costs.weights.components(work.stage)}
        requests = [self._requests[self._uids[job_id]] for job_id in work.job_ids]
        beside = 0 if work.sliced else self._costs.weights.activation_bytes(work.stage, requests, len(work.devices))
        for device_id in work.devices:
            lacking = needed - self._weights[device_id]
            require(not lacking, f"device {device_id} lacks {lacking} for work {work.work_id} of {work.stage}")
            limit = self._memory_bytes[device_id]
            total = sum(map(self._sizes.__getitem__, self._weights[device_id]))
            fits = limit is None or total + beside <= limit
            require(fits, f"work {work.work_id} of {work.stage} needs {beside} bytes beside {total}, and {limit} fit")

    def _check_memory(self, work: Work, now_ns: int) -> None:
        """Check that a sliceable work out of memory is not tried whole again for FORGET_NS, unless reports may be late.

        That of an exact request is tried whole until the request fails.
        """
        if self._requests[self._uids[work.job_ids[0]]].exact:
            return
        if work.stage.spec.sliceable and not work.sliced and not LATE_FAULTS & self._faults.by_name.keys():
            pixels = self._pixels(work)
            known = [
                size
                for (stage, size), until_ns in self._too_large.items()
                if stage == _key(work.stage) and size <= pixels and now_ns < until_ns
            ]
            require(not known, f"a whole {work.stage} of {pixels} pixels begins, though {known} did not fit")

    def _check_residents(self, work: Work) -> None:
        """Check that a device has a bounded number of works ahead, and states of a bounded number of jobs."""
        for device_id in work.devices:
            device = self._simulation.controller.tracker.device(device_id)
            require(device is not None, f"device {device_id} is up but unknown to the controller")
            assert device is not None
            num_jobs = len({job_id for work in device.works for job_id in work.job_ids})
            stages = self._costs.graph(work.stage.pipeline).stages
            num_at_once = sum(not stage.has_steps for stage in stages)
            limit = num_at_once * num_jobs + _MAX_STEPPED_WORKS + _MAX_STEPPED_WORKS_PER_OTHER * (num_jobs - 1)
            require(len(device.works) <= limit, f"device {device_id} has {len(device.works)} works")
            residents = device.residents
            most = max(self._config.max_residents, sum(bool(job.works) for job in residents.values()))
            require(len(residents) <= most, f"device {device_id} keeps {len(residents)} jobs; it may keep {most}")

    def _check_nodes(self) -> None:
        """Check that ended sessions of nodes change nothing, and that nodes have what the server believes."""
        nodes = self._simulation.cluster.nodes
        require(
            not nodes.num_outdated, "a message of a session that was given up counts, or a work of one that has ended"
        )
        require(not nodes.num_false_fetches, "a fetch that failed, or from another node, counts as measured")
        require(not nodes.num_missing, "a node does not have a state that the server believes there")
        require(not nodes.num_clock_errors, "a time of a node is off by more than its clock's stated error")

    def _compare_with_tracker(self, now_ns: int) -> None:
        tracker = self._simulation.controller.tracker
        require(len(tracker.up) == len(self._up), f"the controller counts {len(tracker.up)} devices")
        if self._num_events % _FULL_CHECK_EVERY == 0:
            open_uids = self._job_ids.keys() - self._ended
            require(tracker.job_ids.keys() == open_uids, f"at {now_ns} ns the tracker's open requests differ")
            check_states(tracker)
        if self._simulation.cluster.num_refused and not _STATE_FAULTS & self._faults.by_name.keys():
            raise Violation(f"at {now_ns} ns a device gets a work whose state it does not have")
        if self._simulation.cluster.fleet.num_overloads and not _STATE_FAULTS & self._faults.by_name.keys():
            raise Violation(f"at {now_ns} ns a device lacks memory for a load, or components for a work")

    # At the end.

    @property
    def _is_exact(self) -> bool:
        """True if works take exactly the predicted time, so that every promise can be kept."""
        config = self._simulation.config
        if any(row.skipped_std for row in self._costs.table.rows):
            return False
        return not self._faults and not config.jitter and config.dispatch_ns_at(1) < NS_PER_MS

    def finish(self, trace: Trace) -> None:
        """Check what must hold at the end of a simulation."""
        for ending in trace.endings:
            uid = ending.request.uid
            if ending.status is Status.DONE:
                check_image(uid, ending.image, self._lengths[uid])
            if self._is_exact and ending.request.is_promise and ending.job_id is not None:
                self._check_promise(ending)
            if self._is_exact and ending.request.is_dropped_if_late and ending.status is Status.DONE:
                require(ending.on_time, f"{uid} was to be dropped, but is done late")
            if ending.status is Status.EXPIRED:
                require(ending.request.is_dropped_if_late, f"{uid} was not to be dropped")
        require(self._job_ids.keys() <= self._ended, "an accepted request has not ended")
        for device_id in {device_id for run in trace.runs for device_id in run.devices}:
            check_no_overlap(device_id, [run for run in trace.runs if device_id in run.devices])
        self._check_waits(len(trace.runs))
        self._check_leftovers()

    def _check_promise(self, ending: TraceEnding) -> None:
        """Check that accepted promises are kept, unless the client cancels or the policy may fail what it accepted."""
        status = ending.status
        deadline_ns = ending.request.deadline_ns
        if status is Status.CANCELLED or (status is Status.FAILED and may_fail(self._config.policy)):
            return
        assert deadline_ns is not None
        at = f"{status.value} {s_from_ns(ending.finish_ns - deadline_ns):+.3f} s from its deadline"
        require(ending.on_time, f"the promise to {ending.request.uid} is broken without a fault: {at}")

    def _check_waits(self, num_works: int) -> None:
        """Check that best-effort requests wait at most for more urgent or promised ones, and for interruptions.

        A request may wait for a less urgent one, too, if that runs when it arrives and does not give way. The dispatch
        of works, which takes longer than some of them, is no part of what a request takes alone.
        """
        alone_ns = {uid: self._alone_ns[uid] for uid in self._urgency_ns}
        slowness = 2 * max(1.0, 1.5 * self._faults.size("slow") if "slow" in self._faults else 1.0)
        spare_ns = self._num_interruptions * INTERRUPTION_NS + self._delays_ns() + 10 * NS_PER_S
        spare_ns += self._num_placements * downtime_ns(self._config.policy)
        spare_ns += num_works * self._simulation.config.dispatch_ns_at(1)
        for uid, start_ns in self._first_start_ns.items():
            request = self._requests[uid]
            urgency_ns = self._urgency_ns[uid]
            if request.deadline_ns is None:
                before_ns = sum(
                    run_ns
                    for other, run_ns in alone_ns.items()
                    if self._urgency_ns[other] <= urgency_ns or self._requests[other].is_promise
                )
                earlier = [other for other in alone_ns if self._requests[other].arrival_ns < request.arrival_ns]
                running_ns = max((alone_ns[other] for other in earlier), default=0)
                waited_s = s_from_ns(start_ns - request.arrival_ns)
                bound_s = s_from_ns(int(slowness * (before_ns + running_ns)) + spare_ns)
                require(waited_s <= bound_s, f"{uid} waits {waited_s:.1f} s; it may wait {bound_s:.1f} s")

    def _delays_ns(self) -> int:
        """Return the time that late messages, a wrong clock and replays may have cost."""
        names = [name for name in ("delayed", "reordered", "skew", "replay") if name in self._faults]
        counts = self._simulation.fault_counts
        return round(sum(2 * counts[name] * self._faults.size(name) for name in names) * NS_PER_S)

    def _takes_alone_ns(self, request: Request) -> int:
        """Return the time on one device if others push its weights out before each step."""
        start = self._costs.start(request)
        loads_ns = sum(num_steps * load_bound_ns(stage, self._costs.weights) for stage, num_steps in start.pieces)
        return demand_at(request, start, 1, self._costs).run_ns + loads_ns

    def _check_leftovers(self) -> None:
        tracker = self._simulation.controller.tracker
        fleet = self._simulation.cluster.fleet
        require(not tracker.jobs and not tracker.num_waiting() and not tracker.promised(), "the tracker keeps a job")
        require(not any(device.residents for device in tracker.up.values()), "the tracker keeps a resident")
        if not MESSAGE_FAULTS & self._faults.by_name.keys() and "hang" not in self._faults:
            kept = {device_id: fleet.num_states(device_id) for device_id in self._up if fleet.is_up(device_id)}
            require(not any(kept.values()), f"devices keep states of jobs that have ended: {kept}")
            left = self._simulation.cluster.leftovers
            require(not left, f"the driver keeps works or blobs of jobs that have ended: {left}")


def check_states(tracker: Tracker) -> None:
    """Check that each job is kept where its state says (`control.cluster.life`). Raises Violation."""
    queued = [job.job_id for job in (*tracker.waiting(), *tracker.for_slots)]
    require(len(set(queued)) == len(queued), "a job is in a queue twice")
    waiting = set(queued)
    for job_id, job in tracker.jobs.items():
        if tracker.job(job_id) is None:
            expected = JobState.PARKED
        elif job_id in waiting:
            expected = JobState.WAITING
        else:
            expected = JobState.STOPPING if job.stops_at is not None else JobState.RUNNING
        require(job.state is expected, f"job {job_id} is {job.state}, and is kept as one that is {expected}")
        require(bool(job.works) == (job.state in HAS_WORKS), f"job {job_id} is {job.state}, with works {job.works}")


def _key(stage: Stage) -> _StageKey:
    return stage.pipeline, stage.name, len(stage.loras)
