"""Comparing policies: figures of traces checked by hand, intervals, what is kept and what is run again, the grid."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import ended, record_of, summary, trace

from builders import PIPELINE, SERVICE_S, Idle, request, table
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.control.controller import ControllerConfig
from tilework.core.lora import UsedLora
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.time import NS_PER_MS, ns_from_s
from tilework.core.work import Member, Plan, Work
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.policy import registry
from tilework.sim.config import SimConfig
from tilework.sim.runs import Run
from tilework.sim.simulation import Simulation
from tilework.sim.workloads.cells import Cell, CellDevices, cell_of
from tilework.sim.workloads.requests import BadRequests
from tilework_lab.compare.figures import Figures, figures_of, jain, nearest_rank, preemptions
from tilework_lab.compare.grid import chosen, grid
from tilework_lab.compare.overall import bound_overall, overall_of
from tilework_lab.compare.records import BadRecords, BoundFigures, Record, Records, parse_record
from tilework_lab.compare.runs import Conditions, Failed, Task, config_of, given, run, run_all
from tilework_lab.compare.summary import estimate, summary_of, t_quantile
from tilework_lab.workloads.tetriserve import TetriServe

NO_CONDITIONS = Conditions()


def ran(
    job: int, start_s: float, end_s: float, *devices: int, steps: int = 5, stage: str = DIFFUSE, work: int = 0
) -> Run:
    """A work of one job on these devices; numbered by its start if it has no number."""
    number = work or round(1000 * start_s)
    done = Work(
        work_id=number,
        stage=stage_of(PIPELINE, stage),
        members=(Member(job, 1, 1, 0),),
        devices=devices,
        num_steps=steps,
        why="",
    )
    return Run(work=done, devices=devices, start_ns=ns_from_s(start_s), end_ns=ns_from_s(end_s), steps=steps)


# Figures.


def test_figures_of_a_trace_by_hand() -> None:
    """Four requests with deadlines: on time, just on time, late, refused; and one without that is done."""
    endings = (
        ended(request("a", 0.0, slo_s=2.0), 1.0),
        ended(request("b", 1.0, slo_s=3.0), 4.0),
        ended(request("c", 2.0, slo_s=1.0), 12.0),
        ended(request("d", 3.0, slo_s=1.0, side=64), 3.0, Status.REJECTED),
        ended(request("e", 4.0), 6.0),
    )
    runs = (ran(1, 0.0, 1.0, 0), ran(2, 1.0, 3.0, 0, 1), ran(3, 3.0, 3.5, 0, stage=DECODE))
    found = figures_of(trace(*endings, runs=runs, num_events=17))
    assert (found.num_requests, found.num_due, found.num_on_time, found.num_good) == (5, 4, 2, 3)
    assert (found.num_unserved, found.num_events) == (1, 17)
    assert found.attainment == 0.5
    assert found.device_s == pytest.approx(1.0 + 2 * 2.0 + 0.5)
    assert found.device_s_each == pytest.approx(5.5 / 3)
    assert found.mean_s == found.p95_s == found.p99_s == math.inf
    assert found.quantiles_s[:20] == (1.0,) * 20
    assert found.quantiles_s[20:80] == (2.0,) * 20 + (3.0,) * 20 + (10.0,) * 20
    assert found.quantiles_s[80:] == (math.inf,) * 20
    small, large = found.by_size["64x64"], found.by_size["128x128"]
    assert (small.num_requests, small.num_due, small.num_on_time, small.mean_s) == (1, 1, 0, math.inf)
    assert (large.num_requests, large.num_due, large.num_on_time, large.mean_s) == (4, 3, 2, 4.0)
    assert list(found.by_size) == ["64x64", "128x128"]


def test_without_deadlines_there_is_latency_and_no_attainment() -> None:
    found = figures_of(trace(*(ended(request(str(i), float(i)), 2.0 * i + 1) for i in range(100))))
    assert (found.attainment, found.fairness, found.num_good) == (None, None, 100)
    assert (found.mean_s, found.p95_s, found.p99_s) == (pytest.approx(50.5), 95.0, 99.0)


def test_no_request_on_time_makes_device_time_infinite() -> None:
    found = figures_of(trace(ended(request("a", slo_s=1.0), 5.0), runs=(ran(1, 0.0, 1.0, 0),)))
    assert (found.attainment, found.device_s_each) == (0.0, math.inf)


def test_chunks_that_follow_each_other_are_no_preemption() -> None:
    runs = [ran(1, 0.0, 1.0, 0, stage=ENCODE), ran(1, 3.0, 4.0, 0, 1), ran(1, 4.0, 5.0, 1, 0), ran(2, 4.0, 6.0, 2)]
    runs += [ran(1, 8.0, 9.0, 0, stage=DECODE)]
    assert preemptions(runs) == (0, 0)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (ran(1, 2.0, 3.0, 0, 1), (1, 0)),  # After a gap, on the same devices.
        (ran(1, 1.0, 2.0, 0, 1, 2, 3), (1, 1)),  # At once, on more.
        (ran(1, 1.0, 2.0, 2, 3), (1, 1)),  # At once, on others.
        (ran(1, 9.0, 10.0, 0), (1, 1)),  # Both is one.
        (ran(2, 2.0, 3.0, 0, 1), (0, 0)),  # Another job.
        (ran(1, 2.0, 2.0, 0, 1, steps=0), (0, 0)),  # Revoked before it did anything.
    ],
)
def test_a_preemption_is_a_gap_or_other_devices(later: Run, expected: tuple[int, int]) -> None:
    assert preemptions([later, ran(1, 0.0, 1.0, 0, 1)]) == expected


def test_interruptions_are_counted_when_a_job_resumes() -> None:
    runs = [ran(1, at_s, at_s + 1.0, 0) for at_s in (0.0, 1.0, 3.0, 5.0)] + [ran(1, 6.0, 7.0, 1)]
    assert preemptions(runs) == (3, 1)
    assert preemptions(runs, dispatch_ns=ns_from_s(1.0)) == (1, 1), "what is lost before every work is no gap"


def test_fairness_is_over_tenants_if_there_are_several_else_over_sizes() -> None:
    assert jain([0.5, 0.5, 0.5]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.9, 0.3]) == pytest.approx(1.2**2 / (2 * 0.9))
    assert jain([0.0, 0.0]) == 1.0
    served = [request("a", side=64, slo_s=2.0), request("b", slo_s=2.0)]
    late = [request("c", side=192, slo_s=0.5)]
    sizes = [ended(one, 1.0) for one in served + late]
    assert figures_of(trace(*sizes)).fairness == pytest.approx(2**2 / (3 * 2))
    tenants = [replace(one, request=replace(one.request, tenant=name)) for one, name in zip(sizes, "xyx", strict=True)]
    assert figures_of(trace(*tenants)).fairness == pytest.approx(1.5**2 / (2 * 1.25))
    assert figures_of(trace(sizes[0])).fairness is None


def test_nearest_rank_is_one_of_the_values() -> None:
    assert [nearest_rank([1.0, 2.0, 4.0], percent) for percent in (1, 33, 34, 67, 99, 100)] == [1, 1, 2, 4, 4, 4]


def test_an_edf_that_never_pauses_differs_from_one_that_does() -> None:
    """On one device, of two that come together neither is interrupted, unless an urgent one comes between."""
    calm = [request("a", 0.0, slo_s=9.0), request("b", 0.0, slo_s=9.0)]
    urgent = [*calm, request("c", 0.3, side=64, slo_s=0.9)]
    counts = [
        figures_of(Simulation(ControllerConfig(), table(), SimConfig(num_devices=1)).run(some)).num_preempted
        for some in (calm, urgent)
    ]
    assert counts == [0, 1]


# Intervals and summaries.


def test_an_interval_is_student_s_t() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert estimate([5.0]).half is None
    assert (estimate([1.0, math.inf]).mean, estimate([1.0, math.inf]).half) == (math.inf, None)
    assert t_quantile(20) == pytest.approx(2.0860, abs=1e-4)
    assert t_quantile(21) == pytest.approx(2.0796, abs=1e-4)
    assert t_quantile(120) == pytest.approx(1.9799, abs=1e-4)


def test_the_lead_is_over_the_best_of_the_others_seed_by_seed() -> None:
    found = summary({"a": [80, 90], "b": [70, 80], "c": [79, 80]}, bounds=[100.0, 100.0])
    lead = {one.policy: (one.rival, one.lead) for one in found.policies}
    assert lead["a"][0] == "c"
    assert lead["a"][1] is not None
    assert lead["a"][1].values == pytest.approx((0.01, 0.10))
    assert lead["b"][0] == lead["c"][0] == "a"
    assert lead["b"][1] is not None
    assert (lead["b"][1].mean, lead["b"][1].half) == (pytest.approx(-0.10), pytest.approx(0.0, abs=1e-12))
    assert found.best("attainment") == ["a"]
    assert summary({"a": [80]}).policies[0].lead is None


def test_each_seed_is_compared_with_its_own_bound() -> None:
    found = summary({"a": [80, 45]}, bounds=[80.0, 90.0])
    of_bound = found.policies[0].estimates["of_bound"]
    assert of_bound is not None
    assert of_bound.values == (1.0, 0.5)
    assert found.bound is not None
    assert found.bound.mean == pytest.approx(0.85)
    assert summary({"a": [80]}).policies[0].estimates["of_bound"] is None


def test_overall_is_the_mean_over_cells_with_deadlines_and_names_the_worst() -> None:
    cells = grid()
    easy, hard = summary({"a": [90], "b": [80]}, cell=cells[0]), summary({"a": [10], "b": [60]}, cell=cells[1])
    videos = chosen(cells, "ddit8-r1")[0]
    slow = summary_of(videos, {"a": [record_of(0, 0, 3.0)], "b": [record_of(0, 0, 2.0)]}, [None], {})
    first, second = overall_of([easy, hard, slow])
    assert first.attainment is not None
    assert first.attainment.mean == pytest.approx(0.5)
    assert (first.worst, first.worst_cell, first.num_best) == (0.1, cells[1].name, 1)
    assert (first.slowdown, second.slowdown, second.num_best) == (pytest.approx(1.5), 1.0, 2)
    assert second.by_section == {"deadlines": pytest.approx(0.7)}
    assert bound_overall([easy, hard, slow]) is None
    assert first.of_bound is None


def test_the_overall_share_of_the_bound_is_over_the_cells_that_have_one() -> None:
    cells = grid()
    bounded = summary({"a": [40]}, bounds=[80.0], cell=cells[0])
    batched = summary({"a": [90]}, cell=cells[1])
    (overall,) = overall_of([bounded, batched])
    assert overall.of_bound is not None
    assert overall.of_bound.mean == pytest.approx(0.5)


# Runs.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """Twelve requests on two devices, of which most can be on time."""
    return Cell(name="small", workload=TetriServe(num_requests=12), table="flux1dev_h100_eager", num_devices=2)


def file_cell(path: Path, *lines: WorkloadRequest) -> Cell:
    write_workload(path / "r.jsonl", lines)
    (path / "costs.json").write_text(json.dumps(table_json(table())))
    return Cell(name="file", workload=path / "r.jsonl", table=str(path / "costs.json"), num_devices=1)


def line(arrival_s: float, slo_s: float | None = None, pipeline: str = PIPELINE) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=arrival_s, pipeline=pipeline, height=128, width=128, steps=10, slo_s=slo_s)


def test_a_run_and_its_bound_by_hand(tmp_path: Path) -> None:
    """Two that come together on one device, each due when one of them can be done."""
    cell = file_cell(tmp_path, line(0.0, 1.2), line(0.0, 1.2), line(5.0))
    found = run(Task(cell=cell, seed=0, policy="edf"), NO_CONDITIONS)
    figures, bound = found.result, run(Task(cell=cell, seed=0, policy=None), NO_CONDITIONS).result
    assert not isinstance(figures, BoundFigures)
    assert (figures.num_due, figures.num_on_time, figures.num_good) == (2, 1, 2)
    assert figures.device_s == pytest.approx(3 * SERVICE_S)
    assert figures.quantiles_s[-1] == pytest.approx(2 * SERVICE_S)
    assert isinstance(bound, BoundFigures)
    assert (bound.num_due, bound.most_on_time) == (2, 1.0)
    assert found.timing is not None
    assert found.timing.num_plans >= figures.num_events
    assert 0 < found.timing.plan_p50_ms <= found.timing.plan_p99_ms


def test_a_switch_takes_the_configured_time(tmp_path: Path) -> None:
    cell = file_cell(tmp_path, line(0.0), line(0.0))
    task = Task(cell=cell, seed=0, policy="fixed-sp1")
    means = [run(task, Conditions(switch_ns=ms * NS_PER_MS)).result for ms in (0, 100)]
    assert [one.mean_s for one in means if not isinstance(one, BoundFigures)] == pytest.approx(
        [1.5 * SERVICE_S, 1.5 * (SERVICE_S + 0.1)]
    )


def test_refusals_of_a_policy_of_its_own_are_part_of_a_comparison() -> None:
    cell = cell_of("tetriserve,rpm=120,num=60", CellDevices())
    unserved = {}
    for policy in ("onepiece", "onepiece-wo-reject"):
        result = run(Task(cell=cell, seed=0, policy=policy), Conditions()).result
        assert isinstance(result, Figures)
        unserved[policy] = result.num_unserved
    assert unserved["onepiece"] > unserved["onepiece-wo-reject"] == 0


def test_equal_tasks_have_equal_figures_in_one_process_and_in_two(small: Cell) -> None:
    policies = (None, "edf", "tetriserve", "fixed-sp2")
    tasks = [Task(cell=small, seed=seed, policy=policy) for seed in (0, 1) for policy in policies]
    jittered = Conditions(jitter=0.05)

    def figures(num_processes: int) -> dict[Task, Any]:
        found = dict(run_all(tasks, jittered, num_processes))
        assert not any(isinstance(result, Failed) for result in found.values())
        return {
            task: replace(one.result, wall_s=0.0) if isinstance(one.result, BoundFigures) else one.result
            for task, one in found.items()
            if isinstance(one, Record)
        }

    alone, again, both = figures(1), figures(1), figures(2)
    assert list(alone) == tasks
    assert alone == again == both
    assert alone[tasks[1]] != alone[tasks[5]], "another seed is another run"


def test_the_key_knows_all_that_decides_a_result(small: Cell, tmp_path: Path) -> None:
    task = Task(cell=small, seed=0, policy="edf")
    others = [
        (replace(task, policy="tetriserve"), NO_CONDITIONS),
        (replace(task, seed=1), NO_CONDITIONS),
        (replace(task, policy=None), NO_CONDITIONS),
        (task, Conditions(jitter=0.1)),
        (task, Conditions(switch_ns=NS_PER_MS)),
        (replace(task, cell=replace(small, num_devices=3)), NO_CONDITIONS),
        (replace(task, cell=replace(small, devices_per_node=1)), NO_CONDITIONS),
        (replace(task, cell=replace(small, workload=TetriServe(num_requests=12, scale=1.1))), NO_CONDITIONS),
    ]
    configs = [config_of(one, conditions) for one, conditions in [(task, NO_CONDITIONS), *others]]
    keys = [Record(config=config, result=BoundFigures(num_due=0, most_on_time=0, wall_s=0)).key for config in configs]
    assert len(set(keys)) == len(keys)
    renamed = replace(task, cell=replace(small, name="other", section="s"))
    assert config_of(renamed, NO_CONDITIONS) == configs[0], "a name decides nothing"
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, at_s in zip(paths, (0.0, 1.0), strict=True):
        path.mkdir()
        file_cell(path, line(at_s))
    files = [Cell(name="f", workload=path / "r.jsonl", table=str(path / "costs.json"), num_devices=1) for path in paths]
    digests = [config_of(Task(cell=one, seed=0, policy="edf"), NO_CONDITIONS)["requests"] for one in files]
    assert digests[0] != digests[1], "what is in a file decides, not its name"
    jittered = [config_of(Task(cell=files[0], seed=seed, policy="edf"), Conditions(jitter=0.1)) for seed in (0, 1)]
    assert jittered[0] != jittered[1], "a seed decides what jitters, also of requests that are the same"


def test_a_policy_that_breaks_is_reported_and_the_others_continue(small: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Idle):
        def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
            raise ZeroDivisionError("by zero")

    monkeypatch.setitem(registry._GIVEN, "broken", Broken)
    tasks = [Task(cell=small, seed=0, policy=policy) for policy in ("broken", "edf")]
    found = dict(run_all(tasks, NO_CONDITIONS, 1))
    assert found[tasks[0]] == Failed(task=tasks[0], error="ZeroDivisionError: by zero")
    assert isinstance(found[tasks[1]], Record)


def test_closing_the_results_ends_what_is_running(small: Cell) -> None:
    tasks = [Task(cell=small, seed=seed, policy="edf") for seed in range(6)]
    begun: list[Task] = []
    runs = run_all(tasks, NO_CONDITIONS, 2, begun.append)
    next(runs)
    runs.close()
    assert len(begun) < len(tasks)


def test_requests_that_cannot_be_simulated_are_refused(tmp_path: Path) -> None:
    cell = file_cell(tmp_path, line(0.0, pipeline="flux"))
    with pytest.raises(BadRequests, match=r"pipeline 'flux' is not in .*; it knows toy"):
        given(cell, 0)
    cell = file_cell(tmp_path, replace(line(0.0), loras=(UsedLora("ink", 1.0),)))
    with pytest.raises(BadRequests, match=r"LoRA 'ink' of 'toy' is not in .*; leave it out"):
        given(cell, 0)


# What is kept.


def record(policy: str = "edf", **more: Any) -> Record:
    """One with a latency that is infinite."""
    endings = (ended(request("a", slo_s=2.0), 1.0), ended(request("b", slo_s=1.0), 1.0, Status.REJECTED))
    return Record(config={"policy": policy} | more, result=figures_of(trace(*endings)), cell="c", code="d")


def test_records_are_read_back_with_infinite_values(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    records, timed = Records(path), run(Task(cell=grid()[0], seed=0, policy=None), NO_CONDITIONS)
    for one in (record(), record(seed=1), timed):
        records.add(one)
    again = Records(path)
    assert len(again) == 3
    assert again.get(record().key) == record()
    assert again.get(timed.key) == timed
    assert again.get(record("tetriserve").key) is None
    assert "Infinity" not in path.read_text()


def test_a_truncated_line_is_removed_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Records(path).add(record())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    records = Records(path)
    assert (len(records), path.read_bytes()) == (1, whole)
    records.add(record(seed=1))
    assert len(Records(path)) == 2


@pytest.mark.parametrize("content", ["{}\n", "no\n", '{"format": 9}\n', "[]\n"])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.jsonl"
    Records(path).add(record())
    path.write_text(path.read_text() + content)
    with pytest.raises(BadRecords, match=r"results\.jsonl:2: no result of tilework compare .*; give another --out"):
        Records(path)


def test_a_record_of_a_run_keeps_its_timing(small: Cell) -> None:
    found = run(Task(cell=small, seed=0, policy="edf"), NO_CONDITIONS, 2)
    assert parse_record(found.to_json()) == found
    assert found.timing is not None
    assert found.timing.num_processes == 2
