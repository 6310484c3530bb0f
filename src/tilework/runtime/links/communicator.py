"""The communicator of a node's workers: how it forms, lasts and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tilework.comm.rendezvous import Meeting
from tilework.core.comm import LINK_TIMEOUT_S
from tilework.core.time import s_from_ns
from tilework.core.wire.commands import BreakGroup, CloseGroup, EnterNode, GroupRef
from tilework.core.wire.reports import NodeFormed
from tilework.core.work import Group
from tilework.runtime.links.groups import GroupTable

_log = logging.getLogger(__name__)
_ANSWER_S = 5.0
"""Time, beyond their wait for each other, in which workers must report whether the communicator has formed."""
_COME_S = 2.0
"""Time after which the workers that have come go on without the others, which may be stuck: all come at once."""
_AGAIN_S, _MOST_AGAIN_S = 5.0, 300.0

Sent = EnterNode | BreakGroup | CloseGroup


class NodeCommunicator:
    """Communicator of which the groups of a node are parts, where groups do not connect by themselves.

    It forms while its workers run works, and waits for none. It lasts until one of its workers is lost, or one of its
    groups is broken off, which aborts it on the members of that group. Works in its other groups go on: it is closed
    after all that is queued. While a worker joins, the present communicator serves until the next one has formed. So a
    loss ends it once, and the next one forms at once.

    If it did not form, or not with all workers, it is tried again after a while, and after twice as long each time.
    """

    def __init__(
        self,
        groups: GroupTable,
        send: Callable[[int, Sent], None],
        meeting: Callable[[int], Meeting],
        on_changed: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s + _ANSWER_S
        self._groups = groups
        self._send = send
        self._meeting = meeting
        self._on_changed = on_changed
        self._call_later = call_later
        self._up: Group = ()
        self._standing: GroupRef | None = None
        self._forming: GroupRef | None = None
        self._met: set[int] = set()  # The workers that have entered the communicator that forms.
        self._num_failed = 0
        self._ended = False  # One had formed and ended, and no other has formed since.
        self._timer: asyncio.TimerHandle | None = None
        self._decided = asyncio.Event()
        self.failure = ""
        """Reason why it has not formed, if it could not."""

    @property
    def linked(self) -> Group:
        """Workers that can run in groups with each other now."""
        return () if self._standing is None else self._standing.devices

    @property
    def is_forming(self) -> bool:
        return self._forming is not None

    async def decided(self) -> None:
        """Return when it has formed, or it is known why it has not."""
        await self._decided.wait()

    def node_id(self, devices: Group) -> int:
        """Return the id of the communicator for a group of these workers: the one that forms, if no other fits."""
        if self._standing is not None and set(devices) <= set(self._standing.devices):
            return self._standing.group_id
        return 0 if self._forming is None else self._forming.group_id

    def form(self, up: Group) -> None:
        """Let it form from these workers, which are all that are up."""
        self._up = up
        self._begin(up)

    def _begin(self, members: Group) -> None:
        self._give_up()
        if len(members) > 1 and members != self.linked:
            self._forming = self._groups.new_ref(members)
            self._met = set()
            self._decided.clear()
            for device_id in members:
                self._send(device_id, EnterNode(self._forming))
            self._set_timer(_COME_S, self._go_without)
        else:
            self._decided.set()
        self._on_changed()

    def _go_without(self) -> None:
        """Go on without those that have not come, if several have."""
        assert self._forming is not None
        members = self._forming.devices
        come = tuple(filter(self._meeting(self._forming.group_id).has_come, members))
        if come == members or len(come) < 2:
            self._set_timer(self._timeout_s - _COME_S, self._time_out)
            return
        silent = tuple(one for one in members if one not in come)
        _log.warning("workers %s do not answer; others form groups without them", _numbers(silent))
        self._begin(come)
        if self._forming is None:  # The communicator of these exists already, without one that joins.
            self._try_again()

    def _try_again(self) -> None:
        """Form it later, with all workers that are up then."""
        again_s = min(_AGAIN_S * 2**self._num_failed, _MOST_AGAIN_S)
        self._num_failed += 1
        self._set_timer(again_s, lambda: self.form(self._up))

    def lose(self, device_id: int, up: Group) -> None:
        """Handle the loss of a worker; these remain."""
        if device_id in self.linked:
            self._end()
        self.form(up)

    def break_off(self, ref: GroupRef) -> None:
        """Form it again if a group of it was broken off."""
        if self._standing is not None and ref.node_id == self._standing.group_id:
            self._end()
            self.form(self._up)
        elif self._forming is not None and ref.node_id == self._forming.group_id:
            self.form(self._up)

    def answered(self, device_id: int, report: NodeFormed) -> None:
        """Record that a worker has entered it, or could not: then the others no longer wait for that worker."""
        if self._forming is None or report.group_id != self._forming.group_id:
            return
        if report.error:
            self._fail(f"worker {device_id}: {report.error}")
            return
        self._met.add(device_id)
        if self._met.issuperset(self._forming.devices):
            self._stand(self._forming, report.run_ns)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _stand(self, formed: GroupRef, run_ns: int) -> None:
        self.stop()
        level = logging.WARNING if self._ended else logging.INFO
        self._retire()
        self._standing = formed
        self._forming = None
        self._ended = False
        self._meeting(formed.group_id).end()  # All have connected.
        self.failure = ""
        _log.log(level, "workers %s can form groups, after %.3g s", _numbers(formed.devices), s_from_ns(run_ns))
        if formed.devices == self._up:
            self._num_failed = 0
        else:
            self._try_again()
        self._decided.set()
        self._on_changed()

    def _time_out(self) -> None:
        assert self._forming is not None
        silent = tuple(one for one in self._forming.devices if one not in self._met)
        self._fail(f"workers {_numbers(silent)} did not answer within {self._timeout_s:g} s")

    def _fail(self, why: str) -> None:
        assert self._forming is not None
        without = [one for one in self._forming.devices if one not in self.linked]
        self.failure = why
        self._give_up()
        _log.error(
            "workers %s cannot form groups, and serve each request on one device: %s; this is tried again",
            *(_numbers(tuple(without)), self.failure),
        )
        self._try_again()
        self._decided.set()
        self._on_changed()

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._call_later(delay_s, call)

    def _give_up(self) -> None:
        """End the communicator that forms, if there is one."""
        self.stop()
        forming, self._forming = self._forming, None
        if forming is None:
            return
        for device_id in forming.devices:
            self._send(device_id, BreakGroup(forming.group_id))
            self._send(device_id, CloseGroup(forming.group_id))
        self._meeting(forming.group_id).end()

    def _end(self) -> None:
        _log.warning("workers %s run alone until they are connected again", _numbers(self.linked))
        self._ended = True
        self._retire()

    def _retire(self) -> None:
        """Close the present communicator after all that is queued for its groups."""
        retired, self._standing = self._standing, None
        if retired is None:
            return
        for ref in (*self._groups.close_parts(retired.group_id), retired):
            for device_id in ref.devices:
                self._send(device_id, CloseGroup(ref.group_id))


def _numbers(devices: Group) -> str:
    return ", ".join(map(str, devices))
