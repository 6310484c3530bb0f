"""TridentServe: at each decision, the dispatch that earns the most reward, and nobody gives a device up before the end.

What is left out of the paper, and why:

- Placement by stages (§6.1), adjust-on-dispatch (§5.3) and the communication penalty: here all stages are on every
  device (the paper's type EDC), where inter-stage communication costs nothing. So there is one primary type.
- Plans for encode and decode (the second of its two steps): with EDC the encode "takes almost no time" and is merged
  with the steps, and the decode runs on a subset of their devices. Here both run on the first of them.
- Batches of small requests (appendix E.1) and model parallelism (E.2).
- Its clock: it decides at every tick, this at every event that frees a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.published.tridentserve.ilp import pack_by_ilp, require_solver
from tilework.policy.registry import policy
from tilework.policy.toolkit.buddy_allocator import nodes
from tilework.policy.toolkit.degrees import all_speeds, efficient_speeds
from tilework.policy.toolkit.demand import Speed, worthwhile
from tilework.policy.toolkit.elastic import Elastic
from tilework.policy.toolkit.elastic_groups import ONE_DEVICE, Placed, Pool
from tilework.policy.toolkit.knapsack import Option, pack_quickly
from tilework.policy.toolkit.order import by_urgency, doom, explain
from tilework.policy.toolkit.tasks import Task

Pack = Callable[[Sequence[Sequence[Option]], int], Sequence[int | None]]

ON_TIME, LATE, MOST_SPEED = 1_000_000, 100_000, 1_000


@dataclass(slots=True, eq=False)
class Bid:
    """A request that waits, and what it is worth to dispatch it now: `choices` and `options` go together, ascending.

    `earliest_ns` is when it ends at the quickest of its efficient degrees.
    """

    task: Task
    choices: tuple[Speed, ...]
    options: tuple[Option, ...]
    earliest_ns: int

    def within(self, widest: int) -> tuple[Option, ...]:
        """The options, without those that need more devices than any node has free."""
        if self.options[-1].width <= widest:
            return self.options
        return tuple([option for option in self.options if option.width <= widest])


def read_bids(tasks: Iterable[Task]) -> list[Bid]:
    """The bids of tasks that have not begun. Rewards are in thousandths; see `TridentServe`.

    What requests of a kind have in common is computed once: there are many, of few kinds.
    """
    kinds: dict[tuple[int, int, int, int], _Kind] = {}
    bids = []
    for task in tasks:
        key = task.encode_ns, task.num_steps, task.decode_ns, id(task.speeds)  # Those of a shape are one object.
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _Kind.of(task)
        bids.append(kind.bid(task))
    return bids


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is left of tasks, at each efficient degree: its duration, and what its speed adds to the reward.

    The wider of the degrees are the quicker: how many are in time says which.
    """

    speeds: tuple[Speed, ...]
    runs_ns: tuple[int, ...]
    added: tuple[int, ...]
    best_ns: int
    _known: dict[tuple[int, int], tuple[Option, ...]] = field(default_factory=dict)

    @staticmethod
    def of(task: Task) -> _Kind:
        speeds = tuple(worthwhile(efficient_speeds(task.speeds or (ONE_DEVICE,))))
        runs_ns = tuple([task.encode_ns + task.num_steps * speed.step_ns + task.decode_ns for speed in speeds])
        best_ns = min(runs_ns)
        return _Kind(speeds, runs_ns, tuple([MOST_SPEED * best_ns // max(1, run_ns) for run_ns in runs_ns]), best_ns)

    def bid(self, task: Task) -> Bid:
        deadline_ns, best_ns = task.job.request.deadline_ns, self.best_ns
        slack_ns = (task.due_ns if deadline_ns is None else deadline_ns) - task.ready_ns
        reward, num = ON_TIME, len(self.speeds)
        if deadline_ns is None or slack_ns < best_ns:
            late_ns = max(0, best_ns - slack_ns)
            reward = min(ON_TIME, LATE + LATE * late_ns // max(1, best_ns))
        elif slack_ns < self.runs_ns[0]:
            num = sum([run_ns <= slack_ns for run_ns in self.runs_ns])
        options = self._known.get((reward, num))
        if options is None:
            pairs = zip(self.speeds[-num:], self.added[-num:], strict=True)
            options = tuple([Option(speed.degree, reward + added) for speed, added in pairs])
            self._known[reward, num] = options
        return Bid(task, self.speeds[-num:], options, task.ready_ns + best_ns)


@dataclass(slots=True, kw_only=True)
class TridentServe(Elastic):
    """Dispatch those requests, and on so many devices each, that the sum of their rewards is greatest.

    At each end of a chunk, and whenever devices come free:

    1. who has begun keeps its group until it is finished;
    2. each that waits is worth a reward on each efficient number of devices. At most one number for each request, and
       no more devices than are free: `pack` finds the most reward;
    3. the widest get their devices first, each on one node. Who finds no node with enough stays undispatched, and it is
       decided again with what is left.

    Rewards: who can be on time is worth 1000, on so many devices that it is. Who cannot, or has no deadline, is worth
    100 on any number, and as much again for each time its own runtime that it is late, 1000 at most. Speed adds 1 at
    most.

    Source: TridentServe §6.2, the program for the diffuse stage, and appendix C.2, whose formulas and numbers our text
    lost. 1000, and 100 x (1 + overtime / best runtime) up to 1000, are those of its published code; from which overtime
    on the reward grows is not known, here it is the deadline. Ours besides:

    - who can be on time earns nothing on so few devices that it is late: it waits, as it would be late for good;
    - the addition for speed, where the paper has its penalty for communication, and as small. Else the late would run
      on one device each beside idle ones;
    - without a deadline, a request is late from a minute after its arrival on (`DeadlineOrder`);
    - of equal rewards those on fewer devices count more, then those of the more urgent;
    - who waits even beyond the patience of `DeadlineOrder` goes before all others, one at each decision. If it needs
      several devices, they are held for it: no reward does that, and narrower requests would take them for ever.
    """

    pack: Pack = pack_quickly
    chunk_ns: int = 200 * NS_PER_MS

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return [speed.degree for speed in efficient_speeds(all_speeds(request, costs))]

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that sets jobs aside starts nothing, and is asked for again in the new order."""
        pool = Pool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        ready = [task for task in pool.tasks() if pool.is_ready(task)]
        placed, others = _keep(pool, ready)
        bids = read_bids(others)
        doomed = tuple(
            (bid.task.job.job_id, why) for bid in bids if (why := doom(bid.task.job, bid.earliest_ns)) is not None
        )
        if doomed:
            return Plan(dropped_to_best_effort=doomed)
        if (longest := _past_patience(bids, now_ns)) is not None:
            bids.remove(longest)
            placed += _go_first(pool, longest)
        return pool.plan([*placed, *self._dispatch(pool, bids)])

    def _dispatch(self, pool: Pool, bids: Sequence[Bid]) -> list[Placed]:
        """Each time at least the widest of the chosen finds its devices, so this ends."""
        placed: list[Placed] = []
        waiting = list(bids)
        while waiting and (room := pool.allocator.num_free()):
            widest = pool.allocator.widest()
            chosen = self.pack([bid.within(widest) for bid in waiting], room)
            winners = [
                (bid, bid.choices[index]) for bid, index in zip(waiting, chosen, strict=True) if index is not None
            ]
            winners.sort(key=lambda winner: -winner[1].degree)
            found = [one for bid, speed in winners if (one := _place(pool, bid, speed)) is not None]
            placed += found
            if len(found) == len(winners):
                break
            served = {one.task.job.job_id for one in placed}
            waiting = [bid for bid in waiting if bid.task.job.job_id not in served]
        return placed


def _keep(pool: Pool, ready: Sequence[Task]) -> tuple[list[Placed], list[Task]]:
    """Place those that have begun on their groups; returns them, and those that are to be dispatched.

    Among these is who has begun and lost its group: a device of it is down, or does what had been promised to others.
    """
    placed, others = [], []
    for task in ready:
        group = task.job.last_devices if task.speeds else task.job.last_devices[:1]
        widths = [speed.degree for speed in task.speeds or (ONE_DEVICE,)]
        has_begun = task.num_steps < task.job.request.steps and len(group) in widths
        if has_begun and pool.allocator.num_free_of(group) == len(group):
            pool.allocator.take(len(group), group)
            placed.append(Placed(task, group, "keeps its devices until it is finished"))
        elif has_begun and task.job.works:  # They are not over yet, and its devices not all open.
            pool.allocator.take_some(group, len(group))
        else:
            others.append(task)
    return placed, others


def _past_patience(bids: Sequence[Bid], now_ns: int) -> Bid | None:
    """Of those whose turn it is, though they are late or have no deadline, the one whose it has been for longest."""
    late = [bid for bid in bids if bid.task.due_ns <= now_ns]
    return min(late, key=lambda bid: by_urgency(bid.task.job), default=None)


def _go_first(pool: Pool, bid: Bid) -> list[Placed]:
    """Place it on as few devices as it can use. If there are not enough, hold those of the node that has most.

    Nobody else gets these, so they do not become fewer.
    """
    speed = bid.choices[0]
    placed = _place(pool, bid, speed)
    if placed is not None:
        return [placed]
    wide = [node for node in nodes(pool.view.devices) if len(node) >= speed.degree]
    node = max(wide, key=pool.allocator.num_free_of)
    pool.allocator.take_some(node, speed.degree)
    return []


def _place(pool: Pool, bid: Bid, speed: Speed) -> Placed | None:
    task = bid.task
    group = pool.allocator.take(speed.degree, task.job.last_devices)
    if group is None:
        return None
    devices = "1 device" if speed.degree == 1 else f"{speed.degree} devices"
    reward = bid.options[bid.choices.index(speed)].value // MOST_SPEED
    return Placed(task, group, explain(task.job, f"is dispatched on {devices}, for a reward of {reward}", pool.now_ns))


def _by_ilp() -> TridentServe:
    """Raises UnknownPolicy without the solver."""
    require_solver()
    return TridentServe(pack=pack_by_ilp)


policy("tridentserve")(TridentServe)
policy("tridentserve-ilp", is_extra=True)(_by_ilp)
