"""The wheel builds with and without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tilework

ROOT = Path(tilework.__file__).parents[2]
EXTENSION = "tilework/comm/ring/_native.abi3.so"


def test_a_build_by_one_python_serves_all() -> None:
    """A format with '#', compiled by Python 3.13 or later, is an error in 3.11 and 3.12."""
    source = (ROOT / "src/tilework/comm/ring/_native.c").read_text("utf-8")
    formats = re.findall(r'Py(?:Arg_\w+|_BuildValue)\([^"]*"([^"]*)"', source)
    assert len(formats) >= 5
    assert not [one for one in formats if "#" in one]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "/does/not/exist"])
def test_the_wheel_has_the_extension_where_there_is_a_compiler(compiler: str, tmp_path: Path) -> None:
    has_compiler = shutil.which(compiler) is not None
    wheel = _build(tmp_path, compiler)
    assert wheel.name.endswith("py3-none-any.whl") != has_compiler
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        assert (EXTENSION in file.namelist()) == has_compiler
        file.extractall(installed)
    code = "from tilework.comm.ring.consumer import Ring; print(Ring.create(4096).is_one_sided)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(has_compiler)


def _build(tmp_path: Path, compiler: str) -> Path:
    """Of a copy, since the extension is built in place."""
    source = tmp_path / "source"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(command, cwd=source, env={**os.environ, "CC": compiler}, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    return wheel
