"""The command line, without a model: what it prints, what it writes, and how it tells a mistake."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import ignore_patterns
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import tilework
from builders import PIPELINE, poisson, request, table
from cli.command_line import invoke
from cli.run_files import NUM_REQUESTS, simulate, write_log
from tilework.cli.app import app
from tilework.control.controller import ControllerConfig
from tilework.control.log import entry_line, header_line
from tilework.core.actions import Action
from tilework.core.events import Event
from tilework.core.request import OnMiss
from tilework.cost.table_file import table_json
from tilework.distribution import install_command
from tilework.formats.schedule import read_schedule
from tilework.pipelines.model_index import shipped_directory
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

pytestmark = pytest.mark.usefixtures("plain_output")


HEAVY = ("torch", "diffusers", "transformers", "fastapi", "uvicorn", "starlette", "prometheus_client")
COMMANDS = (
    "serve",
    "agent",
    "generate",
    "simulate",
    "replay",
    "timeline",
    "explain",
    "bench",
    "profile",
    "plan",
    "quality",
    "classes",
    "demo",
    "doctor",
    "verify",
    "fuzz",
    "bound",
    "compare",
    "fake",
)


GROUPS = {
    "cost": ("list", "show", "export", "memory"),
    "workload": ("list", "make", "show"),
}  # Commands that have commands.


# Help.


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    for flag in ("--help", "-h"):
        text = " ".join(invoke(command, flag).output.split())
        assert re.search(rf"Examples?: tilework {command}", text)


def every_command() -> list[tuple[str, ...]]:
    return [(), *((name,) for name in (*COMMANDS, *GROUPS)), *((g, c) for g in GROUPS for c in GROUPS[g])]


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(*words, "--help").stdout
    assert "…" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    command = get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    for option in command.params:
        assert all(name in text for name in option.opts if option.param_type_name == "option"), option.opts
        if option.param_type_name == "option" and option.show_default is True and option.default not in (None, False):
            assert f"default: {option.default}" in " ".join(text.split()), option.name


def test_help_names_every_command_and_version_says_which() -> None:
    assert all(command in invoke("--help").output for command in (*COMMANDS, *GROUPS))
    assert "  tilework serve" in invoke("--help").output.partition("Example")[2]
    assert invoke("--version").output.strip() == tilework.__version__
    assert len(app.registered_commands) == len(COMMANDS)
    assert {group.name for group in app.registered_groups} == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_of_a_group_is_named_there_and_has_an_example(group: str) -> None:
    named = invoke(group, "--help").output
    assert f"  tilework {group}" in named.partition("Example")[2]
    for command in GROUPS[group]:
        assert command in named
        text = " ".join(invoke(group, command, "--help").output.split())
        assert re.search(rf"Examples?: tilework {group} {command}", text)


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--help"], ["simulate", "FILES"], ["replay", "FILES"]])
def test_planning_needs_no_torch_and_no_server(files: Path, arguments: list[str]) -> None:
    """Run with the heavy packages made unimportable, as on a machine without the `serve` extra."""
    given = {"simulate": [files / "requests.jsonl", "--cost", files / "costs.json"], "replay": [files / "events.jsonl"]}
    paths = given[arguments[0]] if "FILES" in arguments else []
    result = without_heavy_packages(*(a for a in arguments if a != "FILES"), *map(str, paths))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["serve", "profile"])
def test_a_model_that_cannot_be_served_is_refused_once_and_before_any_worker(tmp_path: Path, command: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    words = [sys.executable, "-m", "tilework", command, str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}")
    assert "'KandinskyPipeline'" in line
    assert "worker" not in line


@pytest.mark.parametrize(("option", "known"), [("--device", "cpu, cuda"), ("--dtype", "float32, bfloat16")])
@pytest.mark.parametrize("command", ["serve", "profile"])
def test_an_unknown_device_or_dtype_is_refused_before_any_worker(
    mistake: Callable[..., str], command: str, option: str, known: str
) -> None:
    said = mistake(command, "shapes", option, "tpu")
    assert f"{option.removeprefix('--')} is 'tpu'" in said
    assert known in said


def test_models_are_given_once(mistake: Callable[..., str], tmp_path: Path) -> None:
    said = mistake("serve", "shapes", "--models", tmp_path / "models.toml")
    assert said.endswith("models.toml, and MODEL names others; leave one of them out")
    assert "cannot be read" in mistake("serve", "--models", tmp_path / "models.toml")


def test_models_of_one_name_are_told_before_any_is_loaded(mistake: Callable[..., str], tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(shipped_directory(), tmp_path / place / "house", ignore=ignore_patterns("tilework.json"))
    first, second = tmp_path / "a" / "house", tmp_path / "b" / "house"
    said = mistake("serve", first, second)
    assert said.startswith(f"the models of {first} and {second} are both called 'house'; ")
    assert said.endswith(f"as in house-2={second}")
    assert "are both called 'shapes'" in mistake("serve", "shapes", f"shapes={tmp_path}/a/house")


def test_one_of_several_models_may_be_damaged_unless_all_are_required(
    mistake: Callable[..., str], tmp_path: Path
) -> None:
    """Workers leave it out. A path that leads nowhere is a mistake all the same."""
    shutil.copytree(shipped_directory(), tmp_path / "cut")
    (weights,) = (tmp_path / "cut" / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    cut, damaged = f"cut={tmp_path}/cut", f"{weights}: cannot be read"
    assert damaged in mistake("serve", cut)
    assert damaged in mistake("serve", "shapes", cut, "--require-all")
    assert "no/such/table: no such file" in mistake("serve", "shapes", cut, "--cost", "no/such/table")
    assert "which does not exist" in mistake("serve", "shapes", cut, "./nowhere", "--cost", "no/such/table")


def test_devices_of_a_model_are_workers_and_need_a_policy_that_keeps_to_them(
    mistake: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\npath = "shapes"\ndevices = [2]\n')
    assert f"{path}: models.a.devices has 2, and there are 2 workers" in mistake("serve", "--models", path)
    said = mistake("serve", "--models", path, "--workers", 3, "--policy", "edf")
    assert said == (
        "policy 'edf' gives every device to every model, and 'a' has devices of its own; choose tilework, or leave its "
        "devices out"
    )


def test_a_model_decodes_in_tiles_as_its_entry_says_or_else_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handed: list[list[bool]] = []
    monkeypatch.setattr(
        "tilework.cli.serving.Serving",
        lambda **given: SimpleNamespace(
            run=lambda: handed.append([one.vae_tiling for one in given["workers"].each.sources])
        ),
    )
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\npath = "shapes"\n[models.b]\npath = "shapes"\nvae_tiling = false\n')
    for arguments in (["shapes"], ["shapes", "--vae-tiling"], ["--models", path], ["--models", path, "--vae-tiling"]):
        invoke("serve", *arguments)
    assert handed == [[False], [True], [False, False], [True, False]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cell", "3", "--devices", "4"], "cell is 3, which does not divide the 4 devices; give another number"),
        (["--cell", "2"], "cell is 2, and --weights-memory does not say what a device has for weights; give it"),
        (["--cell", "auto"], "cell is auto, and --weights-memory does not say what a device has for weights; give it"),
        (["--cell", "many"], "cell is 'many'; give how many devices are one, 1 to 64, or auto"),
        (["--cell", "0"], "cell is '0'; give how many devices are one, 1 to 64, or auto"),
        (["--cell", "2", "--weights-memory", "1GB", "--max-batch", "4"], "max_batch is 4, and requests share no"),
        (["--cell", "2", "--weights-memory", "1GB", "--exact"], "cell is 2, and its devices round otherwise than one"),
        (
            ["--cell", "2", "--backend", "modelled", "--cost", "flux1dev_h100_eager"],
            "--cell is 2, and simulated devices have no weights; give --cost NAME,cell=2 instead",
        ),
    ],
)
def test_what_cells_cannot_do_is_refused_by_name(mistake: Callable[..., str], arguments: list[str], said: str) -> None:
    assert mistake("serve", *arguments).startswith(said)


@pytest.mark.parametrize(
    "option",
    [
        *(["--models", "models.toml"], ["--adapter", "a:B"], ["--loras", "loras"], ["--no-previews"]),
        *(["--dtype", "bfloat16"], ["--quantize", "int8"], ["--offload", "layers"], ["--attention", "math"]),
        *(["--compile"], ["--cuda-graphs"], ["--copy-stream"], ["--vae-tiling"], ["--weights-memory", "1GB"]),
        ["--recalibrate"],
        ["--measure-seconds", "5"],
    ],
)
def test_what_is_of_models_is_refused_of_simulated_devices(mistake: Callable[..., str], option: list[str]) -> None:
    said = mistake("serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager", *option)
    assert said.startswith(f"{option[0]} is ")
    assert said.endswith(f", and simulated devices run no model; leave out {option[0]} or --backend modelled")


def test_what_a_table_says_is_not_measured_again(mistake: Callable[..., str]) -> None:
    nothing = "--cost says what steps cost, so nothing is measured"
    said = mistake("serve", "shapes", "--device", "cpu", "--cost", "sdxl_h100", "--recalibrate")
    assert said == f"--recalibrate is given, and {nothing}; leave one of them out"
    said = mistake("serve", "shapes", "--device", "cpu", "--cost", "sdxl_h100", "--measure-seconds", "5")
    assert said == f"--measure-seconds is 5.0, and {nothing}; leave one of them out"


def test_a_name_that_is_neither_directory_nor_reachable_is_refused_so(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = mistake("serve", "nope")
    assert "no such directory" in said
    assert "cannot be reached" in said


def test_serve_without_its_extra_names_the_remedy() -> None:
    result = without_heavy_packages("generate", "a red circle")
    assert result.returncode == 2
    assert result.stderr == (
        f"error: torch, diffusers, transformers, fastapi, uvicorn not installed; run: {install_command('serve')}\n"
    )


def without_heavy_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); sys.argv = {['tilework', *arguments]!r}"
    code = f"{block}; from tilework.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# simulate.


def test_simulate_prints_attainment_by_size(files: Path) -> None:
    text = simulate(files, "--devices", 2).output
    assert text.startswith("tilework, 2 devices, simulated")
    assert all(size in text for size in ("64x64", "128x128", "192x192", "on time", "p99"))
    assert re.search(rf"^ *all +{NUM_REQUESTS} +{NUM_REQUESTS} ", text, re.MULTILINE)


def test_simulate_prints_its_configuration_as_json(files: Path) -> None:
    document = json.loads(simulate(files, "--devices", 3, "--policy", "fixed-sp1", "--seed", 7, "--json").stdout)
    assert document["simulated"] is True
    assert document["policy"] == "fixed-sp1"
    assert document["config"] == {
        "num_devices": 3,
        "seed": 7,
        "state_copies": 1,
        "jitter": 0.0,
        "dispatch_ns": 0,
        "switch_ns": 0,
        "slots_per_node": 1,
        "hosts_have_read": False,
        "result_ns": 0,
    }
    result = document["result"]
    assert (result["requests"], result["done"]) == (NUM_REQUESTS, NUM_REQUESTS)
    assert sum(size["requests"] for size in result["by_size"].values()) == NUM_REQUESTS
    assert "live" not in document


def test_the_same_seed_prints_the_same_and_another_does_not(files: Path) -> None:
    def printed(seed: int) -> str:
        return simulate(files, "--jitter", 0.1, "--seed", seed, "--json").stdout

    assert printed(3) == printed(3)
    assert json.loads(printed(3))["result"] != json.loads(printed(4))["result"]


def test_simulate_takes_the_times_of_the_devices_from_another_table(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "true.json"
    path.write_text(json.dumps(table_json(table(encode_s=0.03, step_s=0.3, decode_s=0.15))))

    def mean_s(*options: object) -> float:
        printed = simulate(files, "--policy", "fixed-sp1", "--devices", NUM_REQUESTS, "--json", *options).stdout
        result: float = json.loads(printed)["result"]["latency_s"]["mean"]
        return result

    assert mean_s("--true-cost", path) == pytest.approx(3 * mean_s())


def test_simulate_defaults_to_one_device_and_tilework(files: Path) -> None:
    document = json.loads(simulate(files, "--json").stdout)
    assert (document["policy"], document["config"]["num_devices"]) == ("tilework", 1)


def test_simulate_writes_a_schedule_that_can_be_read_and_a_picture(files: Path, tmp_path: Path) -> None:
    schedule, timeline = tmp_path / "schedule.jsonl", tmp_path / "plan.png"
    simulate(files, "--devices", 2, "--schedule", schedule, "--timeline", timeline)
    read = read_schedule(schedule)
    assert {line.request for line in read.requests} == {str(index) for index in range(NUM_REQUESTS)}
    assert {work.devices for work in read.works} == {(0,), (1,)}
    assert sum(work.steps for work in read.works if work.stage == "diffuse") == NUM_REQUESTS * 10
    with Image.open(timeline) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_requests_without_ids_are_known_by_their_lines(files: Path, tmp_path: Path) -> None:
    path, schedule = tmp_path / "requests.jsonl", tmp_path / "schedule.jsonl"
    line = {"arrival_s": 0.0, "pipeline": PIPELINE, "height": 64, "width": 64, "steps": 4}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'id': 'mine', 'slo_s': 0.01})}\n{json.dumps(line)}\n")
    invoke("simulate", path, "--cost", files / "costs.json", "--schedule", schedule)
    ends = {line.request: line for line in read_schedule(schedule).requests}
    assert {name: end.on_time for name, end in ends.items()} == {0: None, "mine": False, 2: None}


ROW = {"arrival_s": 0.5, "height": 128, "width": 128, "steps": 10, "slo_s": 3.0}


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "FILE", "--cost", "COSTS", "--json"],
        ["bound", "--requests", "FILE", "--cost", "COSTS", "--json"],
        ["workload", "show", "FILE", "--cost", "COSTS", "--json"],
        ["timeline", "SCHEDULE", "--requests", "FILE", "--out", "PAGE", "--json"],
    ],
    ids=" ".join,
)
def test_requests_may_be_a_csv_file(files: Path, tmp_path: Path, command: list[str]) -> None:
    rows = [ROW, ROW | {"arrival_s": 0.0}, ROW | {"arrival_s": 0.6, "slo_s": 0.01}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row | {"pipeline": PIPELINE}) + "\n" for row in rows))
    lines = [",".join(map(str, row.values())) for row in rows]
    (tmp_path / "r.csv").write_text("\n".join([",".join(ROW), *lines]))
    schedule, costs, page = tmp_path / "schedule.jsonl", files / "costs.json", tmp_path / "page.html"
    invoke("simulate", tmp_path / "r.csv", "--cost", costs, "--schedule", schedule)
    assert {line.request for line in read_schedule(schedule).requests} == {0, 1, 2}
    places: dict[str, object] = {"COSTS": costs, "SCHEDULE": schedule, "PAGE": page}
    by_file = [
        invoke(*(places.get(word, word.replace("FILE", str(tmp_path / name))) for word in command)).stdout
        for name in ("r.csv", "r.jsonl")
    ]
    assert by_file[0].replace("r.csv", "r.jsonl") == by_file[1]


def test_a_csv_file_names_the_pipeline_where_costs_have_several(mistake: Callable[..., str], tmp_path: Path) -> None:
    path, schedule = tmp_path / "r.csv", tmp_path / "schedule.jsonl"
    size, costs = "0,512,512,28", "flux1_l20+hunyuanvideo_l20"
    path.write_text(f"arrival_s,height,width,steps\n{size}\n")
    said = mistake("simulate", path, "--cost", costs)
    assert said == f"{path}:2: \"pipeline\" is 'missing'; add the column pipeline, with one of flux.1, hunyuanvideo"
    path.write_text(f"arrival_s,height,width,steps,pipeline\n{size},flux.1\n")
    invoke("simulate", path, "--cost", costs, "--schedule", schedule)
    assert len(read_schedule(schedule).requests) == 1


@pytest.mark.parametrize("most", [1, 3])
def test_batches_are_bounded_in_simulation(tmp_path: Path, most: int) -> None:
    path, schedule = tmp_path / "requests.jsonl", tmp_path / "schedule.jsonl"
    line = {"arrival_s": 0.0, "pipeline": "sdxl", "height": 512, "width": 512, "steps": 50}
    path.write_text(f"{json.dumps(line)}\n" * 6)
    invoke("simulate", path, "--cost", "sdxl_h100", "--max-batch", most, "--schedule", schedule)
    assert max(len(work.requests) for work in read_schedule(schedule).works) == most


def test_a_live_run_is_simulated_from_its_log(tmp_path: Path) -> None:
    """Devices, policy, costs and the time between works come from the log; the mean latency is that of the run."""
    path = tmp_path / "events.jsonl"
    write_log(path, poisson(80, 1.5, seed=6), dispatch_ns=4_000_000)
    document = json.loads(invoke("simulate", "--log", path, "--json").stdout)
    assert document["policy"] == "fixed-sp1"
    assert (document["config"]["num_devices"], document["config"]["dispatch_ns"]) == (2, {"1": 4_000_000})
    assert document["live"]["requests"] == document["result"]["requests"] == 80
    assert document["mean_latency_ratio"] == pytest.approx(1.0, abs=0.05)
    assert document["mean_latency_ratio"] == pytest.approx(
        document["result"]["latency_s"]["mean"] / document["live"]["latency_s"]["mean"]
    )
    text = invoke("simulate", "--log", path, "--schedule", tmp_path / "schedule.jsonl").output
    assert "the live run of the log" in text
    assert f"simulated / live mean latency: {document['mean_latency_ratio']:.3f}" in text
    assert len(read_schedule(tmp_path / "schedule.jsonl").requests) == 80


def test_the_controller_starts_from_the_costs_that_the_live_one_started_from(tmp_path: Path) -> None:
    """The live devices took twice the table's time, which the controller learnt from the first request."""
    path = tmp_path / "events.jsonl"
    config, true = ControllerConfig(policy="fixed-sp1"), table(encode_s=0.02, step_s=0.2, decode_s=0.1)
    lines = [header_line(tilework.__version__, config, table())]

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        lines.append(entry_line(event, actions, now_ns))

    requests = [request(uid, at_s, slo_s=1.5, on_miss=OnMiss.REJECT) for uid, at_s in (("a", 0.0), ("b", 9.0))]
    trace = Simulation(config, table(), SimConfig(num_devices=1), true).run(requests, observe=observe)
    path.write_text("\n".join(lines) + "\n")
    assert [ending.status for ending in trace.endings] == ["done", "rejected"]
    document = json.loads(invoke("simulate", "--log", path, "--json").stdout)
    assert (document["result"]["done"], document["mean_latency_ratio"]) == (1, pytest.approx(1.0))


