"""Event logs in segments: when one ends, what is deleted, and what is read of the rest."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import poisson
from recorded import recorded
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog, LogEntry, header_line, read_log, replay
from tilework.control.log_state import LogState
from tilework.runtime.event_log.log_file import LogFile
from tilework.runtime.event_log.segmented_file import DAY_NS, LogBounds, SegmentedFile
from tilework.runtime.event_log.segments import closed_paths, lines_of, newest_log, segments_of


@cache
def whole() -> tuple[str, ...]:
    return tuple(recorded(poisson(60, rate_per_s=4.0, seed=1)).lines)


def never() -> None:
    raise AssertionError("the log was lost")


def write(path: Path, bounds: LogBounds, clock: Callable[[], int] | None = None) -> list[LogEntry]:
    """Write a recorded log to a file in segments; returns its entries."""
    header, found = read_log(whole())
    entries = list(found)
    file = SegmentedFile(path, bounds) if clock is None else SegmentedFile(path, bounds, unix_ns=clock)
    log = LogFile(file, never)

    def header_of(segment: int, state: LogState | None) -> str:
        return header_line(header.version, header.config, header.table, segment, state)

    log.begin(header_of)
    for entry in entries:
        log.add(entry.event, entry.actions, entry.now_ns)
    file.close()
    return entries


SMALL = LogBounds(segment_bytes=8_000)


def test_segments_together_are_the_log(tmp_path: Path) -> None:
    log = tmp_path / "events-3.jsonl"
    entries = write(log, SMALL)
    paths = segments_of(log)
    assert len(paths) > 3
    assert [path.name for path in paths[:2]] == ["events-3.000001.jsonl.gz", "events-3.000002.jsonl.gz"]
    assert paths[-1] == log
    assert segments_of(tmp_path) == paths
    assert replay(lines_of(paths)) == (len(entries), None)
    _, read = read_log(lines_of(paths))
    assert [entry.text for entry in read] == list(map(str.rstrip, whole()[1:]))
    assert read_history(lines_of(paths)) == read_history(whole())


def test_a_closed_segment_can_be_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", SMALL)
    for number, path in enumerate(closed_paths(tmp_path / "events.jsonl"), 1):
        assert segments_of(path) == [path]
        header, entries = read_log(lines_of([path]))
        assert header.segment == number
        assert list(entries)


def test_what_is_left_is_explained_and_not_replayed(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    write(log, SMALL)
    paths = segments_of(log)
    paths[0].unlink()
    left, warnings = segments_of(log), list[str]()
    assert left == paths[1:]
    history, before = read_history(lines_of(left), warnings.append), read_history(whole())
    assert warnings == ["the log begins with segment 2: what happened before is not known"]
    ends = {one.request.uid: (one.status, one.finish_ns, one.eta_ns, one.job_id) for one in before.requests}
    found = {one.request.uid: (one.status, one.finish_ns, one.eta_ns, one.job_id) for one in history.requests}
    assert found.items() <= ends.items()
    assert {one.request.uid for one in before.requests if one.finish_ns is not None} > found.keys()
    assert set(history.works) < set(before.works)
    assert history.num_devices == before.num_devices
    with pytest.raises(BadLog, match="the log begins with segment 2: earlier segments are gone"):
        replay(lines_of(left))
    paths[2].unlink()
    with pytest.raises(BadLog, match="begins segment 4, after segment 2; those between are missing"):
        read_history(lines_of(segments_of(log)))


def test_a_segment_ends_by_its_age(tmp_path: Path) -> None:
    times_ns = iter(range(0, 10**6 * DAY_NS, DAY_NS // 100))
    write(tmp_path / "events.jsonl", LogBounds(), lambda: next(times_ns))
    assert 2 < len(segments_of(tmp_path)) < len(whole()) // 10


def test_the_oldest_files_are_deleted_by_size(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    write(log, SMALL)
    all_bytes = sum(path.stat().st_size for path in closed_paths(log))
    all_names = [path.name for path in closed_paths(log)]
    write(log, LogBounds(segment_bytes=8_000, kept_bytes=8_000 + all_bytes // 2))
    left = closed_paths(log)
    assert [path.name for path in left] == all_names[-len(left) :]
    assert 0 < sum(path.stat().st_size for path in left) <= all_bytes // 2


def test_old_files_of_earlier_starts_are_deleted_and_no_others(tmp_path: Path) -> None:
    now_ns = 100 * DAY_NS
    for name, days in {"events-1.jsonl": 9, "events-2.000001.jsonl.gz": 8, "events-2.jsonl": 6, "results": 50}.items():
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, ns=(now_ns - days * DAY_NS,) * 2)
    file = SegmentedFile(tmp_path / "events-3.jsonl", LogBounds(), family="events-*.jsonl*", unix_ns=lambda: now_ns)
    file.write("a line")
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-2.jsonl", "events-3.jsonl", "results"]


def test_the_log_of_an_earlier_start_is_kept_with_its_segments_and_bounded_with_the_others(tmp_path: Path) -> None:
    log, earlier = tmp_path / "events.jsonl", tmp_path / "events-start1.jsonl"
    write(log, SMALL)
    names = {path.name for path in segments_of(log)}
    write(log, LogBounds())
    assert segments_of(log) == [log]
    assert {path.name.replace("-start1", "") for path in segments_of(earlier)} == names
    for one in (log, earlier):
        assert replay(lines_of(segments_of(one)))[1] is None
    write(log, LogBounds(kept_bytes=0))
    assert list(tmp_path.iterdir()) == [log]


def test_a_move_of_an_earlier_log_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "events.jsonl"
    write(log, SMALL)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == log:
            raise OSError("in between")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    file = SegmentedFile(log, SMALL)
    with pytest.raises(OSError, match="in between"):
        file.write("a line")
    file.close()
    monkeypatch.undo()
    write(log, LogBounds())
    assert replay(lines_of(segments_of(tmp_path / "events-start1.jsonl")))[1] is None


def test_a_file_that_is_no_log_stays(tmp_path: Path) -> None:
    """Such as a database, or notes; and what has nearly the name of an earlier log."""
    notes, pipe, loop = tmp_path / "notes.txt", tmp_path / "pipe", tmp_path / "loop"
    notes.write_text("what I wrote")
    with pytest.raises(OSError, match="is no event log; give another name"):
        SegmentedFile(notes, LogBounds())
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path in (pipe, loop, tmp_path):
        with pytest.raises(OSError):  # noqa: PT011
            SegmentedFile(path, LogBounds())
    beside, cut_short = tmp_path / "events-start1.jsonl.bak", tmp_path / "events.000007.jsonl.gz.part"
    beside.write_text("a copy")
    cut_short.touch()
    write(tmp_path / "events.jsonl", LogBounds(kept_bytes=0))
    assert (notes.read_text(), beside.read_text()) == ("what I wrote", "a copy")
    assert not cut_short.exists(), "the server was killed while it compressed a segment"


def test_a_start_that_fails_leaves_the_log_of_the_server_that_runs(tmp_path: Path) -> None:
    """The same command twice: the second start finds the file in use, or fails before its log has a line."""
    log = tmp_path / "events.jsonl"
    header, *lines = whole()
    running = SegmentedFile(log, LogBounds())
    running.write(header + "\n")
    for _ in range(2):
        with pytest.raises(OSError, match="a running server writes its event log there"):
            SegmentedFile(log, LogBounds())
    running.write("".join(f"{line}\n" for line in lines))
    running.begin_segment()
    with pytest.raises(OSError, match="a running server writes its event log there"):
        SegmentedFile(log, LogBounds())
    running.close()
    for path in (log, tmp_path / "other.jsonl"):
        SegmentedFile(path, LogBounds()).close()  # It starts, and fails then.
    assert {*tmp_path.iterdir()} == {log, *closed_paths(log)}
    assert list(map(str.rstrip, lines_of(segments_of(log)))) == [header, *lines]


@pytest.mark.parametrize("name", ["events", ".hidden", "run[1].jsonl", "a.b.jsonl"])
def test_a_log_may_have_any_name(name: str, tmp_path: Path) -> None:
    log, other = tmp_path / name, tmp_path / f"{name}.2"
    other.write_text("of somebody else")
    entries = write(log, SMALL)
    write(log, LogBounds())
    (earlier,) = (one for one in tmp_path.iterdir() if "-start1" in one.name and one.name.count(".") == name.count("."))
    for one in (log, earlier):
        assert replay(lines_of(segments_of(one))) == (len(entries), None)
    write(log, LogBounds(kept_bytes=0))
    assert {*tmp_path.iterdir()} == {log, other}


def test_a_link_is_followed_and_a_device_stays(tmp_path: Path) -> None:
    """A device that is renamed is gone for all."""
    link, device = tmp_path / "events.jsonl", tmp_path / "device"
    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk" / "events.jsonl")
    for _ in range(2):
        write(link, SMALL)
    assert replay(lines_of(segments_of(link)))[1] is None
    assert len(closed_paths(tmp_path / "disk" / "events.jsonl")) > 3
    device.symlink_to("/dev/null")
    write(device, SMALL)
    assert device.is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "disk", "device"}


def test_the_newest_log_of_a_directory_is_found_by_its_number(tmp_path: Path) -> None:
    for name in ("events-9.jsonl", "events-10.jsonl", "events-11.000001.jsonl.gz"):
        (tmp_path / name).write_text("")
    assert newest_log(tmp_path).name == "events-10.jsonl"
    with pytest.raises(FileNotFoundError):
        newest_log(tmp_path.parent / "missing")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a log in segments."""
    directory = tmp_path_factory.mktemp("written")
    write(directory / "events.jsonl", SMALL)
    return directory


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_log_that_was_killed_anywhere_is_readable(written: Path, data: st.DataObject) -> None:
    """The newest segment is cut at any byte; and the closed one before it may not be compressed yet."""
    with TemporaryDirectory() as folder:
        log = Path(shutil.copytree(written, folder, dirs_exist_ok=True)) / "events.jsonl"
        content = log.read_bytes()
        log.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        if data.draw(st.booleans()):
            packed = closed_paths(log)[-1]
            text = gzip.decompress(packed.read_bytes())
            packed.with_suffix("").write_bytes(text)
            packed.write_bytes(packed.read_bytes()[: data.draw(st.integers(0, 100))])
        warnings: list[str] = []
        num_equal, difference = replay(lines_of(segments_of(log)), warnings.append)
        assert difference is None
        _, entries = read_log(lines_of(segments_of(log)))
        assert [one.text for one in entries] == list(map(str.rstrip, whole()[1 : num_equal + 1]))
        assert len(warnings) <= 1
        read_history(lines_of(segments_of(log)))
