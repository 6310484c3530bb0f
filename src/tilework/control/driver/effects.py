"""Effects: what the driver core asks the driver to do.

`perform` answers an action with messages: (devices, message), sent to each of these devices. Everything else is
answered with effects, which the driver performs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilework.control.driver.result import WorkResult
from tilework.control.driver.state_registry import StateMove
from tilework.core.actions import DropComponents, LoadComponents
from tilework.core.events import DeviceLost, LeftOut, NodeLost
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget, StopWork
from tilework.core.work import Group, Work

Message = Work | StopWork | StateMove | Forget | LoadComponents | DropComponents
"""A work to run, a work to stop, a state to import, a job to forget, components to load or drop.

A driver that has a wire turns works and moves into wire commands. Prompts and groups of processes, which it adds to
them, have no effect on decisions.
"""

Messages = tuple[tuple[Group, Message], ...]


@dataclass(frozen=True, slots=True)
class HandleEvent:
    """Let the controller handle an event."""

    event: LeftOut | DeviceLost | NodeLost


@dataclass(frozen=True, slots=True)
class Resolve:
    """Send a move, which was sent unresolved, again as resolved: works queued for it on its targets can begin."""

    move: StateMove


@dataclass(frozen=True, slots=True)
class BreakOff:
    """End a group's work on all its members, since one of them cannot go on."""

    work: Work


@dataclass(slots=True)
class Discard:
    """Remove blobs that are no longer needed."""

    blobs: tuple[StateBlob, ...]


@dataclass(frozen=True, slots=True)
class ReportStuck:
    """Report that a work has finished no step for longer than `limit_ns`. `BreakOff` or `Kill` follows."""

    work: Work
    limit_ns: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker of a device, which has finished no step for longer than `limit_ns`."""

    device_id: int
    limit_ns: int


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Effects that the controller's answers to earlier ones may change: to be computed when those are performed."""

    effects: Callable[[], Effects]


Effect = HandleEvent | WorkResult | Resolve | BreakOff | Discard | ReportStuck | Kill | FollowUp
"""A `WorkResult` says that a work has ended: let the controller handle its `event`, if there is one."""
Effects = Sequence[Effect]


def in_turn(effects: Effects) -> Iterator[Effect]:
    """Yield effects to perform, those of a follow-up when the ones before it are performed."""
    for effect in effects:
        if isinstance(effect, FollowUp):
            yield from in_turn(effect.effects())
        else:
            yield effect
