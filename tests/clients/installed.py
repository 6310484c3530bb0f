"""Other people's clients, installed into a folder of the tests' own where a registry is within reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_INSTALL_S = 300


def from_pypi(directory: Path, *packages: str) -> dict[str, str]:
    """The environment of a Python that has these packages beside ours. Their dependencies are named, too."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), *packages]
    _install(command)
    return {**os.environ, "PYTHONPATH": str(directory)}


def source_from_pypi(directory: Path, package: str) -> Path:
    """The folder of a package's sources, of which nothing is installed. The package is given as NAME==VERSION."""
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(directory)]
    _install([sys.executable, "-m", "pip", "download", *options, package])
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


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
