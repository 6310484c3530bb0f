"""The place of a user's caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory of this user's caches of Tilework, in $XDG_CACHE_HOME, or in ~/.cache if that is not set.

    Raises RuntimeError if nothing says where the home of this user is.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tilework"
