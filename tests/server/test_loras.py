"""LoRAs over HTTP: how requests name them, what is refused, and that they survive a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fake_engine import EDITOR, INFO, FakeEngine, Plan, Served, serving
from server.picture_files import data_url, plain
from tilework.core.lora import UsedLora
from tilework.core.request import RefusalCode
from tilework.server.config import ConfigError
from tilework.server.lora_directory import loras_in
from tilework.server.models_file import read_models
from waiting import eventually

NAMES = tuple(f"n{index}" for index in range(9))
DRAWING = replace(INFO, loras=("ink", "chalk.v2", *NAMES))
EDITS, CHATS, ASYNC = "/v1/images/edits", "/v1/chat/completions", {"Prefer": "respond-async"}
LORA = [{"name": "ink", "scale": 0.5}, {"name": "chalk.v2"}, {"name": "n1", "scale": -10}]
USED = UsedLora("ink", 0.5), UsedLora("chalk.v2", 1.0), UsedLora("n1", -10.0)


def start() -> AbstractContextManager[Served]:
    return serving(FakeEngine(info=DRAWING, others=(replace(EDITOR, loras=DRAWING.loras),)))


@pytest.fixture
def server() -> Iterator[Served]:
    with start() as server:
        yield server


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    """For requests that are refused: they leave nothing behind."""
    with start() as server:
        yield server


def used(server: Served, answer: httpx.Response) -> tuple[UsedLora, ...]:
    """What has reached the engine."""
    assert answer.is_success, answer.text
    return server.engine.specs[-1].loras


@pytest.mark.parametrize(
    ("code", "param", "remedy"),
    [
        (RefusalCode.LORAS, "lora", "use fewer or smaller ones"),
        (RefusalCode.WEIGHTS, "model", "use another model"),
        (RefusalCode.MEMORY, "size", "ask for less"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_field_that_is_too_large(
    refusing: Served, code: RefusalCode, param: str, remedy: str
) -> None:
    refusing.engine.script = [Plan(code=code)]
    error = refusing.post({"prompt": "x", "lora": [{"name": "ink"}]}).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert remedy in error["message"].lower()
    value = {"lora": '["ink"]', "model": f'"{DRAWING.name}"', "size": '"48x64"'}[param]
    assert error["message"].startswith(f"{param} = {value} is not accepted. It does not fit: ")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert (error["param"], error["type"]) == ("lora", "invalid_request_error")
    return error


def test_loras_reach_the_engine_in_their_order(server: Served) -> None:
    assert used(server, server.post({"prompt": "x", "lora": LORA})) == USED
    assert server.engine.requests[-1].loras == USED
    for nothing in (None, []):
        assert used(server, server.post({"prompt": "x", "lora": nothing})) == ()


def test_loras_in_forms_are_json(server: Served) -> None:
    files = {"image": plain()}
    fields = {"prompt": "x", "model": EDITOR.name}
    assert used(server, server.http.post(EDITS, data=fields | {"lora": json.dumps(LORA)}, files=files)) == USED
    assert used(server, server.http.post(EDITS, data=fields | {"lora": ""}, files=files)) == ()
    whole = {"image": data_url(plain()), "lora": LORA}
    assert used(server, server.http.post(EDITS, json=fields | whole)) == USED
    for wrong in ("ink", "[" * 60_000, '["ink"]', "ink=0.5"):
        assert (
            "a list of up to 8"
            in error_of(server.http.post(EDITS, data=fields | {"lora": wrong}, files=files))["message"]
        )
    twice = server.http.post(EDITS, data=fields | {"lora": ["[]", "[]"]}, files=files)
    assert "give it once" in error_of(twice)["message"]


@pytest.mark.parametrize("is_spread", [False, True])
def test_loras_in_chats(server: Served, is_spread: bool) -> None:
    fields = {"lora": LORA} if is_spread else {"extra_body": {"lora": LORA}}
    messages = [{"role": "user", "content": "a cat"}]
    assert used(server, server.http.post(CHATS, json={"messages": messages, **fields})) == USED


def test_openai_client_sends_loras_as_an_extra_field(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)
    client.images.generate(prompt="x", model=INFO.name, extra_body={"lora": LORA})
    assert server.engine.specs[-1].loras == USED


BAD = [
    ("ink", "a list of up to 8 LoRAs"),
    (["ink"], "a list of up to 8 LoRAs"),
    ({"name": "ink"}, "a list of up to 8 LoRAs"),
    ([{"scale": 1.0}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "weight": 1.0}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "scale": "one"}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "scale": True}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "scale": 10.1}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "scale": -10.1}], "a list of up to 8 LoRAs"),
    ([{"name": "ink", "scale": float("nan")}], "a list of up to 8 LoRAs"),
    ([{"name": name} for name in NAMES], "a list of up to 8 LoRAs"),
    ([{"name": "ink"}, {"name": "wax"}], 'has no LoRA "wax": give some of "ink", "chalk.v2", "n0"'),
    ([{"name": "Ink"}], 'has no LoRA "Ink": give some of'),
    ([{"name": "ink"}, {"name": "n1"}, {"name": "ink", "scale": 0.5}], '"ink" is given twice: give it once'),
]


@pytest.mark.parametrize(("lora", "remedy"), BAD, ids=str)
def test_wrong_loras_are_refused_with_a_remedy(refusing: Served, lora: object, remedy: str) -> None:
    content = json.dumps({"prompt": "x", "lora": lora})
    answer = refusing.http.post("/v1/images/generations", content=content, headers={"Content-Type": "application/json"})
    assert remedy in error_of(answer)["message"]
    assert not refusing.engine.requests


def test_eight_loras_are_not_too_many(server: Served) -> None:
    eight = [{"name": name, "scale": 10} for name in NAMES[:8]]
    assert len(used(server, server.post({"prompt": "x", "lora": eight}))) == 8


def test_a_model_without_loras_says_so() -> None:
    with serving(FakeEngine()) as server:
        error = error_of(server.post({"prompt": "x", "lora": [{"name": "ink"}]}))
        assert (error["code"], 'has no LoRA "ink": leave it out' in error["message"]) == ("unknown_lora", True)
        assert server.post({"prompt": "x", "lora": []}).is_success


def test_of_many_loras_a_refusal_names_the_first() -> None:
    many = tuple(f"n{index}" for index in range(1000))
    with serving(FakeEngine(info=replace(INFO, loras=many))) as server:
        message = error_of(server.post({"prompt": "x", "lora": [{"name": "wax"}]}))["message"]
    assert '"n0", "n1"' in message
    assert "and 990 more (GET /v1/models has all)" in message
    assert len(message) < 300


def test_models_are_listed_with_their_loras(server: Served) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert [card["tilework"]["loras"] for card in cards] == [list(DRAWING.loras)] * 2


def test_a_repeat_with_other_loras_is_another_call(server: Served) -> None:
    key = {"Idempotency-Key": "k"}
    ask = {"prompt": "x", "lora": LORA}
    first = server.post(ask, headers=key)
    assert server.post(ask, headers=key).headers["x-request-id"] == first.headers["x-request-id"]
    assert server.post(ask | {"lora": LORA[:1]}, headers=key).status_code == 422


def test_calls_keep_their_loras_over_a_restart(tmp_path: Path) -> None:
    def start(engine: FakeEngine) -> Any:
        return serving(engine, durable=str(tmp_path / "state"), drain_s=0.1)

    with start(FakeEngine(info=DRAWING, plan=Plan(is_held=True))) as server:
        uid = server.post({"prompt": "x", "lora": LORA}, headers=ASYNC).json()["uid"]
    with start(FakeEngine(info=DRAWING, plan=Plan(is_held=True))) as server:
        ((wanted, _),) = server.engine.restored
        assert wanted.spec.loras == USED
        server.on_loop(server.engine.finish, f"{uid}-0")
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")


# Directories.


def file(place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    return place


def test_files_are_named_by_themselves_or_by_their_directory(tmp_path: Path) -> None:
    ink, chalk = file(tmp_path / "ink.safetensors"), file(tmp_path / "chalk.v2" / "pytorch_lora_weights.safetensors")
    for other in ("notes.txt", "weights.bin", "deep/ink.safetensors", "deep/a/pytorch_lora_weights.safetensors"):
        file(tmp_path / other)
    (tmp_path / "empty.safetensors").mkdir()
    assert [(one.name, one.path) for one in loras_in(tmp_path)] == [("chalk.v2", str(chalk)), ("ink", str(ink))]


def test_a_relative_directory_gives_absolute_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ink = file(tmp_path / "loras" / "ink.safetensors")
    monkeypatch.chdir(tmp_path)
    assert [one.path for one in loras_in(Path("loras"))] == [str(ink)]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    file(tmp_path / "ink.safetensors")
    file(tmp_path / "ink" / "pytorch_lora_weights.safetensors")
    with pytest.raises(ConfigError, match="are both called 'ink'; rename one"):
        loras_in(tmp_path)


@pytest.mark.parametrize("name", ["red ink", "ink,chalk", "ink=1", "x" * 129, "tinté"])
def test_a_name_that_no_request_can_give_is_refused(tmp_path: Path, name: str) -> None:
    file(tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="a name that no request can give"):
        loras_in(tmp_path)


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    for place, what in ((tmp_path / "nowhere", "does not exist"), (file(tmp_path / "ink.safetensors"), "is a file")):
        with pytest.raises(ConfigError, match=f"{what}; give a directory that holds"):
            loras_in(place)


def test_a_models_file_has_a_directory_for_each_model(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\npath = "p"\nloras = "./of-a"\n[models.b]\npath = "q"\n')
    first, second = read_models(str(path)).values()
    assert (first.loras, second.loras) == (str(tmp_path / "of-a"), None)
    path.write_text('[models.a]\npath = "p"\nloras = ""\n')
    with pytest.raises(ConfigError, match=r"models.a.loras = \'\' cannot be used; give the directory of its LoRAs"):
        read_models(str(path))
