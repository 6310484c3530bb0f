"""A node as the engine sees it: its connection, its devices, its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tilework.comm.net.channel import Channel
from tilework.control.driver.report_check import ReportCheck
from tilework.control.nodes.clock import ClockOffset
from tilework.control.nodes.numbers import DeviceNumbers
from tilework.core.time import ns_from_s
from tilework.core.wire.commands import Command, Execute, GroupRef
from tilework.core.wire.content import ModelContent
from tilework.core.wire.node_blobs import FetchBlobs, Origin
from tilework.core.wire.reports import DeviceReading, Ended, Report
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.nodes.messages import Leave, Links, NodeMemory, Ping, Pong, Started
from tilework.runtime.nodes.session_chores import end_if_failed
from tilework.runtime.outbox import Outbox, Outgoing

_FIRST_PINGS = 8
_FIRST_PING_S = 0.02
_UNHEARD_S = 1.0
LAST_WORD_S = 1.0
Answer = TypeVar("Answer")


class RemoteNode:
    """The node at place `node`, over a connection that has been greeted.

    It is pinged every `ping_s`. After a silence of a second it `may_be_lost`, and its connection is closed after one of
    `silence_s`; a pause of this process does not count as silence. Times of its reports are converted to the clock of
    the engine, with an error of at most `clock.error_ns`. Its messages are compared with what it was told (`check`,
    `NodeCheck`).
    """

    def __init__(
        self,
        node: int,
        channel: Channel,
        ping_s: float,
        silence_s: float,
        models_version: int,
        num_models: int,
        on_silence: Callable[[], None],
    ) -> None:
        """Begin to ping. `on_silence` is called when `may_be_lost` changes."""
        self.node = node
        self.channel = channel
        self.models_version = models_version
        self.num_models = num_models  # Models that it is told to start with.
        self.clock = ClockOffset()
        self.started: Started | None = None
        self.up: set[int] = set()  # By their numbers on the node, as everywhere here.
        self.links = Links((), False)
        self.left: frozenset[int] = frozenset()
        self.fetches: dict[int, FetchBlobs] = {}  # Fetches that it was told to do, by id.
        self.reads: set[int] = set()  # Reads ahead of need that it has not answered.
        self.resident_bytes: Mapping[str, int] = {}  # Of its workers, as `Executor.resident_bytes`.
        self.readings: Mapping[str, DeviceReading] = {}
        self.contents: Mapping[str, ModelContent] = {}  # Of its models, by name, as far as it has sent them.
        self.leave: Leave | None = None  # The message when it goes, if it is about to leave.
        self._ping_s = ping_s
        self._silence_s = silence_s
        self._outboxes: dict[int, Outbox] = {}
        self._checks: dict[int, ReportCheck] = {}
        self._checks_before: dict[int, ReportCheck] = {}  # Of the former workers, for their late reports.
        self._pings: set[int] = set()  # Times of the pings that are not answered.
        self._awaited: list[tuple[object, type, asyncio.Future[Any]]] = []
        self.is_silent = self.may_be_lost = False
        self._silent_s = 0.0
        self._on_silence = on_silence
        self._pinging = asyncio.get_running_loop().create_task(self._ping())
        self._pinging.add_done_callback(partial(end_if_failed, channel))

    @property
    def has_started(self) -> bool:
        return self.started is not None

    @property
    def stays(self) -> bool:
        return self.started is not None and self.leave is None

    @property
    def origin(self) -> Origin:
        """Address at which its blobs can be fetched."""
        assert self.started is not None
        return Origin(self.channel.host, self.started.port, self.channel.epoch)

    def begin(
        self,
        started: Started,
        num_workers: int,
        prepared: Callable[[Command], Command],
        is_taken: Callable[[str], bool],
    ) -> None:
        """Begin to send commands, since all its workers are up.

        `prepared` is called with each command just before it is sent to a device. No worker may write a blob whose name
        `is_taken`.
        """
        self._is_taken = is_taken
        self.started = started
        self.up = set(range(num_workers + started.num_slots))
        self.left = frozenset(self.up)
        for device_id in self.up:
            outbox = self._outboxes[device_id] = Outbox(partial(self._write, prepared, device_id))
            self._checks[device_id] = ReportCheck(device_id, is_taken)
            outbox.open()

    def lose(self, device_id: int) -> None:
        """Handle the loss of a device's worker; commands that wait for it are not sent to the next one."""
        self.up.discard(device_id)
        self._outboxes[device_id].clear()
        self._checks_before[device_id] = self._checks[device_id]
        self._checks[device_id] = ReportCheck(device_id, self._is_taken)

    def send(self, device_id: int, outgoing: Outgoing) -> None:
        """Send a command to a device, as `Outbox` does."""
        self._outboxes[device_id].send(outgoing)

    def _write(self, prepared: Callable[[Command], Command], device_id: int, command: Command) -> None:
        ready = prepared(command)
        self._checks[device_id].sent(ready, time.monotonic_ns())
        self.channel.send(ready, device_id)

    def tell(self, message: object) -> None:
        """Send a message that concerns no device."""
        self.channel.send(message)

    def ask(self, message: object, kind: type[Answer]) -> asyncio.Future[Answer]:
        """Send a message; returns the answer of this kind, which raises WorkerStartFailed if the node is lost."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited.append((message, kind, answer))
        self.tell(message)
        return answer

    def asked(self, kind: type) -> object | None:
        """Return the question that the next message of this kind answers; None if none was asked."""
        return next((message for message, its_kind, _ in self._awaited if its_kind is kind), None)

    def has_pinged(self, sent_ns: int) -> bool:
        """Return whether an unanswered ping was sent at this time."""
        return sent_ns in self._pings

    def check(self, device_id: int, report: Report, now_ns: int) -> None:
        """Check a report of a device, with its times on the clock of the engine. Raises BadReport."""
        before = self._checks_before.get(device_id)
        check = self._checks[device_id]
        if before is not None and before.knows(report) and not check.knows(report):
            check = before
        error_ns = self.clock.error_ns
        # After a suspension shorter than a silence, a machine's clock is off by that time until it is pinged often
        # enough.
        check.check(report, now_ns, None if error_ns is None else error_ns + ns_from_s(self._silence_s))

    def heard(self, message: Any, received_ns: int) -> None:
        """Note that it has sent a message; the message's times are converted."""
        self._note_silence(0.0)
        if isinstance(message, Ended):
            message.start_ns = self.clock.engine_ns(message.start_ns)
            message.end_ns = self.clock.engine_ns(message.end_ns)

    def take(self, message: Any, received_ns: int) -> bool:
        """Take a message that was asked for; returns whether it is one."""
        if isinstance(message, Pong):
            self._pings.discard(message.sent_ns)
            self.clock.add(message.sent_ns, message.now_ns, received_ns)
            return True
        if isinstance(message, NodeMemory):
            self.resident_bytes = message.resident_bytes
            self.readings = message.readings
            return True
        for index, (_, kind, answer) in enumerate(self._awaited):
            if isinstance(message, kind):
                del self._awaited[index]
                if not answer.done():
                    answer.set_result(message)
                return True
        return False

    def close(self, reason: str, last_word: object | None = None) -> None:
        """Close the connection to a lost node. Open questions are never answered.

        With a `last_word` its agent has a moment to read that, and to close the connection by itself.
        """
        self._pinging.cancel()
        if last_word is None:
            self.channel.close()
        else:
            self.tell(last_word)
            asyncio.get_running_loop().call_later(LAST_WORD_S, self.channel.abort)
        for _, _, answer in self._awaited:
            if not answer.done():
                answer.set_exception(WorkerStartFailed(f"node {self.node} was lost: {reason}"))
        self._awaited.clear()

    async def _ping(self) -> None:
        for _ in range(_FIRST_PINGS):
            self._send_ping()
            await asyncio.sleep(_FIRST_PING_S)
        while self._silent_s < self._silence_s:
            self._send_ping()
            asleep_s = time.monotonic()
            await asyncio.sleep(self._ping_s)
            # Messages that came while this process did not run are handled after this.
            self._note_silence(self._silent_s + min(time.monotonic() - asleep_s, 2 * self._ping_s))
        self.is_silent = True
        self.channel.abort()

    def _note_silence(self, silent_s: float) -> None:
        """Note that it has sent nothing for this time."""
        self._silent_s = silent_s
        if self.may_be_lost != (silent_s >= _UNHEARD_S):
            self.may_be_lost = not self.may_be_lost
            self._on_silence()

    def _send_ping(self) -> None:
        sent_ns = time.monotonic_ns()
        self._pings.add(sent_ns)
        self.tell(Ping(sent_ns))


def with_devices(command: Command, numbers: DeviceNumbers) -> Command:
    """Return the command with the devices of its group by their numbers on their node."""
    if isinstance(command, Execute) and command.group is not None:
        devices = tuple(numbers.on_node(device_id) for device_id in command.group.devices)
        return replace(command, group=GroupRef(command.group.group_id, devices))
    return command
