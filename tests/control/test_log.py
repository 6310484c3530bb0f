"""The event log: round trips, replay, alterations, and unreadable logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PIPELINE, POLICIES, poisson, request, table
from recorded import cancelled_at_work, find, record
from stages import DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog, Difference, entry_line, header_line, read_log, replay
from tilework.core.actions import Action
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.events import Event, ModelServed, Stopped, Woke
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import is_lora_name
from tilework.core.request import OnMiss
from tilework.core.wire.spec import Spec
from tilework.cost.table_file import table_json
from tilework.policy.registry import UnknownPolicy
from tilework.sim.config import SimConfig

HEADER = header_line("1.0", ControllerConfig(), table())
USED_LORAS = st.builds(
    UsedLora, st.from_regex(r"[\w.-]{1,20}", fullmatch=True).filter(is_lora_name), st.floats(-10, 10)
)
KINDS = {kind.__name__: kind for union in (Event, Action) for kind in get_args(union)}


# Round trip.


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
@settings(max_examples=12)
def test_every_event_and_action_survives_its_line(kind: str, data: st.DataObject) -> None:
    stages, loras = st.sampled_from(latent_diffusion(PIPELINE).stages), st.lists(USED_LORAS, max_size=3)
    caches = st.lists(st.builds(CacheChoice, st.sampled_from(CacheKind), st.floats(0, 1)), max_size=1)
    with_both = st.builds(
        lambda one, *used: replace(one, loras=tuple(used[0]), caches=tuple(used[1])), stages, loras, caches
    )
    st.register_type_strategy(Stage, with_both)
    st.register_type_strategy(ModelServed, st.just(ModelServed(json.dumps(table_json(table())))))
    value = data.draw(st.from_type(KINDS[kind]).filter(lambda drawn: "=nan" not in repr(drawn)))  # NaN equals nothing.
    now_ns = data.draw(st.integers(0, 2**63))
    is_event = KINDS[kind] in get_args(Event)
    event, actions = (value, ()) if is_event else (Woke(), (value, value))
    line = entry_line(event, actions, now_ns)
    assert "\n" not in line
    _, entries = read_log([HEADER, line + "\n"])
    (entry,) = entries
    assert (entry.now_ns, entry.event, entry.actions) == (now_ns, event, actions)
    assert (entry.line, entry.text) == (2, line)
    assert [type(action) for action in entry.actions] == [type(action) for action in actions]


def test_the_header_survives() -> None:
    config, costs = ControllerConfig(policy="fixed-sp1", max_attempts=7), replace(table(), devices_per_node=3)
    header, entries = read_log([header_line("1.2.3", config, costs)])
    assert (header.version, header.config, header.table) == ("1.2.3", config, costs)
    assert list(entries) == []


def test_no_text_of_a_client_is_in_a_log() -> None:
    """Lists every text field that a log can hold, so that adding one makes you check what it reveals."""
    texts: set[str] = set()
    for kind in reachable(Event) | reachable(Action):
        hints = get_type_hints(kind)
        texts |= {field.name for field in fields(kind) if str in (hints[field.name], *get_args(hints[field.name]))}
    stages = {
        "name",
        "components",
        "inputs",
        "outputs",
        "previews",
        "read",
        "forgets",
        "dropped",
        "costs",
        "digests",
    }  # Of stages, weights and cost tables: the model's.
    assert texts == {"uid", "pipeline", "tenant", "priority", "reason", "why"} | stages
    assert not texts & {field.name for field in fields(Spec)}


def reachable(kind: Any) -> set[type]:
    """The dataclasses that a value of this type may hold."""
    if not is_dataclass(kind):
        return set().union(*(reachable(argument) for argument in get_args(kind)))
    return {kind}.union(*(reachable(hint) for hint in get_type_hints(kind).values()))  # type: ignore[arg-type]


@pytest.mark.parametrize("pipeline", ["flux", "flux[dev]"])
def test_works_with_loras_replay_and_keep_their_stages(pipeline: str) -> None:
    denoise = latent_diffusion(pipeline).stage(DIFFUSE)
    changed = Graph(pipeline, (replace(denoise.spec, components=("net",), previews=""),))
    lora = Lora(changes=frozenset({"net"}))
    costs = replace(
        table(pipeline=pipeline), graphs={pipeline: changed}, loras={pipeline: {"ink": lora, "a-1.b_2": lora}}
    )
    costs = replace(costs, rows=tuple(row for row in costs.rows if row.stage == DIFFUSE))
    used = UsedLora("ink", -0.1), UsedLora("a-1.b_2", 1e-7)
    asked = [replace(request(str(index), loras=used[:index]), pipeline=pipeline) for index in range(3)]
    lines, trace = record(asked, costs=costs)
    assert {run.work.stage.loras for run in trace.runs} == {used[:index] for index in range(3)}
    assert replay(lines) == (len(lines) - 1, None)
    assert {past.work.stage.loras for past in read_history(lines).works} == {used[:index] for index in range(3)}
    assert [past.request.loras for past in read_history(lines).requests] == [used[:index] for index in range(3)]


@pytest.mark.parametrize("pipeline", ["flux", "flux{dev}"])
def test_works_with_a_cache_replay_and_keep_their_stages(pipeline: str) -> None:
    caches = None, CacheChoice(CacheKind.PATCH, 0.1), CacheChoice(CacheKind.IMAGE, 1e-7)
    costs = replace(table(pipeline=pipeline), graphs={pipeline: latent_diffusion(pipeline)})
    asked = [replace(request(str(index), cache=one), pipeline=pipeline) for index, one in enumerate(caches)]
    lines, trace = record(asked, costs=costs)
    used = {(one,) if one else () for one in caches}
    assert {run.work.stage.caches for run in trace.runs if run.work.stage.has_steps} == used
    assert not any(run.work.stage.caches for run in trace.runs if not run.work.stage.has_steps)
    assert replay(lines) == (len(lines) - 1, None)
    assert {past.work.stage.caches for past in read_history(lines).works if past.work.stage.has_steps} == used
    assert [past.request.cache for past in read_history(lines).requests] == list(caches)


# Replay.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulated_run_replays(policy: str) -> None:
    requests = poisson(30, 1.5, seed=4, slo_s=3.0)
    requests += [request(f"strict{i}", 5 + i, slo_s=0.9, on_miss=OnMiss.REJECT) for i in range(4)]
    cancels = cancelled_at_work(requests, 3, 12)
    lines, _ = record(requests, policy, sim=SimConfig(num_devices=2, jitter=0.2), cancels=cancels)
    if policy == "deadline-belady":
        with pytest.raises(UnknownPolicy, match="only a simulation can run it"):
            replay(line + "\n" for line in lines)
        return
    assert replay(line + "\n" for line in lines) == (len(lines) - 1, None)


@pytest.fixture(scope="module")
def busy_log() -> list[str]:
    """One device and a queue: each completion starts a work, so that any alteration shows at once."""
    return record([request(str(index), index * 0.7, slo_s=5 + index) for index in range(8)])[0]


def change(text: str, field: str, start: str = '"actions"') -> str:
    """Add one to a number, the first of this field after `start`."""
    at = text.index(start)
    return text[:at] + re.sub(rf'("{field}":)(\d+)', lambda m: f"{m[1]}{int(m[2]) + 1}", text[at:], count=1)


@pytest.mark.parametrize(
    "field", ["work_id", "num_steps", "after", "devices", "attempts", "job_ids", "eta_ns", "job_id"]
)
def test_an_altered_number_of_an_action_is_found(busy_log: list[str], field: str) -> None:
    with_field = "Accept" if field in ("eta_ns", "job_id") else "RunWork"
    index = find(busy_log, f'"is":"{with_field}"', after=20 if with_field == "RunWork" else 4)
    lines = list(busy_log)
    if field in ("after", "devices", "attempts", "job_ids"):
        lines[index] = re.sub(rf'"{field}":\[(\d+)\]', lambda m: f'"{field}":[{int(m[1]) + 1}]', lines[index], count=1)
    else:
        lines[index] = change(lines[index], field)
    assert lines[index] != busy_log[index]
    assert replay(lines) == (index - 1, Difference(line=index + 1, logged=lines[index], replayed=busy_log[index]))


@given(data=st.data())
@settings(max_examples=40)
def test_any_digit_of_any_action_counts(data: st.DataObject) -> None:
    original = SMALL_LOG
    index = data.draw(st.sampled_from([i for i, line in enumerate(original) if '"actions":[{' in line]))
    start = original[index].index('"actions"')
    at = data.draw(st.sampled_from([m.start() for m in re.finditer(r"\d", original[index]) if m.start() > start]))
    digit = data.draw(st.sampled_from([d for d in "0123456789" if d != original[index][at]]))
    lines = list(original)
    lines[index] = lines[index][:at] + digit + lines[index][at + 1 :]
    assert where_it_differs(lines) == index + 1


SMALL_LOG = record([request(str(index), index * 0.3, steps=5, slo_s=3) for index in range(3)])[0]


def where_it_differs(lines: list[str]) -> int | None:
    """The line that a replay complains about; a digit can also make invalid JSON, such as 07."""
    try:
        _, difference = replay(lines)
    except BadLog as error:
        return int(re.search(r"line (\d+)", str(error))[1])  # type: ignore[index]
    return None if difference is None else difference.line


def drop_action(lines: list[str], index: int) -> None:
    document = json.loads(lines[index])
    document["actions"].pop()
    lines[index] = json.dumps(document, separators=(",", ":"))


def double_action(lines: list[str], index: int) -> None:
    document = json.loads(lines[index])
    document["actions"] *= 2
    lines[index] = json.dumps(document, separators=(",", ":"))


def drop_line(lines: list[str], index: int) -> None:
    del lines[index]


def double_line(lines: list[str], index: int) -> None:
    lines.insert(index + 1, lines[index])


def swap_lines(lines: list[str], index: int) -> None:
    lines[index], lines[index + 1] = lines[index + 1], lines[index]


def other_event(lines: list[str], index: int) -> None:
    lines[index] = re.sub(r'"event":\{[^}]*\}', '"event":{"is":"Woke"}', lines[index])


def other_work_in_event(lines: list[str], index: int) -> None:
    lines[index] = change(lines[index], "work_id", start='"event"')


def blank(lines: list[str], index: int) -> None:
    lines[index] = lines[index].replace(",", ", ", 1)


@pytest.mark.parametrize(
    ("alter", "offset"),
    [
        (drop_action, 0),
        (double_action, 0),
        (drop_line, 0),
        (double_line, 1),
        (swap_lines, 0),
        (other_event, 0),
        (other_work_in_event, 0),
        (blank, 0),
    ],
)
def test_an_altered_log_is_found_at_its_line(
    busy_log: list[str], alter: Callable[[list[str], int], None], offset: int
) -> None:
    lines = list(busy_log)
    index = find(lines, '"event":{"is":"WorkFinished"', '"is":"RunWork"', after=12)
    assert '"actions":[{' in lines[index + 1], "the next line has actions, too"
    alter(lines, index)
    assert lines != busy_log
    assert where_it_differs(lines) == index + 1 + offset


def test_an_altered_measurement_is_found_where_it_first_changes_a_decision(busy_log: list[str]) -> None:
    index = find(busy_log, '"event":{"is":"WorkFinished"', after=5)
    answered = find(busy_log, '"is":"Accept"', after=index)
    lines = list(busy_log)
    lines[index] = re.sub(r'"run_ns":\d+', '"run_ns":777777777', lines[index])
    line = where_it_differs(lines)
    assert line is not None
    assert index + 1 <= line <= answered + 1


def test_an_altered_header_is_found_where_it_first_changes_a_decision(busy_log: list[str]) -> None:
    for old, new in (('"policy":"edf"', '"policy":"fixed-sp1"'), ('"seconds":0.1,', '"seconds":0.2,')):
        lines = [busy_log[0].replace(old, new), *busy_log[1:]]
        assert lines != busy_log
        assert where_it_differs(lines) == find(busy_log, "Submitted") + 1


def test_an_event_that_the_controller_cannot_handle_is_a_difference(busy_log: list[str]) -> None:
    encoded = find(busy_log, '"event":{"is":"WorkFinished"')
    index = find(busy_log, '"event":{"is":"WorkFinished"', after=encoded)
    work_id = json.loads(busy_log[index])["event"]["work_id"]
    impossible = entry_line(Stopped(work_id, 1000), (), json.loads(busy_log[index])["t"])
    count, difference = replay([*busy_log[:index], impossible])
    assert difference is not None
    assert (count, difference.line) == (index - 1, index + 1)
    assert "the controller fails: AssertionError('a work has more steps than its job')" in difference.replayed


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UnknownPolicy, match="'gone'"):
        replay([header_line("1.0", ControllerConfig(policy="gone"), table())])


# Logs that cannot be read.


@given(data=st.data())
@settings(max_examples=40)
def test_a_last_line_that_was_cut_off_is_left_out(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(SMALL_LOG[-1]) - 1))
    cut, warnings = [*SMALL_LOG[:-1], SMALL_LOG[-1][:length]], list[str]()
    assert replay(cut, warnings.append) == (len(cut) - 2, None)
    assert read_history(cut, warnings.append) == read_history(SMALL_LOG[:-1])
    assert warnings == 2 * [f"line {len(cut)}, the last, was cut off while it was written; it is left out"]


def test_a_line_that_was_cut_off_elsewhere_is_named() -> None:
    for cut in ([*SMALL_LOG[:-1], SMALL_LOG[-1][:9] + "\n"], [*SMALL_LOG[:4], SMALL_LOG[4][:9], *SMALL_LOG[5:]]):
        for read in (replay, read_history):
            with pytest.raises(BadLog, match=r"is not JSON.*cut off"):
                read(cut)


def test_what_is_unknown_in_a_header_is_left_out_with_one_warning() -> None:
    """The cost table has a row of a stage that its pipeline lacks, and one of a later version; so has the config."""
    document = json.loads(HEADER)
    rows = document["cost_table"]["rows"]
    document["cost_table"]["rows"] = [{**rows[0], "stage": "export"}, *rows, {"kind": "of a later version"}]
    document["cost_table"]["graphs"] = {"other": {"stages": [{"name": "a", "shape": "round"}]}}
    document["config"]["patience"] = 3
    document["colour"] = "red"
    warnings: list[str] = []
    header, _ = read_log([json.dumps(document)], warnings.append)
    assert header.table == table()
    assert header.config == ControllerConfig()
    (warning,) = warnings
    assert warning.startswith("line 1 is read without what is unknown in it: ")
    assert warning.endswith("(and 3 more)")


def test_a_missing_last_line_break_is_no_error() -> None:
    lines = [line + "\n" for line in SMALL_LOG]
    lines[-1] = SMALL_LOG[-1]
    assert replay(lines) == (len(SMALL_LOG) - 1, None)


def header_without(*keys: str, **changes: Any) -> str:
    document = {key: value for key, value in json.loads(HEADER).items() if key not in keys}
    return json.dumps(document | changes)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "line 1 is not JSON"),
        ("", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ("{}", "line 1 is not the header of a log; give"),
        (
            header_without(tilework_log=1),
            "line 1 is the header of a log of format 1, and this Tilework reads format 22",
        ),
        (SMALL_LOG[1], "line 1 is not the header of a log; give"),
        (header_without("version"), "line 1 is not the header of a log: KeyError('version')"),
        (header_without("cost_table"), "line 1 is not the header of a log: KeyError('cost_table')"),
        (header_without(config=5), "line 1 is not the header"),
        (header_without(cost_table={"rows": []}), "non-empty list"),
    ],
)
def test_a_wrong_header_is_named(header: str | None, complaint: str) -> None:
    with pytest.raises(BadLog, match=re.escape(complaint)):
        read_log([] if header is None else [header])


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "{}",
        '{"t":0,"event":{"is":"Woke"}}',
        '{"t":"0","event":{"is":"Woke"},"actions":[]}',
        '{"t":0.5,"event":{"is":"Woke"},"actions":[]}',
        '{"t":null,"event":{"is":"Woke"},"actions":[]}',
        '{"t":0,"event":"Woke","actions":[]}',
        '{"t":0,"event":{"is":["Woke"]},"actions":[]}',
        '{"t":0,"event":{"is":"Slept"},"actions":[]}',
        '{"t":0,"event":{"is":"Stop","work_id":1},"actions":[]}',
        '{"t":0,"event":{"is":"Woke"},"actions":[{"is":"Woke"}]}',
        '{"t":0,"event":{"is":"Woke"},"actions":7}',
        '{"t":0,"event":{"is":"Woke"},"actions":[{"is":"Stop"}]}',
        '{"t":0,"event":{"is":"Woke"},"actions":[{"is":"Stop","work_id":"1"}]}',
        '{"t":0,"event":{"is":"Woke"},"actions":[{"is":"DropState","job_id":0,"devices":4}]}',
        '{"t":0,"event":{"is":"WorkFinished","work_id":1,"run_ns":true},"actions":[]}',
        '{"t":0,"event":{"is":"DeviceLost","device_id":0,"reason":null},"actions":[]}',
        '{"t":0,"event":{"is":"Woke"},"actions":[{"is":"Finish","job_id":0,"uid":"a","status":"over","reason":""}]}',
    ],
)
def test_an_invalid_entry_is_named(line: str) -> None:
    for read in (replay, read_history):
        with pytest.raises(BadLog, match="line 3 is not"):
            read([HEADER, entry_line(Woke(), (), 0), line + "\n"])


def test_a_line_earlier_than_the_line_before_is_named() -> None:
    lines = [HEADER, *(entry_line(Woke(), (), now_ns) for now_ns in (5, 5, 4))]
    with pytest.raises(BadLog, match="line 4 has time 4, before that of the line above"):
        replay(lines)
