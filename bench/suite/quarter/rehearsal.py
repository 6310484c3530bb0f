"""Everything but the card, from nothing: a fresh environment with what the machine has, the wheels, and all parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from suite.children import GRACE_S, child
from suite.quarter.wheels import ROOT, THERE, alone, name_of, pack

TORCH = "torch==2.13.0"
"""In place of the build for cards."""
_MINUTES = 120
"""More than it takes: every part is to begin, whatever its limit on a card is."""
_OF_TORCH = ("nvidia-", "cuda-")
_SCRIPT = ROOT / "bench" / "gpu" / "quarter.py"


class RehearsalFailed(RuntimeError):
    """The message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """`seconds` by phase; `code` is the exit status of the parts' run, and `packed_bytes` the size of its wheels."""

    seconds: dict[str, float]
    code: int
    packed_bytes: int
    files: tuple[str, ...]


def rehearse(folder: Path, python: str) -> Rehearsal:
    """In `folder`, which is made anew, with this interpreter.

    Raises:
        RehearsalFailed, PackFailed: it did not come to measuring.
    """
    seconds: dict[str, float] = {}
    with alone(folder.with_suffix(".lock")):
        with _timed(seconds, "removal of the last one"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        with _timed(seconds, "environment"):
            version, fresh = _version_of(python), _environment(folder / "venv", python)
        with _timed(seconds, "pack"):
            packed = pack(version)
        run = [str(fresh), str(_SCRIPT), "--minutes", str(_MINUTES), "--out", str(folder / "results")]
        with _timed(seconds, "parts"), child(run, _bare(), ROOT, grace_s=2 * GRACE_S) as parts:
            code = parts.wait()
    files = tuple(sorted(path.name for path in (folder / "results").glob("*")))
    return Rehearsal(seconds=seconds, code=code, packed_bytes=packed.num_bytes, files=files)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    print(f"rehearsal: {phase} ...", flush=True)
    start_s = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - start_s


def _version_of(python: str) -> str:
    line = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    return _run([python, "-c", line]).strip()


def _environment(place: Path, python: str) -> Path:
    """The interpreter of an environment that has what the machine has, and nothing else."""
    _run([python, "-m", "venv", str(place)])
    fresh = place / "bin" / "python"
    wanted = [f"{name}=={version}" if version else name for name, version in THERE.items() if name != "torch"]
    pip = [str(fresh), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", TORCH, *wanted])
    listed = [name_of(one["name"]) for one in json.loads(_run([*pip, "list", "--format", "json"]))]
    others = [name for name in listed if name not in THERE and not name.startswith(_OF_TORCH)]
    if others:
        _run([*pip, "uninstall", "--yes", *others])
    return fresh


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_bare())
    if done.returncode:
        raise RehearsalFailed(f"{' '.join(command[:5])} ... failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def _bare() -> dict[str, str]:
    """Without what leads Python elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
