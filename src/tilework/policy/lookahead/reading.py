"""What hosts read from the disk ahead of need, while their devices work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.graph.stage import DeviceKind, Stage
from tilework.core.interfaces import JobView
from tilework.core.work import ReadAhead
from tilework.policy.lookahead.eviction import Eviction, Holdings
from tilework.policy.lookahead.preloading import stages_by_rate

_PAYBACK_S = 300.0  # A read for no request must save more time than it takes within this time.
_MOST_TRIED = 8  # Stages, those that are asked for most often.
_State = tuple[object, ...]


@dataclass(slots=True)
class Reading:
    """Chooses what a host reads: first what jobs wait for, and then what is expected to save most.

    A job that waits while all devices work is read for at once, so that its device loads from the host's memory. Jobs
    are tried in order of urgency; what an earlier one needs is not forgotten for a later one. If all have what they
    need, a read pays by the rule of `Preloading`.
    """

    _refused: dict[int, _State] = field(default_factory=dict)  # By node: the latest state in which no read paid.

    def best(self, eviction: Eviction, node: int, waiting: Sequence[JobView]) -> list[ReadAhead]:
        """The next read of a host, if it can read now; `waiting` are the jobs that wait on its node."""
        if not eviction.view.may_read(node):
            return []
        holdings = eviction.holdings(node)
        state: _State = (
            eviction.rates.num_requests,
            tuple(job.job_id for job in waiting),
            tuple(holdings.devices.values()),
            holdings.host,
        )
        if self._refused.get(node) == state:
            return []
        reads = _for_waiting(eviction, node, holdings, waiting) or _by_rate(eviction, node, holdings)
        if not reads:
            self._refused[node] = state
        return reads


def _for_waiting(eviction: Eviction, node: int, holdings: Holdings, waiting: Iterable[JobView]) -> list[ReadAhead]:
    needed: set[Component] = set()
    for job in sorted(waiting, key=lambda job: (job.urgency_ns, job.job_id)):
        for stage in dict.fromkeys(stage for stage, _ in job.left.pieces if stage.kind is DeviceKind.ACCELERATOR):
            if lacking := _lacking(eviction, holdings, stage):
                order = eviction.host_order(node, holdings)
                after = holdings.host.with_read(lacking, order)
                forgotten = set(holdings.host.components).difference(after.components)
                fits = all(one in after.components for one in lacking)
                return [ReadAhead(node=node, stage=stage, forgets=order)] if fits and not forgotten & needed else []
            needed.update(eviction.costs.components(stage))
    return []


def _by_rate(eviction: Eviction, node: int, holdings: Holdings) -> list[ReadAhead]:
    saved, best = max(_options(eviction, node, holdings), key=lambda option: option[0], default=(0.0, None))
    return [best] if best is not None and saved > 1 else []


def _options(eviction: Eviction, node: int, holdings: Holdings) -> Iterator[tuple[float, ReadAhead | None]]:
    """Reads of a host, each with what it saves within the payback time, over the time that it takes."""
    if not any(_lacking(eviction, holdings, stage) for stage in eviction.rates.stages):
        return  # As nearly always.
    order = eviction.host_order(node, holdings)
    here = stages_by_rate(eviction, eviction.view.on_node(node))
    asked = ((stage, _lacking(eviction, holdings, stage)) for stage in here)
    for stage, lacking in islice(((stage, lacking) for stage, lacking in asked if lacking), _MOST_TRIED):
        after = replace(holdings, host=holdings.host.with_read(lacking, order))
        changed = sorted({*holdings.host.components, *lacking})
        saved_ns = sum(eviction.miss_ns(one, holdings) - eviction.miss_ns(one, after) for one in changed)
        read_ns = eviction.costs.load_ns(num_bytes(lacking), LoadSource.DISK)
        yield _PAYBACK_S * saved_ns / max(1, read_ns), ReadAhead(node=node, stage=stage, forgets=order)


def _lacking(eviction: Eviction, holdings: Holdings, stage: Stage) -> list[Component]:
    """What neither the host nor a device of the node has of a stage's components, but for what cannot be read."""
    there = holdings.host.components
    lacking = [one for one in eviction.costs.components(stage) if one not in there and not holdings.copies(one)]
    return [] if any(one in eviction.view.unreadable for one in lacking) else lacking
