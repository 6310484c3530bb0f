"""Watches a simulation, and ends it as soon as what is asked is known."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.core.actions import Action, Finish, Reject
from tilework.core.events import Event
from tilework.core.request import Request, Status
from tilework.sim.plan.interval import Block

BLOCKS = 10
"""Into how many blocks the requests of a run are cut, at most."""
SHOWN = 0.25
"""A run goes on while the share on time may be as near to the target as that, so that curves show how far below."""


class Decided(Exception):
    """No request is left whose deadline can still be kept or missed, or the target is far out of reach."""


class Judge:
    """Counts which deadlines are kept, for `Simulation.run(observe=...)`. Raises Decided when the rest does not matter.

    A deadline is missed once it has passed, or its request has ended without a result, also if one is made later.
    """

    def __init__(self, requests: Sequence[Request], target: float) -> None:
        """`requests` are those whose deadlines count, in order of arrival; others may be simulated with them."""
        due = [one for one in requests if one.deadline_ns is not None]
        self._place = {one.uid: index for index, one in enumerate(due)}
        self._by_deadline = sorted((one.deadline_ns, one.uid) for one in due if one.deadline_ns is not None)
        self._num_passed = 0
        self._open = set(self._place)
        self._missed: list[str] = []
        self._most_missed = round(len(due) * (1 - target + SHOWN))

    def __call__(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        while self._num_passed < len(self._by_deadline) and self._by_deadline[self._num_passed][0] < now_ns:
            self._end(self._by_deadline[self._num_passed][1], is_kept=False)
            self._num_passed += 1
        for action in actions:
            if type(action) is Finish:
                self._end(action.uid, is_kept=action.status is Status.DONE)
            elif type(action) is Reject:
                self._end(action.uid, is_kept=False)
        if self.is_whole or len(self._missed) > self._most_missed:
            raise Decided

    def _end(self, uid: str, *, is_kept: bool) -> None:
        if uid in self._open:
            self._open.remove(uid)
            if not is_kept:
                self._missed.append(uid)

    @property
    def is_whole(self) -> bool:
        """Whether all deadlines were judged; else those that were not count as kept."""
        return not self._open

    def end(self) -> None:
        """No event is left: what is not done by now is missed."""
        self._missed += self._open
        self._open.clear()

    def blocks(self) -> tuple[Block, ...]:
        """Requests with a deadline in the order of their arrival, in blocks of equal size to within one."""
        num = min(BLOCKS, len(self._place))
        due, missed = [0] * num, [0] * num
        for place in self._place.values():
            due[place * num // len(self._place)] += 1
        for uid in self._missed:
            missed[self._place[uid] * num // len(self._place)] += 1
        return tuple(Block(all_, all_ - late) for all_, late in zip(due, missed, strict=True))
