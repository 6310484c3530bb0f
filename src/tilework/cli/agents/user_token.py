"""The token of a user: what servers and agents of one user on one machine know without being told."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from tilework.cli.console import UserError
from tilework.cli.options.nodes import TOKEN

_NAME = "cluster-token"


def user_token() -> bytes:
    """The one in tilework/cluster-token in $XDG_STATE_HOME, which is ~/.local/state if not set.

    The first process makes it, readable by this user alone. It stays, so that agents outlive their server. Raises
    UserError.
    """
    try:
        return _read(_directory())
    except (OSError, RuntimeError) as error:  # The latter if nothing says where the home of this user is.
        raise UserError(
            f"no token is set, and that of this user cannot be had: {error}; "
            f"set {TOKEN}, the same for server and agents"
        ) from error


def _directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    directory = (Path(state) if state else Path.home() / ".local" / "state") / "tilework"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _read(directory: Path) -> bytes:
    """Raises OSError; UserError if others may know it."""
    path = directory / _NAME
    if not path.exists():
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError(f"{path} is of another user, or others may read it; remove it, and a new one is made")
        token = file.read().strip()
    if not token:
        raise UserError(f"{path} is empty; remove it, and a new one is made")
    return token


def _make(path: Path) -> None:
    """Write it whole or not at all; another process may do the same now, and the first one counts."""
    hidden = path.with_name(f".{_NAME}-{os.getpid()}")
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(16).encode())
    finally:
        os.close(descriptor)
    with suppress(FileExistsError):
        os.link(hidden, path)
    hidden.unlink()