def test_options_overrule_the_log(files: Path) -> None:
    given = ("--devices", 4, "--policy", "edf", "--seed", 9, "--jitter", 0.5)
    document = json.loads(invoke("simulate", "--log", files / "events.jsonl", *given, "--json").stdout)
    config = document["config"]
    assert (document["policy"], config["num_devices"], config["seed"], config["jitter"]) == ("edf", 4, 9, 0.5)
    assert document["mean_latency_ratio"] < 0.95, "twice the devices"


def test_a_log_in_which_nothing_was_drawn_has_no_ratio(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_log(path, [request("a"), request("b", 0.1)], cancels=[(200_000_000, "a"), (200_000_000, "b")])
    document = json.loads(invoke("simulate", "--log", path, "--json").stdout)
    assert (document["live"]["not_done"], document["mean_latency_ratio"]) == ({"cancelled": 2}, None)
    assert "simulated / live mean latency: -" in invoke("simulate", "--log", path).output


def test_the_ratio_compares_only_what_was_drawn_in_both(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    requests = [request("long", steps=100), request("short", 0.0)]
    write_log(path, requests, cancels=[(300_000_000, "long")])
    document = json.loads(invoke("simulate", "--log", path, "--json").stdout)
    assert (document["live"]["done"], document["result"]["done"]) == (1, 2)
    assert document["mean_latency_ratio"] == pytest.approx(1.0, abs=0.1)


# replay.


def test_replay_agrees_with_a_true_log(files: Path) -> None:
    count = len((files / "events.jsonl").read_text().splitlines()) - 1
    assert f"{count} events replayed: every action is the same, byte for byte." in invoke(
        "replay", files / "events.jsonl"
    ).output.replace("\n", " ")
    document = json.loads(invoke("replay", files / "events.jsonl", "--json").stdout)
    assert document == {"events": count, "identical": True}


def test_replay_of_a_tampered_log_shows_both_versions_and_fails(files: Path, tmp_path: Path) -> None:
    lines = (files / "events.jsonl").read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if i > 9 and '"is":"Accept"' in line)
    true = lines[index]
    lines[index] = re.sub(r'"eta_ns":\d+', '"eta_ns":1', true)
    path = tmp_path / "tampered.jsonl"
    path.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert f"line {index + 1} differs after {index - 1} events that agree" in result.output
    assert f"logged:   {lines[index]}\n" in result.output
    assert f"replayed: {true}\n" in result.output
    result = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "events": index - 1,
        "identical": False,
        "line": index + 1,
        "logged": lines[index],
        "replayed": true,
    }
