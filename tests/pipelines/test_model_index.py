"""What a model's files say before anything of it is loaded, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

from tilework.pipelines.errors import IncompleteModel, ModelNotFound, UnsupportedModel
from tilework.pipelines.model_index import INDEX, SHIPPED, read_model_index, shipped_directory


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_found_by_name_and_by_directory(name: str) -> None:
    directory = shipped_directory(name)
    assert directory.name == name
    for path in (name, str(directory)):
        found = read_model_index(path)
        assert found.directory == directory
        assert found.adapter.startswith("tilework.pipelines.")


def test_an_unsupported_class_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers']));"
        f"from tilework.pipelines.model_index import read_model_index; read_model_index({str(tmp_path)!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UnsupportedModel" in result.stderr
    assert "KandinskyPipeline" in result.stderr
    assert "tilework classes" in result.stderr
    with pytest.raises(UnsupportedModel, match="KandinskyPipeline"):
        read_model_index(str(tmp_path))


def test_an_index_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("[1]")
    with pytest.raises(IncompleteModel, match=r"model_index\.json: holds a list, not a JSON object; fetch the model"):
        read_model_index(str(tmp_path))
    (tmp_path / INDEX).write_text('{"_class_name": "Flux')
    with pytest.raises(IncompleteModel, match=r"model_index\.json: cannot be read as JSON"):
        read_model_index(str(tmp_path))


def unreachable(*_: object, **__: object) -> None:
    raise httpx.ConnectError("Name or service not known")


def test_an_unreachable_hub_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", unreachable)
    with pytest.raises(ModelNotFound, match=r"'nope'.* no such directory.*cannot be reached.*Name or service"):
        read_model_index("nope")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        read_model_index("nope")


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"_class_name": "FluxPipeline"}))
    monkeypatch.setattr(httpx, "head", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / INDEX))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / INDEX))
    assert read_model_index("someone/flux").adapter.endswith(":Flux")


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RepositoryNotFoundError("404", response=response(404)), "no such directory"),
        (EntryNotFoundError("404"), "diffusers' layout"),
        (HFValidationError("Repo id must use alphanumeric chars"), "alphanumeric"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_errors_of_the_hub_are_reported_with_a_remedy(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ModelNotFound, match=words):
        read_model_index("nope")
