"""`tilework serve --config`: what goes before what, where each value is from, and mistakes by their names."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.command_line import invoke
from tilework.cli.app import app
from tilework.cli.options.logs import ServerLog
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.reload import Reread

DOCS = Path(__file__).parents[2] / "docs"
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TILEWORK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "tilework.toml"
        path.write_text(text, "utf-8")
        return path

    return written


def shown(*arguments: object) -> dict[str, tuple[Any, str]]:
    """Value and source of each setting."""
    found = json.loads(invoke("serve", *arguments, "--show-config", "--json").stdout)
    return {name: (one["value"], one["source"]) for name, one in found.items()}


def test_an_option_goes_before_the_environment_and_that_before_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what the command reads (`cell`, `weights_memory`) and for what the server reads."""
    path = write('workers = 6\ncell = 3\nweights_memory = "9GB"\nport = 1\nmax_steps = 2\nmax_batch = 3\ndrain_s = 4\n')
    monkeypatch.setenv("TILEWORK_CELL", "2")
    monkeypatch.setenv("TILEWORK_WEIGHTS_MEMORY", "8GB")
    monkeypatch.setenv("TILEWORK_MAX_BATCH", "8")
    monkeypatch.setenv("TILEWORK_MAX_STEPS", "5")
    found = shown("--config", path, "--weights-memory", "7GB", "--max-batch", 9)
    assert (found["weights_memory"], found["max_batch"]) == ((7 * 10**9, "option"), (9, "option"))
    assert (found["cell"], found["max_steps"]) == (("2", "environment"), (5, "environment"))
    assert (found["workers"], found["port"], found["drain_s"]) == ((6, "file"), (1, "file"), (4.0, "file"))
    assert (found["threads"], found["host"]) == ((1, "default"), ("127.0.0.1", "default"))
    monkeypatch.setenv("TILEWORK_CONFIG", str(path))
    assert shown()["port"] == (1, "file")


def test_every_variable_that_the_help_names_is_known() -> None:
    """The server refuses variables that neither it nor the command knows."""
    names = set(re.findall(r"env\s+var:\s+(TILEWORK_\w+)", invoke("serve", "--help").stdout))
    assert len(names) > 30
    for name in names - {"TILEWORK_CONFIG"}:
        result = CliRunner().invoke(app, ["serve", "--show-config"], env={name: "1"})
        assert "is not a setting" not in f"{result.output}{result.exception}"


