"""Quantised weights, offloading by layers, attention, compilation: pictures are those of stock that is set up so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import tilework
import tiny
from cards import card
from tilework.core.model import ModelSource
from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.errors import InvalidSource, UnsupportedModel
from tilework.pipelines.fits.parts import read_parts
from tilework.pipelines.identity import model_identity
from tilework.pipelines.loading import load, load_component, load_stock
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.setup import offload
from tilework.pipelines.setup.quantize import SCHEMES, check_schemes, parse_schemes
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import Weights

BUILDERS: dict[str, Callable[[], Any]] = {"flux": tiny.build_flux, "sd3": tiny.build_sd3, "sdxl": tiny.build_sdxl}
INT8 = (("", "int8"),)


@pytest.fixture(scope="module", params=BUILDERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("flux", tmp_path_factory)


def saved(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp(name)
    tiny.save(BUILDERS[name](), directory, name)
    return directory


def equals_stock(directory: Path, **setup: Any) -> tiny.Stock:
    """Compare a request that moves after every step with the stock pipeline so configured, whose picture it returns."""
    quantize = setup.pop("quantize", None)
    stock = tiny.run_stock(tilework.reference(str(directory), quantize=quantize, **setup), tiny.spec())
    schemes = () if quantize is None else parse_schemes(quantize)
    source = ModelSource(path=str(directory), quantize=schemes, **setup)
    here, there = load(source), load(source)
    state = tiny.begin(here, tiny.spec())
    for latents in stock.latents:
        tiny.iterate(here, state)
        assert torch.equal(state.latents, latents)
        state = tiny.move(here, there, state)
        here, there = there, here
    assert np.array_equal(tiny.pixels(tiny.decode(here, state)), stock.pixels)
    return stock


@pytest.mark.slow
def test_offloaded_by_layers_it_is_the_same_picture(flux: Path) -> None:
    stock = equals_stock(flux, offload="layers")
    usual = tiny.run_stock(tilework.reference(str(flux)), tiny.spec())
    assert np.array_equal(stock.pixels, usual.pixels)
    pipeline = load_stock(ModelSource(path=str(flux), offload="layers"))
    assert all(hasattr(one, "_diffusers_hook") for one in leaves(pipeline.transformer)), "each layer is offloaded"


@pytest.mark.parametrize(("num_cards", "free_gb", "pins"), [(1, 7.0, True), (1, 5.0, False), (2, 7.0, False)])
def test_layers_are_pinned_ahead_where_the_host_has_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_cards: int, free_gb: float, pins: bool
) -> None:
    """On each of the cards 1.2 GB of weights, of which pinned copies take 2.1; beside them 4 GB are left free."""
    given: dict[str, object] = {}
    layer = torch.nn.Linear(20_000, 30_000, bias=False, dtype=torch.bfloat16, device="meta")
    pipeline = SimpleNamespace(components={"transformer": layer}, enable_group_offload=given.update)
    monkeypatch.setattr(offload, "free_host_bytes", lambda: free_gb * 1e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    offload.offload_layers(pipeline, torch.device("cuda", 0))
    assert (given["use_stream"], given["low_cpu_mem_usage"]) == (True, not pins)
    assert ("pinned when they are copied" in caplog.text) == (not pins)


def leaves(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (one for one in module.modules() if isinstance(one, torch.nn.Linear))


@pytest.mark.parametrize("text", ["int4", "", "int8,int8", "=int8", "transformer=", "int8;fp8"])
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(InvalidSource, match=r"give one of int8, fp8, nf4, nvfp4 or a file \*\.gguf for"):
        parse_schemes(text)


def test_schemes_are_of_denoisers_or_of_components_by_name() -> None:
    assert parse_schemes("int8") == INT8
    assert parse_schemes("fp8, text_encoder_2=int8") == (("", "fp8"), ("text_encoder_2", "int8"))


def test_a_library_that_is_missing_is_named(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: None)
    with pytest.raises(InvalidSource, match=r"torchao is not installed; run: .*-m pip install .*\[quantize\]"):
        load_stock(ModelSource(path=str(flux), quantize=INT8))


def test_nf4_on_cpus_is_refused(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: "there")
    with pytest.raises(InvalidSource, match="quantize is 'nf4', which needs CUDA, and device is 'cpu'; take int8"):
        load_stock(ModelSource(path=str(flux), quantize=(("", "nf4"),)))


def test_nvfp4_needs_a_card_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.pipelines.setup.quantize.find_spec", lambda name: "there")
    schemes = parse_schemes("nvfp4")
    check_schemes(schemes, "cuda", (card(capability=(10, 0)), card(capability=(12, 0))))
    said = r"which needs cards of compute capability 10\.0, and a card has 9\.0; take nf4, int8 or fp8"
    with pytest.raises(InvalidSource, match=said):
        check_schemes(schemes, "cuda", (card(capability=(10, 0)), card(capability=(9, 0))))
    with pytest.raises(InvalidSource, match=r"which needs CUDA, and device is .cpu.; take nf4, int8 or fp8"):
        check_schemes(schemes, "cpu")
    check_schemes(parse_schemes("nf4"), "cuda", (card(capability=(7, 5)),))


def test_each_setup_has_costs_of_its_own(flux: Path) -> None:
    source = ModelSource(path=str(flux))
    others = [
        replace(source, quantize=INT8),
        replace(source, quantize=(("text_encoder_2", "int8"),)),
        replace(source, offload="layers"),
        replace(source, attention="math"),
        replace(source, compiles=True),
    ]
    assert len({model_identity(one) for one in (source, *others)}) == 6
    assert model_identity(replace(source, offload="components")) == model_identity(source), "its runs take as long"


@pytest.mark.slow
def test_another_attention_is_that_of_the_stock_pipeline(flux: Path) -> None:
    try:
        pin_numerics(1, "math")
        equals_stock(flux, attention="math")
        active, _ = _AttentionBackendRegistry.get_active_backend()
        assert active is AttentionBackendName._NATIVE_MATH
    finally:
        pin_numerics(1)


def test_blocks_that_repeat_themselves_are_compiled_for_all_sizes(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def note(module: torch.nn.Module, **options: Any) -> None:
        compiled.append((type(module).__name__, options))

    monkeypatch.setattr(torch.nn.Module, "compile", note)
    source = ModelSource(path=str(flux), compiles=True)
    load_stock(source)
    assert {name for name, _ in compiled} == {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    assert all(options == {"dynamic": True} for _, options in compiled)
    monkeypatch.setattr(FluxTransformer2DModel, "_repeated_blocks", [])
    with pytest.raises(UnsupportedModel, match="transformer is to be compiled, and FluxTransformer2DModel names no"):
        load_stock(source)


@pytest.mark.slow
def test_no_size_compiles_anything_anew(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own front end, which decides that; what it finds is run as it is, since that takes no compiler.

    The first size is not 64x64 here, which has as many tokens as the text: torch takes lengths that are equal at first
    for always equal, and compiles once more for the next size.
    """
    compiling, numbers = torch.compile, list[int]()
    monkeypatch.setattr(torch, "compile", partial(compiling, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pipeline = load_stock(ModelSource(path=str(flux), compiles=True))
    for height, width in ((96, 64), (64, 64), (64, 32), (128, 96)):
        tiny.run_stock(pipeline, tiny.spec(height=height, width=width, steps=2))
        numbers.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert numbers[0] > 0
    assert numbers == [numbers[0]] * len(numbers)


@pytest.mark.slow
class TestQuantized:
    @pytest.fixture(autouse=True)
    def _with_torchao(self) -> None:
        pytest.importorskip("torchao")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_it_is_the_stock_pipeline_with_these_weights(self, directory: Path, dtype: str) -> None:
        quantized = equals_stock(directory, quantize="int8", dtype=dtype)
        usual = tiny.run_stock(tilework.reference(str(directory), dtype=dtype), tiny.spec())
        assert not np.array_equal(quantized.latents[-1], usual.latents[-1]), "they are other weights"

    def test_fp8_and_encoders_by_name(self, flux: Path) -> None:
        equals_stock(flux, quantize="fp8,text_encoder_2=int8", dtype="bfloat16")

    def test_what_the_class_of_a_pipeline_calls_optional_is_not_read_again_as_it_was(self) -> None:
        """The transformer of Wan, whose pipeline may have another one in its place."""
        placed = list[torch.nn.Module]()
        family = load(ModelSource(path="shapes-motion", quantize=INT8), placed.append)
        assert [name for name, module in family.modules.items() if all(module is not one for one in placed)] == []
        assert any(type(layer.weight) is not torch.nn.Parameter for layer in leaves(family.modules["transformer"]))

    def test_a_component_that_there_is_not_is_named(self, flux: Path) -> None:
        with pytest.raises(UnsupportedModel, match="quantize names 'unet', and the components with weights are"):
            load_stock(ModelSource(path=str(flux), quantize=(("unet", "int8"),)))

    def test_weights_come_and_go_and_are_read_again(self, flux: Path, tmp_path: Path) -> None:
        source = ModelSource(path=str(flux), dtype="bfloat16", quantize=INT8)
        family = load(source)
        weights = Weights(SharedWeights(tmp_path))
        transformer = family.modules["transformer"]
        expected = tiny.run_stock(load_stock(source), tiny.spec()).pixels
        component = weights.add(transformer, lambda: load_component(source, "transformer"))
        assert sum(one.numel() for one in weights_of(transformer)) == 0
        for _ in weights.loading(component.digest):
            pass
        assert component.num_bytes == sum(one.nbytes for one in weights_of(transformer))
        state = tiny.begin(family, tiny.spec())
        for _ in range(tiny.spec().steps):
            tiny.iterate(family, state)
        assert np.array_equal(tiny.pixels(tiny.decode(family, state)), expected)

    @pytest.mark.parametrize("scheme", ["int8", "fp8"])
    def test_a_row_knows_what_weights_take(self, flux: Path, scheme: str) -> None:
        modules = modules_of(load_stock(ModelSource(path=str(flux), quantize=(("", scheme),))))
        for layer in leaves(modules["transformer"]):
            taken = sum(part.nbytes for part in weights_of(layer)) - (0 if layer.bias is None else layer.bias.nbytes)
            assert taken == SCHEMES[scheme].weight_bytes(layer.out_features, layer.in_features)

    def test_nvfp4_is_loaded_as_for_a_card_that_has_it(self, flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its products are computed on such cards alone: here weights are quantised, and none is used."""
        from torchao.prototype.mx_formats import inference_workflow

        monkeypatch.setattr(inference_workflow, "is_sm_at_least_100", lambda: True)
        monkeypatch.setattr("tilework.pipelines.loading.check_schemes", lambda *_: None)
        source = ModelSource(path=str(flux), dtype="bfloat16", quantize=(("", "nvfp4"),))
        transformer = load_stock(source).transformer
        for layer in leaves(transformer):
            bias_bytes = 0 if layer.bias is None else layer.bias.nbytes
            taken = sum(part.nbytes for part in weights_of(layer)) - bias_bytes
            assert taken == SCHEMES["nvfp4"].weight_bytes(layer.out_features, layer.in_features)
            assert layer.weight.act_quant_kwargs.use_dynamic_per_tensor_scale is False, "it would be that of a batch"
        again = load_component(source, "transformer")
        for one, other in zip(weights_of(transformer), weights_of(again), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    def test_what_is_quantised_in_its_files_is_served_as_it_is(self, flux: Path, tmp_path: Path) -> None:
        """As `save_pretrained` leaves it; other libraries than torchao say so in the same place."""
        directory = tmp_path / "flux"
        shutil.copytree(flux, directory)
        shutil.rmtree(directory / "transformer")
        quantized = load_stock(ModelSource(path=str(flux), dtype="bfloat16", quantize=INT8)).transformer
        quantized.save_pretrained(directory / "transformer")
        source = ModelSource(path=str(directory), dtype="bfloat16")
        expected = tiny.run_stock(load_stock(replace(source, path=str(flux), quantize=INT8)), tiny.spec())
        assert np.array_equal(equals_stock(directory, dtype="bfloat16").pixels, expected.pixels)
        (planned,) = (one for one in read_parts(directory) if one.name == "transformer")
        stored = sum(one.nbytes for one in weights_of(load_stock(source).transformer))
        assert (planned.quantized_by, planned.num_bytes(torch.bfloat16, None)) == ("torchao", stored)
        with pytest.raises(UnsupportedModel, match=r"transformer is quantised already \(torchao\); leave it out"):
            load_stock(replace(source, quantize=(("", "fp8"),)))
