"""Mistakes on the command line: each is named in one line, with what to do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
from typer.testing import CliRunner

from builders import PIPELINE, table
from cli.command_line import invoke
from fake_engine import INFO, VIDEOS
from tilework.cli.app import app
from tilework.cli.commands import generate
from tilework.cli.console import UserError
from tilework.cli.models import checked_spec
from tilework.core.wire.spec import Image as Pixels
from tilework.cost.table_file import table_json
from tilework.policy.registry import policy_names

pytestmark = pytest.mark.usefixtures("plain_output")


def test_a_mistake_at_the_entry_point_is_one_line_and_status_2(files: Path) -> None:
    arguments = ["simulate", str(files / "requests.jsonl"), "--cost", str(files / "costs.json"), "--policy", "edg"]
    command = [sys.executable, "-m", "tilework", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    names = ", ".join(policy_names())
    choice = f"choose one of {names}, or give module:Class"
    assert result.stderr == f"error: policy 'edg' does not exist; did you mean 'edf'? {choice}\n"


@pytest.mark.parametrize(
    ("option", "value"), [("--devices", "0"), ("--jitter", "1.5"), ("--seed", "x"), ("--device_id", "1")]
)
def test_a_wrong_option_is_named(files: Path, option: str, value: str) -> None:
    arguments = ["simulate", str(files / "requests.jsonl"), "--cost", str(files / "costs.json"), option, value]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert option in result.stderr


def test_a_name_that_no_model_can_have_is_named(mistake: Callable[..., str]) -> None:
    said = mistake("serve", "q/loras/z=shapes")
    assert said.startswith(
        "'q/loras/z=shapes' names a model 'q/loras/z'; give NAME=MODEL with a NAME of up to 128 letters"
    )


def test_simulate_names_missing_options(files: Path, mistake: Callable[..., str]) -> None:
    for arguments in ([], [files / "requests.jsonl"], ["--cost", files / "costs.json"]):
        assert mistake("simulate", *arguments) == "give REQUESTS and --cost, or --log; see tilework simulate --help"
    for arguments in ([files / "requests.jsonl"], ["--cost", files / "costs.json"]):
        said = mistake("simulate", "--log", files / "events.jsonl", *arguments)
        assert said == "--log brings its own requests and costs; leave out REQUESTS and --cost"
    said = mistake("simulate", "--log", files / "events.jsonl", "--true-cost", files / "costs.json")
    assert said == "--log brings the times that the run measured; leave out --true-cost"


def test_files_that_are_not_there_are_named(files: Path, mistake: Callable[..., str]) -> None:
    absent = files / "absent"
    for arguments in (
        ("simulate", absent, "--cost", files / "costs.json"),
        ("simulate", files / "requests.jsonl", "--cost", absent),
        ("simulate", "--log", absent),
        ("replay", absent),
        ("simulate", files / "requests.jsonl", "--cost", files / "costs.json", "--schedule", absent / "s.jsonl"),
        ("simulate", files / "requests.jsonl", "--cost", files / "costs.json", "--timeline", absent / "t.png"),
    ):
        said = mistake(*arguments)
        assert str(absent) in said
        assert "no such file or " in said.lower()


def test_a_picture_format_that_does_not_exist_is_named(
    files: Path, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    given = (files / "requests.jsonl", "--cost", files / "costs.json", "--timeline", tmp_path / "plan.docx")
    assert "plan.docx ends in '.docx'; a timeline is one of .html, .png, .json" in mistake("simulate", *given)


def test_a_bad_request_is_named_with_its_line(files: Path, tmp_path: Path, mistake: Callable[..., str]) -> None:
    """At line 100, which rich would decorate with an emoji."""
    path = tmp_path / "requests.jsonl"
    good = (files / "requests.jsonl").read_text().splitlines()[0]
    lines = [good.replace('"id": "0"', f'"id": {index}') for index in range(100)]
    lines[99] = lines[99].replace('"steps": 10', '"steps": 0')
    path.write_text("\n".join(lines) + "\n")
    said = mistake("simulate", path, "--cost", files / "costs.json")
    assert said == f'{path}:100: "steps" is 0; use a whole number of at least 1'


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "holds no requests; write one per line"),
        ([{"pipeline": "flux"}], "pipeline 'flux' is not in {costs}; it knows toy"),
        ([{"id": "1"}, {}], "an id occurs once as text and once as a number or a place; use other names"),
    ],
)
def test_requests_that_cannot_be_simulated_are_refused(
    files: Path, tmp_path: Path, mistake: Callable[..., str], lines: list[dict[str, Any]], complaint: str
) -> None:
    path = tmp_path / "requests.jsonl"
    base = {"arrival_s": 0.0, "pipeline": PIPELINE, "height": 64, "width": 64, "steps": 4}
    path.write_text("".join(json.dumps(base | line) + "\n" for line in lines))
    said = mistake("simulate", path, "--cost", files / "costs.json")
    assert said.startswith(str(path))
    assert said.endswith(complaint.format(costs=files / "costs.json"))


def test_a_bad_cost_table_is_named(files: Path, tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "costs.json"
    document = table_json(table())
    document["rows"][4]["seconds"] = -1
    path.write_text(json.dumps(document))
    said = mistake("simulate", files / "requests.jsonl", "--cost", path)
    assert said == f"{path}: rows[4].seconds is -1; expected seconds above 0"


def test_devices_of_a_pipeline_are_those_that_there_are_and_need_a_policy_that_keeps_to_them(
    files: Path, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table_json(table()) | {"devices": {PIPELINE: [1]}}))
    simulate = "simulate", files / "requests.jsonl", "--cost", path
    assert mistake(*simulate, "--devices", 1).startswith(f"{path}: devices.{PIPELINE} has 1, and there are 1 devices")
    assert "choose tilework" in mistake(*simulate, "--devices", 2, "--policy", "edf")
    compare = "compare", "--workload", files / "requests.jsonl", "--cost", path
    assert f"devices.{PIPELINE} has 1" in mistake(*compare, "--devices", 1)
    assert "choose tilework" in mistake(*compare, "--devices", 2, "--policies", "tilework,edf")
    assert invoke(*simulate, "--devices", 2).exit_code == 0


@pytest.mark.parametrize("command", [("replay",), ("simulate", "--log")])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "line 1 is not JSON"),
        (b"{}\n", "line 1 is not the header of a log; give a file that `tilework serve --log` wrote"),
        (b"\x89PNG\r\n\x1a\n\xff", "line 1 is not JSON"),
    ],
)
def test_a_bad_log_is_reported(
    tmp_path: Path,
    mistake: Callable[..., str],
    command: tuple[str, ...],
    content: bytes,
    complaint: str,
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    assert complaint in mistake(*command, path)


def test_a_log_without_events_is_reported(files: Path, tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text((files / "events.jsonl").read_text().splitlines()[0] + "\n")
    for flags in ((), ("--json",)):
        assert mistake("replay", path, *flags) == f"{path} holds no events; was anything served?"
        assert mistake("simulate", "--log", path, *flags) == f"{path} holds no finished request; serve something first"


def test_a_log_of_an_unknown_policy_is_reported(files: Path, tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text((files / "events.jsonl").read_text().replace('"policy":"fixed-sp1"', '"policy":"edg"'))
    for command in (("replay",), ("simulate", "--log")):
        assert "policy 'edg' does not exist; did you mean 'edf'?" in mistake(*command, path)


@pytest.mark.parametrize("name", ["picture", "picture.gif", "picture.png.txt"])
def test_generate_names_the_formats_that_it_writes(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str], name: str
) -> None:
    monkeypatch.setattr(generate, "require_serve_extra", lambda: None)
    said = mistake("generate", "a red circle", "-o", name)
    assert said == f"output is '{name}'; use a name that ends in .png, .jpg, .jpeg, .webp, .mp4"


def test_generate_names_the_directory_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str], tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "require_serve_extra", lambda: None)
    path = tmp_path / "[nowhere]" / "out.png"
    said = mistake("generate", "a red circle", "-o", path)
    assert said == f"output is {str(path)!r}; the directory {path.parent} does not exist"


def test_generate_checks_values_as_the_server_does() -> None:
    with pytest.raises(UserError, match=r'size = "100x90" is not accepted.*nearest size is "96x96"'):
        checked_spec({"prompt": "x", "size": "100x90"}, INFO)


def test_generate_writes_the_frames_of_a_clip_as_a_video() -> None:
    spec = checked_spec({"prompt": "x", "size": "48x64", "num_frames": 9}, VIDEOS, is_video=True)
    pixels = b"".join(bytes((20 * frame, 0, 0)) * (48 * 64) for frame in range(9))
    file = generate._file(Pixels(64, 48, pixels, 9), spec, VIDEOS, "mp4")
    with av.open(io.BytesIO(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate or 0) == VIDEOS.default_fps
    assert [round(frame[0, 0, 0] / 20) for frame in frames] == list(range(9))
    with pytest.raises(UserError, match="It makes images"):
        checked_spec({"prompt": "x"}, INFO, is_video=True)


def test_generate_needs_a_prompt() -> None:
    result = CliRunner().invoke(app, ["generate"])
    assert result.exit_code == 2
    assert "PROMPT" in result.stderr.upper()
