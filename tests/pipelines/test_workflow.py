"""Workflows before they are served: what fits together, what is refused at the edge, and what a stage gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture

import tilework
import tiny
from tilework.core.graph.stage import DeviceKind
from tilework.core.model import Argument, ArgumentKind, ModelInfo, ModelSource, PictureInput, StrengthRule
from tilework.pipelines.draw import draw
from tilework.pipelines.errors import InvalidSource, InvalidWorkflow, ModelError, UnsupportedModel
from tilework.pipelines.family import LIVE
from tilework.pipelines.identity import model_identity, stage_keys
from tilework.pipelines.loading import load, load_component
from tilework.pipelines.model_index import check_model
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.workflow.definition import Function
from tilework.pipelines.workflow.family import describe_workflow, parts_of
from tilework.pipelines.workflow.functions import LoadedFunction, StageFailed, StageRefused, require_picture
from tilework.pipelines.workflow.parallels import Parallels
from tilework.pipelines.workflow.parts import WorkflowPart
from tilework.pipelines.workflow.pictures import for_user, from_user, image_of, tensor_of
from tilework.pipelines.workflow.source import read_workflow

POSTER = f"{Path(__file__).parents[2] / 'examples' / 'poster.py'}:poster"
LIMITS: dict[str, Any] = {
    "name": "x",
    "family": "x",
    "library": "x",
    "parameters": 1,
    "side_multiple": 8,
    "max_side": 128,
    "default_height": 64,
    "default_width": 64,
    "default_steps": 10,
    "default_guidance_scale": 4.0,
    "max_degree": 4,
}
CLASS = """
import tilework, torch

class softened:
    def __init__(self):
        torch.manual_seed(1)
        self.blur = torch.nn.Conv2d(3, 3, 3)

    def __call__(self, picture):
        return picture

def chosen(x, y):
    return x

