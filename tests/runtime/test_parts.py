"""Parts of the runtime that need no worker: groups, the directory of blobs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import GroupRef
from tilework.core.work import Group
from tilework.pipelines import serialization
from tilework.runtime import state_blobs
from tilework.runtime.links.groups import GroupTable
from tilework.runtime.state_blobs import StateBlobDirectory
from tilework.worker.state_blobs import StateBlobs

CPU = torch.device("cpu")


groups = st.lists(st.integers(0, 5), min_size=2, max_size=4, unique=True).map(lambda devices: tuple(sorted(devices)))


@given(st.lists(groups, max_size=40), st.integers(1, 4))
def test_members_agree_on_few_groups(uses: list[Group], limit: int) -> None:
    table, held = GroupTable(max_per_worker=limit), dict[int, GroupRef]()
    seen: set[int] = set()
    for devices in uses:
        ref, closed = table.use(devices)
        for old in closed:
            del held[old.group_id]
        assert ref.devices == devices
        assert (ref.group_id in held) == (ref.group_id in seen), "a closed id was used again"
        seen.add(ref.group_id)
        held[ref.group_id] = ref
        assert all(sum(device_id in ref.devices for ref in held.values()) <= limit for device_id in range(6))


def test_groups_in_use_stay_and_broken_ones_get_a_new_id() -> None:
    table = GroupTable(max_per_worker=2)
    first, second = table.use((0, 1))[0], table.use((0, 2))[0]
    assert table.use((0, 1)) == (first, [])
    assert table.use((0, 3))[1] == [second], "not the least recently used"
    assert table.forget_device(1) == [first]
    assert table.use((0, 1))[0].group_id > first.group_id
    again = table.use((0, 1))[0]
    assert table.forget(again)
    assert not table.forget(again)


def test_blobs_carry_tensors_of_any_kind(tmp_path: Path) -> None:
    contents = {
        "large": torch.randn(3, 5000),
        "half": torch.randn(7, 3).bfloat16(),
        "view": torch.randn(100, 100).t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(5),
        "plain": [1, "two", (3.0, None)],
    }
    blob = StateBlobs(tmp_path, 0).write(serialization.serialize(contents))
    assert blob.num_bytes == (tmp_path / blob.name).stat().st_size
    taken = serialization.deserialize(StateBlobs(tmp_path, 1).read(blob), CPU)
    assert taken["plain"] == contents["plain"]
    for name in ("large", "half", "view", "empty", "scalar"):
        assert taken[name].dtype == contents[name].dtype  # type: ignore[union-attr]
        assert torch.equal(taken[name], contents[name]), name  # type: ignore[arg-type]
        assert taken[name].numel() == 0 or taken[name].data_ptr() % 64 == 0, f"{name} lies unaligned"
    taken["small"] = taken["scalar"].add_(1)  # What is taken may be written to.


def test_a_worker_waits_for_room_and_leaves_no_rests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shared memory that is full until others' requests have ended, or for good."""
    write, refusals = os.write, [3]

    def full(descriptor: int, piece: memoryview) -> int:
        if refusals[0] and len(piece) > 1000:
            refusals[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, piece)

    monkeypatch.setattr(os, "write", full)
    contents = {"large": torch.randn(3, 5000)}
    blob = StateBlobs(tmp_path, 0).write(serialization.serialize(contents))
    assert torch.equal(serialization.deserialize(StateBlobs(tmp_path, 1).read(blob), CPU)["large"], contents["large"])
    refusals[0] = 1_000_000
    with pytest.raises(OSError, match="No space left"):
        StateBlobs(tmp_path, 0, patience_s=0.1).write(serialization.serialize(contents))
    assert [path.name for path in tmp_path.iterdir()] == [blob.name]


def test_blobs_lie_in_shared_memory_unless_it_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state_blobs.tempfile, "tempdir", str(tmp_path))
    for free, root in ((64 << 20, tmp_path), (2 << 30, Path("/dev/shm"))):
        usage = SimpleNamespace(total=free, used=0, free=free)
        monkeypatch.setattr(state_blobs.shutil, "disk_usage", lambda path, usage=usage: usage)
        directory = StateBlobDirectory()
        assert directory.path.parent == root
        directory.close()


def test_unreported_blobs_of_a_lost_worker_are_removed(tmp_path: Path) -> None:
    directory = StateBlobDirectory(tmp_path)
    for name in ("1-77-0", "1-77-1", ".1-77-2", "2-77-0", "11-77-0", "1-770-0"):
        (directory.path / name).touch()
    directory.add(StateBlob("1-77-0", 0))
    directory.sweep(1, 77)
    left = {path.name for path in directory.path.iterdir()} - {"lock"}
    assert left == {"1-77-0", "2-77-0", "11-77-0", "1-770-0"}
    directory.close()


def test_a_killed_process_leaves_no_blobs_behind(tmp_path: Path) -> None:
    code = "import signal, sys; from pathlib import Path; from tilework.runtime.state_blobs import StateBlobDirectory\n"
    code += "print(StateBlobDirectory(Path(sys.argv[1])).path, flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    ours = StateBlobDirectory(tmp_path)
    assert theirs.is_dir(), "a directory in use was removed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    StateBlobDirectory(tmp_path).close()
    assert not theirs.exists()
    assert ours.path.is_dir()
    ours.close()
    assert not list(tmp_path.iterdir())
