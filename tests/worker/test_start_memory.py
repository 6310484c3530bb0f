"""What lies on a card while a worker starts: never more than the weights that it may have there, on an emulated one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import tiny
from emulated_card import CARD, EmulatedCard, use_emulated_card
from loras import save_lora
from pipelines.test_gguf_files import write
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import Site
from tilework.core.wire.reports import Loaded
from tilework.pipelines import loading
from tilework.pipelines.components import weights_of
from tilework.pipelines.loading import load, load_stock
from tilework.worker import process
from tilework.worker.models.models import Models
from zoo.registry import ZOO, build

INT8 = (("", "int8"), ("text_encoder_2", "int8"))
WORKFLOW = """
import tilework, torch

class softened:
    def __init__(self):
        torch.manual_seed(1)
        self.blur = torch.nn.Conv2d(3, 3, 65)

    def __call__(self, picture):
        return picture

both = tilework.Workflow("both", tilework.Pipeline({path!r}), softened)
"""


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_card(monkeypatch)


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return saved(tiny.build_sd3(), tmp_path_factory.mktemp("sd3"), "sd3")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return saved(tiny.build_flux(), tmp_path_factory.mktemp("flux"), "flux")


def saved(pipeline: Any, directory: Path, name: str) -> ModelSource:
    tiny.prepare()
    tiny.save(pipeline, directory, name)
    return ModelSource(path=str(directory), name=name, device="cuda")


def card_for(*sources: ModelSource) -> EmulatedCard:
    """A card that has room for the largest component of models, and for no other beside it."""
    modules = [one for source in sources for one in load(replace(source, device="cpu", loras=())).modules.values()]
    sizes = [sum(one.nbytes for one in weights_of(module)) for module in modules]
    card = EmulatedCard(max(sizes) + shapes_bytes(*modules))
    assert sum(sizes) > card.limit_bytes
    return card


def shapes_bytes(*modules: nn.Module) -> int:
    """What weights take that have their shapes alone: an element each."""
    return sum(one.itemsize for module in modules for one in weights_of(module))


def start(card: EmulatedCard, directory: Path, *sources: ModelSource) -> tuple[Models, Loaded]:
    """A worker whose weights come and go, of which the card has nothing after its start."""
    site = Site(device_id=0, blobs=str(directory), loads_on_demand=True)
    with card:
        models, loaded = process._load(sources, site, 0, None)
    assert card.num_bytes == 0, "no command has loaded anything"
    return models, loaded


def assert_components_take_turns(card: EmulatedCard, directory: Path, *sources: ModelSource) -> Loaded:
    """A worker starts with no component on the card, and each comes there alone, with all its weights."""
    models, loaded = start(card, directory, *sources)
    components = {one for model in loaded.models for one in model.components.values()}
    assert card.most_bytes < min(one.num_bytes for one in components), "shapes, and tables of samplers"
    assert models.device == CARD
    for component in components:
        with card:
            models.load((component.digest,))
            assert card.num_bytes == component.num_bytes
            models.drop((component.digest,))
            assert card.num_bytes == 0
    return loaded


@pytest.mark.parametrize("offload", ["none", "components"])
def test_a_model_larger_than_the_card_starts_and_its_components_take_turns(
    sd3: ModelSource, tmp_path: Path, offload: str
) -> None:
    source = replace(sd3, offload=offload)
    card = card_for(source)
    loaded = assert_components_take_turns(card, tmp_path, source)
    whole = load(replace(sd3, device="cpu"))
    (model,) = loaded.models
    assert model.info.parameters == whole.info.parameters
    for name, module in whole.modules.items():
        assert model.components[name].num_bytes == sum(one.nbytes for one in weights_of(module))


def test_two_models_of_which_no_component_fits_beside_another(
    sd3: ModelSource, flux: ModelSource, tmp_path: Path
) -> None:
    assert_components_take_turns(card_for(sd3, flux), tmp_path, sd3, flux)


def test_without_weights_that_come_and_go_it_does_not_fit(sd3: ModelSource, tmp_path: Path) -> None:
    with card_for(sd3):
        _, loaded = process._load((sd3,), Site(device_id=0, blobs=str(tmp_path)), 0, None)
    assert (loaded.models, ["does not fit into memory" in one.reason for one in loaded.not_loaded]) == ((), [True])


def test_loras_are_read_while_nothing_else_is_there(sd3: ModelSource, tmp_path: Path) -> None:
    names = ("one", "other")
    files = [save_lora(tiny.build_sd3(), tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate(names)]
    loras = tuple(LoraSource(name, str(file)) for name, file in zip(names, files, strict=True))
    card = card_for(sd3)
    _, loaded = start(card, tmp_path, replace(sd3, loras=loras))
    (model,) = loaded.models
    assert set(model.loras) == set(names)
    sizes = [one.component.num_bytes for one in model.loras.values() if one.component is not None]
    shapes = shapes_bytes(*load(replace(sd3, device="cpu")).modules.values())
    assert max(sizes) <= card.most_bytes < sum(sizes) + shapes


def test_offloaded_by_layers_no_component_is_ever_there_whole(
    flux: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By diffusers' hooks as they are, but for the streams of CUDA."""
    stock = DiffusionPipeline.enable_group_offload
    without = {"use_stream": False, "low_cpu_mem_usage": False}
    monkeypatch.setattr(
        DiffusionPipeline, "enable_group_offload", lambda one, **options: stock(one, **{**options, **without})
    )
    card = EmulatedCard(10**9)
    with card, torch.no_grad():
        pipeline = load_stock(replace(flux, offload="layers"))
        assert card.most_bytes == 0
        assert pipeline._execution_device == CARD
        pipeline.text_encoder_2(torch.ones(1, 4, dtype=torch.long))
    weights = weights_of(pipeline.text_encoder_2)
    assert max(one.nbytes for one in weights) <= card.most_bytes < sum(one.nbytes for one in weights)


