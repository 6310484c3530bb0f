"""Other people's clients, installed into a folder of the tests' own where a registry is within reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_INSTALL_S = 300


def from_pypi(directory: Path, *packages: str) -> dict[str, str]:
    """The environment of a Python that has these packages beside ours. Their dependencies are named, too."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), *packages]
    _install(command)
    return {**os.environ, "PYTHONPATH": str(directory)}


def from_npm(directory: Path, *packages: str) -> None:
    """Put these packages and their dependencies into the folder; scripts there can import them."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    _install(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), *packages])


def _install(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the registry does not answer")
    if done.returncode:
        pytest.skip(f"no registry gives the packages: {done.stderr[-300:]}")
