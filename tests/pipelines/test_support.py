"""What is said of classes: the score, the rules behind it, and the pages that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
from click.testing import Result
from typer.testing import CliRunner

import tiny
from tilework.cli.app import app
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support import installed
from tilework.pipelines.support.installed import APART, MODULAR, SCORED, Score, Standing, count_served
from tilework.pipelines.support.kinds import PipelineClass
from tilework.pipelines.support.record import KINDS, ClassRecord, Record, limits_of, read_record, served_classes
from tools import class_tables
from zoo.registry import ZOO, build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def score() -> Score:
    return installed.score()


def classes(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["classes", *arguments])


@pytest.fixture
def known(score: Score, monkeypatch: pytest.MonkeyPatch) -> Score:
    """The score as the command finds it, without the time that it takes."""
    monkeypatch.setattr(installed, "score", lambda: score)
    return score


def test_every_pipeline_that_diffusers_exports_is_in_the_score_once(score: Score) -> None:
    names = [one.name for one in score.classes]
    assert len(names) == len(set(names))
    assert served_classes() <= set(names)
    assert {"FluxPipeline", "WanModularPipeline", "MarigoldDepthPipeline", "OnnxStableDiffusionPipeline"} <= set(names)
    assert not {"DiffusionPipeline", "ModularPipeline", "AutoPipelineForText2Image"} & set(names)


def test_each_class_is_served_or_says_why_not(score: Score) -> None:
    assert all(one.is_served or one.reason for one in score.classes)
    assert {one.kind for one in score.classes} <= {*KINDS, MODULAR, APART}


def test_the_rule_and_the_record_agree_on_kinds(score: Score) -> None:
    """The record is right where they differ; a rule that differs more often says little about unknown classes."""
    known = {one.name for one in score.classes if one.kind in KINDS} & read_record().classes.keys()
    kinds = {name: PipelineClass(getattr(diffusers, name)).kind() for name in known}
    other = {name: kind for name, kind in kinds.items() if kind != read_record().classes[name].kinds[0]}
    assert len(known) > 100
    assert len(other) <= 0.03 * len(known), other


def test_no_rule_speaks_against_a_class_that_is_served(score: Score) -> None:
    assert {one.name for one in score.classes if one.is_served and one.reason and one.kind != APART} == set()
    assert {one.name for one in score.of(APART) if one.is_served and "deprecated" not in one.reason} == set()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StableAudioPipeline", "sound"),
        ("MiniMaxMusic3ModularPipeline", "sound"),
        ("ShapEPipeline", "three-dimensional"),
        ("MarigoldDepthPipeline", "prediction"),
        ("LLaDA2Pipeline", "texts"),
        ("KandinskyPriorPipeline", "a part"),
        ("KandinskyV22Pipeline", "needs image_embeds of another pipeline"),
        ("LTXLatentUpsamplePipeline", "a part"),
        ("DDPMPipeline", "neither a text nor an image"),
        ("UnCLIPPipeline", "deprecated"),
        ("OnnxStableDiffusionPipeline", "needs onnx"),
    ],
)
def test_classes_apart(score: Score, name: str, reason: str) -> None:
    (one,) = [one for one in score.of(APART) if one.name == name]
    assert reason in one.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [("KandinskyCombinedPipeline", "two other pipelines"), ("LTX2DFRPipeline", "no num_inference_steps")],
)
def test_what_a_class_shows_is_a_reason(name: str, reason: str) -> None:
    assert reason in PipelineClass(getattr(diffusers, name)).obstacle()


def test_the_command_prints_the_score_by_kind(known: Score) -> None:
    printed = classes().stdout
    assert printed.startswith(class_tables.sentence(known))
    for kind in KINDS:
        assert f"\n{kind}: {count_served(known.of(kind))} of {len(known.of(kind))}\n" in printed
    assert "  FluxPipeline: served\n" in printed
    assert "  StableAudioPipeline: not served; makes sound\n" in printed


def test_the_command_prints_one_kind_as_json(known: Score) -> None:
    document = json.loads(classes("--json", "--kind", "edit").stdout)
    counted = known.of(*SCORED)
    assert document["score"] == {"kinds": list(SCORED), "served": count_served(counted), "classes": len(counted)}
    assert {one["kind"] for one in document["classes"]} == {"edit"} == set(document["kinds"])
    assert {one["name"] for one in document["classes"] if one["served"]} >= {"QwenImageEditPipeline"}
    assert isinstance(classes("--kind", "sculpture").exception, Exception)


def test_another_version_of_diffusers_is_named(known: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "score", lambda: replace(known, installed="9.9.9"))
    assert f"tested with diffusers {known.tested}; with 9.9.9 exactness was not tested" in classes().stdout


@pytest.mark.parametrize("name", ["README.md", "docs/models.md"])
def test_the_pages_show_the_score(name: str, score: Score) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert class_tables.sentence(score) in text
    assert class_tables.updated(text, score) == text, "make docs"


def test_the_score_is_updated_and_the_tables_have_each_class() -> None:
    found = Score(
        installed="1.2.3",
        tested="1.2.3",
        classes=(
            Standing(name="APipeline", kind="edit", is_served=True),
            Standing(name="BPipeline", kind="edit", is_served=False, reason="sleeps"),
        ),
    )
    one = ClassRecord(kinds=("edit",), exact=True, interleaved=True, moved=True, degrees="heads", inputs=("image",))
    assert class_tables.updated("Has 3 of 4 pipeline classes of diffusers 0.1.2.", found) == (
        "Has 1 of 2 pipeline classes of diffusers 1.2.3."
    )
    printed = class_tables.tables(found, Record(diffusers="1.2.3", classes={"APipeline": one}))
    assert printed.startswith("# Classes\n")
    assert "| `APipeline` | | yes | yes | yes | no | up to heads | image | previews, shared passes |" in printed
    assert "- BPipeline is not served: sleeps" in printed


@pytest.mark.parametrize("name", ["qwen-image", "sana", "modular-z-image", "sd3-pag", "modular-ltx2"])
def test_a_loaded_model_and_the_record_lack_the_same(name: str) -> None:
    tiny.prepare()
    info = StockPipeline(build(ZOO[name]), name, {}, "").info
    assert limits_of(info) == read_record().classes[ZOO[name].class_name].limits
    assert limits_of(replace(info, family="SomePipeline"))[-1] == "tests that hold its class exact"
