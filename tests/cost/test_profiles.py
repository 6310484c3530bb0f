"""The profile database: saving and reading, several processes at once, and unusable files."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, PROFILE_KEY
from stages import DECODE, DIFFUSE, ENCODE, STAGES
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.request import Shape
from tilework.cost import profiles as profiles_module
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles, ProfilesUnavailable
from tilework.cost.rows import merge_rows, missing_batches
from tilework.cost.table import CostTable

GRAPH = latent_diffusion(PIPELINE)
KEY = PROFILE_KEY


def row(seconds: float, side: int = 64, **changes: Any) -> CostRow:
    given = {"pipeline": PIPELINE, "stage": DIFFUSE, "height": side, "width": side} | changes
    return CostRow(**given, seconds=seconds)


def profile(
    *rows: CostRow, key: ProfileKey = KEY, origin: ProfileOrigin = ProfileOrigin.CALIBRATION, at: int = 0
) -> Profile:
    return Profile(key=key, origin=origin, rows=rows, tilework="0", created_unix_ns=at)


@pytest.fixture
def store(tmp_path: Path) -> Profiles:
    return Profiles(tmp_path / "cache" / "costs.sqlite")


def seconds(table: CostTable | None) -> dict[tuple[str, int, int], float]:
    assert table is not None
    return {(one.stage, one.height, one.degree): one.seconds for one in table.rows}


def sqlite(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def asides(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir() if ".aside-" in other.name)


# Saving and reading.


def test_a_saved_profile_is_read_back_unchanged(store: Profiles) -> None:
    assert store.latest(KEY, PIPELINE) is None
    assert store.entries() == ()
    assert not store.path.parent.exists(), "reading creates no file"
    sizes = {"peak_bytes": 1 << 40, "activation_bytes": 1 << 39, "state_bytes": 1 << 20}
    full = row(0.5, frames=5, degree=2, batch=3, link="pcie", p99_seconds=0.6, num_runs=20, **sizes)
    mixed = CostRow.of((Shape(64, 64), Shape(64, 96, 5)), pipeline=PIPELINE, stage=DIFFUSE, seconds=0.75)
    saved = profile(full, mixed, row(0.25), origin=ProfileOrigin.PROFILE, at=1_700_000_000_123_456_789)
    store.save(saved)
    again = Profiles(store.path)
    nameless = tuple(replace(one, pipeline="") for one in saved.rows)
    assert again.entries() == (replace(saved, rows=nameless),)
    table = again.latest(KEY, PIPELINE)
    assert table is not None
    assert table.rows == saved.rows
    assert table.hardware == "a CPU"
    assert all(word in table.source for word in ("toy@1", "float32", "2 x 1 threads", "torch 2"))


@pytest.mark.parametrize("field", [field.name for field in fields(ProfileKey) if field.name != "model"])
def test_a_profile_of_another_key_is_not_found(store: Profiles, field: str) -> None:
    old: Any = getattr(KEY, field)
    other = replace(KEY, **{field: old + 1 if isinstance(old, int) else f"other {old}"})
    store.save(profile(row(1.0), key=other))
    assert store.latest(KEY, PIPELINE) is None
    assert store.latest(other, PIPELINE) is not None


def test_the_newest_row_of_each_key_counts_in_any_order_of_saving(store: Profiles) -> None:
    store.save(profile(row(2.0), row(2.5, degree=2), at=20))
    store.save(profile(row(1.0), row(1.5, side=128), at=10))
    store.save(profile(row(3.0, stage=DECODE), at=30))
    assert seconds(store.latest(KEY, PIPELINE)) == {
        (DIFFUSE, 64, 1): 2.0,
        (DIFFUSE, 64, 2): 2.5,
        (DIFFUSE, 128, 1): 1.5,
        (DECODE, 64, 1): 3.0,
    }
    assert [entry.created_unix_ns for entry in store.entries()] == [10, 20, 30]


def test_a_profile_precedes_a_later_calibration_which_fills_its_gaps(store: Profiles) -> None:
    store.save(profile(row(1.0), origin=ProfileOrigin.PROFILE, at=10))
    store.save(profile(row(9.0), row(2.0, side=128), at=20))
    assert seconds(store.latest(KEY, PIPELINE)) == {(DIFFUSE, 64, 1): 1.0, (DIFFUSE, 128, 1): 2.0}
    store.save(profile(row(1.5), origin=ProfileOrigin.PROFILE, at=30))
    assert seconds(store.latest(KEY, PIPELINE))[DIFFUSE, 64, 1] == 1.5


# Several processes at once.

WRITER = """
import sys
from pathlib import Path
from tilework.core.cost_row import CostRow
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
store, name = Profiles(Path(sys.argv[1])), sys.argv[2]
key = ProfileKey(hardware=name, architecture="a", model="m", dtype="d", threads=1, workers=1, libraries="l")
for at in range(10):
    rows = tuple(CostRow(pipeline="p", stage="diffuse", height=8, width=w, seconds=1.0) for w in range(1, 31))
    store.save(Profile(key=key, origin=ProfileOrigin.CALIBRATION, rows=rows, tilework="0", created_unix_ns=at))
    assert len(store.latest(key, "p").rows) == 30
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_use_it_at_once_lose_nothing(store: Profiles, damaged: bool) -> None:
    """Also if the file has to be created, or a damaged file moved away."""
    if damaged:
        store.path.parent.mkdir()
        store.path.write_bytes(b"nonsense" * 1000)
    names = [f"writer {index}" for index in range(4)]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, store.path, name], stderr=-1) for name in names]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors.decode()
    entries = store.entries()
    assert {name: sum(entry.key.hardware == name for entry in entries) for name in names} == dict.fromkeys(names, 10)
    assert all(len(entry.rows) == 30 for entry in entries)
    assert len(asides(store.path)) == (1 if damaged else 0)


