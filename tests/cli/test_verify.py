"""`tilework verify`: exact pictures that tiny models have drawn, made again by the stock pipelines."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from PIL import Image as Pillow
from typer.testing import CliRunner

import tiny
from fake_engine import INFO
from loras import save_lora
from tilework.cli.app import app
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.draw import draw
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.server.calls.encode import encode
from tilework.server.calls.provenance import provenance_of, text_chunks
from tilework.worker.models.describe import described
from zoo.registry import ZOO
from zoo.requests import build, spec_of

LORA = "chalk.v2"


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(place / "model")
    save_lora(tiny.build_sd3(), place / "loras" / f"{LORA}.safetensors", seed=3)
    return place


def drawn(source: ModelSource, spec: Spec | None = None, zoo: str = "", **more: Any) -> list[bytes]:
    """The PNGs that a server would give for a request, with what its worker says of itself."""
    family: Family = load(source)
    for one in source.loras:
        family.loras.add(one.name, Path(one.path))
    spec = replace(spec_of(ZOO[zoo], family, seed=5) if spec is None else spec, exact=True)
    family.loras.use(spec.loras)
    image = draw(family, spec)
    spec = replace(spec, height=image.height, width=image.width)
    info = replace(described(family, source, {}, {}, {}).info, **more)
    provenance = provenance_of(spec, info, image, is_exact=True)
    return [encode(image, "png", 90, frame, text_chunks(spec, provenance, frame)) for frame in range(image.frames)]


def answer(pngs: list[bytes]) -> str:
    return json.dumps({"data": [{"b64_json": base64.b64encode(one).decode()} for one in pngs]})


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def found(*arguments: object, status: int = 0) -> Mapping[str, Any]:
    result = verify(*arguments, "--json")
    assert result.exit_code == status, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["identical"] == (status == 0)
    return document


@pytest.fixture(scope="module")
def picture(directory: Path) -> Path:
    """Of a request with much to it."""
    source = ModelSource(
        path=str(directory / "model"),
        dtype="bfloat16",
        loras=(LoraSource(LORA, str(directory / "loras" / f"{LORA}.safetensors")),),
    )
    spec = tiny.spec(
        prompt="ein rotes Ü",
        negative_prompt="blue",
        seed=2**40,
        loras=(UsedLora(LORA, 0.7),),
        arguments={"sigmas": (1.0, 0.6, 0.3), "prompt_2": "a square", "clip_skip": 1},
        steps=3,
        width=80,
    )
    file = directory / "picture.png"
    file.write_bytes(*drawn(source, spec))
    return file


@pytest.mark.slow
def test_a_picture_is_made_again_from_what_its_file_says(picture: Path, directory: Path) -> None:
    """Dtype, texts, arguments and LoRAs included; each of them decides the pixels."""
    here = ("--model", directory / "model", "--loras", directory / "loras")
    assert found(picture, *here) == {
        "identical": True,
        "pictures": [{"place": str(picture), "is_intact": True, "is_remade": True, "differences": {}}],
    }


def _changed(png: Path, to: Path, change: Any) -> Path:
    """The file with other metadata or pixels."""
    with Pillow.open(png) as opened:
        texts, image = dict(opened.text), Image(opened.height, opened.width, opened.tobytes())  # type: ignore[attr-defined]
    metadata = json.loads(texts["tilework"])
    pixels = change(metadata, bytearray(image.pixels))
    to.write_bytes(encode(replace(image, pixels=bytes(pixels)), "png", 90, 0, {"tilework": json.dumps(metadata)}))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt", "prompt_2", "negative_prompt", "seed", "steps", "sigmas", "clip_skip"])
def test_another_request_makes_other_pixels(picture: Path, directory: Path, tmp_path: Path, name: str) -> None:
    values = {"prompt": "x", "prompt_2": "x", "negative_prompt": "x", "seed": 1, "sigmas": [1.0, 0.5, 0.3]}
    values |= {"clip_skip": 0}

    def change(metadata: dict[str, Any], pixels: bytearray) -> bytearray:
        settings = metadata["provenance"]["settings"]
        if name == "steps":
            settings["steps"], _ = 4, settings["arguments"].pop("sigmas")
        for place in (metadata["texts"], settings, settings["arguments"]):
            if name in place and name in values:
                assert place[name] != values[name]
                place[name] = values[name]
        return pixels

    changed = _changed(picture, tmp_path / "changed.png", change)
    here = ("--model", directory / "model", "--loras", directory / "loras")
    (one,) = found(changed, *here, status=1)["pictures"]
    assert (one["is_intact"], one["is_remade"]) == (True, False)


@pytest.mark.slow
def test_pixels_that_were_changed_are_noticed(picture: Path, directory: Path, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], pixels: bytearray) -> bytearray:
        pixels[7] ^= 1
        return pixels

    changed = _changed(picture, tmp_path / "changed.png", change)
    result = verify(changed, "--model", directory / "model", "--loras", directory / "loras")
    assert result.exit_code == 1
    assert "its pixels are not those that were drawn" in result.stdout


@pytest.mark.slow
def test_an_answer_has_several_and_what_differs_here_is_said(directory: Path, tmp_path: Path) -> None:
    source = ModelSource(path=str(directory / "model"))
    more = {"library": "torch 1.0", "hardware": "abacus"}
    pngs = [one for seed in (1, 2) for one in drawn(source, tiny.spec(steps=2, seed=seed), **more)]
    file = tmp_path / "answer.json"
    file.write_text(answer(pngs))
    first, second = found(file, "--model", directory / "model")["pictures"]
    assert (first["place"], second["place"]) == (f"{file}, image 0", f"{file}, image 1")
    assert {name: there for name, (there, _) in first["differences"].items()} == {
        "libraries": "torch 1.0",
        "hardware": "abacus",
    }
    told = verify(file, "--model", directory / "model")
    assert "the stock pipeline makes the same pixels" in told.stdout
    assert "other hardware: abacus there, " in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd1-image", "wan22", "flux-kontext"])
def test_given_pictures_and_clips(name: str, tmp_path: Path) -> None:
    model, place = ZOO[name], tmp_path / "model"
    build(model).save_pretrained(str(place), safe_serialization=True)
    pngs = drawn(ModelSource(path=str(place)), zoo=name)
    file = tmp_path / "answer.json"
    file.write_text(answer(pngs))
    options: list[object] = []
    if "image" in model.inputs:
        model.inputs["image"].save(tmp_path / "given.png")
        model.inputs["image"].rotate(90).save(tmp_path / "other.png")
        options = ["--picture", f"image={tmp_path / 'given.png'}"]
        for wrong, remedy in (
            ([], "give --picture image=FILE"),
            (["--picture", f"image={tmp_path / 'other.png'}"], "was drawn from another image"),
        ):
            result = verify(file, "--model", place, *wrong)
            assert remedy in str(result.exception)
    pictures = found(file, "--model", place, *options)["pictures"]
    assert len(pictures) == len(pngs)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"x", "nor the JSON of an answer; give a PNG of `tilework generate`"),
        (encode(Image(1, 1, bytes(3)), "jpeg", 90), "neither a PNG, as files must be to say how they were made"),
        (b'{"data": [{"url": "x"}]}', "nor the JSON of an answer; give a PNG of `tilework generate`"),
        (b'{"data": []}', "holds no image"),
        (b"\x89PNG\r\n", "is no PNG that can be read"),
        (encode(Image(1, 1, bytes(3)), "png", 90), "lacks the text chunk 'tilework', which says how it was made"),
        (encode(Image(1, 1, bytes(3)), "png", 90, 0, {"tilework": "{}"}), "another version of tilework"),
    ],
    ids=["text", "jpeg", "url", "empty", "damaged", "plain", "version"],
)
def test_a_file_that_cannot_be_verified_is_named(content: bytes, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    result = verify(tmp_path / "file")
    assert remedy in str(result.exception)
    assert str(tmp_path / "file") in str(result.exception)


def test_what_generate_draws_can_be_verified_and_says_its_parameters(tmp_path: Path) -> None:
    file = tmp_path / "out.png"
    drawn_by = ["generate", "a blue cross on red", "-o", str(file), "--size", "64x64", "--steps", "1", "--seed", "7"]
    result = CliRunner().invoke(app, [*drawn_by, "--threads", "1"])
    assert result.exit_code == 0, result.output
    with Pillow.open(file) as opened:
        parameters = opened.text["parameters"]  # type: ignore[attr-defined]
    assert parameters.startswith("a blue cross on red\nSteps: 1, CFG scale: 4, Seed: 7, Size: 64x64, Model: shapes")
    (one,) = found(file)["pictures"]
    assert one == {"place": str(file), "is_intact": True, "is_remade": True, "differences": {}}


def test_a_picture_that_is_not_exact_is_named_with_its_seed(tmp_path: Path) -> None:
    image, spec = Image(1, 1, bytes(3)), tiny.spec(seed=5)
    texts = text_chunks(spec, provenance_of(spec, INFO, image, is_exact=False), 0)
    (tmp_path / "file.png").write_bytes(encode(image, "png", 90, 0, texts))
    told = str(verify(tmp_path / "file.png").exception)
    assert (
        'is not exact, so it depends on what else its server did; ask for it again with "exact": true, "seed": 5'
        in told
    )


@pytest.mark.slow
def test_a_lora_that_is_not_here_is_named(picture: Path, directory: Path) -> None:
    result = verify(picture, "--model", directory / "model")
    assert f"uses the LoRA {LORA}; give --loras DIR" in str(result.exception)
