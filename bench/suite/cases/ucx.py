"""Messages between nodes, on loopback: the ring over UCX against its verbs, NIXL, Redis, and ways within a node."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.disturbed import Disturbed
from suite.message_transports import NODE_WAYS, Way, open_sender
from suite.network_transports import NETWORK_WAYS, UcxReceiver, UcxSender
from suite.stats import exact, extremes
from tilework.comm.ring.verbs import Buffer, Memory

_CONTEXT = multiprocessing.get_context("fork")
_WAYS = {name: NODE_WAYS[name] for name in ("ring, checked", "pipe", "ZeroMQ")} | NETWORK_WAYS
_FAULTS = (signal.SIGKILL, signal.SIGSTOP)
_STAMP = 8
_Verb = Callable[[Memory], object]


@dataclass(frozen=True, slots=True)
class _Latency:
    """Microseconds of one way by message, and of processor time that the receiver took for each."""

    p50: float
    p99: float
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxMessages:
    """`size`: bytes of a message; `sends`: in each of `rounds`, against as many of each verb; `paced`: messages of each
    way for latencies; one every `every_s`; `faults`: repeats of each fault."""

    size: int = 64 << 10
    rounds: int = 7
    sends: int = 150
    paced: int = 500
    every_s: float = 2e-3
    faults: int = 5
    stopped_s: float = 0.5

    @classmethod
    def make(cls, quick: bool) -> UcxMessages:
        return cls(rounds=2, sends=50, paced=100, faults=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        note("the verbs of a message, and the message")
        paced, packed, verbs = _apart(_against_verbs, self)
        latencies: dict[str, list[_Latency]] = {name: [] for name in _WAYS}
        for number in range(self.rounds):
            for name, way in _WAYS.items():
                note(f"latency, round {number + 1}, {name}")
                latencies[name].append(_apart(_paced, way, self))
        faults: dict[str, list[tuple[tuple[int, int, int], float]]] = {}
        for name, way in _WAYS.items():
            for fault in _FAULTS:
                note(f"{fault.name}, {name}")
                faults[f"{name}, {fault.name}"] = [_apart(_disturb, way, fault.name, self) for _ in range(self.faults)]
        return Finding(
            checks=(
                _ratio_check("one by one", paced),
                _ratio_check("without a pause", packed),
                *(_fault_check(fault.name, faults[f"ring over UCX, {fault.name}"]) for fault in _FAULTS),
            ),
            method=_METHOD,
            tables=(_table(latencies, faults),),
            facts={
                "send of 64 KB and its verbs, one by one, us": _medians(paced),
                "the same without a pause, us": _medians(packed),
                "each verb again and again, us": [round(one, 1) for one in verbs],
                "left out": [name for name in ("Redis Streams", "NIXL") if name not in _WAYS],
            },
        )


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which may fork before it uses UCX."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _CONTEXT.Process(target=lambda: theirs.send(function(*arguments)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


_Rounds = list[tuple[float, float]]


def _against_verbs(case: UcxMessages) -> tuple[_Rounds, _Rounds, list[float]]:
    """Medians in microseconds. By round those of send, and of its verbs one after the other: first with, then without
    pauses between; and of each verb that is repeated without a pause."""
    ours = UcxReceiver(1, case.size)
    result, told = multiprocessing.Pipe(duplex=False)
    sender = _CONTEXT.Process(target=_send_and_measure, args=(ours.addresses[0], case, told))
    sender.start()
    ours.hand_over()
    while not result.poll():
        ours.receive(0.01)
    found: tuple[_Rounds, _Rounds, list[float]] = result.recv()
    sender.join()
    ours.close()
    return found


def _send_and_measure(address: Any, case: UcxMessages, told: Any) -> None:
    sender = UcxSender(address)
    message = os.urandom(case.size)
    transport = sender.producer._transport
    memory = transport._memory
    recorder = transport._memory = _Recorder(memory)
    sender.send((message,))
    transport._memory = memory

    def verbs() -> None:
        for verb in recorder.verbs:
            verb(memory)

    send = partial(sender.send, (message,))
    paced = [_in_turns((send, verbs), case.sends, case.every_s) for _ in range(case.rounds)]
    packed = [_in_turns((send, verbs), case.sends, 0) for _ in range(case.rounds)]
    alone = [_in_turns((partial(verb, memory),), case.sends, 0)[0] for verb in recorder.verbs]
    told.send((paced, packed, alone))
    sender.close()


def _in_turns(functions: Sequence[Callable[[], object]], count: int, pause_s: float) -> tuple[float, ...]:
    """The median time of each, in microseconds."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(count):
        for function, own in zip(functions, times, strict=True):
            if pause_s:
                time.sleep(pause_s)
            start_ns = time.perf_counter_ns()
            function()
            own.append((time.perf_counter_ns() - start_ns) / 1e3)
    return tuple(map(statistics.median, times))


def _medians(rounds: _Rounds) -> list[float]:
    return [round(statistics.median(values), 1) for values in zip(*rounds, strict=True)]


