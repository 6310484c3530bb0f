"""The event log: round trips, replay, alterations, unreadable logs, and histories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from statistics import median
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PIPELINE, POLICIES, poisson, request, table
from recorded import recorded
from stages import DIFFUSE, stage_of
from tilework.control.controller import ControllerConfig
from tilework.control.history import PastWork
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog, Difference, entry_line, header_line, read_log, replay
from tilework.control.measured import dispatch_ns, profiled_table
from tilework.core.actions import Action, Reject
from tilework.core.cost_row import CostRow
from tilework.core.events import DeviceLost, Event, ModelServed, Stopped, Woke, WorkFailed, WorkFinished
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.lora import LORA_NAME, Lora, UsedLora
from tilework.core.request import OnMiss, RefusalCode, Request, Shape, Status
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.core.wire import Spec
from tilework.core.work import Work
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json
from tilework.policy.registry import UnknownPolicy
from tilework.sim.config import SimConfig
from tilework.sim.runs import RunEnd
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

HEADER = header_line("1.0", ControllerConfig(), table())
USED_LORAS = st.builds(UsedLora, st.from_regex(LORA_NAME, fullmatch=True), st.floats(-10, 10))
KINDS = {kind.__name__: kind for union in (Event, Action) for kind in get_args(union)}


def record(
    requests: list[Request],
    policy: str = "edf",
    *,
    sim: SimConfig | None = None,
    cancels: Iterable[tuple[int, str]] = (),
    costs: CostTable | None = None,
) -> tuple[list[str], Trace]:
    """The log of a simulation."""
    config, costs = ControllerConfig(policy=policy), costs or table()
    lines = [header_line("1.0", config, costs)]

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        lines.append(entry_line(event, actions, now_ns))

    trace = Simulation(config, costs, sim or SimConfig(num_devices=1)).run(requests, cancels, observe)
    return lines, trace


def cancelled_at_work(requests: list[Request], *indices: int) -> list[tuple[int, str]]:
    """Cancellations soon after the arrival of these requests."""
    return [(requests[index].arrival_ns + 400 * NS_PER_MS, requests[index].uid) for index in indices]


# Round trip.


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
@settings(max_examples=30)
def test_every_event_and_action_survives_its_line(kind: str, data: st.DataObject) -> None:
    stages, loras = st.sampled_from(latent_diffusion(PIPELINE).stages), st.lists(USED_LORAS, max_size=3)
    st.register_type_strategy(Stage, st.builds(lambda stage, used: replace(stage, loras=tuple(used)), stages, loras))
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
        "costs",
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


def find(lines: list[str], *parts: str, after: int = 0) -> int:
    """Index of the first entry with all these parts; its line number is one more."""
    return next(i for i, line in enumerate(lines) if i > after and all(part in line for part in parts))


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
def test_a_last_line_that_was_cut_off_is_named(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(SMALL_LOG[-1]) - 1))
    cut = [*SMALL_LOG[:-1], SMALL_LOG[-1][:length]]
    for read in (replay, read_history):
        with pytest.raises(BadLog, match=f"line {len(cut)} is not JSON.*cut off"):
            read(cut)


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
        (header_without(tilework_log=1), "line 1 is the header of a log of format 1, and this Tilework reads format 8"),
        (SMALL_LOG[1], "line 1 is not the header of a log; give"),
        (header_without("version"), "line 1 is not the header of a log: KeyError('version')"),
        (header_without("cost_table"), "line 1 is not the header of a log: KeyError('cost_table')"),
        (header_without(config={"polcy": "edf"}), "polcy"),
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
            read([HEADER, entry_line(Woke(), (), 0), line])


def test_a_line_earlier_than_the_line_before_is_named() -> None:
    lines = [HEADER, *(entry_line(Woke(), (), now_ns) for now_ns in (5, 5, 4))]
    with pytest.raises(BadLog, match="line 4 has time 4, before that of the line above"):
        replay(lines)


# History.


def test_the_history_equals_the_simulation() -> None:
    requests = poisson(40, 1.5, seed=9, slo_s=3.0)
    requests += [request(f"strict{i}", 3 + i, slo_s=0.9, on_miss=OnMiss.REJECT) for i in range(4)]
    cancels = cancelled_at_work(requests, 3, 12)
    lines, trace = record(requests, sim=SimConfig(num_devices=2, jitter=0.1), cancels=cancels)
    history = read_history(lines)
    assert {ending.status for ending in trace.endings} == {Status.DONE, Status.REJECTED, Status.CANCELLED}
    assert history.num_devices == 2
    past = {one.request.uid: one for one in history.requests}
    assert past.keys() == {ending.request.uid for ending in trace.endings}
    for ending in trace.endings:
        one = past[ending.request.uid]
        told = (one.request, one.status, one.finish_ns, one.job_id, one.eta_ns)
        assert told == (ending.request, ending.status, ending.finish_ns, ending.job_id, ending.eta_ns)
    executed = [(run.work, run.start_ns, run.end_ns, run.steps) for run in trace.runs if run.end is not RunEnd.STOPPED]
    assert [(w.work, w.start_ns, w.end_ns, w.steps) for w in history.works if w.run_ns is not None] == executed
    stopped = [(run.work, run.end_ns, run.steps) for run in trace.runs if run.end is RunEnd.STOPPED]
    assert [(w.work, w.end_ns, w.steps) for w in history.works if w.run_ns is None and w.steps] == stopped


def test_a_cut_off_log_leaves_its_requests_open() -> None:
    (past,) = read_history(record([request("a")])[0][:5]).requests
    assert (past.job_id, past.status, past.finish_ns) == (0, None, None)


def seconds_of(costs: CostTable) -> dict[tuple[str, str, int, int], float]:
    return {(row.pipeline, row.stage, row.width, row.degree): row.seconds for row in costs.rows}


def test_the_profiled_table_recovers_what_the_devices_cost() -> None:
    """Jitter averages out; the time in a device's queue is separated from the run time."""
    requests = [request(str(index), index * 0.5, side=(64, 128)[index % 2], steps=20) for index in range(120)]
    sim = SimConfig(num_devices=1, jitter=0.1, dispatch_ns=30 * NS_PER_MS)
    history = read_history(record(requests, sim=sim)[0])
    true, found = seconds_of(table()), seconds_of(profiled_table(history))
    assert found.keys() == true.keys()
    for key, seconds in found.items():
        assert seconds == pytest.approx(true[key], rel=0.05)
        assert (seconds == true[key]) == (key[2] == 192), "sizes that did not run keep their rows"
    assert dispatch_ns(history) == {1: 30 * NS_PER_MS}


