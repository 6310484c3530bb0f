"""Messages between processes of one node: the ring against pipes and ZeroMQ, and when a sender is killed or stopped."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.synchronize import Event
from typing import Any

from suite.case import Check, Finding, Note, Table
from suite.disturbed import Disturbed
from suite.message_transports import NODE_WAYS, SMALL, RingReceiver, RingSender, Way, open_sender
from suite.stats import Interval, extremes

_CONTEXT = multiprocessing.get_context("fork")  # A sender that is started otherwise imports all cases first.
_BATCH = 128
_FAULTS = ("SIGKILL", "SIGSTOP")


@dataclass(frozen=True, slots=True)
class _Rate:
    """Bytes per second, and processor time in all processes and threads per byte, in seconds."""

    wall: float
    cpu_s: float


_Rates = dict[tuple[str, int, int], list[_Rate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpeed:
    """`megabytes` of messages of each size by each way in each of `rounds`; `pings` messages one way and back."""

    sizes: tuple[int, ...] = (1 << 10, 64 << 10, 1 << 20)
    megabytes: tuple[int, ...] = (100, 500, 1000)
    num_senders: tuple[int, ...] = (1, 3)
    rounds: int = 5
    pings: int = 4000
    faults: int = 10
    stopped_s: float = 0.5

    @classmethod
    def make(cls, quick: bool) -> RingSpeed:
        return cls(megabytes=(20, 100, 200), rounds=2, pings=300, faults=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        rates = self._rates(note)
        latencies = {name: self._latencies(name, 64, note) for name in ("polling", "bell")}
        hop_us = self._latencies("bell", self.sizes[-1], note)
        copy_us = statistics.median(self.sizes[-1] / one.wall * 1e6 for one in rates["memcpy", self.sizes[-1], 1])
        note("senders that are killed and stopped")
        faults = tuple(self._fault(name, fault) for name in ("ring, checked", "pipe", "ZeroMQ") for fault in _FAULTS)
        return Finding(
            checks=(*self._speed_checks(rates), *_latency_checks(latencies), _hop_check(hop_us, copy_us)),
            method=_METHOD,
            tables=(self._rate_table(rates), _fault_table(faults)),
            facts={
                f"one way, {name}, p99 in us": round(statistics.quantiles(all_, n=100)[98], 1)
                for name, all_ in latencies.items()
            },
        )

    def _rates(self, note: Note) -> _Rates:
        """Of each round, by way, size and number of senders. memcpy has no senders."""
        rates: _Rates = {}
        for number in range(self.rounds):
            for size, megabytes in zip(self.sizes, self.megabytes, strict=True):
                note(f"round {number + 1}, {size} bytes")
                rates.setdefault(("memcpy", size, 1), []).append(_memcpy_rate(size, megabytes))
                for num_senders in self.num_senders:
                    for name, way in NODE_WAYS.items():
                        rate = _rate(way, size, num_senders, (megabytes << 20) // size)
                        rates.setdefault((name, size, num_senders), []).append(rate)
        return rates

    def _speed_checks(self, rates: _Rates) -> tuple[Check, ...]:
        small, middle, large = self.sizes
        checks = [
            Check(
                what=f"1 KB, {count} sender(s), checked",
                measured=extremes([rate.wall / small / 1e6 for rate in rates["ring, checked", small, count]]),
                low=1,
                unit="M messages/s",
            )
            for count in self.num_senders
        ]
        for name, size, other, low in (
            ("ring", large, "memcpy", 0.8),
            ("ring, checked", large, "memcpy", 0.4),
            ("ring", middle, "ZeroMQ", 6),
            ("ring, checked", middle, "ZeroMQ", 3),
        ):
            measured = _ratio(rates[name, size, 1], rates[other, size, 1])
            checks.append(Check(what=f"{name}, {size >> 10} KB, over {other}", measured=measured, low=low, unit="x"))
        return tuple(checks)

    def _rate_table(self, rates: _Rates) -> Table:
        rows = []
        for (name, size, count), values in sorted(rates.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])):
            rate = statistics.median(value.wall for value in values)
            cpu_us = statistics.median(value.cpu_s for value in values) * size * 1e6
            shown = (f"{rate / size:,.0f}", f"{rate / 1e9:.2f}", f"{cpu_us:.2f}")
            rows.append((name, f"{size >> 10} KB", str(count), *shown))
        return Table(
            title="Throughput, medians of the rounds",
            columns=("way", "message", "senders", "messages/s", "GB/s", "CPU per message, us"),
            rows=tuple(rows),
        )

    def _latencies(self, name: str, size: int, note: Note) -> list[float]:
        """Microseconds of one way, half of each way there and back."""
        note(f"one way, {name}, {size} bytes")
        here, message = RingReceiver(1, size, is_checked=True), os.urandom(size)
        parent, child = multiprocessing.Pipe()
        echo = _CONTEXT.Process(
            target=_echo, args=(child, here.addresses[0], name == "polling", self.pings, message), daemon=True
        )
        echo.start()
        while not here.ring.stats.producers:
            here.ring.poll()
        sender = RingSender(parent.recv())
        times = []
        for _ in range(self.pings):
            start_ns = time.perf_counter_ns()
            sender.send((message,))
            received = _await(here.ring, name == "polling")
            times.append((time.perf_counter_ns() - start_ns) / 2e3)
            received.release()
        echo.join()
        here.close()
        return times

    def _fault(self, name: str, fault: str) -> tuple[str, ...]:
        """Totals over all repeats: messages that were sent and never came, came twice, or came damaged; and how long
        the other sender's messages stood still, at most."""
        missing = doubled = damaged = 0
        pauses_ms = []
        for _ in range(self.faults):
            one = Disturbed(NODE_WAYS[name], fault, self.stopped_s)
            counts, pause_ms = one.run()
            missing, doubled, damaged = missing + counts[0], doubled + counts[1], damaged + counts[2]
            pauses_ms.append(pause_ms)
        return (
            name,
            fault,
            str(missing),
            str(doubled),
            str(damaged),
            f"{statistics.median(pauses_ms):.0f}",
            f"{max(pauses_ms):.0f}",
        )


