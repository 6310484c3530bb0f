"""What the driver core wants done.

`perform` answers an action with messages for devices: (devices, message), which each of these devices gets. Everything
else is answered with effects, which the driver performs in order, each before it asks for the next: what the
controller answers to one may change what the next one is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilework.control.driver.result import WorkResult
from tilework.control.driver.state_registry import StateMove
from tilework.core.events import DeviceLost, LeftOut
from tilework.core.wire import Forget, StateBlob, StopWork
from tilework.core.work import Group, Work

Message = Work | StopWork | StateMove | Forget
"""A work to run, a work to stop, a state to take over, a job to forget.

Works and moves become wire commands in the driver that has a wire: what these carry besides (prompts, groups of
processes) decides nothing here.
"""

Messages = tuple[tuple[Group, Message], ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the controller."""

    event: LeftOut | DeviceLost


@dataclass(frozen=True, slots=True)
class Resolve:
    """A move that was sent unresolved is resolved now: its targets can go on."""

    move: StateMove


@dataclass(frozen=True, slots=True)
class BreakOff:
    """End a group's work on all its members, since one of them cannot go on."""

    work: Work


@dataclass(slots=True)
class Discard:
    """Remove blobs that are not needed any more."""

    blobs: tuple[StateBlob, ...]


@dataclass(frozen=True, slots=True)
class ReportStuck:
    """A work has done no step for longer than `limit_ns`. What is done about it follows."""

    work: Work
    limit_ns: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker of a device, which has done no step for longer than `limit_ns`."""

    device_id: int
    limit_ns: int


Effect = Tell | WorkResult | Resolve | BreakOff | Discard | ReportStuck | Kill
"""A `WorkResult` says that a work has ended: tell the controller its `event`, if there is one."""
