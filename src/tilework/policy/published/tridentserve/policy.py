"""TridentServe: stages have their own devices, and each decision is the dispatch that earns the most reward.

Theory of operation. `orchestration` says which devices are for which stages (`PoolLayout`); it changes as requests do.
Each request that waits has *ways* (`ways`): placement types on which it fits, at degrees that are efficient. `bids`
says what each way is worth, `program` chooses the requests that begin now. `dispatch` makes the starts: steps on the
chosen devices, encode and decode on the same if these hold them, else on auxiliaries. Devices hold all stages (type
EDC) as long as all requests fit there: then this is the dispatcher alone, as for a table without weights.

Small requests of one class begin in batches (appendix E.1). Models that exceed one device (E.2) are a matter of the
cost table (`cost.table.in_cells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.cost.demand import step_speeds
from tilework.policy.published.tridentserve.bids import MOST_SPEED, Bid, batched, one_by_one, read_bids
from tilework.policy.published.tridentserve.devices import DeviceAllocator
from tilework.policy.published.tridentserve.dispatch import Dispatch
from tilework.policy.published.tridentserve.layout import PoolLayout
from tilework.policy.published.tridentserve.orchestration import Orchestration
from tilework.policy.published.tridentserve.program import Solver, solve_quickly
from tilework.policy.published.tridentserve.ways import Ways
from tilework.policy.toolkit.degrees import efficient_speeds
from tilework.policy.toolkit.open_devices import OpenDevices
from tilework.policy.toolkit.order import DeadlinePolicy, by_urgency, late_jobs
from tilework.policy.toolkit.tasks import Task, TaskPrices, TaskReader
from tilework.policy.traits import PlacementStatus


@dataclass(slots=True, kw_only=True)
class TridentServe(DeadlinePolicy):
    """Chooses the requests to dispatch, with the type and the number of devices of each, for the most reward.

    At each end of a chunk, and whenever devices come free:

    1. a request that has begun its steps keeps its group until these are done. Then it decodes on a part of the group
       that is as wide as the decode's optimal degree, if the group's type has C; else on C auxiliaries;
    2. each waiting request is worth a reward on each type where it fits, at each degree that is efficient. `solver`
       chooses at most one for each, within the devices of each type that are free, with the most reward;
    3. the widest get their devices first, each on one node. A request that finds no node with enough is not dispatched,
       and the remaining devices are decided on again. A request on a type without E is encoded on an E auxiliary.

    Auxiliary stages go to the devices of a node that are free first, idle or not, in the order in which they come.

    Rewards: a request that can be on time is worth 1000, on as many devices as that takes. One that cannot, or has no
    deadline, is worth 100 on any number, and as much again for each time its own runtime that it is late, at most 1000.
    Speed adds at most 1, communication takes at most 0.3.

    Source: TridentServe §5 and §6 with appendix C, whose formulas and numbers are missing in the text that we have.
    1000, and 100 x (1 + overtime / best runtime) up to 1000, are those of its published code; from which overtime on
    the reward grows is not known, here it is the deadline.

    Departures:

    - Times include the stages that are not on the chosen type, which would make types with fewer stages look faster;
      `paper_times` leaves them out, as the paper does.
    - A request that can be on time earns nothing on too few devices for that: it waits, as it would be late for good.
    - Speed adds to the reward, so that late requests do not run on one device each beside idle ones.
    - It decides at every event that frees a device; the paper at every tick of a clock.
    - A decode for an auxiliary is queued when its steps end, not when they begin: it would block the queue meanwhile.
    - Steps are started in chunks; a group keeps its request when its type changes, and the decode follows the new type.
    - Without a deadline, a request is late from a minute after its arrival on (`DeadlineOrder`).
    - A batch is worth what its members are. Batches run on one device, are formed of what waits, and are made smaller
      where a member would be late by its batch. Devices are divided as if each request ran by itself.
    - Of equal rewards, fewer devices come first, then the more urgent request.
    - A request that waits even beyond the patience of `DeadlineOrder` goes before all others, one at each decision. If
      it needs several devices, they are held for it: no reward does that, and narrower requests would always take them.

    Attributes:
        batches: whether small requests of one class begin together (`bids.batched`), and encodes on auxiliaries.
        is_stage_aware: whether encode and decode get their own number of devices; else they hold as many as the steps.
        orchestration: which devices are for what. It keeps state, so each policy needs its own.
    """

    solver: Solver = solve_quickly
    chunk_ns: int = 200 * NS_PER_MS
    paper_times: bool = False
    is_stage_aware: bool = True
    batches: bool = True
    orchestration: Orchestration = field(default_factory=Orchestration)
    _up: OpenDevices = field(init=False, default_factory=OpenDevices)
    _prices: TaskPrices = field(init=False, default_factory=TaskPrices)
    _ways: Ways | None = field(init=False, default=None)

    @property
    def downtime_ns(self) -> int:
        """Time for which a device whose placement changes is closed."""
        return self.orchestration.downtime_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return [speed.degree for speed in efficient_speeds(step_speeds(request, costs))]

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """Return the next starts.

        A plan that drops jobs to best effort starts nothing, and is asked for again in the new order.
        """
        orchestration = self.orchestration
        up = self._up
        if orchestration.monitor.first_ns is None and next(iter(view.waiting()), None) is None:
            return Plan()  # Thousands of devices may join before the first request comes.
        up.update(view.devices, now_ns)
        if not up.has_open:
            return Plan(wake_ns=up.next_open_ns())
        reader = TaskReader(up.by_id, costs, up.widest, now_ns, self._prices)
        tasks = _tasks(view, up, reader)
        orchestration.update(view, costs, tasks, now_ns)
        devices = DeviceAllocator(up, orchestration.layout, orchestration.closed(now_ns))
        profiles = orchestration.profiles
        how = self.chunk_ns, self.is_stage_aware, self.batches
        dispatch = Dispatch(view, costs, now_ns, devices, reader, profiles, *how)
        others = dispatch.after(dispatch.keep(tasks))
        ways = self._ways_on(orchestration.layout, costs)
        bids = read_bids(batched(others, ways) if self.batches else one_by_one(others), ways)
        if late := late_jobs([(task.job, bid.earliest_ns) for bid in bids for task in bid.tasks]):
            return Plan(dropped_to_best_effort=late)
        if (longest := _past_patience(bids, now_ns)) is not None:
            bids.remove(longest)
            _go_first(dispatch, longest)
        self._dispatch(dispatch, bids)
        return self._plan(dispatch, bool(tasks) or _has_tasks(view))

    def placement_status(self, now_ns: int) -> Sequence[PlacementStatus]:
        return self.orchestration.status(now_ns)

    def forget(self, pipeline: str, costs: CostModel) -> None:
        DeadlinePolicy.forget(self, pipeline, costs)  # Dataclasses with slots know no super().
        self.orchestration.forget(pipeline)
        self._prices.forget(pipeline)
        self._ways = None

    def _ways_on(self, layout: PoolLayout, costs: CostModel) -> Ways:
        """Return the ways on this layout, with what was computed since it changed."""
        if self._ways is None or not self._ways.is_of(layout):
            self._ways = Ways(layout, self.orchestration.profiles, costs, self.paper_times)
        return self._ways

    def _plan(self, dispatch: Dispatch, has_tasks: bool) -> Plan:
        orchestration = self.orchestration
        dispatch.queue_encodes()
        for run in dispatch.runs:
            orchestration.monitor.note(run)
        wakes_ns = (self._up.next_open_ns(), orchestration.wake_ns(has_tasks, dispatch.now_ns))
        return Plan(
            starts=tuple(dispatch.starts),
            placement=orchestration.take_news(),
            wake_ns=min([at_ns for at_ns in wakes_ns if at_ns is not None], default=None),
        )

    def _dispatch(self, dispatch: Dispatch, bids: Sequence[Bid]) -> None:
        """Dispatch until no more fit, or none of the chosen finds its devices."""
        waiting = list(bids)
        devices = dispatch.devices
        while waiting and (room := devices.room()):
            widest = devices.widest()
            groups = [bid.within(widest) for bid in waiting]
            chosen = [
                (bid, options[index])
                for bid, options, index in zip(waiting, groups, self.solver(groups, room), strict=True)
                if index is not None
            ]
            chosen.sort(key=lambda one: -one[1].width)
            placed = {
                bid.tasks[0].job.job_id
                for bid, option in chosen
                if dispatch.place(bid, bid.way(option), f"for a reward of {option.value // MOST_SPEED}")
            }
            if not placed or len(placed) == len(chosen):
                break
            waiting = [bid for bid in waiting if bid.tasks[0].job.job_id not in placed]


def _tasks(view: ClusterView, up: OpenDevices, reader: TaskReader) -> list[Task]:
    """Return the tasks of the most urgent waiting jobs, and of those of which works end soon, in order of urgency.

    The others go on with their works as they are: to look at all of them in each plan would take most of its time.
    """
    ids = {job_id: None for device in up.soon.values() for work in device.works for job_id in work.job_ids}
    ids |= {job.job_id: None for job in islice(view.waiting(), max(32, 4 * len(view.devices)))}
    jobs = sorted((job for job_id in ids if (job := view.job(job_id)) is not None), key=by_urgency)
    return [task for job in jobs if (task := reader.read(job)) is not None]


def _has_tasks(view: ClusterView) -> bool:
    """Return whether something is left to start of a job that runs."""
    jobs = (view.job(job_id) for device in view.devices for work in device.works for job_id in work.job_ids)
    return any(job is not None and job.left.stage is not None for job in jobs)


def _past_patience(bids: Sequence[Bid], now_ns: int) -> Bid | None:
    """Return the request that is past its turn for longest, of those that are late or have no deadline."""
    late = [bid for bid in bids if bid.tasks[0].due_ns <= now_ns]
    return min(late, key=lambda bid: by_urgency(bid.tasks[0].job), default=None)


def _go_first(dispatch: Dispatch, bid: Bid) -> None:
    """Place a request on as few devices as it can use. If there are not enough, hold those of the node that has most.

    No other request gets these, so they do not become fewer.
    """
    ways = sorted(bid.ways, key=lambda way: (way.degree, way.penalty))
    devices = dispatch.devices
    narrow = [way for way in ways if way.degree == ways[0].degree]
    if any(dispatch.place(bid, way, "as it has waited longest") for way in narrow):
        return
    way = narrow[0]
    wide = [node for node in devices.layout.nodes(way.pool) if len(node) >= way.degree]
    devices.take_some(max(wide, key=devices.num_open), way.degree)
