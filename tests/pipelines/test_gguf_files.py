"""Files of weights that are quantised already: pictures are those of the stock pipeline with the same transformer."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, GGUFQuantizationConfig
from diffusers.quantizers.gguf.utils import GGUFLinear
from torch import nn

import tilework
import tiny
from pipelines.test_setup import equals_stock, saved
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.errors import InvalidSource, ModelNotFound, UnsupportedModel
from tilework.pipelines.fits.beside import SERVER
from tilework.pipelines.fits.changes import cheapest_change
from tilework.pipelines.fits.plan import Planner
from tilework.pipelines.identity import model_identity
from tilework.pipelines.loading import load, load_component, load_stock
from tilework.pipelines.setup.gguf_files import load_gguf, read_header
from tilework.pipelines.setup.quantize import begin_at, check_schemes, parse_schemes, schemes_of
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import Weights

Q8 = gguf.GGMLQuantizationType.Q8_0
_BLOCK = 32
"""Weights of Q8_0 that have one scale."""


def write(file: Path, module: nn.Module, architecture: str = "flux") -> Path:
    """The weights of a module as others write them: matrices in Q8_0, vectors as numbers."""
    writer = gguf.GGUFWriter(str(file), architecture)
    for name, weight in module.state_dict().items():
        values = weight.float().numpy()
        if values.ndim == 2 and values.shape[-1] % _BLOCK == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("flux", tmp_path_factory)


@pytest.fixture(scope="module")
def file(flux: Path) -> Path:
    """Beside the folders of the model, and of its transformer."""
    return write(flux / "q8.gguf", FluxTransformer2DModel.from_pretrained(flux / "transformer"))


def source_of(flux: Path, file: Path, **setup: Any) -> ModelSource:
    return ModelSource(path=str(flux), quantize=parse_schemes(str(file)), **setup)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_stock_pipeline_with_this_transformer(flux: Path, file: Path, dtype: str) -> None:
    drawn = equals_stock(flux, quantize=str(file), dtype=dtype)
    number_type = getattr(torch, dtype)
    transformer = FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(flux),
        subfolder="transformer",
        torch_dtype=number_type,
        quantization_config=GGUFQuantizationConfig(compute_dtype=number_type),
    )
    plain = DiffusionPipeline.from_pretrained(flux, transformer=transformer, dtype=number_type)
    ours = load_stock(source_of(flux, file, dtype=dtype))
    assert any(isinstance(one, GGUFLinear) for one in ours.transformer.modules())
    for mine, its in zip(weights_of(ours.transformer), weights_of(plain.transformer), strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.data, its.data)
    usual = tiny.run_stock(tilework.reference(str(flux), dtype=dtype), tiny.spec())
    assert not torch.equal(drawn.latents[-1], usual.latents[-1]), "they are other weights"


@pytest.mark.slow
def test_the_folder_of_the_transformer_needs_no_weights(flux: Path, file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "flux"
    shutil.copytree(flux, directory)
    (directory / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"transformer: there is no \*.safetensors"):
        load(ModelSource(path=str(directory)))
    for name in ("", "transformer="):
        source = ModelSource(path=str(directory), quantize=parse_schemes(f"{name}{file}"))
        transformer, there = load(source).modules["transformer"], load_component(source, "transformer")
        assert [one.nbytes for one in weights_of(there)] == [one.nbytes for one in weights_of(transformer)]


@pytest.mark.slow
def test_offloaded_by_layers_it_is_the_same_picture(flux: Path, file: Path) -> None:
    usual = tiny.run_stock(tilework.reference(str(flux), quantize=str(file)), tiny.spec())
    layers = tiny.run_stock(tilework.reference(str(flux), quantize=str(file), offload="layers"), tiny.spec())
    assert np.array_equal(usual.pixels, layers.pixels)


@pytest.mark.slow
def test_weights_come_and_go_and_are_read_again(flux: Path, file: Path, tmp_path: Path) -> None:
    source = source_of(flux, file)
    family, weights = load(source), Weights(SharedWeights(tmp_path))
    transformer = family.modules["transformer"]
    before = [one.clone() for one in weights_of(transformer)]
    component = weights.add(transformer, lambda: load_component(source, "transformer"))
    assert sum(one.numel() for one in weights_of(transformer)) == 0
    for _ in weights.loading(component.digest):
        pass
    assert all(torch.equal(one, again) for one, again in zip(before, weights_of(transformer), strict=True))
    expected = tiny.run_stock(load_stock(source), tiny.spec()).pixels
    state = tiny.begin(family, tiny.spec())
    for _ in range(tiny.spec().steps):
        tiny.iterate(family, state)
    assert np.array_equal(tiny.pixels(tiny.decode(family, state)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_has_what_the_header_says(flux: Path, file: Path, dtype: str) -> None:
    source = source_of(flux, file, dtype=dtype)
    planner, shape = Planner.of(str(flux)), Shape(128, 128)
    (planned,) = (one for one in planner.plan(source, 0, shape).components if one.name == "transformer")
    assert planned.scheme == "q8.gguf"
    assert planned.num_bytes == sum(one.nbytes for one in weights_of(modules_of(load_stock(source))["transformer"]))


@pytest.mark.slow
def test_a_file_of_another_model_is_named(flux: Path, tmp_path: Path) -> None:
    sd3 = write(tmp_path / "sd3.gguf", tiny.build_sd3().transformer, "sd3")
    said = r"sd3.gguf: holds \d+ weights of the architecture 'sd3', which are not those of transformer \(FluxTr.* in "
    with pytest.raises(UnsupportedModel, match=said):
        load(source_of(flux, sd3))
    transformer = FluxTransformer2DModel.from_pretrained(flux / "transformer")
    transformer.proj_out = nn.Identity()
    part = write(tmp_path / "part.gguf", transformer)
    with pytest.raises(UnsupportedModel, match=r"are not those of transformer .*; give a file of that model"):
        load(source_of(flux, part))
    with pytest.raises(ModelNotFound, match=r"part.gguf: holds \d+ weights .*, and transformer \(FluxTr.*\) has \d+;"):
        Planner.of(str(flux)).plan(source_of(flux, part), 0, Shape(128, 128))
    with pytest.raises(UnsupportedModel, match="for text_encoder, and diffusers reads no such files for CLIPTextModel"):
        load(ModelSource(path=str(flux), quantize=parse_schemes(f"text_encoder={sd3}")))


def test_a_plan_that_does_not_fit_names_no_other_file(tmp_path: Path) -> None:
    tried = list[ModelSource]()

    class Small:
        def plan(self, source: ModelSource, *_: object) -> Any:
            tried.append(source)
            plan: Any = SimpleNamespace(fits=False)
            plan.fitted = lambda: plan
            return plan

    source = source_of(tmp_path, tmp_path / "q8.gguf")
    refused: Any = SimpleNamespace(source=source, memory_bytes=0, shape=None, beside=SERVER)
    assert cheapest_change(Small(), refused) is None  # type: ignore[arg-type]
    assert {one.offload for one in tried} == {"none", "components"}
    assert {one.quantize for one in tried} == {source.quantize}


def test_weights_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    class Kind:
        @staticmethod
        def from_single_file(*_: object, **__: object) -> nn.Module:
            return nn.Linear(2, 2, device="meta")

    with pytest.raises(UnsupportedModel, match=r"\(Kind\) in flux \(it has no weight\); give a file of that model"):
        load_gguf(Kind, str(small(tmp_path / "small.gguf")), "flux", "transformer", torch.float32)


def small(file: Path) -> Path:
    return write(file, nn.Linear(_BLOCK, 4))


def test_a_header_says_what_weights_take(tmp_path: Path) -> None:
    header = read_header(str(small(tmp_path / "small.gguf")))
    assert (header.architecture, header.num_plain, header.num_quantized) == ("flux", 4, 4 * _BLOCK)
    assert header.num_bytes(2) == 4 * 2 + 4 * (_BLOCK + 2)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"quantize names /absent.gguf, which cannot be read \(No such file"):
        check_schemes((("", "/absent.gguf"),), "cpu")
    file = small(tmp_path / "small.gguf")
    file.write_bytes(file.read_bytes()[:-32])
    with pytest.raises(ModelNotFound, match=r"small.gguf: is no GGUF file, or not whole"):
        read_header(str(file))
    file.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelNotFound, match=r"small.gguf: is no GGUF file, or not whole"):
        read_header(str(file))
    file.write_bytes(tiny.LFS_POINTER)
    with pytest.raises(ModelNotFound, match=r"small.gguf: is a pointer of Git LFS.*`git lfs pull`"):
        read_header(str(file))
    with pytest.raises(UnsupportedModel, match="diffusers reads no such files for Linear; take a scheme"):
        load_gguf(nn.Linear, str(small(file)), "flux", "transformer", torch.float32)


def test_the_package_that_reads_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small(tmp_path / "small.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidSource, match=r"gguf is not installed; run: .*-m pip install .*\[gguf\]"):
        read_header(str(file))


def test_a_file_is_given_like_a_scheme() -> None:
    assert parse_schemes("./a=b.gguf") == (("", "./a=b.gguf"),)
    assert parse_schemes("transformer=hi.gguf,transformer_2=/lo.gguf, fp8") == (
        ("", "fp8"),
        ("transformer", "hi.gguf"),
        ("transformer_2", "/lo.gguf"),
    )
    assert begin_at(Path("there"), "fp8,transformer=./hi.gguf,x=/lo.gguf") == "fp8,transformer=there/hi.gguf,x=/lo.gguf"
    with pytest.raises(UnsupportedModel, match=r"2 denoisers; give transformer=FILE.gguf,transformer_2=FILE.gguf"):
        schemes_of((("", "one.gguf"),), ("transformer", "transformer_2"), ("transformer", "transformer_2", "vae"))


def test_each_file_has_costs_of_its_own_and_other_models_none(tmp_path: Path) -> None:
    one, other = small(tmp_path / "one.gguf"), write(tmp_path / "other.gguf", nn.Linear(_BLOCK, 8))
    source = ModelSource(path="shapes", quantize=(("", str(one)), ("text_encoder", "int8")))
    again = replace(source, quantize=(("", str(other)), ("text_encoder", "int8")))
    assert len({model_identity(source), model_identity(again)}) == 2
    assert source.weights_files == ("",)
    assert source.of_others().quantize == (("text_encoder", "int8"),)