def test_a_profiled_size_is_the_median_of_its_works_by_step() -> None:
    history = read_history(record([request("a", steps=11)], sim=SimConfig(num_devices=1, jitter=0.3, seed=5))[0])
    measured = [(w.run_ns or 0) / w.steps / NS_PER_S for w in history.works if w.work.stage.name == DIFFUSE]
    assert len(measured) > 2
    assert seconds_of(profiled_table(history))[PIPELINE, DIFFUSE, 128, 1] == median(measured)


def test_profiling_keeps_other_pipelines_and_degrees_and_ignores_unguided_requests() -> None:
    others = (
        replace(table().rows[0], pipeline="other", height=128, width=128, stage=DIFFUSE, seconds=7.0),
        replace(table().rows[0], degree=2, height=128, width=128, stage=DIFFUSE, seconds=0.06),
    )
    costs = replace(table(), rows=table().rows + others)
    sim = SimConfig(num_devices=1, jitter=0.2)
    guided, unguided = request("a"), replace(request("b"), guided=False)
    found = seconds_of(profiled_table(read_history(record([guided], sim=sim, costs=costs)[0])))
    assert (found["other", DIFFUSE, 128, 1], found[PIPELINE, DIFFUSE, 128, 2]) == (7.0, 0.06)
    assert found[PIPELINE, DIFFUSE, 128, 1] != 0.1
    alone = profiled_table(read_history(record([unguided], sim=sim, costs=costs)[0]))
    assert sorted(map(repr, alone.rows)) == sorted(map(repr, costs.rows))


