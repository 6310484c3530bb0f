"""The token of a user: made once, for this user alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilework.cli.console import UserError
from tilework.cli.nodes import token, user_token


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TILEWORK_CLUSTER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tilework" / "cluster-token"


def test_it_is_made_once_and_for_its_user_alone(state: Path) -> None:
    made = user_token()
    assert len(made) == 32
    assert user_token() == made == state.read_bytes()
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in state.parent.iterdir()] == [state.name]


def test_processes_that_make_it_at_once_agree(state: Path) -> None:
    program = "from tilework.cli.nodes import user_token; print(user_token().decode())"
    command = [sys.executable, "-c", program]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({one.communicate()[0] for one in asking}) == 1


def test_it_is_for_the_loopback_and_gives_way_to_what_is_told(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token("0.0.0.0") == b""
    assert token("127.0.0.1") == user_token()
    monkeypatch.setenv("TILEWORK_CLUSTER_TOKEN", "told")
    assert token("127.0.0.1") == b"told"


def test_one_that_others_may_know_is_not_used(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_token()
    state.chmod(0o640)
    with pytest.raises(UserError, match="others may read it; remove it"):
        user_token()
    state.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(UserError, match="of another user"):
        user_token()


def test_a_link_in_its_place_is_not_followed(state: Path, tmp_path: Path) -> None:
    (tmp_path / "else").write_text("known to others")
    state.parent.mkdir()
    state.symlink_to(tmp_path / "else")
    with pytest.raises(UserError, match="set TILEWORK_CLUSTER_TOKEN"):
        user_token()


def test_without_a_place_for_it_a_token_must_be_told(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.parent.write_text("no folder")
    with pytest.raises(UserError, match="set TILEWORK_CLUSTER_TOKEN, the same for server and agents"):
        user_token()