one = tilework.Workflow("one", softened, tilework.Pipeline("shapes"))
two = tilework.Workflow("two", *(tilework.Pipeline("shapes", name=n, returns=m) for n, m in ("ax", "by")), chosen)
"""
SHAPES = tilework.Pipeline("shapes", prompt="long_prompt")


def long_prompt(prompt: str) -> str:
    return prompt


def large(picture: Picture.Image) -> Picture.Image:
    return picture


def run(function: Callable[..., object], *values: dict[str, object]) -> list[object]:
    """What a stage writes for requests that have these values."""
    loaded = LoadedFunction.of(Function.of(function), torch.device("cpu"))
    return [next(iter(one.values())) for one in loaded.run([tiny.spec()] * len(values), values)]


def test_the_picture_is_that_of_the_functions_and_the_stock_pipeline_in_a_row() -> None:
    tiny.prepare()
    family = load(ModelSource(path=POSTER))
    spec = tiny.spec(prompt="red circle", height=64, width=96, steps=2, seed=3)
    drawn = draw(family, spec)
    assert np.array_equal(tiny.pixels(drawn), np.asarray(tiny.poster(tilework.reference("shapes"), POSTER, spec)))
    stages = family.info.graph.stages
    assert [stage.name for stage in stages] == ["long_prompt", "encode", "diffuse", "decode", "large", "checked"]
    assert [stage.name for stage in stages if stage.kind is DeviceKind.CPU] == ["long_prompt", "checked"]
    assert all("long_prompt" in stage.spec.inputs for stage in stages[1:4]), "a request that moves takes it along"


def test_public_names_need_no_torch() -> None:
    code = "import sys, tilework; tilework.Workflow, tilework.stage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tilework.Workflow("w", large), "w has no pipeline"),
        (lambda: tilework.Workflow("", SHAPES), "the name of a workflow is ''"),
        (lambda: tilework.Workflow("w", SHAPES), "prompt of 'shapes' reads 'long_prompt', which no stage writes"),
        (lambda: tilework.Workflow("w", tilework.Pipeline("shapes"), _reads("pictur")), "'made' reads 'pictur'"),
        (lambda: tilework.Workflow("w", long_prompt, SHAPES, long_prompt), "'long_prompt' comes twice; rename one"),
        (
            lambda: tilework.Workflow("w", *(tilework.Pipeline("shapes", name=one) for one in "ab")),
            "'picture' comes twice",
        ),
        (
            lambda: tilework.Workflow("w", _reads("picture"), SHAPES, _named("long_prompt", "made")),
            "wait for each other",
        ),
        (lambda: tilework.Workflow("w", tilework.Pipeline("shapes"), long_prompt), "no other stage reads"),
        (
            lambda: tilework.Workflow("w", _named("prompt", "steps"), SHAPES),
            "'prompt' writes 'prompt', which comes with",
        ),
        (lambda: tilework.Workflow("w", 7), "a stage is 7; give a function"),
        (lambda: tilework.Workflow("w", lambda prompt: prompt), "give a function"),
        (lambda: tilework.Workflow("w", _takes_all), "takes '\\*values'; give each value"),
        (lambda: tilework.stage(devices="tpu"), "devices is 'tpu'; choose"),
        (lambda: tilework.stage(batch=0), "batch is 0; give"),
        (lambda: tilework.stage(devices="cpu", batch=2), 'batch is 2 with devices "cpu"'),
        (lambda: tilework.stage(returns="one"), "returns is 'one'; give a tuple"),
        (lambda: tilework.Pipeline("shapes", prompt="no name"), "prompt of the pipeline 'shapes' is 'no name'"),
        (lambda: tilework.Pipeline("shapes", prompt="one", settings={"prompt": "two"}), "prompt .* is given twice"),
    ],
)
def test_a_workflow_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        make()


def _reads(name: str) -> Callable[..., object]:
    return _named("made", name)


def _named(name: str, reads: str) -> Callable[..., object]:
    scope: dict[str, Callable[..., object]] = {}
    exec(f"def {name}({reads}): return {reads}", scope)
    return scope[name]


def _takes_all(*values: object) -> None: ...


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file; give FILE.py:NAME"),
        ("import nothing_such", "line 1 of .*flow.py raises ModuleNotFoundError: No module named 'nothing_such'"),
        ("\n1 / 0", "line 2 of .*flow.py raises ZeroDivisionError"),
        ("def (", "flow.py raises SyntaxError"),
        ("one = 1", 'one is no workflow of flow.py; write one = tilework.Workflow\\("NAME", ...\\) there'),
        ("import tilework\ntwo = tilework.Workflow('w', tilework.Pipeline('shapes'))", "it has two"),
        ("import tilework\none = tilework.Workflow('w')", "flow.py: w has no pipeline"),
        ("import tilework\none = tilework.Workflow('w', tilework.Pipeline('./gone'))", "gone', which does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_a_worker_starts(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "flow.py").write_text(text)
    with pytest.raises(ModelError, match=message):
        check_model(f"{tmp_path}/flow.py:one")


def test_an_adapter_belongs_into_the_workflow() -> None:
    with pytest.raises(InvalidSource, match=r"adapter is 'a:B', and .* is a workflow"):
        check_model(POSTER, "a:B")


def test_a_workflow_cannot_be_named_where_its_file_may_not_be_run() -> None:
    with pytest.raises(ModelError, match="is a workflow, which has no stock pipeline and cannot be added later"):
        tilework.reference(POSTER)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": "found"}, "reads of the pipeline 'x' have 'image'; it takes negative_prompt, prompt"),
        ({"settings": {"size": 1}}, "settings of the pipeline 'x' have 'size'; it takes"),
        ({"settings": {"steps": 0}}, "steps = 0; give a number of steps"),
    ],
)
def test_what_a_pipeline_does_not_take_is_named_when_it_is_loaded(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        WorkflowPart(tilework.Pipeline("x", **given), ModelInfo(**LIMITS), "", is_first=True)


def test_a_stage_cannot_read_a_picture_that_requests_do_not_give() -> None:
    workflow = tilework.Workflow("w", tilework.Pipeline("x", returns="drawn"), _named("made", "drawn, image"))
    with pytest.raises(InvalidWorkflow, match="'made' reads 'image', which no stage writes"):
        describe_workflow(workflow, "", parts_of(workflow, [ModelInfo(**LIMITS)]), ())


def test_a_component_is_read_again_from_where_it_is(tmp_path: Path) -> None:
    tiny.prepare()
    (tmp_path / "flow.py").write_text(CLASS)
    one, two = (ModelSource(path=f"{tmp_path}/flow.py:{name}") for name in ("one", "two"))
    again, stock = load_component(one, "softened.blur"), load_component(ModelSource(path="shapes"), "vae")
    assert torch.equal(
        again.weight, LoadedFunction.of(_softened(one), torch.device("cpu")).modules["softened.blur"].weight
    )
    for found in (load_component(one, "vae"), load_component(two, "b.vae")):
        assert all(map(torch.equal, found.parameters(), stock.parameters()))


def _softened(source: ModelSource) -> Function:
    return read_workflow(source.path).functions[0]


def test_measurements_are_those_of_the_text_of_the_workflow(tmp_path: Path) -> None:
    texts = ["import tilework\nx = tilework.Workflow('w', tilework.Pipeline('shapes'))", "# other"]
    names = list[str]()
    for index in range(2):
        (tmp_path / f"flow{index}.py").write_text("\n".join(texts[: index + 1]))
        names.append(model_identity(ModelSource(path=f"{tmp_path}/flow{index}.py:x")))
    assert names[0] != names[1]
    assert all(name.startswith("w@") for name in names)


def test_stages_that_take_the_same_time_have_equal_keys(tmp_path: Path) -> None:
    text = (
        CLASS
        + """