def test_steps_with_loras_are_no_measurement_of_those_without() -> None:
    history = read_history(record([request("a"), request("b", 5.0)])[0])
    slow = [
        replace(past, work=replace(past.work, stage=replace(past.work.stage, loras=(UsedLora("ink", 1.0),))))
        for past in history.works
    ]
    slow = [replace(past, end_ns=past.end_ns + NS_PER_S, run_ns=(past.run_ns or 0) + NS_PER_S) for past in slow]
    changed = replace(history, works=(*history.works, *slow))
    assert profiled_table(changed).rows == profiled_table(history).rows


def test_a_profiled_batch_replaces_the_row_of_the_same_members_and_no_other() -> None:
    """The controller predicts 0.11 s; the devices take 0.09 s."""
    two, three = (Shape(64, 64), Shape(128, 128)), (Shape(128, 128),) * 3
    rows = [CostRow.of(batch, pipeline=PIPELINE, stage=DIFFUSE, seconds=0.11) for batch in (two, three)]
    costs, devices = (
        replace(table(), rows=(*table().rows, replace(rows[0], seconds=s), rows[1])) for s in (0.11, 0.09)
    )
    requests = [request("a"), request("b", side=64)]
    run = recorded(requests, "patchedserve", sim=SimConfig(num_devices=1), costs=costs, devices=devices)
    steps = {row.shapes: row.seconds for row in profiled_table(run.history).rows if row.stage == DIFFUSE}
    assert (steps[two], steps[three]) == (pytest.approx(0.09), 0.11)


def test_a_run_without_a_queue_has_no_dispatch_time() -> None:
    assert dispatch_ns(read_history([HEADER])) == {}


def past(work_id: int, start_ns: int, devices: tuple[int, ...], after: tuple[int, ...] = ()) -> PastWork:
    """A work of 100 ns."""
    work = Work(
        work_id=work_id,
        stage=stage_of(PIPELINE, DIFFUSE),
        job_ids=(0,),
        attempts=(0,),
        positions=(1,),
        first_steps=(0,),
        devices=devices,
        num_steps=1,
        why="a test",
        after=after,
    )
    return PastWork(work=work, start_ns=start_ns, end_ns=start_ns + 100, steps=1, run_ns=100)


def test_dispatch_is_the_mean_gap_by_degree_after_the_last_work_before() -> None:
    works = (
        past(0, 0, (0,)),
        past(1, 50, (1,)),
        past(2, 106, (0,), (0,)),
        past(3, 300, (0, 1), (2, 1)),
        past(4, 420, (0, 1), (3,)),
        past(5, 900, (0, 1)),
        past(6, 1030, (0,), (5,)),
        past(7, 1133, (0,), (6,)),
    )
    assert dispatch_ns(replace(read_history([HEADER]), works=works)) == {1: 13, 2: 57}


def test_the_largest_hundredth_of_the_gaps_is_left_out() -> None:
    behind = [past(index, 100 + gap, (0,), (0,)) for index, gap in enumerate([10_000] * 2 + [5, 9] * 99, start=1)]
    history = replace(read_history([HEADER]), works=(past(0, 0, (0,)), *behind))
    assert dispatch_ns(history) == {1: 7}
    assert dispatch_ns(replace(history, works=history.works[:2])) == {1: 10_000}


@pytest.mark.parametrize(
    "entry",
    [
        entry_line(WorkFinished(9, 1), (), 0),
        entry_line(Stopped(9, 1), (), 0),
        entry_line(Woke(), (Reject("9", "no", None, RefusalCode.QUEUE),), 0),
    ],
)
def test_history_refuses_a_work_that_no_line_began(entry: str) -> None:
    with pytest.raises(BadLog, match=r"the log names '?9'?, which no earlier line began"):
        read_history([HEADER, entry])


def test_history_lists_failed_and_lost_works_apart() -> None:
    """They are not among the executed works."""
    lines, _ = record([request("a")])
    begun = find(lines, '"event":{"is":"WorkFinished"')
    broken = [*lines[:begun], *(entry_line(e, (), 10**7) for e in (WorkFailed(1, "broken"), DeviceLost(0, "gone")))]
    history = read_history(broken)
    assert history.works == ()
    assert [past.status for past in history.requests] == [None]