def test_a_server_is_started_with_what_is_shown(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(
        'model = ["a=shapes"]\nworkers = 3\nlog = "events.jsonl"\nvae_tiling = false\nport = 7\nexact = true\n'
    )
    given: dict[str, Any] = {}

    def serving(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("tilework.cli.serving.Serving", serving)
    invoke("serve", "--config", path, "--exact")
    each = given["workers"].each
    assert (each.num_workers, [one.name for one in each.sources]) == (3, ["a"])
    assert given["logs"].log == tmp_path / "events.jsonl"
    assert (given["config"].port, given["config"].exact) == (7, True)


def test_paths_begin_at_the_file(write: Write, tmp_path: Path) -> None:
    path = write(
        'model = ["./sdxl", "x=../y", "hub/model", "shapes"]\nprofiles = "p.sqlite"\nmodels = "m.toml"\n'
        'durable = "d"\ntenants = "/etc/t.toml"\nresults = "redis://h"\n'
    )
    found = {name: value for name, (value, source) in shown("--config", path).items() if source == "file"}
    assert found == {
        "model": [f"{tmp_path}/sdxl", f"x={tmp_path}/../y", "hub/model", "shapes"],
        "profiles": f"{tmp_path}/p.sqlite",
        "models": f"{tmp_path}/m.toml",
        "durable": f"{tmp_path}/d",
        "tenants": "/etc/t.toml",
        "results": "redis://h",
    }


def test_every_setting_of_the_server_is_there_and_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_API_KEY", "a-secret")
    monkeypatch.setenv("TILEWORK_RESULTS", "redis://:a-secret@h")
    text = invoke("serve", "--show-config").stdout
    assert {line.split()[0] for line in text.splitlines()} >= ServerConfig.model_fields.keys() | {"model", "nodes"}
    assert "a-secret" not in text
    assert re.search(r"^api_key +environment +\(not shown\)$", text, re.MULTILINE)
    assert re.search(r"^admin_key +default *$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("workrs = 3", "workrs is not a setting; the nearest one is workers. Rename or remove it."),
        ("max_stepz = 3", "max_stepz is not a setting; the nearest one is max_steps."),
        ("show_config = true", "show_config is not a setting"),
        ("workers = 0", "workers = 0 cannot be used; "),
        ('policy = ["edf"]', "policy = ['edf'] cannot be used; give one value."),
        ('model = "shapes"', "model = 'shapes' cannot be used; give a list."),
        ("vae_tiling = 1", "vae_tiling = 1 cannot be used; give true or false."),
        ("weights_memory = 5", "weights_memory = 5 cannot be used; '5' is not an amount of memory"),
        ('drain_s = "x"', "drain_s (in the file of settings) = 'x' cannot be used; give a number from 0 to 86400."),
        ("a = {", "is not TOML"),
    ],
)
def test_mistakes_are_named(mistake: Callable[..., str], write: Write, line: str, said: str) -> None:
    assert said in mistake("serve", "--config", write(f"{line}\n"), "--show-config")


def test_a_file_that_is_not_there(mistake: Callable[..., str], tmp_path: Path) -> None:
    assert "cannot be read: No such file" in mistake("serve", "--config", tmp_path / "absent.toml")


def test_the_example_of_the_page_can_be_used(write: Write) -> None:
    section = (DOCS / "operations.md").read_text("utf-8").partition("\n### A file of settings\n")[2]
    example = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert example is not None
    found = shown("--config", write(example[1]))
    keys = re.findall(r"^(\w+) = ", example[1], re.MULTILINE)
    assert len(keys) >= 8
    assert {name for name, (_, source) in found.items() if source == "file"} == set(keys)


def again(*arguments: object) -> tuple[Callable[[], Reread], ServerLog]:
    """What reads the file of a server again that is started so, and its log."""
    given: dict[str, Any] = {}

    def serving(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(run=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilework.cli.serving.Serving", serving)
        invoke("serve", *arguments)
    return given["reread"], given["server_log"]


def test_a_file_that_is_read_again_says_what_the_server_may_change_and_what_not(write: Write) -> None:
    path = write('api_key = "a"\nworkers = 3\nlog_level = "error"\nport = 7\n')
    read, log = again("--config", path, "--policy", "edf")
    assert read().differ == ()
    assert (applied(read()), read().config.api_key, read().config.port) == ("ERROR", "a", 7)
    write('api_key = "b"\nthreads = 2\nlog_level = "info"\nport = 7\npolicy = "fcfs"\n')
    now = read()
    assert sorted(now.differ) == ["threads", "workers"], "the policy is that of the option, whatever the file says"
    assert (applied(now), now.config.api_key, now.config.port) == ("INFO", "b", 7)
    write('api_key = "b"\n')
    assert applied(read()) == "WARNING", "its default"
    read, _ = again("--config", path, "--log-level", "error")
    write('log_level = "info"\n')
    assert applied(read()) == "ERROR", "an option goes before the file"
    log.set_level("warning")


def applied(now: Reread) -> str:
    """The level of the log once the settings are in effect."""
    now.apply()
    return logging.getLevelName(logging.getLogger("tilework").level)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("api_key = ", "is not TOML"),
        ('log_level = "loud"', "log_level = 'loud' cannot be used"),
        ("wrokers = 3", "wrokers is not a setting; the nearest one is workers"),
    ],
)
def test_a_file_that_is_read_again_with_a_mistake_is_named(write: Write, text: str, said: str) -> None:
    path = write("")
    read, _ = again("--config", path)
    write(text)
    with pytest.raises(ConfigError) as error:
        read()
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_log_file_that_was_renamed_is_opened_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "server.log"
    log = ServerLog("warning", file)
    logger = logging.getLogger("tilework.server")
    try:
        logging.getLogger().addHandler(log.handler)  # pytest has some already.
        logger.error("one")
        file.rename(tmp_path / "server.log.1")
        logger.error("two")
        log.reopen()
        logger.error("three")
        log.set_level("error")
        logger.warning("unheard")
        written = (tmp_path / "server.log.1").read_text().splitlines()
        assert [line.split(" ", 1)[1] for line in written] == [f"ERROR tilework.server: {n}" for n in ("one", "two")]
        assert file.read_text().endswith("Z ERROR tilework.server: three\n")
        assert len(file.read_text().splitlines()) == 1
        file.unlink()
        file.mkdir()
        log.reopen()
        assert "the log goes on in the file that was open" in caplog.text
        logger.error("four")
    finally:
        logging.getLogger().removeHandler(log.handler)
        logging.getLogger("tilework").setLevel(logging.NOTSET)
        log.handler.close()
