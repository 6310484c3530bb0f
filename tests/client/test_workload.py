"""The workload file: what is written comes back, and every mistake is named with its place."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.core.lora import UsedLora
from tilework.core.request import OnMiss, Shape
from tilework.formats.json_lines import BadLine
from tilework.formats.workload import WorkloadRequest, by_id, read_workload, write_workload

GOOD = {"arrival_s": 0.5, "pipeline": "shapes", "height": 64, "width": 96, "frames": 1, "steps": 20, "slo_s": 3.0}

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
seconds = st.floats(0, 1e6, allow_nan=False)
requests = st.builds(
    WorkloadRequest,
    arrival_s=seconds,
    pipeline=text,
    height=st.integers(1, 4096),
    width=st.integers(1, 4096),
    frames=st.integers(1, 81),
    steps=st.integers(1, 100),
    slo_s=st.none() | st.floats(0.001, 1e6),
    seed=st.none() | st.integers(0, 2**63),
    tenant=st.none() | text,
    priority=text,
    on_miss=st.sampled_from(OnMiss),
    prompt=st.none() | text,
    exact=st.booleans(),
    loras=st.lists(st.builds(UsedLora, text, st.floats(-10, 10)), max_size=3, unique_by=lambda one: one.name).map(
        tuple
    ),
)


def written(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@given(st.lists(requests, max_size=5))
def test_what_is_written_comes_back(tmp_path_factory, workload):
    path = tmp_path_factory.mktemp("workload") / "requests.jsonl"
    write_workload(path, workload)
    first = read_workload(path)
    assert by_id(first) == {i: first[i] for i in range(len(workload))}
    write_workload(path, first)
    assert read_workload(path) == first
    assert [replace(one, id=None) for one in first] == [replace(one, id=None) for one in workload]


def test_loras_are_an_object_in_the_order_of_the_file(tmp_path):
    path = written(tmp_path, {**GOOD, "loras": {"ink": 1, "chalk": 0.5}}, {**GOOD, "loras": None})
    first, second = read_workload(path)
    assert (first.loras, second.loras) == ((UsedLora("ink", 1.0), UsedLora("chalk", 0.5)), ())
    write_workload(path, [first])
    assert json.loads(path.read_text())["loras"] == {"ink": 1.0, "chalk": 0.5}


def test_the_design_s_example_reads(tmp_path):
    path = written(tmp_path, GOOD, {**GOOD, "slo_s": None, "id": "mine"}, json.dumps(GOOD))
    assert [r.id for r in read_workload(path)] == [0, "mine", 2]
    assert [r.deadline_s for r in read_workload(path)] == [3.5, None, 3.5]
    assert read_workload(path)[0].shape == Shape(64, 96)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"heigth": 64}, "heigth", 'did you mean "height"'),
        ({"zzz": 1}, "zzz", "the known fields are arrival_s"),
        ({"height": 64.0}, "height", "whole number of at least 1"),
        ({"height": True}, "height", "whole number"),
        ({"width": 0}, "width", "at least 1"),
        ({"arrival_s": -1}, "arrival_s", "at least 0"),
        ({"arrival_s": "0"}, "arrival_s", "use a number"),
        ({"arrival_s": 10**400}, "arrival_s", "use a number"),
        ({"slo_s": 0}, "slo_s", "above 0"),
        ({"steps": None}, "steps", "whole number"),
        ({"pipeline": ""}, "pipeline", "not empty"),
        ({"on_miss": "retry"}, "on_miss", "best_effort, reject, drop"),
        ({"on_miss": []}, "on_miss", "best_effort, reject, drop"),
        ({"id": 1.5}, "id", "line number"),
        ({"id": 0}, "id", "line 1 has the same"),
        ({"priority": 3}, "priority", "text that is not empty"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"prompt": 3}, "prompt", "text"),
        ({"exact": 1}, "exact", "true or false"),
        ({"loras": ["ink"]}, "loras", "an object of names and numbers"),
        ({"loras": {"ink": True}}, "loras", "an object of names and numbers"),
        ({"loras": {"ink": "1"}}, "loras", "an object of names and numbers"),
        ({"loras": {"": 1}}, "loras", "an object of names and numbers"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, field, words):
    with pytest.raises(BadLine) as caught:
        read_workload(written(tmp_path, GOOD, {**GOOD, **change}))
    assert (caught.value.line, caught.value.field) == (2, field)
    assert words in str(caught.value)
    assert f"requests.jsonl:2: {json.dumps(field)}" in str(caught.value)


@pytest.mark.parametrize("field", ["arrival_s", "pipeline", "height", "width", "steps"])
def test_a_missing_field_is_named(tmp_path, field):
    line = {key: value for key, value in GOOD.items() if key != field}
    with pytest.raises(BadLine, match=f'"{field}" is missing; add it'):
        read_workload(written(tmp_path, line))


@pytest.mark.parametrize(
    "line", ["\n", "[1]\n", "{\n", '{"slo_s": NaN}\n', '{"width": 1, "width": 2}\n', "[" * 100_000 + "\n"]
)
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    with pytest.raises(BadLine, match="one JSON object per line") as caught:
        read_workload(written(tmp_path, GOOD, line))
    assert (caught.value.line, caught.value.field) == (2, "")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(BadLine, match="one JSON object per line"):
        read_workload(path)
