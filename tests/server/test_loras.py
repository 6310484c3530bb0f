"""LoRAs of requests: which fields name them, what is refused, and which files of a directory they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fake_engine import EDITOR, INFO, FakeEngine, Served, serving
from server.picture_files import plain
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource
from tilework.server.config import ConfigError
from tilework.server.lora_directory import loras_in

LORAS = tuple(f"lora-{index}" for index in range(9))


@pytest.fixture
def server() -> Iterator[Served]:
    plain_model = replace(INFO, name="plain")
    with serving(FakeEngine(info=replace(EDITOR, loras=LORAS), others=(plain_model,))) as served:
        yield served


def used(server: Served) -> tuple[UsedLora, ...]:
    """The LoRAs of the latest request, which its worker and the scheduler agree on."""
    assert server.engine.requests[-1].loras == server.engine.specs[-1].loras
    return server.engine.requests[-1].loras


def test_json_forms_and_chats_name_loras_in_their_order(server: Served) -> None:
    lora = [{"name": "lora-2", "scale": 0.5}, {"name": "lora-1"}]
    expected = (UsedLora("lora-2", 0.5), UsedLora("lora-1", 1.0))
    answers = [
        server.http.post("/v1/images/generations", json={"prompt": "x", "lora": lora}),
        server.http.post("/v1/images/edits", data={"prompt": "x", "lora": json.dumps(lora)}, files={"image": plain()}),
        server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "lora": lora}),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    assert [one.loras for one in server.engine.requests] == [expected] * 3
    assert [one.loras for one in server.engine.specs] == [expected] * 3


@pytest.mark.parametrize("lora", [None, []])
def test_no_lora_is_none(server: Served, lora: object) -> None:
    assert server.http.post("/v1/images/generations", json={"prompt": "x", "lora": lora}).status_code == 200
    assert used(server) == ()


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("lora-1", "Give a list of up to 8 LoRAs"),
        ([{"scale": 1}], "Give a list of up to 8 LoRAs"),
        ([{"name": "lora-1", "scale": 10.5}], "Give a list of up to 8 LoRAs"),
        ([{"name": "lora-1", "scale": "1"}], "Give a list of up to 8 LoRAs"),
        ([{"name": "lora-1", "weight": 1}], "Give a list of up to 8 LoRAs"),
        ([{"name": name} for name in LORAS], "Give a list of up to 8 LoRAs"),
        ([{"name": "other"}], f'{EDITOR.name} has no LoRA "other": give some of "lora-0", "lora-1"'),
        ([{"name": "lora-1"}, {"name": "lora-1", "scale": 0.5}], '"lora-1" is there twice'),
    ],
    ids=str,
)
def test_a_wrong_lora_is_refused_with_its_remedy(server: Served, lora: object, said: str) -> None:
    answer = server.http.post("/v1/images/generations", json={"prompt": "x", "lora": lora})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora")
    assert said in answer.json()["error"]["message"]
    assert not server.engine.requests


def test_a_model_without_loras_says_so(server: Served) -> None:
    ask = {"prompt": "x", "model": "plain", "lora": [{"name": "lora-1"}]}
    error = server.http.post("/v1/images/generations", json=ask).json()["error"]
    assert (error["code"], error["message"].endswith('plain has no LoRA "lora-1": leave it out.')) == (
        "unknown_lora",
        True,
    )


def test_a_form_without_a_list_is_refused(server: Served) -> None:
    for text in ("lora-1", "{", "[" * 100_000):
        data = {"prompt": "x", "lora": text}
        answer = server.http.post("/v1/images/edits", data=data, files={"image": plain()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora")


def test_models_list_their_loras(server: Served) -> None:
    cards = {one["id"]: one["tilework"]["loras"] for one in server.http.get("/v1/models").json()["data"]}
    assert cards == {EDITOR.name: list(LORAS), "plain": []}


def test_the_loras_of_a_directory(tmp_path: Path) -> None:
    for file in ("ink.safetensors", "chalk.v2.safetensors", "notes.txt", "weights.bin", "deep/other.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "pytorch_lora_weights.safetensors").touch()
    assert loras_in(tmp_path) == (
        LoraSource("chalk.v2", str(tmp_path / "chalk.v2.safetensors")),
        LoraSource("ink", str(tmp_path / "ink.safetensors")),
        LoraSource("saved", str(tmp_path / "saved" / "pytorch_lora_weights.safetensors")),
    )


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no directory; give one that holds NAME\.safetensors"):
        loras_in(tmp_path / "absent")
    (tmp_path / "a b.safetensors").touch()
    with pytest.raises(ConfigError, match=r"a b\.safetensors has a name that no request can give"):
        loras_in(tmp_path)
    (tmp_path / "a b.safetensors").rename(tmp_path / "ink.safetensors")
    (tmp_path / "ink").mkdir()
    (tmp_path / "ink" / "pytorch_lora_weights.safetensors").touch()
    with pytest.raises(ConfigError, match="are both called 'ink'; rename one"):
        loras_in(tmp_path)
