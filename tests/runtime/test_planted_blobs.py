"""What another user of the machine plants among the directories of blobs: never used, read or removed.

Run as root, the tests plant as the user nobody. Otherwise what was planted is this user's, and the server is told that
it runs as another: it sees the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import WEIGHTS
from tilework.pipelines.serialization import SerializedState
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.worker.start import entry
from tilework.worker.state_blobs import StateBlobs

NOBODY = 65534
ROOT = 0
IS_ROOT = os.geteuid() == ROOT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder like /dev/shm: all users may make files there."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The durable directory of the server that is attacked; its path is no secret."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


def as_another(root: Path, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do it in this folder, as a user that is not the server's."""
    if not IS_ROOT:
        with contextlib.chdir(root):
            act()
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
        return
    child = os.fork()
    if child == 0:
        try:
            os.chdir(root)  # Before: to the folders above it only root may go.
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def plant(folder: Path, owner: Path, mode: int, lock: Callable[[Path], None]) -> None:
    """What looks like the directory of the owner's former start, with a state and a skeleton in it."""
    folder.mkdir(mode=mode)
    folder.chmod(mode)
    (folder / WEIGHTS).mkdir()
    (folder / "owner").write_text(str(owner), "utf-8")
    (folder / "owner").chmod(0o600)
    (folder / "1-2-a-0").write_text("planted")
    (folder / WEIGHTS / "0.skeleton").write_text("planted")
    lock(folder / "lock")


LOCKS: dict[str, Callable[[Path, str], None]] = {
    "a link to a file of the server": lambda lock, theirs: lock.symlink_to(Path("..", theirs)),
    "another name of a file": lambda lock, theirs: lock.hardlink_to(theirs),
    "a file": lambda lock, _theirs: lock.touch(0o600),
    "a pipe": lambda lock, _theirs: os.mkfifo(lock, 0o600),
    "a directory": lambda lock, _theirs: lock.mkdir(),
}


@pytest.mark.parametrize("mode", [0o700, 0o777])
@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("is_durable", [True, False])
def test_a_directory_that_another_user_has_made_is_left_alone(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: int, is_durable: bool
) -> None:
    theirs, folder = root / "readable", root / "tilework-planted"
    theirs.touch()
    theirs.chmod(0o666)
    name, owner = Path(folder.name), state if is_durable else state / "gone"  # What has no owner is removed.
    as_another(root, lambda: plant(name, owner, mode, lambda lock: LOCKS[kind](lock, theirs.name)), monkeypatch)
    directory = StateBlobDirectory(root, state if is_durable else None) if IS_ROOT else None
    if directory is None:  # What it makes itself would not be its own, either.
        with pytest.raises(Exception, match="belongs to user"):
            StateBlobDirectory(root, state if is_durable else None)
    else:
        assert directory.path != folder
        assert directory.inherit({StateBlob("1-2-a-0", 7)}) == set()
        directory.close()
    assert (folder / "1-2-a-0").read_text() == "planted"
    assert (folder / WEIGHTS / "0.skeleton").exists()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_link_to_a_directory_is_left_alone(root: Path, state: Path, tmp_path: Path, is_link: bool) -> None:
    real = tmp_path / "elsewhere"
    plant(real, state, 0o700, lambda lock: lock.touch(0o600))
    name = root / "tilework-planted"
    name.symlink_to(real) if is_link else real.rename(name)
    directory = StateBlobDirectory(root, state)
    assert (directory.path == name) is not is_link
    assert (real / "1-2-a-0").exists() is is_link or name.exists()
    os.close(directory._lock)


def test_a_directory_that_others_may_write_to_is_left_alone_with_a_warning(
    root: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have put the name of the owner there, and states."""
    folder = root / "tilework-open"
    plant(folder, state, 0o777, lambda lock: lock.touch(0o600))
    directory = StateBlobDirectory(root, state)
    assert directory.path != folder
    directory.close()
    assert (folder / "1-2-a-0").exists()
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]
    assert "0777" in caplog.text


@pytest.mark.parametrize("name", ["lock", "owner"])
@pytest.mark.parametrize("kind", ["a link", "readable for all", "another name"])
def test_a_directory_whose_lock_or_owner_is_not_private_is_left_alone(
    root: Path, state: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder = root / "tilework-odd"
    plant(folder, state, 0o700, lambda lock: lock.touch(0o600))
    file, other = folder / name, tmp_path / "other"
    if kind == "a link":
        file.rename(other)
        file.symlink_to(other)
    elif kind == "another name":
        other.hardlink_to(file)
    else:
        file.chmod(0o644)
    directory = StateBlobDirectory(root, state)
    assert directory.path != folder
    directory.close()
    assert (folder / "1-2-a-0").exists()


def test_what_is_removed_is_in_the_directory_not_behind_a_link(root: Path, state: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    for owner in (state, tmp_path / "gone"):
        folder = root / f"tilework-{owner.name}"
        plant(folder, owner, 0o700, lambda lock: lock.touch(0o600))
        (folder / "groups-x").symlink_to(precious)
    directory = StateBlobDirectory(root, state)
    assert directory.path == root / "tilework-state"
    assert not (root / "tilework-gone").exists()
    directory.inherit(())
    directory.close()
    assert (precious / "file").exists()


def test_what_a_server_and_its_workers_write_is_for_no_other_user(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        directory = StateBlobDirectory(root, state)
        served: list[Path] = []

        def serve(*_: object) -> None:
            blobs = StateBlobs(directory.path, 0)
            served.append(directory.path / blobs.write(SerializedState(b"head", [])).name)
            (directory.path / WEIGHTS).mkdir()

        monkeypatch.setattr("tilework.worker.process.serve", serve)
        entry.run(None, (), None)  # type: ignore[arg-type]
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.path.iterdir()}
    assert modes == {"lock": 0o600, "owner": 0o600, served[0].name: 0o600, WEIGHTS: 0o700}
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
