"""TridentServe: each decision is the dispatch that earns the most reward; requests keep their devices to the end.

What the paper has and this policy does not, and why:

- Placement by stages (§6.1), adjust-on-dispatch (§5.3) and the communication penalty: here all stages are on every
  device (the paper's type EDC), where inter-stage communication costs nothing. So there is one primary type.
- Plans for encode and decode (the second of its two steps): with EDC the encode "takes almost no time" and is merged
  with the steps, and the decode runs on a subset of their devices. Here both run on the first of them.
- Batches of small requests (appendix E.1) and model parallelism (E.2).
- Its clock: it decides at every tick, this at every event that frees a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilework.core.interfaces import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.published.tridentserve.bids import Bid, read_bids
from tilework.policy.published.tridentserve.ilp import require_solver, solve_by_ilp
from tilework.policy.registry import policy
from tilework.policy.toolkit.best_effort import late_jobs
from tilework.policy.toolkit.buddy_allocator import nodes
from tilework.policy.toolkit.deadline_policy import DeadlinePolicy
from tilework.policy.toolkit.degrees import efficient_speeds
from tilework.policy.toolkit.demand import Speed, step_speeds
from tilework.policy.toolkit.elastic_groups import DevicePool, Placement
from tilework.policy.toolkit.knapsack import Option, solve_knapsack_quickly
from tilework.policy.toolkit.order import by_urgency
from tilework.policy.toolkit.tasks import Task
from tilework.policy.toolkit.wording import devices_text, explain

Solver = Callable[[Sequence[Sequence[Option]], int], Sequence[int | None]]


@dataclass(slots=True, kw_only=True)
class TridentServe(DeadlinePolicy):
    """Choose the requests to dispatch, and the number of devices for each, so that the sum of rewards is greatest.

    At each end of a chunk, and whenever devices come free:

    1. a request that has begun keeps its group until it is finished;
    2. each waiting request is worth a reward on each efficient number of devices. `solver` chooses at most one number
       for each, on no more devices than are free, with the most reward;
    3. the widest get their devices first, each on one node. A request that finds no node with enough is not dispatched,
       and the remaining devices are decided on again.

    Rewards: a request that can be on time is worth 1000, on as many devices as that takes. One that cannot, or has no
    deadline, is worth 100 on any number, and as much again for each time its own runtime that it is late, at most 1000.
    Speed adds at most 1.

    Source: TridentServe §6.2, the program for the diffuse stage, and appendix C.2, whose formulas and numbers are
    missing in the text that we have. 1000, and 100 x (1 + overtime / best runtime) up to 1000, are those of its
    published code; from which overtime on the reward grows is not known, here it is the deadline.

    Departures:

    - A request that can be on time earns nothing on too few devices for that: it waits, as it would be late for good.
    - Speed adds to the reward, where the paper subtracts its penalty for communication, which is as small. Otherwise
      late requests would run on one device each beside idle ones.
    - Without a deadline, a request is late from a minute after its arrival on (`DeadlineOrder`).
    - Of equal rewards, fewer devices come first, then the more urgent request.
    - A request that waits even beyond the patience of `DeadlineOrder` goes before all others, one at each decision. If
      it needs several devices, they are held for it: no reward does that, and narrower requests would always take them.
    """

    solver: Solver = solve_knapsack_quickly
    chunk_ns: int = 200 * NS_PER_MS

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return [speed.degree for speed in efficient_speeds(step_speeds(request, costs))]

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        """A plan that drops jobs to best effort starts nothing, and is asked for again in the new order."""
        pool = DevicePool(view, costs, now_ns, self.chunk_ns)
        if not pool.allocator.num_free():
            return pool.plan(())
        ready = [task for task in pool.tasks() if pool.is_ready(task)]
        placed, others = _keep(pool, ready)
        bids = read_bids(others)
        if late := late_jobs([(bid.task.job, bid.earliest_ns) for bid in bids]):
            return Plan(dropped_to_best_effort=late)
        if (longest := _past_patience(bids, now_ns)) is not None:
            bids.remove(longest)
            placed += _go_first(pool, longest)
        return pool.plan([*placed, *self._dispatch(pool, bids)])

    def _dispatch(self, pool: DevicePool, bids: Sequence[Bid]) -> list[Placement]:
        """Dispatch until no more fit. Each time at least the widest of the chosen finds its devices, so this ends."""
        placed: list[Placement] = []
        waiting = list(bids)
        while waiting and (room := pool.allocator.num_free()):
            widest = pool.allocator.widest()
            chosen = self.solver([bid.within(widest) for bid in waiting], room)
            winners = [
                (bid, bid.speeds[index]) for bid, index in zip(waiting, chosen, strict=True) if index is not None
            ]
            winners.sort(key=lambda winner: -winner[1].degree)
            found = [one for bid, speed in winners if (one := _place(pool, bid, speed)) is not None]
            placed += found
            if len(found) == len(winners):
                break
            served = {one.task.job.job_id for one in placed}
            waiting = [bid for bid in waiting if bid.task.job.job_id not in served]
        return placed


def _keep(pool: DevicePool, ready: Sequence[Task]) -> tuple[list[Placement], list[Task]]:
    """Place the tasks that have begun on their groups; returns these, and the tasks that are to be dispatched.

    A task that has begun and lost its group is to be dispatched: a device of it is down, or was reserved for another.
    """
    placed, others = [], []
    for task in ready:
        group = task.job.last_devices if task.speeds else task.job.last_devices[:1]
        widths = [speed.degree for speed in task.group_speeds]
        has_begun = task.num_steps < task.job.request.steps and len(group) in widths
        if has_begun and pool.allocator.num_free_of(group) == len(group):
            pool.allocator.take(len(group), group)
            placed.append(Placement(task, group, "keeps its devices until it is finished"))
        elif has_begun and task.job.works:  # Its works are not over yet, and its devices not all open.
            pool.allocator.take_some(group, len(group))
        else:
            others.append(task)
    return placed, others


def _past_patience(bids: Sequence[Bid], now_ns: int) -> Bid | None:
    """Of the requests that are past their turn, though late or without a deadline, the one that is so for longest."""
    late = [bid for bid in bids if bid.task.due_ns <= now_ns]
    return min(late, key=lambda bid: by_urgency(bid.task.job), default=None)


def _go_first(pool: DevicePool, bid: Bid) -> list[Placement]:
    """Place a request on as few devices as it can use. If there are not enough, hold those of the node that has most.

    No other request gets these, so they do not become fewer.
    """
    speed = bid.speeds[0]
    placed = _place(pool, bid, speed)
    if placed is not None:
        return [placed]
    wide = [node for node in nodes(pool.view.devices) if len(node) >= speed.degree]
    node = max(wide, key=pool.allocator.num_free_of)
    pool.allocator.take_some(node, speed.degree)
    return []


def _place(pool: DevicePool, bid: Bid, speed: Speed) -> Placement | None:
    task = bid.task
    group = pool.allocator.take(speed.degree, task.job.last_devices)
    if group is None:
        return None
    verb = f"is dispatched on {devices_text(speed.degree)}, for a reward of {bid.reward(speed)}"
    return Placement(task, group, explain(task.job, verb, pool.now_ns))


def _by_ilp() -> TridentServe:
    """Raises UnknownPolicy without the solver."""
    require_solver()
    return TridentServe(solver=solve_by_ilp)


policy("tridentserve")(TridentServe)
policy("tridentserve-ilp", is_extra=True)(_by_ilp)