def long(prompt): return prompt
three = tilework.Workflow("three", long, tilework.Pipeline("shapes", prompt="long"), softened)
four = tilework.Workflow("four", tilework.Pipeline("shapes", settings={"guidance_scale": 1.0}), softened)
"""
    )
    (tmp_path / "flow.py").write_text(text)
    plain = stage_keys(ModelSource(path="shapes"), ModelInfo(**LIMITS))
    one, two, three, four = (_keys(f"{tmp_path}/flow.py:{name}") for name in ("one", "two", "three", "four"))
    assert one.items() >= plain.items(), "the first pipeline of a workflow costs what the model does"
    assert three.items() >= one.items(), "also with another prompt"
    assert {two[f"a.{name}"] for name in plain} == set(plain.values())
    assert set(plain.values()).isdisjoint(two[f"b.{name}"] for name in plain), "it has its own defaults"
    assert one.keys() == four.keys()
    assert one.items().isdisjoint(four.items()), "guidance costs time, and softened reads another picture"
    (tmp_path / "flow.py").write_text(text + "# other")
    assert _keys(f"{tmp_path}/flow.py:one")["softened"] != one["softened"]


def _keys(path: str) -> dict[str, str]:
    workflow = read_workflow(path)
    parts = parts_of(workflow, [ModelInfo(**LIMITS)] * len(workflow.pipelines))
    functions = [LoadedFunction.of(one, torch.device("cpu")) for one in workflow.functions]
    info = describe_workflow(workflow, "", parts, functions)
    return stage_keys(ModelSource(path=path), info)


def test_pictures_come_as_images_and_go_back_bit_for_bit() -> None:
    clip = torch.randint(0, 256, (3, 4, 5, 3), dtype=torch.uint8)
    assert torch.equal(from_user(for_user(clip)), clip)
    assert isinstance(for_user(clip[:1]), Picture.Image), "a stock pipeline writes a picture as a clip of one frame"
    assert torch.equal(from_user(for_user(clip[0])), clip[0])
    assert torch.equal(tensor_of(image_of(clip)), clip)
    assert image_of(clip[0]) == replace(image_of(clip[:1]), frames=1)


def test_a_later_pipeline_gets_the_picture_before_it_and_makes_the_steps_that_its_strength_leaves() -> None:
    rule = StrengthRule.DOWN
    info = ModelInfo(
        **LIMITS,
        arguments=(Argument(name="strength", kind=ArgumentKind.NUMBER, high=1, strength=rule, default=0.9),),
        pictures=(PictureInput(name="image", required=True),),
    )
    pipeline = tilework.Pipeline("x", image="sketch", settings={"steps": 20, "strength": 0.5})
    part = WorkflowPart(pipeline, info, "second.", is_first=False)
    asked = tiny.spec(prompt="red", steps=7, seed=5)
    given = part.spec(replace(asked, arguments={"clip_skip": 1}), {"sketch": torch.zeros(4, 5, 3, dtype=torch.uint8)})
    assert (given.steps, given.whole_steps) == (10, 20), "the request's 7 are those of the first pipeline"
    assert (given.prompt, given.seed, given.height) == ("red", 5, asked.height)
    assert given.guidance_scale == info.default_guidance_scale
    assert given.arguments == {"strength": 0.5}
    assert given.pictures["image"][0].width == 5
    (steps,) = (stage.steps for stage in part.stages if stage.steps is not None)
    assert steps.of(7) == steps.of(100) == 10
    assert [stage.name for stage in part.stages] == ["second.encode", "second.diffuse", "second.decode"]
    ended = part.outer_values({"picture": 1, "any_seed": True})
    assert ended == {"picture": 1, "any_seed": True, LIVE: None}, "nothing of it stays alive"
    assert part.inner_values({"second.latents": 2, "latents": 3, LIVE: 4}) == {"latents": 2, LIVE: 4}
    own = WorkflowPart(tilework.Pipeline("x", image="sketch", settings={"strength": 0.5}), info, "", is_first=False)
    assert own.spec(asked, {}).steps == info.default_steps / 2
    first = WorkflowPart(tilework.Pipeline("x"), info, "", is_first=True)
    assert first.spec(asked, {}) == asked, "the first one takes all of the request"


def test_a_group_is_that_of_all_families_of_a_workflow() -> None:
    members = [Parallel(), Parallel()]
    group = Parallels(members)
    group.wants_stop = True
    assert all(one.wants_stop for one in members)
    assert group.stop_agreed, "alone a rank decides"
    group.join(SimpleNamespace(size=2, rank=1), guided=False)  # type: ignore[arg-type]
    assert [one.degree for one in (group, *members)] == [2, 2, 2]
    assert not group.stop_agreed, "in a group the first rank has not said so"
    group.leave()
    assert [one.degree for one in (group, *members)] == [1, 1, 1]


def test_a_size_suits_all_pipelines() -> None:
    pipelines = tilework.Pipeline("x", name="one"), tilework.Pipeline("x", name="two", returns="end", prompt="picture")
    workflow = tilework.Workflow("w", *pipelines)
    infos = [ModelInfo(**LIMITS), ModelInfo(**LIMITS | {"side_multiple": 12, "max_side": 100, "max_degree": 2})]
    info = describe_workflow(workflow, "", parts_of(workflow, infos), ())
    assert (info.side_multiple, info.max_side, info.default_height, info.max_degree) == (24, 96, 48, 2)
    infos[1] = replace(infos[1], side_multiple=96)
    with pytest.raises(InvalidWorkflow, match="no size in common"):
        describe_workflow(workflow, "", parts_of(workflow, [infos[0], replace(infos[1], max_side=95)]), ())


def test_a_stage_gets_what_it_names_of_values_and_of_the_request() -> None:
    def made(text: str, seed: int, width: int, factor: int = 2) -> tuple[object, ...]:
        return text, seed, width, factor

    assert run(made, {"text": "one", "other": 1}) == [("one", tiny.spec().seed, tiny.spec().width, 2)]


def test_a_result_that_is_no_picture_is_named() -> None:
    require_picture("end", torch.zeros(4, 5, 3, dtype=torch.uint8))
    for value in ("text", torch.zeros(4, 5, 3)):
        with pytest.raises(
            UnsupportedModel, match=r"the result 'end' is a (str|Tensor); the last stage returns an image"
        ):
            require_picture("end", value)


def test_a_stage_with_a_batch_is_called_for_as_many_requests() -> None:
    calls = list[list[int]]()

    @tilework.stage(batch=2)
    def made(number: list[int]) -> list[int]:
        calls.append(number)
        return [10 * one for one in number]

    assert run(made, *({"number": one} for one in range(3))) == [0, 10, 20]
    assert calls == [[0, 1], [2]]
    assert Function.of(made).spec(frozenset()).batchable


def test_what_a_stage_raises_names_it() -> None:
    def fails(text: str) -> None:
        raise KeyError(text)

    def refuses(text: str) -> None:
        raise tilework.Refused("too red")

    @tilework.stage(batch=2)
    def forgets(text: list[str]) -> str:
        return text[0]

    @tilework.stage(returns=("left", "right"))
    def halves(text: str) -> str:
        return text

    for function, error, message in (
        (fails, StageFailed, "stage 'fails' raises KeyError: 'x'"),
        (refuses, StageRefused, "stage 'refuses' has refused it: too red"),
        (forgets, StageFailed, "stage 'forgets' returns a str for 1 requests; return a list"),
        (halves, StageFailed, "stage 'halves' returns a str; return a tuple of left, right"),
    ):
        with pytest.raises(error, match=message):
            run(function, {"text": "x"})
