"""How many requests of one class run a stage together on one device, and how long that takes.

Source: TridentServe appendix E.1: the optimal batch is "the largest batch size whose latency increase is less than
20%". Its published code tests each doubling, and so do we: against one request alone, FLUX at 128 px, of which it has
batches of 4, would have 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tilework.core.graph.stage import Stage
from tilework.core.interfaces import CostModel
from tilework.core.request import Request

_MOST_GROWTH = 1.2

T = TypeVar("T")


def optimal_batch(stage: Stage, request: Request, costs: CostModel, room_bytes: int) -> int:
    """How many such requests a stage runs together: the last doubling that takes less than 1.2 times as long.

    Their activations fit into `room_bytes` of a device. 1 where requests may not share the stage. Raises UnknownCost.
    """
    size = 1
    while stage.spec.batchable:
        twice = (request,) * (2 * size)
        if not costs.fits_together(stage, [one.shape for one in twice]):
            break
        if costs.activation_bytes(stage, twice, 1) > room_bytes:
            break
        if costs.work_ns(stage, twice, 1) >= _MOST_GROWTH * costs.work_ns(stage, twice[:size], 1):
            break
        size *= 2
    return size


def batch_ns(stage: Stage, request: Request, num: int, costs: CostModel, room_bytes: int) -> int:
    """How long a stage takes on one device for `num` such requests, in batches of the optimal size.

    A stage with steps: for one step. Raises UnknownCost.
    """
    most = optimal_batch(stage, request, costs, room_bytes)
    return sum(costs.work_ns(stage, some, 1) for some in parts_of((request,) * num, most))


def parts_of(members: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    """The members in their order, `most` at a time."""
    for first in range(0, len(members), most):
        yield tuple(members[first : first + most])
