"""Graphs of stages, the ways of requests through them, and progress on these."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import request
from stages import DECODE, DIFFUSE, ENCODE, STAGES, at_start, stage_of
from tilework.core.graph.graph import BadGraph, Graph
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.progress import Cursor
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import DeviceKind, ResultKind, Stage, StageSpec, StepShare
from tilework.core.lora import UsedLora

TEXT = StageSpec(name="text", inputs=("prompt",), outputs=("words",))
PICTURE = StageSpec(name="picture", components=("vision",), inputs=("image",), outputs=("reference",))
BASE = StageSpec(
    name="base",
    components=("unet",),
    inputs=("words", "reference"),
    outputs=("latents",),
    steps=StepShare(last=0.8),
    degrees=None,
    batchable=True,
    previews="finish",
)
REFINE = StageSpec(
    name="refine", inputs=("latents", "words"), outputs=("refined",), steps=StepShare(first=0.8), degrees=(1, 2)
)
FINISH = StageSpec(name="finish", inputs=("refined",), outputs=("result",), sliceable=True)
SPECS = (TEXT, PICTURE, BASE, REFINE, FINISH)
GRAPH = Graph("toy", SPECS)
WAY = GRAPH.itinerary(10)


def _place(cursor: Cursor) -> tuple[Stage | None, int, int, int, Stage | None, int]:
    """What is to be done at a position."""
    here = cursor.stage, cursor.num_done, cursor.num_left_here
    return *here, cursor.num_steps_left, cursor.stepped, cursor.num_steps


def names(graph: Graph) -> list[str]:
    return [stage.name for stage in graph.stages]


def spec(name: str, *inputs: str, **more: Any) -> StageSpec:
    """A stage that writes a value of its own name."""
    return StageSpec(name=name, inputs=inputs, outputs=(name,), **more)


# Graphs.


@given(st.permutations(SPECS))
def test_stages_are_sorted_so_that_each_follows_those_that_write_its_inputs(specs: list[StageSpec]) -> None:
    graph = Graph("toy", tuple(specs))
    assert names(graph)[2:] == ["base", "refine", "finish"]
    assert names(graph)[:2] == [one.name for one in specs if one in (TEXT, PICTURE)], "as described, where it is free"


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_graph_without_a_circle_has_an_order(number: int, random: Any) -> None:
    """Each stage reads some of those before it, and the last one all."""
    specs = [spec(str(index), *(str(one) for one in range(index) if random.random() < 0.4)) for index in range(number)]
    specs.append(spec("last", *map(str, range(number))))
    random.shuffle(specs)
    done = set[str]()
    for stage in Graph("toy", tuple(specs)).stages:
        assert done.issuperset(stage.spec.inputs)
        done.add(stage.name)
    assert done == {one.name for one in specs}
    assert stage.name == "last"


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        (
            (spec("a", "b"), spec("b", "a"), spec("c", "b")),
            "the inputs of a, b, c wait for each other; break the cycle",
        ),
        ((spec("a", "a"),), "the inputs of a wait for each other; break the cycle"),
        (
            (spec("a"), spec("b", "a"), spec("c", "a")),
            "no other stage reads the outputs of b, c; expected one such stage, the last",
        ),
        ((), "no other stage reads the outputs of any; expected one such stage, the last"),
        ((spec("a"), StageSpec(name="a", outputs=("b",))), "the stage 'a' comes twice; rename one"),
        ((spec("a"), StageSpec(name="b", outputs=("a",))), "the output 'a' comes twice; rename one"),
        (
            (spec("a", previews="show"),),
            "previews of 'a' is 'show', which is no stage; name one, or leave it out",
        ),
        ((spec("a", degrees=(1, 0)),), "degrees of 'a' is (1, 0); expected numbers of at least 1, or null"),
        ((spec("a", degrees=()),), "degrees of 'a' is (); expected numbers of at least 1, or null"),
    ],
)
def test_a_graph_that_cannot_be_used_is_refused(specs: tuple[StageSpec, ...], complaint: str) -> None:
    with pytest.raises(BadGraph) as caught:
        Graph("toy", specs)
    assert str(caught.value) == complaint


def test_stages_are_equal_by_pipeline_and_name_and_found_by_name() -> None:
    assert GRAPH.stage("base") == Stage("toy", "base", spec("other")) != Stage("mine", "base", BASE)
    assert str(GRAPH.stage("base")) == "toy/base"
    with pytest.raises(KeyError, match="absent"):
        GRAPH.stage("absent")
    assert [stage.name for stage in GRAPH.stepped] == ["base", "refine"]


def test_loras_are_part_of_the_stages_whose_components_they_change() -> None:
    ink, chalk = UsedLora("ink", 0.8), UsedLora("chalk.v2", -1.0)
    changes = {ink: frozenset({"unet"}), chalk: frozenset({"vision", "unet"})}
    way = GRAPH.itinerary(10, changes)
    used = {stage.name: stage.loras for stage in way.stages}
    assert (used["base"], used["picture"], used["text"]) == ((ink, chalk), (chalk,), ())
    base = next(stage for stage in way.stages if stage.name == "base")
    assert base != GRAPH.stage("base") != replace(base, loras=(replace(ink, scale=0.7), chalk))
    assert str(base) == "toy/base[ink=0.8,chalk.v2=-1.0]"
    assert [UsedLora.parse(str(one)) for one in base.loras] == [ink, chalk]
    assert base.spec.one_shape, "requests of one size may share it"
    assert not GRAPH.stage("base").spec.one_shape
    assert (
        way
        is GRAPH.itinerary(10, {ink: frozenset({"unet"}), chalk: frozenset({"vision", "unet"})})
        is not GRAPH.itinerary(10)
    )
    with pytest.raises(ValueError, match="could not convert"):
        UsedLora.parse("ink=much")


def test_on_how_many_devices_a_stage_may_run() -> None:
    text, base, refine = (GRAPH.stage(name) for name in ("text", "base", "refine"))
    assert [stage.is_parallel for stage in (text, base, refine)] == [False, True, True]
    allowed = [[degree for degree in (1, 2, 4) if stage.allows(degree)] for stage in (text, base, refine)]
    assert allowed == [[1], [1, 2, 4], [1, 2]]


def test_a_graph_can_be_renamed() -> None:
    renamed = GRAPH.renamed("mine")
    assert renamed == Graph("mine", SPECS) != GRAPH
    assert {stage.pipeline for stage in renamed.stages} == {"mine"}


def test_the_shipped_graph_encodes_denoises_and_decodes() -> None:
    graph = latent_diffusion("flux")
    assert tuple(names(graph)) == STAGES
    assert {stage.pipeline for stage in graph.stages} == {"flux"}
    assert [stage.has_steps for stage in graph.stages] == [False, True, False]
    assert graph.stage(DIFFUSE).spec.previews == DECODE


# JSON.


@pytest.mark.parametrize(
    "graph", [GRAPH, latent_diffusion("toy"), Graph("toy", (spec("a", steps=StepShare(count=4)),))]
)
def test_a_graph_survives_json(graph: Graph) -> None:
    read = Graph.parse("toy", json.loads(json.dumps(graph.to_json())))
    assert read == graph
    assert [stage.spec for stage in read.stages] == [stage.spec for stage in graph.stages]


def test_json_leaves_defaults_out() -> None:
    document = Graph("toy", (spec("a"), spec("b", "a", steps=StepShare(count=4), degrees=None))).to_json()
    assert document == [
        {"name": "a", "outputs": ["a"]},
        {"name": "b", "inputs": ["a"], "outputs": ["b"], "steps": {"count": 4}, "degrees": None},
    ]


@pytest.mark.parametrize("document", [{}, "text", None, 3])
def test_json_that_is_no_list_is_refused(document: object) -> None:
    with pytest.raises(BadGraph, match=r"^the graph of 'toy' is .*; expected a list of stages, or an object .*$"):
        Graph.parse("toy", document)


@pytest.mark.parametrize("document", ["text", None, {}, {"name": 3}, {"name": ""}, ["name"]])
def test_a_stage_without_a_name_is_refused(document: object) -> None:
    with pytest.raises(BadGraph, match=r"^a stage is .*; expected an object with a name$"):
        Graph.parse("toy", [document])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"input": ["x"]}, "input is not a field; leave it out"),
        *(
            ({name: value}, f"{name} is {value!r}; expected a list of names")
            for name in ("components", "inputs", "outputs")
            for value in ("x", [1], 3, None)
        ),
        *(
            ({"degrees": value}, f"degrees is {value!r}; expected a list of whole numbers, or null")
            for value in (2, [1.0], [True], "2")
        ),
        *(({name: 1}, f"{name} is 1; expected true or false") for name in ("batchable", "sliceable")),
        *(
            ({"steps": value}, f'steps is {value!r}; expected {{"first": 0, "last": 1}} or {{"count": 4}}')
            for value in (
                4,
                [],
                {"number": 4},
                {"count": 0},
                {"count": 1.5},
                {"count": True},
                {"first": 0.5, "last": 0.5},
                {"first": -0.1},
                {"last": 1.1},
                {"last": "1"},
                {"last": float("nan")},
            )
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_stage(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadGraph) as caught:
        Graph.parse("toy", [{"name": "text"}, {"name": "base"} | changes])
    assert str(caught.value) == f"stage 'base': {complaint}"


# Steps.


@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [
        (StepShare(), 7, 7),
        (StepShare(last=0.8), 10, 8),
        (StepShare(first=0.8), 10, 2),
        (StepShare(last=0.1), 2, 1),
        (StepShare(first=0.9), 1, 1),
        (StepShare(count=4), 1, 4),
        (StepShare(count=4), 50, 4),
    ],
)
def test_the_steps_of_a_share(share: StepShare, steps: int, expected: int) -> None:
    assert share.of(steps) == expected


@given(st.lists(st.floats(0.001, 0.999), unique=True, max_size=5).map(sorted), st.integers(1, 10_000))
def test_shares_that_follow_each_other_have_all_steps(between: list[float], steps: int) -> None:
    bounds = [0.0, *between, 1.0]
    numbers = [StepShare(first=first, last=last).of(steps) for first, last in pairwise(bounds)]
    assert min(numbers) >= 1
    if all(round(last * steps) > round(first * steps) for first, last in pairwise(bounds)):
        assert sum(numbers) == steps
    else:
        assert sum(numbers) > steps, "one that would have none makes one"


# The way of a request.


def test_each_step_is_a_position_and_so_is_each_other_stage() -> None:
    assert [stage.name for stage in WAY.stages] == ["text", "picture", "base", "refine", "finish"]
    assert (WAY.ends, WAY.length, WAY.steps, WAY.num_stepped) == ((1, 2, 10, 12, 13), 13, 10, 2)
    text, picture, base, refine, finish = WAY.stages
    assert [place.stage for place in all_cursors(WAY)] == [text, picture, *[base] * 8, *[refine] * 2, finish, None]
    assert _place(WAY.at[0]) == (text, 0, 1, 10, base, 8)
    assert _place(WAY.at[2]) == (base, 2, 8, 10, base, 8)
    assert _place(WAY.at[9]) == (base, 2, 1, 3, base, 1)
    assert _place(WAY.at[10]) == (refine, 3, 2, 2, refine, 2)
    assert _place(WAY.at[12]) == (finish, 4, 1, 0, None, 0)
    assert _place(WAY.at[13]) == (None, 5, 0, 0, None, 0)


def test_a_stage_at_once_may_lie_between_two_with_steps() -> None:
    specs = (spec("a", steps=StepShare(last=0.5)), spec("b", "a"), spec("c", "b", steps=StepShare(first=0.5)))
    way = Graph("toy", specs).itinerary(4)
    a, b, c = way.stages
    assert way.ends == (2, 3, 5)
    assert _place(way.at[2]) == (b, 1, 1, 2, c, 2)
    assert [place.num_steps_left for place in all_cursors(way)] == [4, 3, 2, 2, 1, 0]
    assert [place.stepped for place in all_cursors(way)] == [a, a, c, c, c, None]


def test_only_outputs_that_a_later_stage_reads_are_needed() -> None:
    """The words are needed up to the refiner, the reference up to the base; after it the refined latents alone."""
    assert WAY.needed_from == ((), (0,), (0, 1), (0, 2), (3,), ())
    assert latent_diffusion("toy").itinerary(5).needed_from == ((), (0,), (1,), ())


def test_the_shipped_way_has_the_encoder_the_steps_and_the_decoder() -> None:
    way = latent_diffusion("toy").itinerary(3)
    encode, diffuse, decode = way.stages
    assert [place.stage for place in all_cursors(way)] == [encode, diffuse, diffuse, diffuse, decode, None]


def test_a_way_is_made_once_and_not_too_many_are_kept() -> None:
    graph = Graph("toy", SPECS)
    first = graph.itinerary(3)
    assert graph.itinerary(3) is first
    for steps in range(1, 3000):
        assert graph.itinerary(steps).length >= 4
    assert len(graph._itineraries) <= 1024
    assert graph.itinerary(3).ends == first.ends


def test_a_way_without_stages_has_nothing_to_do() -> None:
    assert Itinerary(()).at[0].stage is None


# Progress.


def all_cursors(way: Itinerary) -> list[Cursor]:
    """Those of all positions, in order."""
    return [way.at[position] for position in range(way.length + 1)]


@given(st.integers(1, 60), st.data())
def test_progress_adds_up_at_every_position(steps: int, data: st.DataObject) -> None:
    way = GRAPH.itinerary(steps)
    cursor = way.at[data.draw(st.integers(0, way.length))]
    pieces = cursor.pieces
    assert cursor.position + sum(number for _, number in pieces) == way.length
    assert cursor.num_steps_left == sum(number for stage, number in pieces if stage.has_steps)
    assert cursor.num_steps_done + cursor.num_steps_left == way.steps
    assert (cursor.stage, cursor.num_left_here) == (pieces[0] if pieces else (None, 0))
    stepped = [piece for piece in pieces if piece[0].has_steps]
    assert (cursor.stepped, cursor.num_steps) == (stepped[0] if stepped else (None, 0))
    assert cursor.last_stepped == (cursor.stepped or GRAPH.stage("refine"))
    assert cursor.num_done == sum(end <= cursor.position for end in way.ends)


@given(st.integers(1, 30), st.data())
def test_works_of_any_lengths_lead_to_the_end(steps: int, data: st.DataObject) -> None:
    cursor = GRAPH.itinerary(steps).at[0]
    while cursor.stage is not None:
        number = data.draw(st.integers(1, cursor.num_left_here))
        after = cursor.advanced(number)
        assert after.position == cursor.position + number
        assert after is cursor.itinerary.at[after.position], "an itinerary has one for each position, and none is made"
        assert after.stage == cursor.stage or number == cursor.num_left_here
        cursor = after
    assert cursor.position == cursor.itinerary.length


@pytest.mark.parametrize(("position", "too_many"), [(0, 2), (2, 9), (9, 2), (10, 3), (12, 2), (13, 1)])
def test_a_work_cannot_have_more_steps_than_its_stage(position: int, too_many: int) -> None:
    cursor = WAY.at[position]
    assert cursor.advanced(0) is cursor
    assert cursor.advanced(too_many - 1).position == position + too_many - 1
    with pytest.raises(AssertionError, match="more steps than its job"):
        cursor.advanced(too_many)


def test_the_stages_at_once_that_come_next() -> None:
    def found(position: int) -> list[tuple[str, int]]:
        return [(stage.name, after.position) for stage, after in WAY.at[position].at_once()]

    assert found(0) == [("text", 1), ("picture", 2)]
    assert found(1) == [("picture", 2)]
    assert found(2) == found(11) == found(13) == []
    assert found(12) == [("finish", 13)]


def test_a_request_starts_with_nothing_done() -> None:
    start = at_start(request("a", steps=6))
    assert start.pieces == ((stage_of("toy", ENCODE), 1), (stage_of("toy", DIFFUSE), 6), (stage_of("toy", DECODE), 1))
    assert start == at_start(request("b", steps=6)), "requests of one length share their way"


def test_a_graph_without_steps_has_no_stepped_stage() -> None:
    graph = Graph("toy", (spec("a"), spec("b", "a")))
    cursor = graph.itinerary(9).at[0]
    assert (cursor.stepped, cursor.last_stepped, cursor.num_steps_left) == (None, None, 0)
    assert cursor.itinerary.length == 2


# Kinds of results.

EXPORT = StageSpec(
    name="export", inputs=("result",), outputs=("file",), device_kind=DeviceKind.CPU, result=ResultKind.VIDEO
)
CLIPS = Graph("clips", (*SPECS, EXPORT))


def test_a_stage_for_one_kind_of_result_is_on_the_way_of_requests_for_it_alone() -> None:
    pixels, video = CLIPS.itinerary(10), CLIPS.itinerary(10, result=ResultKind.VIDEO)
    assert [stage.name for stage in video.stages] == [*(stage.name for stage in pixels.stages), "export"]
    assert (pixels.length, video.length) == (WAY.length, WAY.length + 1)
    assert (pixels.needs_slots, video.needs_slots) == (False, True)
    assert video.legs[0].stages == pixels.stages, "a policy sees the same of both"
    assert [stage.name for stage, _ in video.legs[0].following] == ["export"]
    assert (CLIPS.makes(ResultKind.VIDEO), GRAPH.makes(ResultKind.VIDEO)) == (True, False)
    assert CLIPS.makes(ResultKind.PIXELS)
    assert Graph.parse("clips", json.loads(json.dumps(CLIPS.to_json()))) == CLIPS


def test_a_kind_of_result_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadGraph, match="'shrink' reads 'file', which only requests for a video have"):
        Graph("clips", (*SPECS, EXPORT, spec("shrink", "file")))
    with pytest.raises(BadGraph, match="result is 'film'; expected 'pixels' or 'video', or null"):
        Graph.parse("clips", [{"name": "export", "result": "film"}])