def test_a_file_that_another_process_has_replaced_meanwhile_stays(store: Profiles) -> None:
    class Slow(Profiles):
        """Finds the file damaged, but another process replaces it first."""

        def _move_aside(self, *arguments: Any) -> None:
            store.save(profile(row(1.0)))
            super()._move_aside(*arguments)

    store.path.parent.mkdir()
    store.path.write_bytes(b"nonsense" * 1000)
    Slow(store.path).save(profile(row(2.0), at=1))
    assert [entry.created_unix_ns for entry in store.entries()] == [0, 1]
    assert asides(store.path) == ["costs.sqlite.aside-1"]


def test_a_call_waits_for_its_turn_and_then_says_why_it_cannot(
    store: Profiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(profile(row(1.0)))
    monkeypatch.setattr(profiles_module, "_BUSY_S", 0.05)
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ProfilesUnavailable, match=r"costs\.sqlite: database is locked; give another file"):
            store.save(profile(row(2.0), at=1))
        other.execute("ROLLBACK")
    assert len(store.entries()) == 1


def test_a_save_that_fails_half_way_leaves_nothing(store: Profiles) -> None:
    store.save(profile(row(1.0)))
    broken = profile(row(2.0), row(None), at=1)  # type: ignore[arg-type]
    with pytest.raises(ProfilesUnavailable, match="NOT NULL"):
        store.save(broken)
    assert [entry.created_unix_ns for entry in store.entries()] == [0]


# Unusable files.


