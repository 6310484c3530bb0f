"""Cost tables: their file format, interpolation between rows, and what a request takes alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, costs, request, row
from stages import DECODE, DIFFUSE, stage_of
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.request import Shape
from tilework.core.time import ns_from_s, s_from_ns
from tilework.cost.degrees import alone_ns, least_device_ns, optimal_degree, optimal_latency_ns, useful_degrees
from tilework.cost.shipped import shipped_names
from tilework.cost.table import BadCostTable, CostTable, graphs_of, merged
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import parse_table, read_table, table_json

GOOD_ROW = {"pipeline": PIPELINE, "stage": DIFFUSE, "height": 64, "width": 64, "seconds": 0.5}
TWO_STAGES = Graph(
    PIPELINE,
    (
        StageSpec(name="draft", outputs=("sketch",), steps=StepShare(last=0.5), degrees=None, batchable=True),
        StageSpec(name="paint", inputs=("sketch",), outputs=("picture",), steps=StepShare(first=0.5), degrees=(1, 2)),
    ),
)


MEMORY = {"peak_bytes": 7, "activation_bytes": 6, "state_bytes": 5}


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    measured = row(9, 1.5, degree=2, link="pcie", p99_seconds=1.75, num_runs=20, **MEMORY)
    full = CostTable(
        hardware="größer",
        devices_per_node=2,
        sources={"p": "a paper"},
        steps=28,
        slo_s={"9x1": 2.5},
        rows=(measured, row(9, 1.5)),
    )
    path.write_text(json.dumps(table_json(full), ensure_ascii=False), "utf-8")
    assert read_table(path) == full


def test_what_a_file_may_leave_out_and_add() -> None:
    parsed = parse_table({"source": "a paper", "rows": [GOOD_ROW | {"note": "measured twice", "seconds": 2}]})
    assert parsed.rows == (CostRow(**(GOOD_ROW | {"seconds": 2})),)
    assert (parsed.devices_per_node, parsed.hardware, parsed.source) == (8, "unknown", "a paper")
    assert (parsed.steps, parsed.slo_s) == (None, {})
    (read,) = parsed.rows
    assert (read.frames, read.degree, read.batch, read.link) == (1, 1, 1, "none")
    assert (read.peak_bytes, read.p99_seconds, read.num_runs) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        *((name, 0, "a whole number of at least 1") for name in ("height", "width", "frames", "degree")),
        ("height", 1.0, "a whole number of at least 1"),
        ("width", "64", "a whole number of at least 1"),
        ("degree", True, "a whole number of at least 1"),
        ("seconds", 0, "seconds above 0"),
        ("seconds", -1.5, "seconds above 0"),
        ("seconds", "fast", "seconds above 0"),
        ("seconds", True, "seconds above 0"),
        ("seconds", float("nan"), "seconds above 0"),
        ("seconds", float("inf"), "seconds above 0"),
        ("pipeline", 3, "text that is not empty"),
        ("pipeline", "", "text that is not empty"),
        ("stage", None, "text that is not empty"),
        ("link", 5, "text that is not empty"),
        ("peak_bytes", -1, "a whole number of bytes, or null"),
        ("peak_bytes", 1.5, "a whole number of bytes, or null"),
        ("activation_bytes", -1, "a whole number of bytes, or null"),
        ("activation_bytes", "1 GB", "a whole number of bytes, or null"),
        ("state_bytes", -1, "a whole number of bytes, or null"),
        ("num_runs", -1, "a whole number of at least 0, or null"),
        ("num_runs", True, "a whole number of at least 0, or null"),
        ("p99_seconds", 0.25, "seconds, at least the median 0.5, or null"),
        ("p99_seconds", "slow", "seconds, at least the median 0.5, or null"),
        ("p99_seconds", float("nan"), "seconds, at least the median 0.5, or null"),
    ],
)
def test_a_wrong_field_is_named_with_file_row_value_and_remedy(
    tmp_path: Path, field: str, value: object, remedy: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"rows": [GOOD_ROW, GOOD_ROW | {field: value}]}))
    with pytest.raises(BadCostTable) as caught:
        read_table(path)
    assert str(caught.value) == f"{path}: rows[1].{field} is {value!r}; expected {remedy}"


@pytest.mark.parametrize(
    ("stray", "meant"),
    [("degre", "degree"), ("Degree", "degree"), ("batch_size", "batch"), ("num_frames", "frames"), ("links", "link")],
)
def test_a_misspelt_field_with_a_default_is_named_with_the_right_name(stray: str, meant: str) -> None:
    with pytest.raises(
        BadCostTable, match=rf"^rows\[0\]\.{stray} is not a field; rename it to {meant}, or leave it out$"
    ):
        parse_table({"rows": [GOOD_ROW | {stray: 4}]})
    assert parse_table({"rows": [GOOD_ROW | {meant: "pcie" if meant == "link" else 2, stray: 4}]})


@pytest.mark.parametrize(
    "stray", ["note", "std_seconds", "mean_seconds", "min_seconds", "device_id", "measured_at", "peak"]
)
def test_other_keys_of_a_row_are_allowed(stray: str) -> None:
    assert parse_table({"rows": [GOOD_ROW | {stray: 4}]}).rows == (CostRow(**GOOD_ROW),)


@pytest.mark.parametrize("field", sorted(GOOD_ROW))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BadCostTable, match=rf"^rows\[0\] lacks {field}$"):
        parse_table({"rows": [{name: value for name, value in GOOD_ROW.items() if name != field}]})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "expected a JSON cost table"),
        ("[]", 'expected an object with a non-empty list "rows"'),
        ('{"rows": []}', 'expected an object with a non-empty list "rows"'),
        ('{"rows": {"0": {}}}', 'expected an object with a non-empty list "rows"'),
        ('{"rows": [7]}', "rows[0] is 7; expected an object"),
        ('{"rows": [{}], "devices_per_node": 0}', "devices_per_node is 0; expected a whole number of at least 1"),
        ('{"rows": [{}], "steps": "20"}', "steps is '20'; expected a whole number of at least 1"),
        ('{"rows": [{}], "slo_s": {"512x512": 0}}', "slo_s is {'512x512': 0}; expected an object of seconds above 0"),
        ('{"rows": [{}], "slo_s": [1.5]}', "slo_s is [1.5]; expected an object of seconds above 0"),
        ('{"rows": [{}], "devices_per_node": true}', "devices_per_node is True; expected a whole number of at least 1"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(BadCostTable) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary"):
        with pytest.raises(BadCostTable, match=f"^{path}: "):
            read_table(path)


# Graphs in files.


def test_the_graph_of_a_pipeline_survives_the_file_of_its_table(tmp_path: Path) -> None:
    full = CostTable(
        hardware="toy",
        rows=(row(9, 1.5, stage="draft"), row(9, 2.5, stage="paint"), row(9, 1.0, pipeline="usual")),
        graphs={PIPELINE: TWO_STAGES},
    )
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(full)), "utf-8")
    read = read_table(path)
    assert read == full
    assert read.graph(PIPELINE) == TableCosts(read).graph(PIPELINE) == TWO_STAGES
    assert [stage.spec for stage in read.graph(PIPELINE).stages] == list(TWO_STAGES.specs)
    assert read.graph("usual") == latent_diffusion("usual")


def test_a_file_describes_only_graphs_that_are_not_the_usual_one() -> None:
    assert graphs_of(TWO_STAGES) == {PIPELINE: TWO_STAGES}
    assert graphs_of(latent_diffusion(PIPELINE)) == {}
    assert "graphs" not in table_json(CostTable(hardware="toy", rows=(row(9, 1.5),)))


@pytest.mark.parametrize(
    ("graphs", "known"),
    [({}, "encode, diffuse, decode"), ({PIPELINE: TWO_STAGES.to_json()}, "draft, paint")],
)
def test_a_row_of_a_stage_that_its_pipeline_does_not_have_is_refused(graphs: dict[str, Any], known: str) -> None:
    good = GOOD_ROW | ({"stage": "draft"} if graphs else {})
    assert parse_table({"rows": [good], "graphs": graphs}).rows
    with pytest.raises(BadCostTable) as caught:
        parse_table({"rows": [good, good | {"stage": "upscale"}], "graphs": graphs})
    assert str(caught.value) == (
        f"rows[1].stage is 'upscale', and 'toy' has {known}; rename it, leave the row out, or describe the pipeline "
        "under graphs"
    )


@pytest.mark.parametrize(
    ("graphs", "complaint"),
    [
        ([], "graphs is []; expected an object by pipeline"),
        (
            {PIPELINE: "encode"},
            "graphs: the graph of 'toy' is 'encode'; expected a list of stages, or an object with stages and "
            "frames_per_latent",
        ),
        (
            {PIPELINE: {"stages": [], "frames": 4}},
            "graphs: the graph of 'toy' is {'stages': [], 'frames': 4}; expected a list of stages, or an object with "
            "stages and frames_per_latent",
        ),
        (
            {PIPELINE: {"stages": [{"name": "a"}], "frames_per_latent": 0}},
            "graphs: frames_per_latent of 'toy' is 0; expected a whole number of at least 1",
        ),
        ({PIPELINE: []}, "graphs: no other stage reads the outputs of any; expected one such stage, the last"),
        (
            {PIPELINE: [{"name": "draft", "steps": {"first": 1}}]},
            'graphs: stage \'draft\': steps is {\'first\': 1}; expected {"first": 0, "last": 1} or {"count": 4}',
        ),
        (
            {PIPELINE: [{"name": "draft", "inputs": ["b"], "outputs": ["a"]}, {"name": "b", "outputs": ["b"]}] * 2},
            "graphs: the stage 'b' comes twice; rename one",
        ),
    ],
)
def test_a_graph_that_cannot_be_used_is_named_with_its_file(tmp_path: Path, graphs: object, complaint: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"rows": [GOOD_ROW], "graphs": graphs}))
    with pytest.raises(BadCostTable) as caught:
        read_table(path)
    assert str(caught.value) == f"{path}: {complaint}"


def test_joined_tables_keep_their_graphs() -> None:
    first = CostTable(hardware="toy", rows=(row(9, 1.5, stage="draft"),), graphs={PIPELINE: TWO_STAGES})
    other = CostTable(
        hardware="toy", rows=(row(9, 1.5, pipeline="b", stage="paint"),), graphs=graphs_of(TWO_STAGES.renamed("b"))
    )
    joined = merged([first, other])
    assert joined.graphs == {PIPELINE: TWO_STAGES, "b": TWO_STAGES.renamed("b")}
    assert parse_table(table_json(joined)) == joined


# Tables that come with the package.


EVALUATED = [name for name in shipped_names() if name != "gentd26"]


"""Those of published evaluations. That of `gentd26` belongs to its workload (tests/sim/test_gentd26.py)."""


@pytest.mark.parametrize("name", EVALUATED)
def test_a_shipped_table_says_where_it_is_from_and_covers_its_evaluation(name: str) -> None:
    shipped = read_table(name)
    assert shipped.source
    assert shipped.hardware.endswith("(approximation)")
    assert shipped.steps is not None
    stage = stage_of(shipped.rows[0].pipeline, DIFFUSE)
    assert TableCosts(shipped).degrees(stage) == (1, 2, 4, 8)
    sizes = {str(Shape(row.height, row.width, row.frames)) for row in shipped.rows}
    assert set(shipped.slo_s) == sizes


def test_every_shipped_table_meets_its_slos_at_its_best_degree_alone() -> None:
    """Otherwise no policy could: the tables and their SLOs belong together, size by size."""
    for shipped in map(read_table, EVALUATED):
        model, steps = TableCosts(shipped), shipped.steps or 0
        for one in shipped.rows:
            shape = Shape(one.height, one.width, one.frames)
            diffuse, decode = (stage_of(one.pipeline, stage) for stage in (DIFFUSE, DECODE))
            best_ns = min(model.run_ns(diffuse, (shape,), degree, steps) for degree in model.degrees(diffuse))
            assert best_ns + model.run_ns(decode, (shape,), 1) <= ns_from_s(shipped.slo_s[str(shape)]), (one, shipped)


def test_the_names_of_the_shipped_tables() -> None:
    of_stages = ("cogvideox15_l20", "flux1_l20", "hunyuanvideo_l20", "sd3medium_l20")
    others = ("flux1dev_h100_eager", "gentd26", "opensora_h800", "sd3_h100", "sdxl_h100")
    assert shipped_names() == tuple(sorted((*of_stages, *others)))


def test_a_file_with_the_name_of_a_shipped_table_is_reached_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flux1_l20").write_text(json.dumps({"rows": [GOOD_ROW], "hardware": "mine"}))
    assert read_table("./flux1_l20").hardware == "mine"
    assert read_table("flux1_l20").hardware != "mine"
    with pytest.raises(BadCostTable, match=r"^flux1_l2: "):
        read_table("flux1_l2")


# Tables joined.


def test_tables_of_one_hardware_are_one_with_the_pipelines_of_both() -> None:
    parts = [read_table(name) for name in ("flux1_l20", "hunyuanvideo_l20")]
    both = read_table("flux1_l20+hunyuanvideo_l20")
    assert both.rows == parts[0].rows + parts[1].rows
    assert both.slo_s == {**parts[0].slo_s, **parts[1].slo_s}
    assert both.hardware == parts[0].hardware
    assert both.source == f"{parts[0].source} + {parts[1].source}"
    assert both.steps is None
    assert merged([parts[0], replace(parts[1], steps=parts[0].steps)]).steps == parts[0].steps


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ("opensora_h800", "hardware is '128xL20.* in one and '8xH800.* in another; join tables of one hardware"),
        ("flux1_l20", "pipeline 'flux.1' is in two of them; leave one out"),
        ("nowhere", "nowhere: "),
    ],
)
def test_tables_that_conflict_are_not_joined(other: str, what: str) -> None:
    with pytest.raises(BadCostTable, match=rf"^flux1_l20\+{other}: {what}"):
        read_table(f"flux1_l20+{other}")


def test_one_size_with_two_slos_is_not_joined() -> None:
    flux = read_table("flux1_l20")
    other = replace(flux, rows=tuple(replace(one, pipeline="other") for one in flux.rows))
    with pytest.raises(BadCostTable, match="slo_s of 1024x1024 is in two of them"):
        merged([flux, other])


def test_a_file_with_a_plus_in_its_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a+b.json"
    path.write_text(json.dumps({"rows": [GOOD_ROW], "hardware": "mine"}))
    assert read_table(path).hardware == "mine"


# A request alone.


def test_the_optimal_degree_is_the_highest_efficient_one_and_makes_the_published_slos() -> None:
    """TridentServe: 2.5 times the latency at the optimal degrees."""
    for name in ("flux1_l20", "hunyuanvideo_l20", "opensora_h800"):
        shipped = read_table(name)
        model, pipeline = TableCosts(shipped), shipped.rows[0].pipeline
        for shape in {Shape(one.height, one.width, one.frames) for one in shipped.rows}:
            latency_s = s_from_ns(optimal_latency_ns(model, pipeline, shape, shipped.steps or 0))
            assert 2.5 * latency_s == pytest.approx(shipped.slo_s[str(shape)], abs=2e-3)


@pytest.mark.parametrize(("most", "degree"), [(1, 1), (2, 2), (8, 2)])
def test_the_time_alone_is_on_as_many_devices_as_there_are_and_are_efficient(most: int, degree: int) -> None:
    """At 2048 px steps are efficient on up to two devices, and the decode on one; the second pass counts, too."""
    shipped = read_table("flux1_l20")
    model, shape = TableCosts(shipped), Shape(2048, 2048)
    one = replace(request("a", steps=4), pipeline="flux.1", shape=shape, passes=2.0)
    stages = model.graph("flux.1").stages
    steps_ns = 2 * model.run_ns(stages[1], (shape,), degree, 4)
    others_ns = [model.run_ns(stage, (shape,), min(most, optimal_degree(model, stage, shape))) for stage in stages[::2]]
    assert alone_ns(model, one, most) == pytest.approx(steps_ns + sum(others_ns), rel=1e-6)


def test_useful_degrees_are_faster_than_all_narrower_ones() -> None:
    model, stage = TableCosts(read_table("flux1dev_h100_eager")), stage_of("flux.1-dev", DIFFUSE)
    assert useful_degrees(model, stage, Shape(256, 256)) == (1,)
    assert useful_degrees(model, stage, Shape(2048, 2048)) == (1, 2, 4, 8)


def test_the_least_device_time_is_that_of_the_cheapest_degree_of_each_stage() -> None:
    model = costs(
        row(100, 1.0),
        row(100, 0.4, degree=2),
        row(100, 0.3, stage=DECODE),
        row(100, 0.2, stage=DECODE, degree=2),
    )
    assert s_from_ns(least_device_ns(model, PIPELINE, Shape(1, 100), 5)) == pytest.approx(5 * 0.8 + 0.3)


# Stages and degrees.


def test_any_stage_may_have_degrees_batches_and_peaks(tmp_path: Path) -> None:
    """A decoder without steps that two devices may share, and that several requests may share."""
    text = StageSpec(name="text", outputs=("texts",), batchable=True)
    steps = StageSpec(name="steps", inputs=("texts",), outputs=("latents",), steps=StepShare(), degrees=None)
    decoder = StageSpec(name="decoder", inputs=("latents",), outputs=("picture",), degrees=(1, 2), batchable=True)
    rows = (
        row(10, 1.0, stage="text"),
        row(10, 1.5, stage="text", batch=2),
        row(10, 3.0, stage="steps"),
        row(10, 2.0, stage="decoder", peak_bytes=900),
        row(10, 1.2, stage="decoder", degree=2, peak_bytes=500),
        row(10, 3.0, stage="decoder", batch=2),
    )
    graph = Graph(PIPELINE, (text, steps, decoder))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(CostTable(hardware="toy", rows=rows, graphs=graphs_of(graph)))))
    model = TableCosts(read_table(path))
    stage = model.graph(PIPELINE).stage("decoder")
    assert model.degrees(stage) == (1, 2)
    times = [model.run_ns(stage, (Shape(1, 10),) * batch, degree) for batch, degree in ((1, 1), (1, 2), (2, 1))]
    assert times == [ns_from_s(seconds) for seconds in (2.0, 1.2, 3.0)]
    together = model.run_ns(model.graph(PIPELINE).stage("text"), (Shape(1, 10),) * 2, 1)
    assert together == ns_from_s(1.5)
    assert [one.peak_bytes for one in read_table(path).rows if one.stage == "decoder"] == [900, 500, None]
