"""Programs of Debian packages, which tests install where they are missing and this user may do that."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

_APT_S = 120


def has(program: str, package: str) -> bool:
    """Whether there is such a program, after trying to install its package."""
    if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "--yes", "--no-install-recommends", package]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # Starts no service.
        null = subprocess.DEVNULL
        with suppress(subprocess.TimeoutExpired):  # No network.
            subprocess.run(command, stdout=null, stderr=null, env=environment, timeout=_APT_S, check=False)
    return shutil.which(program) is not None
