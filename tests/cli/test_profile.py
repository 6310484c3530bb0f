"""The commands that measure, list, show and export costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cards import card, with_cards
from cli.command_line import invoke
from runtime.fake_measurer import KEY, LARGE, PACKING, SHAPES, SMALL, FakeMeasurer
from stages import DECODE, DIFFUSE, ENCODE, STAGES, stage_of
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.wire.reports import LoadedModel
from tilework.cost.profile import ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import read_table
from tilework.distribution import install_command
from tilework.runtime.models.costs import (
    MAX_BATCH,
    random_batches,
)
from tilework.worker.hardware import describe_hardware

pytestmark = pytest.mark.usefixtures("plain_output")


# The commands.


class FakeExecutor:
    """An executor whose only model is measured by a `FakeMeasurer`."""

    weights_bytes: int | None = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.measurer = FakeMeasurer()
        self.num_stops = 0

    async def start(self, listener: object) -> tuple[LoadedModel, ...]:
        return (LoadedModel(info=self.measurer.info),)

    async def stop(self) -> None:
        self.num_stops += 1

    def profile_key(self, model: str) -> ProfileKey:
        assert model == self.measurer.info.name
        return self.measurer.profile_key

    async def calibrate(self, model: str, *arguments: Any, **others: Any) -> tuple[CostRow, ...]:
        assert model == self.measurer.info.name
        return await self.measurer.calibrate(*arguments, **others)


@pytest.fixture
def measurers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeExecutor]:
    """Every executor that a command makes, without processes. The database is in `tmp_path`."""
    made: list[FakeExecutor] = []

    def make(config: Any) -> FakeExecutor:
        made.append(FakeExecutor(config))
        return made[-1]

    monkeypatch.setattr("tilework.runtime.local_executor.LocalExecutor", make)
    monkeypatch.setattr(
        "tilework.pipelines.model_index.read_model_index", lambda path, adapter, in_files: None
    )  # Models are made up.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWORK_PROFILES", raising=False)
    return made


def test_a_profile_is_printed_kept_and_exported(
    measurers: list[FakeExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilework.pipelines.cuda.look.cuda_state", lambda: with_cards(card(), card(), card(), card()))
    before_ns = time.time_ns()
    result = invoke(
        *("profile", "toy", "--workers", 4, "--degrees", "4,1", "--sizes", "64,160x128,64", "--runs", 7),
        *("--device", "cuda", "--threads", 2, "--out", tmp_path / "toy.json"),
    )
    (measurer,) = measurers
    assert measurer.config.num_workers == 4
    assert measurer.config.sources[0] == ModelSource(path="toy", device="cuda", dtype="bfloat16", threads=2)
    assert measurer.measurer.asked == [((shape,), degree, 7) for shape in (SMALL, Shape(128, 160)) for degree in (1, 4)]
    assert measurer.num_stops == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["diffuse", "64x64", "4", "1.12", "2.02", "3.73", "0.93"] in lines
    assert ["decode", "160x128", "1", "41.1", "42", "1.00", "1.00"] in lines
    (entry,) = Profiles(tmp_path / "cache" / "tilework" / "costs.sqlite").entries()
    assert (entry.origin, entry.key, len(entry.rows)) == (ProfileOrigin.PROFILE, KEY, 8)
    assert {row.num_runs for row in entry.rows} == {7}
    assert before_ns <= entry.created_unix_ns <= time.time_ns()
    exported = read_table(tmp_path / "toy.json")
    named = [replace(row, pipeline="toy") for row in entry.rows]
    assert sorted(exported.rows, key=str) == sorted(named, key=str)
    assert "7 runs" in exported.source
    assert "toy@1" in exported.source


def test_a_profile_without_wishes_takes_the_models_sizes_and_all_its_degrees(
    measurers: list[FakeExecutor], tmp_path: Path
) -> None:
    document = json.loads(invoke("profile", "--workers", 8, "--json", "--profiles", tmp_path / "other.sqlite").stdout)
    (measurer,) = measurers
    assert measurer.measurer.asked == [((shape,), degree, 20) for shape in SHAPES for degree in (1, 2, 4)]
    assert document["model"] == "toy@1"
    assert [document[name] for name in ("hardware", "dtype", "workers")] == ["a CPU", "float32", 2]
    wide = next(row for row in document["rows"] if row["degree"] == 4 and row["size"] == "192x192")
    assert wide["speedup"] == pytest.approx(36.964 / 9.316)
    assert wide["efficiency"] == pytest.approx(36.964 / 9.316 / 4)
    assert len(Profiles(tmp_path / "other.sqlite").entries()) == 1


@pytest.mark.usefixtures("measurers")
def test_a_size_that_does_not_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMeasurer, "too_large", {LARGE})
    result = invoke("profile", "--workers", 1, "--sizes", "64,128")
    assert "128x128 does not run at degree 1 here" in result.stderr
    assert "64x64" not in result.stderr
    monkeypatch.setattr(FakeMeasurer, "too_large", {SMALL, LARGE})
    with pytest.raises(UserError, match="the model ran at none of these sizes"):
        CliRunner().invoke(app, ["profile", "--sizes", "64,128"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--cache", "page"],
            "cache has 'page'; give kinds (patch, image) and thresholds from 0 to 1, as in patch=0.003",
        ),
        (["--cache", "patch=2"], "cache has 'patch=2'; give kinds"),
        (["--cache", "patch", "--prompts", "no/such/file"], "prompts is no/such/file, which cannot be read"),
        (["--cache", "patch"], "cache is given, and toy can have none; leave it out"),
        (["--sizes", "64,big"], "size is 'big'; use WIDTHxHEIGHT, such as 1024x768, or one number for a square"),
        (["--sizes", "64x64x1x1"], "size is '64x64x1x1'; use WIDTHxHEIGHT"),
        (["--sizes", "0x64"], "size is '0x64'; use WIDTHxHEIGHT"),
        (["--sizes", "72"], "size is 72x72; sides of toy are multiples of 16 up to 192"),
        (["--sizes", "208"], "size is 208x208; sides of toy are multiples of 16 up to 192"),
        (["--degrees", "1,3"], "degrees is '1,3'; use whole numbers from 1 to 2, the number of devices"),
        (["--degrees", "0"], "degrees is '0'; use whole numbers"),
        (["--degrees", "1,,2"], "degrees is '1,,2'; use whole numbers"),
        (["--mixed"], "requests of toy of several sizes cannot share a forward pass; leave out --mixed"),
        (["--workers", "8", "--degrees", "8"], "toy runs on at most 4 devices at once, not 8"),
        (["--workers", "3", "--cell", "2"], "cell is 2, which does not divide the 3 devices"),
        (
            ["--workers", "4", "--cell", "2"],
            "cell is 2, and --weights-memory does not say what a device has",
        ),
    ],
)
@pytest.mark.usefixtures("measurers")
def test_an_option_that_cannot_be_met_names_the_remedy(
    mistake: Callable[..., str],
    arguments: list[str],
    said: str,
) -> None:
    assert mistake("profile", *arguments).startswith(said)


@pytest.mark.usefixtures("measurers")
def test_costs_are_listed_shown_and_exported_from_the_database(tmp_path: Path) -> None:
    assert "nothing measured yet" in invoke("cost", "list").stdout
    invoke("profile", "--workers", 2, "--sizes", "64,128")
    (listed,) = json.loads(invoke("cost", "list", "--json").stdout)["measured"]
    assert (listed["model"], listed["origin"], listed["sizes"], listed["degrees"]) == (
        *("toy@1", "profile", ["64x64", "128x128"]),
        [1, 2],
    )
    assert "toy@1" in invoke("cost", "list").stdout
    for arguments in ([], ["--model", "toy"], ["--model", "toy@1"]):
        shown = json.loads(invoke("cost", "show", "--json", *arguments).stdout)
        assert shown["hardware"] == "a CPU"
        assert [(row["stage"], row["size"], row["degree"]) for row in shown["rows"]] == [
            *((ENCODE, size, 1) for size in ("64x64", "128x128")),
            *((DIFFUSE, size, degree) for size in ("64x64", "128x128") for degree in (1, 2)),
            *((DECODE, size, 1) for size in ("64x64", "128x128")),
        ]
    invoke("cost", "export", tmp_path / "out.json", "--model", "toy")
    assert len(read_table(tmp_path / "out.json").rows) == 8
    assert invoke("cost", "show", tmp_path / "out.json", "--json").stdout == invoke("cost", "show", "--json").stdout


@pytest.mark.usefixtures("measurers")
def test_a_size_is_priced_and_said_to_be_measured_or_interpolated() -> None:
    invoke("profile", "--workers", 2, "--sizes", "64,128")
    for size, origin in (("128", "measured"), ("128x128", "measured"), ("96", "interpolated"), ("160", "interpolated")):
        lines = invoke("cost", "show", "--size", size).stdout.splitlines()
        rows = [line.split() for line in lines if line.split()[:1] in [[ENCODE], [DIFFUSE], [DECODE]]]
        assert [(row[0], row[2], row[-1]) for row in rows] == [
            (stage, degree, origin) for stage, degree in ((ENCODE, "1"), (DIFFUSE, "1"), (DIFFUSE, "2"), (DECODE, "1"))
        ]
    (step,) = [
        row
        for row in json.loads(invoke("cost", "show", "--size", "96", "--json").stdout)["rows"]
        if (row["stage"], row["degree"]) == (DIFFUSE, 2)
    ]
    assert step["known"] == "interpolated"
    assert 0.003 < step["seconds"] < 0.0092


@pytest.mark.usefixtures("measurers")
def test_shipped_tables_go_by_name(tmp_path: Path) -> None:
    text = invoke("cost", "show", "flux1dev_h100_eager").stdout
    assert "flux.1-dev on 8xH100-80GB NVLink, eager PyTorch (approximation)" in text
    assert "2048x2048 8 181 6.30 0.79" in " ".join(text.split())
    assert "TetriServe" in text, "the source stands below"
    assert not {"batch", "p99", "peak"} & set(text.split()), "nothing is known of these"
    assert max(map(len, text.splitlines())) <= 100
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"arrival_s": 0, "pipeline": "flux.1-dev", "height": 512, "width": 512, "steps": 20}\n')
    arguments = ("simulate", requests, "--cost", "flux1dev_h100_eager", "--policy", "fixed-sp1", "--json")
    result = json.loads(invoke(*arguments).stdout)["result"]
    assert result["latency_s"]["mean"] == pytest.approx(20 * 0.07, rel=0.01)


@pytest.mark.usefixtures("measurers")
def test_errors_about_tables_are_reported(mistake: Callable[..., str], tmp_path: Path) -> None:
    database = tmp_path / "cache" / "tilework" / "costs.sqlite"
    remedy = f"was measured in {database}; run tilework profile, or name a table: cogvideox15_l20, "
    assert mistake("cost", "show").startswith(f"nothing {remedy}")
    assert mistake("cost", "export", tmp_path / "out.json", "--model", "sd3").startswith(f"nothing of 'sd3' {remedy}")
    assert mistake("cost", "show", "flux1_l20", "--model", "sd3") == "give a table or --model, not both"
    assert mistake("cost", "show", "flux1_l200").startswith("flux1_l200: ")
    assert mistake("cost", "show", "flux1_l20", "--size", "x").startswith("size is 'x'; ")
    assert "is a directory" in mistake("cost", "export", tmp_path, "flux1_l20").lower()
    assert "give another file for the profiles" in mistake("cost", "list", "--profiles", tmp_path)


def test_the_database_path_is_the_option_or_environment_or_user_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(*arguments: object) -> str:
        return str(json.loads(invoke("cost", "list", "--json", *arguments).stdout)["file"])

    monkeypatch.delenv("TILEWORK_PROFILES", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert file() == str(tmp_path / "home" / ".cache" / "tilework" / "costs.sqlite")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert file() == str(tmp_path / "cache" / "tilework" / "costs.sqlite")
    monkeypatch.setenv("TILEWORK_PROFILES", str(tmp_path / "set.sqlite"))
    assert file() == str(tmp_path / "set.sqlite")
    assert file("--profiles", tmp_path / "given.sqlite") == str(tmp_path / "given.sqlite")


# Batches.


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch, measurers: list[FakeExecutor]) -> list[FakeExecutor]:
    """The same executors, of a model whose requests can share a forward pass."""
    monkeypatch.setattr("runtime.fake_measurer.INFO", PACKING)
    return measurers


def test_random_batches_differ_in_their_members_and_are_the_same_again() -> None:
    drawn = random_batches(SHAPES, 200, seed=1)
    assert len({tuple(sorted(batch)) for batch in drawn}) == len(drawn) == 200
    assert drawn[:50] == random_batches(SHAPES, 50, seed=1)
    assert {len(batch) for batch in drawn} == set(range(2, MAX_BATCH + 1))
    assert {shape for batch in drawn for shape in batch} == set(SHAPES)
    assert drawn == random_batches(SHAPES, 200, seed=1) != random_batches(SHAPES, 200, seed=2)
    assert len(random_batches(SHAPES[:1], 200)) == MAX_BATCH - 1
    assert len(random_batches(SHAPES[:2], 200)) == sum(size + 1 for size in range(2, MAX_BATCH + 1))


def test_a_mixed_profile_measures_batches_keeps_them_and_learns_from_all_that_are_known(
    packing: list[FakeExecutor], tmp_path: Path
) -> None:
    given = ("profile", "toy", "--workers", 1, "--mixed", "--json", "--profiles", tmp_path / "costs.sqlite")
    few = json.loads(invoke(*given, "--combinations", 40, "--runs", 9).stdout)
    asked = packing[0].measurer.asked
    assert asked[:3] == [((shape,), 1, 9) for shape in SHAPES]
    assert {num_runs for _, _, num_runs in asked[3:]} == {5}
    batches = [batch for batch, _, _ in asked[3:]]
    assert batches[:6] == [(shape,) * number for shape in SHAPES for number in (2, 4)]
    assert set(batches[6:]) | set(batches[:6]) == set(random_batches(SHAPES, 40)) | set(batches[:6])
    assert few["batch_model"] is None
    assert [row["batch"] for row in few["rows"] if row["stage"] == DIFFUSE and row["size"] == "64x64"][:3] == [1, 2, 4]
    mixed = next(row for row in few["rows"] if isinstance(row["batch"], list))
    assert mixed["size"] == mixed["batch"][-1]
    assert mixed["speedup"] == pytest.approx(1.0, abs=0.5)
    (entry,) = Profiles(tmp_path / "costs.sqlite").entries()
    assert {row.shapes for row in entry.rows if row.batch != 1} == set(batches)
    invoke(*given, "--combinations", 60)
    later = [batch for batch, _, _ in packing[1].measurer.asked]
    assert later[:3] == [(shape,) for shape in SHAPES]
    assert set(later[3:]) == set(random_batches(SHAPES, 60)) - set(batches), "what is known of batches is not repeated"


def test_a_mixed_profile_learns_from_all_batches_that_are_known(packing: list[FakeExecutor], tmp_path: Path) -> None:
    pytest.importorskip("sklearn", exc_type=ImportError)
    given = ("profile", "toy", "--workers", 1, "--mixed", "--profiles", tmp_path / "costs.sqlite")
    first = invoke(*given, "--sizes", "64,128", "--combinations", 80)
    assert "nothing is learned from fewer than 100 mixed batches" in first.stderr
    second = invoke(*given, "--combinations", 90, "--out", tmp_path / "toy.json")
    assert len(packing) == 2
    table = read_table(tmp_path / "toy.json")
    learned = table.batch_models["toy"]
    assert 150 < learned.num_rows <= 80 + 90 + 6
    assert learned.error < 0.05
    assert f"learned from {learned.num_rows} batches" in second.stdout
    assert "mixed batches: one by one / together is 1.0" in second.stdout
    known = Profiles(tmp_path / "costs.sqlite").latest(KEY, "toy")
    assert known is not None
    assert known.batch_models == table.batch_models
    assert f"learned from {learned.num_rows} batches" in invoke("cost", "show", tmp_path / "toy.json").stdout


def test_without_scikit_learn_batches_are_measured_and_nothing_is_learned(
    packing: list[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilework.cli.commands.profile.can_learn", lambda: False)
    result = invoke("profile", "--mixed", "--combinations", 5)
    assert f"without scikit-learn; run: {install_command('learn')}" in " ".join(result.stderr.split())
    assert "mixed batches" in result.stdout
    assert len(packing) == 1


@pytest.mark.usefixtures("packing")
def test_an_interrupted_profile_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calibrate = FakeMeasurer.calibrate

    async def interrupted(self: FakeMeasurer, *arguments: Any) -> tuple[CostRow, ...]:
        if len(self.asked) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()  # For its end.
        return await calibrate(self, *arguments)

    monkeypatch.setattr(FakeMeasurer, "calibrate", interrupted)
    arguments = ["profile", "--workers", "1", "--mixed", "--profiles", str(tmp_path / "costs.sqlite"), "--json"]
    with pytest.raises(UserError, match=r"interrupted: 5 of 20[0-9] are measured, and saved in .*costs.sqlite"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    (entry,) = Profiles(tmp_path / "costs.sqlite").entries()
    assert [row.batch for row in entry.rows if row.stage == DIFFUSE] == [1, 1, 1, 2, 4]


# Live.


@pytest.mark.slow
def test_two_live_workers_profile_the_shipped_model_at_two_degrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    document = json.loads(invoke("profile", "--workers", 2, "--sizes", "64,96x64", "--runs", 3, "--json").stdout)
    rows = {(row["stage"], row["size"], row["degree"]): row for row in document["rows"]}
    assert set(rows) == {(stage, size, 1) for stage in STAGES for size in ("64x64", "96x64")} | {
        (stage, size, 2) for stage in (DIFFUSE, DECODE) for size in ("64x64", "96x64")
    }
    assert all(0 < row["seconds"] <= row["p99_seconds"] < 5 for row in rows.values())
    assert document["model"].startswith("shapes@")
    assert document["hardware"] == describe_hardware(torch.device("cpu"))
    assert document["workers"] == 2
    invoke("cost", "export", tmp_path / "shapes.json", "--model", "shapes")
    table = read_table(tmp_path / "shapes.json")
    assert len(table.rows) == 10
    costs = TableCosts(table)
    assert costs.degrees(stage_of("shapes", DIFFUSE)) == costs.degrees(stage_of("shapes", DECODE)) == (1, 2)


@pytest.mark.slow
def test_a_live_worker_profiles_batches_of_the_shipped_model(tmp_path: Path) -> None:
    given = ("profile", "--workers", 1, "--sizes", "64,96x64", "--runs", 1, "--mixed", "--combinations", 3)
    document = json.loads(invoke(*given, "--json", "--profiles", tmp_path / "costs.sqlite").stdout)
    batches = [row for row in document["rows"] if row["batch"] != 1]
    assert 5 <= sum(row["stage"] == DIFFUSE for row in batches) <= 7
    assert all(row["speedup"] > 0.1 and row["num_runs"] == 1 for row in batches)
    assert all(isinstance(row["batch"], int) for row in batches if row["stage"] == DECODE), "of one size"
    shown = invoke("cost", "show", "--profiles", tmp_path / "costs.sqlite").stdout
    assert f"{sum(isinstance(row['batch'], list) for row in batches)} mixed batches" in shown


# With a cache.


@pytest.mark.slow
def test_steps_with_a_cache_are_measured_beside_those_without(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a large red circle on a blue background\na small black square on an orange background\n")
    invoke(
        *("profile", "--workers", 1, "--degrees", 1, "--sizes", 64, "--runs", 1, "--cache", "patch=0.1,image=0"),
        *("--prompts", prompts, "--profiles", tmp_path / "kept.sqlite", "--out", tmp_path / "costs.json"),
    )
    rows = [row for row in read_table(tmp_path / "costs.json").rows if row.stage == DIFFUSE]
    plain, nothing, much = sorted(rows, key=lambda row: row.skipped if row.cache else -1.0)
    assert plain.cache is None
    assert (str(nothing.cache), nothing.skipped, nothing.skipped_std) == ("image=0.0", 0.0, 0.0)
    assert str(much.cache) == "patch=0.1"
    assert 0.1 < much.skipped < 1
    assert much.skipped_std > 0
    assert much.num_runs == 2
    (entry,) = Profiles(tmp_path / "kept.sqlite").entries()
    assert {replace(row, pipeline="") for row in rows} <= set(entry.rows)
