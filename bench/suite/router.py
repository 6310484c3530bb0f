"""Carries packets between network namespaces, with delay, loss and cuts, for kernels without netem.

Each host is a namespace with a TUN device, whose other end is here. Started by `suite.network`, which says by lines of
JSON on stdin how each way between two hosts is; a line on stdout answers each. It ends with its stdin.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from itertools import count
from random import Random
from typing import Any

DEVICE = "tilework{number}"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU, _MOST_AT_ONCE = 9000, 64
_TARGET = 19  # The last octet of the target, in an IPv4 header.
_libc = ctypes.CDLL(None, use_errno=True)


class Router:
    """Hosts by the last octet of their addresses, 10.78.NUMBER.octet; `namespaces` are theirs, "" the caller's."""

    def __init__(self, number: int, namespaces: dict[int, str], seed: int) -> None:
        self._rng = Random(seed)
        self._ends = {_tun(number, octet, namespace): octet for octet, namespace in namespaces.items()}
        self._of_octet = {octet: end for end, octet in self._ends.items()}
        self._ways: dict[str, dict[str, float]] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = count()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for end in (*self._ends, sys.stdin.fileno()):
            selector.register(end, selectors.EVENT_READ)
        print("up", flush=True)
        while True:
            for key, _ in selector.select(self._left_s()):
                if key.fd in self._ends:
                    self._take(key.fd)
                elif line := sys.stdin.readline():
                    self._ways = json.loads(line)
                    print("done", flush=True)
                else:
                    return
            self._deliver()

    def _left_s(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _take(self, end: int) -> None:
        source, now_s = self._ends[end], time.monotonic()
        for _ in range(_MOST_AT_ONCE):
            try:
                packet = os.read(end, _MTU + 64)
            except BlockingIOError:
                return
            target = packet[_TARGET] if packet[0] >> 4 == 4 else None
            if target not in self._of_octet:
                continue
            way = self._way(source, target)
            if way.get("cut") or self._rng.random() < way.get("loss", 0.0):
                continue
            at_s = now_s + way.get("delay_s", 0.0)
            heapq.heappush(self._under_way, (at_s, next(self._order), self._of_octet[target], packet))

    def _way(self, source: int, target: int) -> dict[str, float]:
        """How the way from a host to another is; * stands for any, and the first of these that is there counts."""
        names = (f"{source}>{target}", f"{source}>*", f"*>{target}", "*>*")
        return next((self._ways[name] for name in names if name in self._ways), {})

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._under_way)
            try:
                os.write(end, packet)
            except OSError:  # Its queue is full, as that of a switch may be.
                continue


def _tun(number: int, octet: int, namespace: str) -> int:
    """A TUN device in a namespace, with the address of the host, and this end of it."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if namespace:
            _enter(f"/run/netns/{namespace}")
        end, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), DEVICE.format(number=number)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        for command in (f"addr add 10.78.{number}.{octet}/24 dev {name}", f"link set {name} mtu {_MTU} up"):
            subprocess.run(["ip", *command.split()], check=True)
        _call(_libc.setns(home, _CLONE_NEWNET))
        return end
    finally:
        os.close(home)


def _enter(path: str) -> None:
    namespace = os.open(path, os.O_RDONLY)
    try:
        _call(_libc.setns(namespace, _CLONE_NEWNET))
    finally:
        os.close(namespace)


def _call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(arguments: Any = None) -> None:
    number, seed, namespaces = arguments or sys.argv[1:]
    Router(int(number), {int(octet): name for octet, name in json.loads(namespaces).items()}, int(seed)).run()


if __name__ == "__main__":
    main()
