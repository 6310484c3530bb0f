"""Folders and files that a server keeps: those that another user has, or could change, are refused with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilework.comm.ring.errors import RingError
from tilework.comm.ring.layout import RingLayout
from tilework.comm.ring.node.place import RingPlace
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.ownership.own import NotOwn, make_own_file, make_own_folder
from tilework.store.durable import DurableDirectory
from tilework.store.epochs import JOURNAL
from tilework.store.journal import JournalUnusable

OTHER = 4321


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another user have it, without following links."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)


def test_a_new_folder_and_file_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert make_own_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
        make_own_file(tmp_path / "c" / "file")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a/b", "c", "c/file")]
    assert modes == [0o700, 0o700, 0o600]
    make_own_folder(tmp_path / "a" / "b")
    make_own_file(tmp_path / "c" / "file")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_to_which_others_may_write_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(NotOwn, match=rf"{folder} has mode {mode:04o}.*chmod 700 {folder}$"):
        make_own_folder(folder)
    with pytest.raises(NotOwn, match="other users can write"):
        make_own_file(folder / "file")
    assert not list(folder.iterdir())


def test_a_folder_that_others_may_only_read_is_taken(tmp_path: Path) -> None:
    """As systemd and images make one."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o755)
    assert make_own_folder(tmp_path / "state") == tmp_path / "state"


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    give_to_another(tmp_path / "state", monkeypatch)
    for make in (make_own_folder, lambda path: make_own_file(path / "file")):
        with pytest.raises(NotOwn, match="belongs to user") as refused:
            make(tmp_path / "state")
        assert refused.value.is_anothers


def test_a_link_is_followed_if_it_is_our_own_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "disk")
    assert make_own_folder(tmp_path / "state") == tmp_path / "disk"
    give_to_another(tmp_path / "state", monkeypatch)
    with pytest.raises(NotOwn, match="is a link of user" if os.geteuid() == 0 else "belongs to user|is a link"):
        make_own_folder(tmp_path / "state")


@pytest.mark.parametrize("mode", [0o620, 0o666])
def test_a_file_that_is_a_link_or_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    make_own_file(tmp_path / "own" / "file")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "own" / "file")
    with pytest.raises(NotOwn, match="is a link"):
        make_own_file(tmp_path / "own" / "link")
    (tmp_path / "own" / "file").chmod(mode)
    with pytest.raises(NotOwn, match=rf"mode {mode:04o}.*chmod 600"):
        make_own_file(tmp_path / "own" / "file")


# Those that keep something there.


def test_a_durable_directory_of_others_is_refused_and_stays_empty(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(JournalUnusable, match=rf"durable: {state} has mode 0777.*chmod 700 {state}"):
        DurableDirectory(state)
    assert not list(state.iterdir())
    state.chmod(0o755)
    before = os.umask(0)
    try:
        directory = DurableDirectory(state)
    finally:
        os.umask(before)
    directory.now_ns()
    assert {path.name: path.stat().st_mode & 0o077 for path in state.iterdir()} == {
        "lock": 0,
        "lock.standbys": 0,
        JOURNAL: 0,
        f"{JOURNAL}-wal": 0,
        f"{JOURNAL}-shm": 0,
    }
    directory.close()


@pytest.mark.parametrize("name", ["lock", JOURNAL])
def test_a_durable_directory_follows_no_link_inside(tmp_path: Path, name: str) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        DurableDirectory(tmp_path / "state")
    assert not (tmp_path / "elsewhere").exists()


def test_measured_costs_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / "cache" / "costs.sqlite")
    make_own_file(profiles.path)
    assert profiles.entries() == ()
    profiles.path.chmod(0o666)
    with pytest.raises(ProfilesUnavailable, match=f"mode 0666.*chmod 600 {profiles.path}"):
        profiles.entries()
    profiles.path.chmod(0o600)
    profiles.path.parent.chmod(0o777)
    with pytest.raises(ProfilesUnavailable, match="other users can write there"):
        profiles.entries()


def test_a_ring_that_others_could_have_made_is_not_found(tmp_path: Path) -> None:
    layout = RingLayout(slots=16, units=16)
    place = RingPlace.make(layout, is_atomic=True, is_checked=False, directory=tmp_path / "ring")
    place.close()
    (tmp_path / "ring").chmod(0o777)
    with pytest.raises(RingError, match=r"directory: .* has mode 0777"):
        RingPlace.find(tmp_path / "ring")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty").chmod(0o777)
    with pytest.raises(RingError, match=r"directory: .* has mode 0777"):
        RingPlace.make(RingLayout(slots=16, units=16), is_atomic=True, is_checked=False, directory=tmp_path / "empty")


@pytest.mark.parametrize(("command", "umask"), [("serve", 0o077), ("agent", 0o077), ("simulate", 0o022)])
def test_what_a_server_or_agent_writes_is_for_its_user_alone(command: str, umask: int) -> None:
    program = f"import os, sys, tilework.cli as cli; sys.argv[1:] = [{command!r}]; os.umask(0o022)\n"
    program += "cli.main = lambda: print(os.umask(0))\ncli.start()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == umask
