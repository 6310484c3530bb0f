"""The limit of open files of this process, and the number of connections that it allows."""

from __future__ import annotations

import resource

_OWN = 256  # The journal, the log, results that are being written, sockets of workers and agents.
_PER_CONNECTION = 2  # The socket, and the result that it fetches.
_MOST = 1 << 20  # Some machines have a hard limit of a billion, for which the kernel has no table.


def raise_limit() -> int:
    """Raise the soft limit of open files of this process, which its children inherit, to the hard one.

    Returns the limit that holds now.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = possible_limit()
    if most > _finite(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return most


def possible_limit() -> int:
    """Return the limit that `raise_limit` would return."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_finite(soft), min(_finite(hard), _MOST))


def connections_within(limit: int) -> int:
    """Return the number of connections within this limit of open files, at least 1."""
    return max(1, (limit - _OWN) // _PER_CONNECTION)


def _finite(limit: int) -> int:
    return _MOST if limit == resource.RLIM_INFINITY else limit