@pytest.mark.parametrize("content", [b"nonsense" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_file_is_moved_aside_with_a_warning(
    store: Profiles, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.path.parent.mkdir()
    for number in (1, 2):
        store.path.write_bytes(content)
        with caplog.at_level(logging.WARNING, "tilework"):
            store.save(profile(row(1.0)))
        assert len(store.entries()) == 1
        aside = store.path.with_name(f"costs.sqlite.aside-{number}")
        assert aside.read_bytes() == content
        assert f"moved to {aside}" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2


def test_what_was_measured_is_valid_for_all_models_of_the_architecture(store: Profiles) -> None:
    store.save(profile(row(1.0)))
    assert seconds(store.latest(replace(KEY, model="tuned@2"), PIPELINE)) == {(DIFFUSE, 64, 1): 1.0}
    store.save(profile(row(2.0), key=replace(KEY, model="tuned@2")))
    assert seconds(store.latest(KEY, PIPELINE)) == {(DIFFUSE, 64, 1): 2.0}, "the newest one counts"


def test_what_was_measured_is_found_under_any_name(store: Profiles) -> None:
    """An operator may give a model another name, and that name to another model."""
    store.save(profile(row(1.0, pipeline="before")))
    store.save(profile(row(2.0, 128, pipeline="since")))
    table = store.latest(KEY, "now")
    assert table is not None
    assert {(one.pipeline, one.height): one.seconds for one in table.rows} == {("now", 64): 1.0, ("now", 128): 2.0}
    assert set(table.sources) == {"now"}


WITHOUT_ARCHITECTURES = "ALTER TABLE profiles DROP COLUMN architecture"
WITH_NAMES = "ALTER TABLE rows ADD COLUMN pipeline TEXT NOT NULL DEFAULT 'before'"


@pytest.mark.parametrize(
    ("schema", "changes"),
    [(6, (WITHOUT_ARCHITECTURES, WITH_NAMES)), (7, (WITHOUT_ARCHITECTURES,))],
    ids=["with names of models", "without architectures"],
)
def test_what_an_earlier_version_has_measured_is_valid_for_its_model(
    store: Profiles, schema: int, changes: tuple[str, ...]
) -> None:
    store.save(profile(row(1.5)))
    sqlite(store.path, *changes, f"PRAGMA user_version = {schema}")
    assert store.latest(replace(KEY, model="tuned@2"), PIPELINE) is None, "its architecture was not known"
    assert store.latest(replace(KEY, libraries="torch 3"), PIPELINE) is None
    assert seconds(store.latest(KEY, PIPELINE)) == {(DIFFUSE, 64, 1): 1.5}
    store.save(profile(row(2.0)))
    assert seconds(store.latest(KEY, PIPELINE)) == {(DIFFUSE, 64, 1): 2.0}
    assert asides(store.path) == []


@pytest.mark.parametrize("schema", [2, 9])
def test_a_file_of_another_schema_is_moved_aside(
    store: Profiles, schema: int, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(profile(row(1.0)))
    sqlite(store.path, f"PRAGMA user_version = {schema}")
    assert store.latest(KEY, PIPELINE) is None
    assert asides(store.path) == ["costs.sqlite.aside-1"]
    assert f"its schema is {schema}, and this version reads 8" in caplog.text


def test_another_programs_database_is_left_alone(store: Profiles) -> None:
    store.path.parent.mkdir()
    sqlite(store.path, "CREATE TABLE letters (text TEXT)")
    before = store.path.read_bytes()
    for use in (lambda: store.save(profile(row(1.0))), store.entries, lambda: store.latest(KEY, PIPELINE)):
        with pytest.raises(ProfilesUnavailable, match="this is another program's database; give another file"):
            use()
    assert store.path.read_bytes() == before
    assert asides(store.path) == []


@pytest.mark.parametrize("place", ["file/costs.sqlite", "directory"])
def test_a_path_where_no_file_can_be_created_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(ProfilesUnavailable, match=f"^{tmp_path / place}: .*; give another file for the profiles$"):
        Profiles(tmp_path / place).save(profile(row(1.0)))


# Rows.


def test_the_rows_of_several_groups_become_one_row_per_key() -> None:
    merged = merge_rows(
        (
            row(1.0, p99_seconds=4.0, peak_bytes=10, activation_bytes=4, num_runs=5),
            row(7.0, degree=2),
            row(2.0, p99_seconds=3.0, peak_bytes=30, activation_bytes=3, num_runs=3),
            row(3.0),
        )
    )
    assert merged == (row(2.0, p99_seconds=4.0, peak_bytes=30, activation_bytes=4, num_runs=3), row(7.0, degree=2))


def test_merging_keeps_the_p99_at_or_above_the_median() -> None:
    for members in range(1, 30):
        (merged,) = merge_rows([row(0.1, p99_seconds=0.1)] * members)
        assert merged.p99_seconds is not None
        assert merged.p99_seconds >= merged.seconds


def test_missing_batches_lack_a_row_for_some_stage_at_that_degree() -> None:
    shapes = tuple((Shape(*sides),) for sides in ((64, 64), (64, 128), (128, 64)))
    known = [row(1.0, stage=stage, width=width) for stage in STAGES for width in (64, 128)]
    known += [row(1.0, degree=2), row(1.0, degree=2, stage=ENCODE, height=128)]
    assert missing_batches(known, GRAPH, shapes, 1) == shapes[2:]
    assert missing_batches(known[1:], GRAPH, shapes, 1) == (shapes[0], shapes[2])
    assert missing_batches(known, GRAPH, shapes, 2) == shapes[1:], "decode is not needed at degree 2"
    assert missing_batches(known, GRAPH, shapes, 4) == shapes
    predicted = [replace(one, num_runs=0) for one in known]
    assert missing_batches(predicted, GRAPH, shapes, 1) == shapes
    assert missing_batches(known, latent_diffusion("other"), shapes, 1) == shapes
    twos = [row(1.0, stage=stage, batch=2) for stage in STAGES]
    assert missing_batches(twos, GRAPH, shapes[:1], 1) == shapes[:1]
    assert missing_batches(twos[1:], GRAPH, (shapes[0] * 2, shapes[0] * 3), 1) == (shapes[0] * 3,), "steps only"


def test_missing_batches_follow_the_graph() -> None:
    """Several together are measured for what is batchable, groups for what they may share."""
    one = (Shape(64, 64),)
    graph = Graph(
        PIPELINE,
        (
            StageSpec(name="read", outputs=("words",), batchable=True),
            StageSpec(name="draft", inputs=("words",), outputs=("sketch",), steps=StepShare(last=0.5), degrees=None),
            StageSpec(name="paint", inputs=("sketch",), outputs=("a",), steps=StepShare(first=0.5), degrees=(1, 2)),
        ),
    )
    alone = [row(1.0, stage=name) for name in ("read", "draft", "paint")]
    assert missing_batches(alone, graph, (one, one * 2), 1) == (one * 2,)
    assert missing_batches([*alone, row(1.0, stage="read", batch=2)], graph, (one, one * 2), 1) == ()
    assert missing_batches(alone[:2], graph, (one,), 1) == (one,)
    twos = [row(1.0, stage=name, degree=2) for name in ("draft", "paint")]
    assert missing_batches(twos, graph, (one,), 2) == ()
    assert missing_batches(twos[:1], graph, (one,), 2) == (one,)
