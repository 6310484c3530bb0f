"""Server settings: where they come from, and that wrong ones say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from fake_engine import FakeEngine
from tilework.cli.app import app
from tilework.cli.console import UserError
from tilework.control.controller import ControllerConfig
from tilework.runtime.engine import EngineConfig
from tilework.server.api.app import new_store
from tilework.server.config import ConfigError, ServerConfig, load_config
from tools.settings_table import page

DOCS = Path(__file__).parents[2] / "docs"


def loaded(
    environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, others: Collection[str] = ()
) -> ServerConfig:
    with mock.patch.dict(os.environ, environ, clear=True):
        return load_config(overrides, others=others)


def test_overrides_beat_environment_beats_defaults() -> None:
    environ = {"TILEWORK_PORT": "9000", "TILEWORK_DRAIN_S": "1.5", "HOME": "/root"}
    config = loaded(environ, {"port": 9001, "host": None})
    assert (config.port, config.drain_s, config.host) == (9001, 1.5, "127.0.0.1")


def test_empty_variable_unsets_an_optional_setting() -> None:
    assert loaded({"TILEWORK_API_KEY": "", "TILEWORK_PUBLIC_URL": ""}) == ServerConfig()


def test_the_queue_is_as_long_as_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment to the controller."""
    assert ServerConfig().max_jobs == ControllerConfig().max_jobs
    assert ServerConfig().max_backlog_s * 1e9 == ControllerConfig().max_backlog_ns
    handed: list[EngineConfig] = []

    async def serve(start: Any, config: ServerConfig, **_: object) -> None:
        handed.append(start._config)

    monkeypatch.setattr("tilework.cli.serving.serve_http", serve)
    monkeypatch.setenv("TILEWORK_MAX_JOBS", "7")
    flags = ["serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager", "--policy", "tetriserve"]
    flags += ["--max-backlog", "1.5", "--max-batch", "3", "--promise-price", "greedy"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert handed[0].controller == ControllerConfig(
        policy="tetriserve", max_jobs=7, max_backlog_ns=1_500_000_000, max_batch=3, promise_price=inf
    )


@pytest.mark.parametrize(("given", "price"), [("0", 0.0), ("1.5", 1.5), (2, 2.0), ("greedy", inf)])
def test_the_price_of_a_promise_is_a_number_or_a_word(given: object, price: float) -> None:
    assert loaded({}, {"promise_price": given}).promise_price == price
    assert loaded({"TILEWORK_PROMISE_PRICE": str(given)}).promise_price == price


@pytest.mark.parametrize("given", ["abc", "-1", "nan", "inf", True])
def test_another_price_of_a_promise_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"promise_price = .* cannot be used; give a number from 0 on, or greedy"):
        loaded({}, {"promise_price": given})


def test_a_command_whose_scheduler_has_failed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(start: Any, config: ServerConfig, **_: object) -> str:
        return "the scheduler failed (AssertionError: no)"

    monkeypatch.setattr("tilework.cli.serving.serve_http", serve)
    result = CliRunner().invoke(app, ["serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("the scheduler failed (AssertionError: no): this is a bug")


def test_keys_are_split_and_never_printed() -> None:
    config = ServerConfig(api_key="alpha, beta")
    assert config.api_keys == (b"alpha", b"beta")
    assert "alpha" not in repr(config)


def test_only_load_config_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_PORT", "9000")
    assert ServerConfig().port == 8000
    assert load_config().port == 9000


def test_the_page_of_settings_says_of_each_what_it_is() -> None:
    lines = "\n".join(page()).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(ServerConfig.model_fields)
    assert [row for row in rows if not row.endswith(". |")] == []
    assert "| `max_backlog_s`, `--max-backlog` | 3600 | 0.001<=x<=31622400 | Seconds of all devices" in "\n".join(rows)
    assert "| `max_input_bytes` | 64 MiB | 1024<=x<=1073741824 | Body" in "\n".join(rows)
    assert all((DOCS / name).exists() for name in re.findall(r"\]\((\w+\.md)\)", "\n".join(rows)))


def test_settings_of_others_are_skipped() -> None:
    assert loaded({"TILEWORK_MODEL": "x"}, others={"model"}) == ServerConfig()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TILEWORK_PROT": "80"}, ("TILEWORK_PROT", "TILEWORK_PORT", "Rename")),
        ({"TILEWORK_MAX_STEP": "80"}, ("TILEWORK_MAX_STEP", "TILEWORK_MAX_STEPS")),
        ({"TILEWORK_PORT": "http"}, ("TILEWORK_PORT", "'http'", "whole number")),
        ({"TILEWORK_PORT": "70000"}, ("TILEWORK_PORT", "70000", "65535")),
        ({"TILEWORK_MAX_JOBS": "0"}, ("TILEWORK_MAX_JOBS", "0", "1 to 1048576")),
        ({"TILEWORK_MAX_BACKLOG_S": "0"}, ("TILEWORK_MAX_BACKLOG_S", "0", "0.001 to")),
        ({"TILEWORK_DRAIN_S": "nan"}, ("TILEWORK_DRAIN_S", "nan", "0 to")),
        ({"TILEWORK_HOST": ""}, ("TILEWORK_HOST", "''", "127.0.0.1")),
    ],
)
def test_wrong_variable_names_value_and_remedy(environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": True}, ("port", "True", "whole number")),
        ({"port": "80"}, ("port", "'80'", "whole number")),
        ({"max_images": 11}, ("max_images", "11", "10")),
        ({"max_steps": 0}, ("max_steps", "0", "1 to")),
        ({"result_ttl_s": float("inf")}, ("result_ttl_s", "inf")),
        ({"public_url": "example.org"}, ("public_url", "example.org", "https://")),
        ({"api_key": " , "}, ("api_key", "unset")),
        ({"speed": 1}, ("speed", "nearest")),
    ],
)
def test_wrong_override_names_value_and_remedy(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded({}, settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:6379", "127.0.0.1"])
def test_an_address_of_results_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"results is '{url}': .*give redis://HOST:PORT"):
        new_store(ServerConfig(results=url), FakeEngine().now_ns)
