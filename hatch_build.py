"""Builds the C extension of the ring into the wheel. Without a compiler the wheel is pure Python and works, too."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOM = Path("src/tilework/comm/ring")
FLAGS = ("-O3", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wall", "-Wextra")


class RingExtension(BuildHookInterface[Any]):
    """Compiles _native.c in place: an editable install and a wheel have it at the same path.

    It uses Python's stable interface, so one build serves Python 3.11 and later. `CC` and `CFLAGS` are heeded.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root, library = Path(self.root), ROOM / "_native.abi3.so"
        (root / library).unlink(missing_ok=True)
        if problem := compile_extension(root / ROOM / "_native.c", root / library):
            print(f"tilework: the ring is built without its C extension, and is slow: {problem}", file=sys.stderr)
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(str(library))


def compile_extension(source: Path, library: Path) -> str:
    """Compile; returns why it is not possible, or an empty text."""
    include = sysconfig.get_path("include")
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    try:
        result = subprocess.run(
            [*command, f"-I{include}", str(source), "-o", str(library)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"no compiler ({error})"
    return result.stderr.strip() if result.returncode else ""