def test_the_components_of_a_workflow_and_its_users_classes_take_turns(sd3: ModelSource, tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text(WORKFLOW.format(path=sd3.path))
    source = replace(sd3, path=f"{file}:both", name="both")
    loaded = assert_components_take_turns(card_for(source), tmp_path, source)
    assert "softened.blur" in loaded.models[0].components


def test_the_components_of_a_modular_pipeline_take_turns(tmp_path: Path) -> None:
    tiny.prepare()
    directory = tmp_path / "model"
    build(ZOO["modular-qwen-image"]).save_pretrained(
        str(directory), safe_serialization=True, overwrite_modular_index=True
    )
    source = ModelSource(path=str(directory), name="modular", device="cuda")
    assert_components_take_turns(card_for(source), tmp_path / "blobs", source)


def test_weights_of_a_file_take_turns_with_the_others(flux: ModelSource, tmp_path: Path) -> None:
    transformer = load_stock(replace(flux, device="cpu")).transformer
    file = write(tmp_path / "weights.gguf", transformer)
    assert gguf.GGUFReader(str(file)).tensors
    source = replace(flux, quantize=(("", str(file)),))
    assert_components_take_turns(card_for(source), tmp_path, source)


@pytest.mark.slow
class TestQuantized:
    @pytest.fixture(autouse=True)
    def _with_torchao(self) -> None:
        pytest.importorskip("torchao")

    def test_quantised_components_take_turns(self, flux: ModelSource, tmp_path: Path) -> None:
        source = replace(flux, dtype="bfloat16", quantize=INT8)
        assert_components_take_turns(card_for(source), tmp_path, source)

    def test_what_a_library_quantises_on_the_card_leaves_it_before_the_next(
        self, flux: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As bitsandbytes does: the component lies there when it has been read."""
        source = replace(flux, dtype="bfloat16", quantize=INT8)
        card, read = card_for(source), loading._read_one

        def read_there(*arguments: Any) -> nn.Module:
            module = read(*arguments)
            return module if arguments[-1] is None else module.to("cuda")

        monkeypatch.setattr(loading, "_read_one", read_there)
        start(card, tmp_path, source)
        assert 0 < card.most_bytes <= card.limit_bytes