def _rate(way: Way, size: int, num_senders: int, count: int) -> _Rate:
    count //= num_senders
    if size < SMALL:
        count -= count % _BATCH
    ours = way.receiver(num_senders, size)
    go, ready, cpu_s = _CONTEXT.Event(), _CONTEXT.Semaphore(0), _CONTEXT.SimpleQueue()
    senders = [
        _CONTEXT.Process(target=_send, args=(way, ours.addresses, index, size, count, go, ready, cpu_s), daemon=True)
        for index in range(num_senders)
    ]
    for sender in senders:
        sender.start()
    ours.hand_over()
    left = num_senders
    while left:
        ours.receive(0.001)
        left -= ready.acquire(False)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    go.set()
    got = 0
    while got < count * num_senders:
        got += len(ours.receive(1))
    elapsed_s, used_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    used_s += sum(cpu_s.get() for _ in senders)
    for sender in senders:
        sender.join()
    ours.close()
    return _Rate(got * size / elapsed_s, used_s / (got * size))


def _send(
    way: Way, addresses: Sequence[Any], index: int, size: int, count: int, go: Event, ready: Any, cpu_s: Any
) -> None:
    sender = open_sender(way, addresses, index)
    message = os.urandom(size)
    batch = [message] * (_BATCH if size < SMALL else 1)
    ready.release()
    go.wait()
    start_s = time.process_time()
    for _ in range(count // len(batch)):
        sender.send(batch)
    sender.close()
    cpu_s.put(time.process_time() - start_s)


def _memcpy_rate(size: int, megabytes: int) -> _Rate:
    """From one place to the places of 64 MiB in turn, as a sender copies into the ring."""
    target, source = memoryview(mmap(-1, 64 << 20)), os.urandom(size)
    places = [target[start : start + size] for start in range(0, len(target), size)]
    for place in places:
        place[:] = source
    laps = max(1, megabytes // 64)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(laps):
        for place in places:
            place[:] = source
    num_bytes = laps * len(places) * size
    return _Rate(num_bytes / (time.perf_counter() - start_s), (time.process_time() - start_cpu_s) / num_bytes)


def _ratio(ours: list[_Rate], theirs: list[_Rate]) -> Interval:
    return extremes([one.wall / other.wall for one, other in zip(ours, theirs, strict=True)])


def _echo(parent: Any, address: str, is_polling: bool, pings: int, message: bytes) -> None:
    ours = RingReceiver(1, len(message), is_checked=True)
    sender = RingSender(address)
    parent.send(ours.addresses[0])
    while not ours.ring.stats.producers:
        ours.ring.poll()
    for _ in range(pings):
        received = _await(ours.ring, is_polling)
        sender.send((message,))
        received.release()


def _await(ring: Any, is_polling: bool) -> Any:
    wait: Callable[[], Any] = ring.poll if is_polling else ring.recv
    while (message := wait()) is None:
        pass
    return message


def _latency_checks(latencies: dict[str, list[float]]) -> tuple[Check, ...]:
    goals = {"polling": 5.0, "bell": 60.0}
    return tuple(
        Check(what=f"one way of 64 bytes, {name}, p50", measured=_of_quarters(times), high=goals[name], unit="us")
        for name, times in latencies.items()
    )


def _hop_check(times_us: Sequence[float], copy_us: float) -> Check:
    beyond = _of_quarters([max(0.0, one - copy_us) for one in times_us])
    return Check(what="one way of 1 MB, checked, bell, beyond a copy of it, p50", measured=beyond, high=300, unit="us")


def _of_quarters(times: Sequence[float]) -> Interval:
    return extremes([statistics.median(times[start::4]) for start in range(4)])


def _fault_table(rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(
        title="A sender of 1 MB messages is killed, or stopped and continued, beside a sender of 1 KB messages",
        columns=("way", "what happens", "sent and lost", "doubled", "damaged", "pause of the other, ms", "longest"),
        rows=rows,
    )


_METHOD = (
    "One receiver, which sleeps while there is nothing; senders are processes of their own. In each round all take "
    "turns. More processes than cores share them.",
    "ring: 64 MiB, 4096 slots. 1 KB: sent 128 and received up to 512 at a time, as copies; longer messages one by one, "
    "received in place. checked: CRC32C of all bytes, at both ends.",
    "memcpy: one process, from one source to 64 MiB in turn. pipe: multiprocessing's send_bytes, one pipe per sender. "
    "ZeroMQ: PUSH and PULL, ipc, not copied in Python from 8 KB on.",
    "CPU: user and system time of all processes and their threads while messages pass.",
    "One way: half of the time there and back, through two rings. polling: both ends poll, so they need a core each. "
    "bell: both sleep. A copy: the median of memcpy above.",
    "Lost: `send` had returned and the message never came. The pause is the longest time between two messages of the "
    "other sender from the fault on. Totals over all repeats.",
    "Intervals of throughput: smallest and largest of the rounds; of latency: of the medians of four parts.",
)
