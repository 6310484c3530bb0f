"""Opens a registry by its address."""

from __future__ import annotations

import re

from tilework.sets.etcd import EtcdRegistry
from tilework.sets.registry import BadRegistry

_PORT = "2379"
_MEMBER = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:]+\])(:(?P<port>\d{1,5}))?")


def open_registry(address: str) -> EtcdRegistry:
    """Return the registry at an address such as etcd://HOST,HOST:PORT, without a call to it yet. Raises BadRegistry."""
    scheme, _, members = address.partition("://")
    found = [_MEMBER.fullmatch(one) for one in members.split(",")]
    urls = [f"http://{one['host']}:{one['port'] or _PORT}" for one in found if one is not None]
    if scheme != "etcd" or len(urls) < len(found):
        raise BadRegistry(f"registry is {address!r}; give etcd://HOST:PORT, several members of one etcd by commas")
    return EtcdRegistry(urls)
