"""The controller on simulated clusters where things go wrong; and that the invariants notice injected bugs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders import ONE_OF_EACH
from quick import quick
from sim.injected_bugs import (
    answer_at_random,
    believe_that_all_is_fetched,
    call_loads_ahead,
    convert_times_by_the_longest_ping,
    count_messages_of_lost_nodes,
    drop_nothing,
    end_twice,
    fail_at_once,
    fetch_nothing,
    forget_copies,
    forget_progress,
    forget_what_does_not_fit,
    go_back,
    go_on_after_the_client_is_gone,
    ignore_late_nodes,
    keep_everything,
    keep_what_is_fetched_too_late,
    load_no_lora,
    load_nothing,
    lose_a_request,
    measure_failed_fetches,
    mix_sizes_with_loras,
    obey_old_commands,
    promise_on_silent_devices,
    send_too_many_works,
    share_among_loras,
    share_exact_requests,
    show_policies_the_stages_of_slots,
    starve,
    take_early_reports,
    widen_exact_requests,
)
from tilework.cli.app import app
from tilework.control.log import replay
from tilework.core.request import Status
from tilework.sim.cluster import Cluster
from tilework.sim.faults import FAULTS, BadFault, Faults, parse_faults
from tilework.sim.fuzz import Choice, ScenarioResult, run_scenario, run_seed, run_seeds, shrink
from tilework.sim.scenarios.scenario import PIPELINE, Scenario, scenario
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

SEEDS = range(40)
# Each fault alone, so often that it happens in a few scenarios.
OFTEN = {
    "crash": "crash=0.05:2",
    "hang": "hang=0.03:2",
    "slow": "slow=0.2:8",
    "error": "error=0.05",
    "oom": "oom=0.05",
    "memory": "memory=1:0.6",
    "node": "node=0.02:5",
    "partition": "partition=0.1:10",
    "fetch": "fetch=0.7:8",
    "clock": "clock=1:100",
    "frontend": "frontend=0.3:2",
    "leave": "leave=0.01:2",
    "late": "late=0.8:5",
    "lost": "lost=0.01",
    "delayed": "delayed=0.2:0.5",
    "doubled": "doubled=0.2:0.2",
    "reordered": "reordered=0.1:0.3",
    "checkpoint": "checkpoint=0.1",
    "skew": "skew=1:3",
    "replay": "replay=0.02:1",
    "restart": "restart=0.02:3",
}


def run(
    texts: list[str], seed: int, policy: str | None = None, **changes: object
) -> tuple[Scenario, Trace, Simulation]:
    """A scenario with these faults, in which a request may lose many works."""
    one = scenario(seed, policy, parse_faults(texts))
    one = replace(one, controller=replace(one.controller, max_attempts=50, **changes))
    simulation = Simulation(one.controller, one.table, one.config)
    return one, simulation.run(one.requests, one.cancels), simulation


def run_all(seeds: range, policy: str | None = None) -> list[ScenarioResult]:
    """The results of these seeds. Fails on a violation, with the commands that run them again."""
    results = list(run_seeds(seeds, Choice(policy=policy), 1))
    assert [result.seed for result in results] == list(seeds)
    bad = [f"tilework fuzz --seed {result.seed}: {result.violation}" for result in results if result.violation]
    assert not bad, "\n".join(bad)
    return results


def test_all_seeds_keep_the_invariants() -> None:
    results = run_all(SEEDS)
    happened = {name for result in results for name, count in result.fault_counts.items() if count}
    assert happened == FAULTS.keys() - {"read"}, "each fault happens in some scenario"
    endings = {status for result in results for status in result.endings}
    assert endings == {"done", "failed", "cancelled", "expired", "rejected"}


def test_reads_ahead_of_need_fail() -> None:
    """Few scenarios have any: devices and hosts must be small, and the policy must look ahead."""
    results = list(run_seeds((21, 24, 32, 58, 61), Choice(policy="tilework", faults=parse_faults(["read=0.5"])), 1))
    assert not [result.violation for result in results if result.violation]
    assert any(result.fault_counts["read"] for result in results)


def test_events_that_wait_for_a_controller_keep_their_order() -> None:
    """In seed 92 the controller is lost between two events of one cause; a device that died joins before it is back."""
    (result,) = run_seeds([92], Choice(policy="tilework"), 1)
    assert result.fault_counts["replay"]
    assert not result.violation


@pytest.mark.slow
def test_the_seeds_of_the_hour_keep_the_invariants() -> None:
    """Other seeds every hour. A failure names its seed, which keeps failing until the bug is fixed."""
    first = 1_000_000 + int(time.time() // 3600) * 8
    run_all(range(first, first + 8))


def test_a_violation_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    end_twice(monkeypatch)
    with pytest.raises(AssertionError, match=r"tilework fuzz --seed \d+: .*ended twice"):
        run_all(range(4), "edf")


def test_jobs_that_wait_for_a_slot_go_on_when_costs_have_changed_since_they_were_promised() -> None:
    """No start could end as early as its reservation said, so none was made, and the cluster was idle for ever."""
    result = run_seed(834)
    assert not result.violation
    assert result.num_events < 3000, "it is not checked a thousand times a second"


@pytest.mark.parametrize(("seed", "uids"), [(19033, range(34, 41)), (3308, range(32, 43)), (2627, [67])])
def test_jobs_of_pipelines_with_many_stages_share_what_can_be_shared(seed: int, uids: Iterable[int]) -> None:
    """A batch came to a stage that cannot be shared; and one job has a work for each stage without steps."""
    one = scenario(seed)
    assert not run_scenario(one.keeping([str(uid) for uid in uids])).violation


def test_a_seed_determines_scenario_and_result() -> None:
    results = [run_seed(seed) for seed in (5, 5, 6)]
    assert results[0] == results[1]
    assert results[0] != results[2]
    assert scenario(5) == scenario(5)


def test_a_job_is_not_continued_on_a_group_that_has_lost_a_device() -> None:
    """Its last works are on what is left of the group, while a work on the whole group is still in flight."""
    result = run_scenario(scenario(658, policy="tilework"))
    assert not result.violation, result.where


@pytest.mark.parametrize("seed", [149, 201, 229])
def test_a_job_whose_work_has_failed_runs_alone(seed: int) -> None:
    """In these scenarios a job that has failed runs alone on a device on which others had shared their steps."""
    result = run_seed(seed, "tilework", parse_faults(["error=0.1:0.5"]))
    assert not result.violation
    assert result.fault_counts["error"] > 0


@pytest.mark.parametrize("fault", quick(("restart",), OFTEN))
def test_requests_are_done_despite_each_fault(fault: str) -> None:
    """Only requests that fit nowhere fail: the others are all done, each image with all its steps in order."""
    num_faults = 0
    for seed, policy in enumerate((*ONE_OF_EACH, "fixed-sp4")):
        one, trace, simulation = run([OFTEN[fault]], seed, policy)
        num_faults += simulation.fault_counts[fault]
        failed = [ending for ending in trace.endings if ending.status is Status.FAILED]
        assert fault == "memory" or not failed, f"seed {seed}, {policy}: {failed}"
        assert all(ending.reason.startswith("there was not enough memory") for ending in failed)
        for ending in trace.endings:
            if ending.status is Status.DONE:
                assert ending.image is not None
                done = 0
                for first_step, num_steps in ending.image.pieces:
                    assert first_step == done
                    done += num_steps
                assert done == one.table.graph(PIPELINE).itinerary(ending.request.steps).length
        cancelled = {uid for _, uid in one.cancels}
        gone = {ending.request.uid for ending in trace.endings if ending.status is Status.CANCELLED}
        assert gone <= cancelled or fault == "frontend"
    assert num_faults > 2 or fault == "memory"


def test_works_too_large_for_a_device_use_several_devices_or_slices() -> None:
    """A decode that does not fit as a whole is done in slices; steps that do not fit on one device go to two."""
    num_wide = num_sliced = 0
    for seed in range(12):
        one, trace, _ = run(["memory=1:0.6"], seed, "tetriserve")
        degrees = {row.degree for row in one.table.rows if row.stage == "diffuse"}
        elastic = [ending for ending in trace.endings if not ending.request.exact]
        pixels = max((ending.request.shape.pixels for ending in elastic), default=0)
        large = [ending for ending in elastic if ending.request.shape.pixels == pixels]
        done = [ending for ending in large if ending.status is Status.DONE]
        if 2 in degrees and min(one.config.num_devices, one.table.devices_per_node) >= 2:
            assert done or not [e for e in large if e.status is Status.FAILED]
            num_wide += len(done)
        num_sliced += sum(run.work.sliced for run in trace.runs)
    assert num_wide > 5
    assert num_sliced > 5


def test_load_failures_delay_requests_and_losing_every_device_fails_them() -> None:
    num_faults = 0
    for seed in range(6):
        _, trace, simulation = run(["load=0.3:1"], seed)
        num_faults += simulation.fault_counts["load"]
        assert Status.FAILED not in {ending.status for ending in trace.endings}
    assert num_faults
    _, trace, _ = run(["load=1:1"], 3)
    reasons = {ending.reason for ending in trace.endings}
    assert reasons <= {
        "no device is left",
        "every worker that a stage needs was lost, and none could be started again",
        "no device is up",
    }


def repeated_steps(seeds: range) -> int:
    """How many steps are run beyond those that the delivered pictures are made of."""
    repeated = 0
    for seed in seeds:
        _, trace, _ = run(["restart=0.02:1"], seed)
        steps = sum(run.steps for run in trace.runs if run.work.stage.name == "diffuse")
        repeated += steps - sum(ending.request.steps for ending in trace.endings if ending.status is Status.DONE)
    return repeated


def test_a_lost_server_continues_from_the_serialized_states(monkeypatch: pytest.MonkeyPatch) -> None:
    with_states = repeated_steps(range(8))
    lose_all = Cluster.lose_all
    monkeypatch.setattr(Cluster, "lose_all", lambda self: lose_all(self) and {})
    assert with_states < 0.6 * repeated_steps(range(8))


@pytest.mark.parametrize(("fault", "loses"), [("leave=0.02:2", False), ("node=0.02:2", True)])
def test_no_step_is_lost_with_a_node_that_leaves(fault: str, loses: bool) -> None:
    """In this scenario another node stays, and no client goes away. A node that is killed loses steps."""
    one, trace, simulation = run([fault], 15, "edf")
    requests = [ending.request for ending in trace.endings if ending.status is Status.DONE]
    needed = [one.table.graph(request.pipeline).itinerary(request.steps).at[0].num_steps_left for request in requests]
    made = sum(run.steps for run in trace.runs if run.work.stage.has_steps)
    assert sum(simulation.fault_counts.values()) > 0
    assert (made > sum(needed)) == loses


@pytest.mark.parametrize(
    ("breakage", "words", "texts", "policy"),
    [
        (lose_a_request, "never ended", ["crash=0.1:1"], "edf"),
        pytest.param(fail_at_once, "may fail after", ["crash=0.1:1"], "edf", marks=pytest.mark.exhaustive),
        (forget_progress, "does not have", ["crash=0.1:1"], "edf"),
        (take_early_reports, "", ["reordered=0.2:0.5"], "fixed-sp1"),
        pytest.param(end_twice, "ended twice", [], "edf", marks=pytest.mark.exhaustive),
        (keep_everything, "may keep", ["crash=0.1:1"], "edf"),
        pytest.param(go_back, "", ["crash=0.1:1", "reordered=0.2:0.5"], "edf", marks=pytest.mark.exhaustive),
        pytest.param(starve, "waits", [], "edf", marks=pytest.mark.exhaustive),
        (forget_what_does_not_fit, "did not fit", ["memory=1:0.6"], "tetriserve"),
        pytest.param(send_too_many_works, " works", [], "tetriserve", marks=pytest.mark.exhaustive),
        (share_exact_requests, "has several jobs or devices", [], "patchedserve"),
        pytest.param(
            widen_exact_requests, "has several jobs or devices", [], "fixed-sp4", marks=pytest.mark.exhaustive
        ),
        pytest.param(show_policies_the_stages_of_slots, "runs on cpu devices", [], "edf", marks=pytest.mark.exhaustive),
        pytest.param(share_among_loras, ", which uses ", [], "tilework", marks=pytest.mark.exhaustive),
        pytest.param(mix_sizes_with_loras, "runs for several sizes", [], "patchedserve", marks=pytest.mark.exhaustive),
        pytest.param(load_no_lora, " without Component(", [], "edf", marks=pytest.mark.exhaustive),
        pytest.param(load_nothing, " lacks {", [], "edf", marks=pytest.mark.exhaustive),
        pytest.param(drop_nothing, " fit", [], "edf", marks=pytest.mark.exhaustive),
        (call_loads_ahead(True), "loads ahead of need, and has the works", [], "edf"),
        pytest.param(call_loads_ahead(False), "load for no work", [], "tilework", marks=pytest.mark.exhaustive),
        (answer_at_random, "replayed", ["replay=0.02:1"], "edf"),
        (count_messages_of_lost_nodes, "session that was given up", ["partition=0.1:20"], "edf"),
        pytest.param(
            count_messages_of_lost_nodes,
            "session that was given up",
            ["restart=0.05:0.5", "delayed=0.5:3"],
            "edf",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(ignore_late_nodes, "the controller counts", ["late=1:1"], "edf", marks=pytest.mark.exhaustive),
        pytest.param(
            measure_failed_fetches, "a fetch that failed", ["fetch=0.5:20"], "edf", marks=pytest.mark.exhaustive
        ),
        (promise_on_silent_devices, "whose nodes say nothing", ["partition=0.3:5"], "edf"),
        (obey_old_commands, "one that has ended", ["node=0.05:0.5", "delayed=0.3:3"], "edf"),
        (convert_times_by_the_longest_ping, "its clock's stated error", ["clock=1:100"], "edf"),
        pytest.param(
            believe_that_all_is_fetched,
            "that the server believes there",
            ["fetch=0.5:20"],
            "edf",
            marks=pytest.mark.exhaustive,
        ),
        (fetch_nothing, "whose state it does not have", ["frontend"], "edf"),
        pytest.param(
            keep_what_is_fetched_too_late,
            "blobs on and of nodes",
            ["fetch=0.5:2", "frontend=0.5:1"],
            "edf",
            marks=pytest.mark.exhaustive,
        ),
        (forget_copies, "blobs on and of nodes", ["frontend"], "edf"),
        (go_on_after_the_client_is_gone, "is cancelled, and goes on", ["frontend=0.5:1"], "edf"),
    ],
)
def test_an_injected_bug_is_found(
    breakage: Callable[[pytest.MonkeyPatch], None],
    words: str,
    texts: list[str],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breakage(monkeypatch)
    faults = parse_faults(texts)
    results = (run_seed(seed, policy, faults) for seed in range(60))
    assert any(result.violation and words in result.violation for result in results)


def test_some_scenarios_have_loras_of_each_kind() -> None:
    """Some on all devices and some to be loaded; requests without, with one and with two."""
    found = [one for one in map(scenario, range(100)) if one.table.loras]
    assert 10 < len(found) < 45
    kinds = {lora.component is None for one in found for lora in one.table.loras[PIPELINE].values()}
    assert kinds == {True, False}
    assert {len(request.loras) for one in found for request in one.requests} == {0, 1, 2}
    assert all(not request.loras for one in map(scenario, range(20)) if not one.table.loras for request in one.requests)


def short_scenario(seed: int) -> Scenario:
    one = scenario(seed, "edf")
    return one.keeping([request.uid for request in one.requests[:12]])


def test_a_failing_scenario_shrinks_to_the_same_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_a_request(monkeypatch)
    whole = next(one for one in map(short_scenario, range(200)) if "never ended" in run_scenario(one).violation)
    small = shrink(whole)
    assert len(small.requests) < len(whole.requests)
    assert len(small.faults.by_name) <= 2
    assert "never ended" in run_scenario(small).violation


# The command.


def tilework(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fuzz", *words])
    return result.exit_code, str(result.exception) if result.exit_code == 1 and not result.stdout else result.stdout


def test_the_command_reports_its_counts() -> None:
    code, text = tilework("--seeds", "4", "--processes", "1", "--json")
    document = json.loads(text)
    assert code == 0
    assert (document["seeds"], document["violations"], document["simulated"]) == (4, [], True)
    results = [run_seed(seed) for seed in range(4)]
    assert document["events"] == sum(one.num_events for one in results)
    assert document["promises"] == {
        "accepted": sum(one.num_promised for one in results),
        "kept": sum(one.num_kept for one in results),
    }
    assert document["promises"]["accepted"] > 0
    code, text = tilework("--seeds", "2", "--first", "10", "--processes", "2", "--faultless")
    assert code == 0
    assert re.search(r"promises: (\d+) of \1 kept", text)
    assert "seeds 10 to 11" in text
    assert "No invariant was violated" in text


@pytest.mark.slow
def test_the_command_prints_a_command_that_reproduces_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_a_request(monkeypatch)
    code, text = tilework("--seeds", "6", "--processes", "1", "--policy", "edf", "--fault", "crash=0.1:1")
    assert code == 1
    (command, *_) = re.findall(r"tilework fuzz (--seed .*)", text)
    words = command.split()
    assert "--keep" in words
    code, text = tilework(*words)
    assert code == 1
    assert "violation" in text


@pytest.mark.parametrize(
    "words", [("7",), ("4", "--faultless", "--policy", "edf")], ids=["any", "with caches of steps"]
)
def test_one_seed_leaves_a_log_that_replays(tmp_path: Path, words: tuple[str, ...]) -> None:
    log = tmp_path / "events.jsonl"
    code, text = tilework("--log", str(log), "--seed", *words)
    assert code == 0
    assert f"seed {words[0]}: policy" in text
    num_events, difference = replay(log.read_text().splitlines())
    assert difference is None
    assert num_events == json.loads(tilework("--json", "--seed", *words)[1])["events"]


def test_the_faults_are_listed() -> None:
    assert json.loads(tilework("--list-faults", "--json")[1]).keys() == FAULTS.keys()
    os.environ.setdefault("COLUMNS", "200")
    assert all(kind in tilework("--list-faults")[1] for kind in FAULTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --seeds N, --minutes M or --seed S"),
        (("--seeds", "1", "--fault", "crahs"), "'crahs' is not a fault; did you mean 'crash'?"),
        (("--seeds", "1", "--fault", "crash=2"), "'crash=2': '2' is not a probability per work and device"),
        (("--seeds", "1", "--fault", "crash=0.1:x"), "'x' is not seconds until it is started again"),
        (("--seeds", "1", "--policy", "eddf"), "did you mean 'edf'"),
        (("--seeds", "1", "--keep", "1"), "give its --seed"),
        (("--seed", "1", "--keep", "x"), "--keep x: seed 1 has the requests 0 to"),
        (("--seed", "1", "--without", "x"), "--without x: seed 1 does not have this fault"),
    ],
)
def test_mistakes_are_reported(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["fuzz", *words])
    assert result.exit_code == 1
    assert message in str(result.exception).replace("\\", "")


def test_one_device_and_one_request_are_not_plural() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--seed", "107", "--keep", "1"])
    assert ", 1 device, 1 request;" in " ".join(result.output.split())


def test_faults_are_read_and_shown() -> None:
    faults = parse_faults(["crash", "slow=0.5", "delayed=0.1:3"])
    assert [str(fault) for fault in faults.by_name.values()] == ["crash=0.03:2", "slow=0.5:6", "delayed=0.1:3"]
    assert not Faults()
    assert "crash" not in faults.without("crash")
    with pytest.raises(BadFault, match="give a number from 0 to 1"):
        parse_faults(["crash=-1"])
    assert isinstance(run_seed(1, "edf", Faults()), ScenarioResult)


def test_what_a_restored_job_leaves_is_removed_from_nodes_though_it_ends_at_once() -> None:
    run_all(range(20485, 20486))