class _Recorder:
    """Notes what is done to a memory, so that it can be done again: compare-and-swaps so that they change nothing."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.verbs: list[_Verb] = []

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        self.verbs.append(lambda memory: memory.get(offset, size, deadline_ns=_FOREVER))
        return self._memory.get(offset, size, deadline_ns=deadline_ns)

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        self.verbs.append(lambda memory: _put(memory, offset, buffers))
        self._memory.put(offset, buffers, deadline_ns=deadline_ns)

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        self.verbs.append(lambda memory: memory.cas64(offset, _NO_WORD, 0, deadline_ns=_FOREVER))
        return self._memory.cas64(offset, expected, desired, deadline_ns=deadline_ns)

    def flush(self, *, deadline_ns: int) -> None:
        """With its put: alone there is nothing to wait for."""
        self._memory.flush(deadline_ns=deadline_ns)

    def checksum(self, buffer: Buffer, value: int) -> int:
        return self._memory.checksum(buffer, value)


_FOREVER = 1 << 62
_NO_WORD = (1 << 64) - 1


def _put(memory: Memory, offset: int, buffers: tuple[Buffer, ...]) -> None:
    memory.put(offset, buffers, deadline_ns=_FOREVER)
    memory.flush(deadline_ns=_FOREVER)


def _paced(way: Way, case: UcxMessages) -> _Latency:
    ours = way.receiver(1, case.size)
    sender = _CONTEXT.Process(target=_send_paced, args=(way, ours.addresses, case), daemon=True)
    sender.start()
    ours.hand_over()
    times: list[float] = []
    start_cpu_s = 0.0
    while len(times) < case.paced:
        for message in ours.receive(1):
            times.append((time.perf_counter_ns() - int.from_bytes(message[:_STAMP], "little")) / 1e3)
            start_cpu_s = start_cpu_s or time.process_time()
    cpu_s = time.process_time() - start_cpu_s
    sender.join()
    ours.close()
    points = statistics.quantiles(times, n=100)
    return _Latency(points[49], points[98], cpu_s / case.paced * 1e6)


def _send_paced(way: Way, addresses: Sequence[Any], case: UcxMessages) -> None:
    sender, rest = open_sender(way, addresses, 0), bytes(case.size - _STAMP)
    for _ in range(case.paced):
        time.sleep(case.every_s)
        sender.send((time.perf_counter_ns().to_bytes(_STAMP, "little") + rest,))
    sender.close()


def _disturb(way: Way, fault: str, case: UcxMessages) -> tuple[tuple[int, int, int], float]:
    return Disturbed(way, fault, case.stopped_s).run()


def _ratio_check(how: str, rounds: _Rounds) -> Check:
    measured = extremes([send / verbs for send, verbs in rounds])
    return Check(what=f"64 KB over TCP, {how}: p50 of send over its verbs", measured=measured, high=1.5, unit="x")


def _fault_check(fault: str, runs: list[tuple[tuple[int, int, int], float]]) -> Check:
    wrong = sum(sum(counts) for counts, _ in runs)
    return Check(what=f"ring over UCX, {fault}: lost, doubled, damaged", measured=exact(wrong), high=0)


def _table(latencies: dict[str, list[_Latency]], faults: dict[str, list[tuple[tuple[int, int, int], float]]]) -> Table:
    rows = []
    for name, values in latencies.items():
        row = [name]
        for field in ("p50", "p99", "cpu"):
            row.append(f"{statistics.median(getattr(value, field) for value in values):.0f}")
        for fault in _FAULTS:
            runs = faults[f"{name}, {fault.name}"]
            row.append(" / ".join(str(sum(counts[index] for counts, _ in runs)) for index in range(3)))
            row.append(f"{statistics.median(pause for _, pause in runs):.0f}")
        rows.append(tuple(row))
    of_fault = [(f"{fault.name}: lost / doubled / damaged", "the other stands still, ms") for fault in _FAULTS]
    columns = ("way", "64 KB, p50, us", "p99, us", "receiver CPU, us", *chain(*of_fault))
    return Table(
        title="One way of 64 KB, and a sender of 1 MB that is killed or stopped", columns=columns, rows=tuple(rows)
    )


_METHOD = (
    "All on one machine: the ring over UCX, NIXL and Redis by TCP on loopback; the ring, the pipe and ZeroMQ (ipc) "
    "within the node. Each measurement is a process of its own that receives, and its senders.",
    "p50 of send over its verbs: a sender notes the verbs of one message (get, compare-and-swap, put with its flush), "
    "then in turns sends one and does these verbs one after the other; one by one: every 2 ms. The receiver sleeps "
    "until it is woken. Beyond its verbs, send has the checksum, Python, waking the receiver, and without a pause what "
    "the receiver does with the message before.",
    "One way: from before `send` until the receiver has the message, one every 2 ms. The receiver sleeps meanwhile; "
    "with NIXL it looks every 50 us. CPU: of the receiver's process with its threads, per message, also while it "
    "waits. Medians of the rounds, in which all take turns.",
    "NIXL: a notification says where the message lies, the receiver reads it and answers. Redis Streams: XADD, XREAD, "
    "XDEL; the server's processor time is not counted.",
    "Killed, or stopped for 0.5 s: a sender of 1 MB messages beside one of 1 KB. Lost: `send` had returned and the "
    "message never came. Totals of the repeats; the other's longest pause is their median.",
    "Intervals: smallest and largest of the rounds.",
)
