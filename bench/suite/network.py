"""Several machines on this one: a network namespace each, and a router between them that delays, loses and cuts.

It needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

from suite.children import end_with_parent

HERE = "here"
"""The host that is this process's own namespace, for clients."""
_FIRST_OCTET = 1
_NUMBERS = count(os.getpid() % 200)


def missing() -> str | None:
    """What this machine lacks for a network of namespaces; None if it has all."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (package iproute2)"
    return None if Path("/dev/net/tun").exists() else "a network between namespaces needs /dev/net/tun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How packets go from one host to another: after `delay_s`, but for a share `loss`; none if it is `cut`."""

    delay_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


@dataclass(kw_only=True)
class Network:
    """Hosts by name, each a namespace. `HERE` is one of them."""

    number: int
    hosts: Sequence[str]
    router: subprocess.Popen[str]
    ways: dict[str, Way] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def address(self, host: str) -> str:
        return f"10.78.{self.number}.{self._octet(host)}"

    def on(self, host: str) -> list[str]:
        """What a command begins with that runs on a host."""
        return ["ip", "netns", "exec", _namespace(self.number, host)]

    def set_all(self, way: Way) -> None:
        """Let all ways between hosts be so that are not set one by one."""
        self._set({"*>*": way})

    def cut(self, host: str) -> None:
        """Carry nothing to or from a host."""
        self._set({f"{self._octet(host)}>*": Way(cut=True), f"*>{self._octet(host)}": Way(cut=True)})

    def join(self, host: str) -> None:
        """Carry what a cut has held up from now on; what was lost stays lost."""
        self._set({}, {f"{self._octet(host)}>*", f"*>{self._octet(host)}"})

    def _octet(self, host: str) -> int:
        return _FIRST_OCTET + self.hosts.index(host)

    def _set(self, more: Mapping[str, Way], less: Collection[str] = ()) -> None:
        assert self.router.stdin is not None
        assert self.router.stdout is not None
        with self._lock:
            self.ways = {name: way for name, way in self.ways.items() if name not in less} | dict(more)
            self.router.stdin.write(json.dumps({name: asdict(way) for name, way in self.ways.items()}) + "\n")
            self.router.stdin.flush()
            assert self.router.stdout.readline(), "the router has ended"


@contextmanager
def network(*hosts: str, seed: int = 1) -> Iterator[Network]:
    """A network of these hosts and `HERE`. What runs on them is to be ended before."""
    every, number = [HERE, *hosts], next(_NUMBERS) % 250
    with ExitStack() as stack:
        for host in hosts:
            name = _namespace(number, host)
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        namespaces = {_FIRST_OCTET: ""}
        namespaces |= {_FIRST_OCTET + at: _namespace(number, host) for at, host in enumerate(hosts, 1)}
        command = [sys.executable, "-m", "suite.router", str(number), str(seed), json.dumps(namespaces)]
        router = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
                preexec_fn=end_with_parent,  # noqa: PLW1509
            )
        )
        stack.callback(router.kill)
        assert router.stdout is not None
        assert router.stdout.readline(), "the router did not start"
        yield Network(number=number, hosts=every, router=router)


def _namespace(number: int, host: str) -> str:
    return f"tilework{number}-{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
