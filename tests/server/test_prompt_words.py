"""Prompts of words that a model does not draw: what clients are told, and that shipped models say what they draw."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from fake_engine import INFO, FakeEngine, serving
from tilework.core.model import ModelSource, PromptWords
from tilework.pipelines.defaults import read_overrides
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import SHIPPED, shipped_directory
from tilework.server.calls.parsing.prompt_words import prompt_warnings
from training.shapes import drawing as shapes
from training.shapes_motion import drawing as shapes_motion

WORDS: PromptWords = (("colour", ("red", "blue")), ("shape", ("circle",)), ("background", ("black", "white")))
DRAWS = replace(INFO, words=WORDS)
TRAINED = {"shapes": shapes, "shapes-motion": shapes_motion}
NONE = "tiny-shapes draws no word of this prompt. It draws colour: red, blue; shape: circle; "
OTHER = "tiny-shapes does not draw the background of this prompt. It draws black, white."


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a lighthouse", [f"{NONE}background: black, white."]),
        ("reddish", [f"{NONE}background: black, white."]),
        ("a Red circle, on a BLACK background", []),
        ("a red circle", []),
        ("red", []),
        ("", []),
        ("a red circle on a blue background", [OTHER]),
        ("a red circle on a pink background, a green background", [OTHER]),
        ("a red circle on a background", []),
        ("the background colour is white", []),
        ("a blue square shape", ["tiny-shapes does not draw the shape of this prompt. It draws circle."]),
    ],
)
def test_a_prompt_is_warned_of_what_the_model_does_not_draw(prompt: str, told: list[str]) -> None:
    assert list(prompt_warnings(prompt, DRAWS)) == told
    assert list(prompt_warnings(prompt, INFO)) == [], "it does not say what it draws"


def test_clients_are_told_in_the_answer_and_of_all_words_with_the_model() -> None:
    with serving(FakeEngine(info=DRAWS), drain_s=0) as served:
        answer = served.http.post("/v1/images/generations", json={"prompt": "a red circle on a blue background"})
        assert answer.status_code == httpx.codes.OK
        assert answer.json()["data"][0]["tilework"]["warnings"] == [OTHER]
        assert served.metric("tilework_warnings_total") == 1
        (card,) = served.http.get("/v1/models").json()["data"]
        assert card["tilework"]["words"] == {kind: list(words) for kind, words in WORDS}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_names_the_words_that_it_was_trained_on(name: str) -> None:
    drawing = TRAINED[name]
    assert read_overrides(shipped_directory(name))["words"] == drawing.DRAWN
    info = load(ModelSource(path=name)).info
    assert {kind: list(words) for kind, words in info.words} == drawing.DRAWN
    for scene in drawing.all_scenes():
        assert list(prompt_warnings(drawing.caption(scene), info)) == []
