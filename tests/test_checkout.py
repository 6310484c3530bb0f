"""A checkout that was never installed, as on a machine that only lends its card: it knows its version and needs."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import tilework
from tilework import distribution

ROOT = Path(tilework.__file__).parents[2]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed here but Tilework."""
    folder = tmp_path_factory.mktemp("others")
    for path in map(Path, sys.path):
        for one in path.iterdir() if any(path.glob("*.dist-info")) else ():
            place = folder / one.name
            if not one.name.startswith("tilework") and one.suffix != ".pth" and not place.exists():
                place.symlink_to(one)
    return folder


def run(arguments: Sequence[str], paths: Iterable[Path], folder: Path) -> str:
    there = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-S", *arguments], cwd=folder, env=there, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_can_be_imported_and_knows_its_version(tmp_path: Path) -> None:
    assert run(["-c", "import tilework; print(tilework.__version__)"], [ROOT / "src"], tmp_path) == "0.1.0\n"


def test_its_commands_can_be_run(others: Path, tmp_path: Path) -> None:
    paths = [ROOT / "src", others]
    assert "tilework serve" in run(["-m", "tilework", "--help"], paths, tmp_path)
    assert run(["-m", "tilework", "--version"], paths, tmp_path) == "0.1.0\n"


def nothing_installed(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.fixture
def never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("version", "metadata", "requires", "distribution"):
        monkeypatch.setattr(importlib.metadata, name, nothing_installed)


def test_it_says_the_same_as_when_it_is_installed(request: pytest.FixtureRequest) -> None:
    def said() -> tuple[str, str, set[Requirement]]:
        asked = map(Requirement, distribution.requirements())
        for_users = {one for one in asked if 'extra == "dev"' not in str(one.marker)}  # It repeats other extras.
        return distribution.version(), distribution.python_wanted(), for_users

    installed = said()
    request.getfixturevalue("never_installed")
    assert said() == installed


@pytest.mark.usefixtures("never_installed")
@pytest.mark.parametrize("text", ["", "[project]\nname = 'another'\nversion = '7'", None])
def test_another_project_around_it_says_nothing_of_it(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(distribution, "_PROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(PackageNotFoundError, match="tilework"):
        distribution.version()


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        ('{"url": "file:///opt/my%20src", "dir_info": {"editable": true}}', "-e '/opt/my src[serve]'"),
        ('{"url": "file:///opt/src", "dir_info": {}}', "'/opt/src[serve]'"),
        ('{"url": "file:///opt/tilework-0.1.0.whl", "archive_info": {}}', "'/opt/tilework-0.1.0.whl[serve]'"),
        (
            '{"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "'tilework[serve] @ git+https://example.org/t.git@abc'",
        ),
        (None, "'tilework[serve]'"),
    ],
    ids=["editable", "checkout", "wheel", "repository", "index"],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry has it, so that the name alone finds nothing, or what another has put there."""
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: origin))
    assert distribution.install_command("serve") == f"{shlex.quote(sys.executable)} -m pip install {asked}"


@pytest.mark.usefixtures("never_installed")
def test_an_extra_is_installed_from_a_checkout_that_never_was() -> None:
    assert distribution.install_command("serve").endswith(f"-m pip install '{ROOT}[serve]'")


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        (f'{{"url": "{ROOT.as_uri()}", "dir_info": {{"editable": true}}}}', f"-e {ROOT}/lab"),
        (f'{{"url": "{ROOT.as_uri()}", "dir_info": {{}}}}', f"{ROOT}/lab"),
        ('{"url": "file:///opt/tilework-0.1.0.whl", "archive_info": {}}', "./lab, in a checkout of the same version"),
        (
            '{"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "'tilework-lab @ git+https://example.org/t.git@abc#subdirectory=lab'",
        ),
        (None, "./lab, in a checkout of the same version"),
    ],
    ids=["editable", "checkout", "wheel", "repository", "index"],
)
def test_the_lab_is_installed_from_where_the_package_came(
    origin: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: origin))
    assert distribution.install_lab_command() == f"{shlex.quote(sys.executable)} -m pip install {asked}"
