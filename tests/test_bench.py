"""The bench's own command line, and the models of its cases for GPUs: what fails or is cut off costs nothing else."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from suite import application
from suite.case import CaseFailed, Check, Finding, Note
from suite.gpu import exactness, fits, live, models, start
from suite.stats import exact
from typer.testing import CliRunner


@dataclass(frozen=True)
class Good:
    @classmethod
    def make(cls, quick: bool) -> Good:
        return cls()

    def measure(self, note: Note) -> Finding:
        return Finding(checks=(Check(what="a number of [/dev/nvidia0]", measured=exact(1.0), high=2.0),), method=())


@dataclass(frozen=True)
class Unable(Good):
    def measure(self, note: Note) -> Finding:
        raise CaseFailed("there is one card [/dev/nvidia0]")


@dataclass(frozen=True)
class Broken(Good):
    def measure(self, note: Note) -> Finding:
        note("at [/dev/nvidia0]")
        raise RuntimeError("CUDA error [/dev/nvidia0]")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_ended_leaves_by_way_of_its_cases(tmp_path: Path) -> None:
    """So that they stop what they have started."""
    left = list[str]()

    @dataclass(frozen=True)
    class Ended(Good):
        def measure(self, note: Note) -> Finding:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                left.append("stopped")
            raise AssertionError("it went on")

    app = application.application({"ended": ("ended", Ended), "next": ("next", Good)}, "x.py", "", "")
    assert CliRunner().invoke(app, []).exit_code == 128 + signal.SIGTERM
    assert left == ["stopped"]


def test_a_case_that_fails_does_not_keep_others_from_being_measured_and_written(tmp_path: Path) -> None:
    kinds = {"unable": Unable, "first": Good, "broken": Broken, "last": Good}
    app = application.application({name: (name, kind) for name, kind in kinds.items()}, "x.py", "", "")
    done = CliRunner().invoke(app, ["--write", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert sorted(path.name.partition("_")[0] for path in tmp_path.iterdir()) == ["first", "last"]
    assert CliRunner().invoke(app, ["first"]).exit_code == 0


class TestFolder:
    """Of a model of real size, which takes a minute to write."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(models, "FOLDER", tmp_path / "models")
        return tmp_path / "models"

    def test_it_is_written_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = list[list[str]]()

        def fake(arguments: list[str]) -> dict[str, str]:
            asked.append(arguments)
            Path(arguments[2]).mkdir()
            (Path(arguments[2]) / "model_index.json").write_text(json.dumps({}))
            return {}

        monkeypatch.setattr(models, "tilework_json", fake)
        (folder / "SDXL.part" / "unet").mkdir(parents=True)  # Of a run that was killed.
        (folder / "profiles").mkdir()
        for _ in range(2):
            assert models.folder_of("SDXL", lambda text: None) == str(folder / "SDXL")
        assert sorted(path.name for path in folder.rglob("*")) == ["SDXL", "model_index.json", "profiles"]
        assert len(asked) == 1

    def test_it_takes_the_place_of_another_model(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fake(arguments: list[str]) -> None:
            assert not (folder / "SDXL").exists(), "memory is short while the next is written"
            Path(arguments[2]).mkdir()

        (folder / "SDXL").mkdir(parents=True)
        (folder / "SDXL" / "model_index.json").write_text("{}")
        (folder / "profiles").mkdir()
        monkeypatch.setattr(models, "tilework_json", fake)
        models.folder_of("FLUX.1-dev", lambda text: None)
        assert sorted(path.name for path in folder.iterdir()) == ["FLUX.1-dev", "profiles"]

    def test_what_could_not_be_written_is_removed_and_the_room_is_named(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fake(arguments: list[str]) -> None:
            Path(arguments[2]).mkdir()
            raise CaseFailed("tilework fake ended with exit code 1")

        monkeypatch.setattr(models, "tilework_json", fake)
        with pytest.raises(CaseFailed, match=r"GB left.*BENCH_MODELS"):
            models.folder_of("SDXL", lambda text: None)
        assert not list(folder.iterdir())

    def test_the_shipped_model_needs_none(self, folder: Path) -> None:
        assert models.folder_of("shapes", lambda text: None) == "shapes"
        assert not folder.exists()


def test_tests_for_gpus_are_found_by_their_mark_and_told_apart_by_their_ends() -> None:
    files = {path.name for path in exactness.files_with_gpu_tests()}
    assert {"test_gpu.py", "test_gpu_setup.py", "test_comm.py", "test_stitcher.py"} <= files
    report = """<testsuites><testsuite>
        <testcase classname="a" name="one"/>
        <testcase classname="a" name="two"><failure message="assert 1 == 2">lines</failure></testcase>
        <testcase classname="b" name="three"><skipped message="needs a CUDA device"/></testcase>
        <testcase classname="b" name="four"><error message="CUDA error"/></testcase>
    </testsuite></testsuites>"""
    assert exactness._results(ElementTree.fromstring(report)) == [
        ("a", "passed", "one"),
        ("a", "failed", "two"),
        ("b", "skipped", "needs a CUDA device"),
        ("b", "failed", "four"),
    ]


def test_a_setup_that_cannot_be_costs_no_other_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fits.Fits(device="cpu", dtype="float32", drawn=models.TOY, setups=({}, {"a": 1}, {"b": 2}, {"c": 3}))
    run = fits._Run(planned_weights=1, planned_step=1, planned_decode=1, planned_all=1, weights_bytes=1, steps_s=[1.0])

    def of_setup(self: fits.Fits, setup: fits.Setup, note: Note) -> fits._Run:
        if setup == {"a": 1}:
            raise CaseFailed("the library is not installed")
        if setup == {"b": 2}:
            raise RuntimeError("CUDA out of memory\nand more")
        return run

    monkeypatch.setattr(fits.Fits, "_run", of_setup)
    found = case.measure(lambda text: None)
    assert [row[:2] for row in found.tables[0].rows[1:3]] == [
        ("a 1", "the library is not installed"),
        ("b 2", "RuntimeError: CUDA out of memory"),
    ]
    assert found.tables[0].rows[3][-1] == "1.000 (1.00)"
    assert [check.what for check in found.checks] == ["b 2: runs"], "what is left out for a reason is no miss"


def test_a_host_without_memory_for_the_weights_is_told_before_it_runs_out() -> None:
    fits._check_host(0)
    with pytest.raises(CaseFailed, match="GB are needed"):
        fits._check_host(10**15)


def test_a_server_in_each_setup_that_fails_is_a_miss_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(self: start.Start, setup: start.Setup, note: Note) -> tuple[int, tuple[str, ...]]:
        if setup.reference:
            raise CaseFailed("the server did not start")
        return 3, (setup.name, "1.0", "1.0", "3 of 3")

    monkeypatch.setattr(start.Start, "_served", served)
    monkeypatch.setattr(start, "tilework_json", lambda *_, **__: {"checks": []})
    found = start.Start.make(quick=False, offloads=True).measure(lambda text: None)
    assert [check.passed for check in found.checks] == [True, True, False]


def test_requests_come_as_fast_as_the_device_draws_them_one_by_one() -> None:
    case = live.LivePolicies(device="cpu", model="m", sizes=((512, 3), (1024, 1)), steps=4, load=0.5)
    assert case._rate_per_s({"512x512": 1.0, "1024x1024": 5.0}) == pytest.approx(0.5 / 2)
