"""Where a user's caches are."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where this user's caches of Tilework are: in $XDG_CACHE_HOME, which is ~/.cache if not set.

    Raises RuntimeError if nothing says where the home of this user is.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tilework"
