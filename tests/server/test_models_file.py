"""The file of models: what it says counts, and a mistake in it is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fake_engine import INFO, FakeEngine, serving
from tilework.server.config import ConfigError
from tilework.server.models_file import check_workers, read_models

GOOD = """
[models.tiny-shapes]
path = "./weights"
aliases = ["shapes", "someone/shapes"]
dtype = "float16"
default_slo = "5s"
devices = [1, 0]
loras = "loras"
vae_tiling = false
previews = false
[models."a/b"]
path = "someone/else"
"""


def written(directory: Path, text: str) -> str:
    path = directory / "models.toml"
    path.write_text(text)
    return str(path)


def test_models_are_read_in_order_with_paths_from_the_file_on(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    first, second = read_models(written(tmp_path, GOOD)).items()
    assert first[0] == INFO.name
    assert first[1].path == str(tmp_path / "weights")
    assert (first[1].aliases, first[1].dtype, str(first[1].default_slo)) == (
        ("shapes", "someone/shapes"),
        "float16",
        "5s",
    )
    assert (first[1].devices, second[1].devices) == ((0, 1), None)
    assert (first[1].loras, second[1].loras) == (str(tmp_path / "loras"), None)
    assert (first[1].vae_tiling, second[1].vae_tiling) == (False, None)
    assert (first[1].previews, second[1].previews) == (False, None)
    assert (second[0], second[1].path, second[1].default_slo) == ("a/b", "someone/else", None)
    assert read_models(None) == {}


def test_an_alias_is_a_name_and_a_request_without_a_deadline_gets_the_models(tmp_path: Path) -> None:
    with serving(FakeEngine(), models=written(tmp_path, GOOD)) as server:

        def slo_s(**fields: object) -> object:
            answer: httpx.Response = server.http.post("/v1/images/generations", json={"prompt": "x", **fields})
            answer.raise_for_status()
            return answer.json()["data"][0]["tilework"]["slo_s"]

        assert slo_s(model="someone/shapes") == 5.0
        assert slo_s(model="shapes", slo_s=9) == 9
        (card,) = server.http.get("/v1/models").json()["data"]
        assert (card["tilework"]["aliases"], card["tilework"]["default_slo"]) == (["shapes", "someone/shapes"], "5s")
        assert server.http.get("/v1/models/someone/shapes").json() == card


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models", "is not TOML"),
        ("", "models is missing or empty; give [models.NAME]"),
        ("[models.a]", "models.a.path is missing or empty"),
        ('[models.a]\npath = "p"\nsteps = 4', "models.a.steps is not known; give path, aliases"),
        ('[models.a]\npath = "p"\n[model.b]\npath = "q"', "model is not known; give [models.NAME]"),
        ('[models.a]\npath = "p"\ndtype = "int8"', "models.a.dtype = 'int8' cannot be used; give float32, bfloat16"),
        ('[models.a]\npath = "p"\ndefault_slo = 0', "models.a.default_slo = 0 cannot be used; give a time such as"),
        ('[models.a]\npath = "p"\nloras = 3', "models.a.loras = 3 cannot be used; give the directory of its LoRAs"),
        ('[models.a]\npath = "p"\ndevices = []', "models.a.devices = [] cannot be used; give a list of workers from 0"),
        ('[models.a]\npath = "p"\ndevices = [0, 0]', "models.a.devices = [0, 0] cannot be used; give a list"),
        ('[models.a]\npath = "p"\ndevices = [true]', "models.a.devices = [True] cannot be used; give a list"),
        ('[models.a]\npath = "p"\ndevices = [-1]', "models.a.devices = [-1] cannot be used; give a list"),
        ('[models.a]\npath = "p"\ndevices = 0', "models.a.devices = 0 cannot be used; give a list"),
        ('[models.a]\npath = "p"\naliases = ["x y"]', "models.a.aliases[0] = 'x y' cannot be used; give a list"),
        ('[models."x y"]\npath = "p"', "models.'x y' is not a name"),
        ('[models."../x"]\npath = "p"', "models.'../x' is not a name; use up to 128 letters"),
        ('[models.a]\npath = "p"\naliases = ["q/loras/z"]', "models.a.aliases[0] = 'q/loras/z' cannot be used"),
        ('[models.a]\npath = "p"\naliases = ["b"]\n[models.b]\npath = "q"', "models.a.aliases has 'b', which names"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_models(written(tmp_path, text))
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_models(str(tmp_path / "nowhere.toml"))


def test_a_worker_that_there_is_not_is_named_with_file_and_model(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    check_workers(path, read_models(path), 2)
    with pytest.raises(ConfigError, match=rf"{path}: models.tiny-shapes.devices has 1, and there are 1 workers, .* 2"):
        check_workers(path, read_models(path), 1)
