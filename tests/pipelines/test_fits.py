"""Plans of memory: what they say is what there is then, and what they refuse would not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tilework
import tiny
from tilework.core.model import ModelSource
from tilework.core.request import Shape
from tilework.core.wire.commands import CACHE_BYTES, STATES_BYTES
from tilework.pipelines.clips.memory import TensorMeter
from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.errors import ModelNotFound, UnsupportedModel
from tilework.pipelines.fits.beside import NCCL_BYTES, NO_SERVER, SERVER, Beside
from tilework.pipelines.fits.changes import CHANGES, cheapest_change, options_of
from tilework.pipelines.fits.parts import read_parts
from tilework.pipelines.fits.plan import MemoryPlan, Planner
from tilework.pipelines.fits.steps import Latents, shorten, step_bytes
from tilework.pipelines.loading import load_stock
from zoo.registry import ZOO, build

pytestmark = pytest.mark.slow

BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": tiny.build_flux,
    "sd": tiny.build_sd,
    "sd3": tiny.build_sd3,
    "sdxl": tiny.build_sdxl,
}
SIDE = 128
SHAPE = Shape(SIDE, SIDE)


@pytest.fixture(scope="module", params=BUILDERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("flux", tmp_path_factory.mktemp("flux"))


def saved(name: str, directory: Path) -> Path:
    tiny.prepare()
    tiny.save(BUILDERS[name](), directory, name)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_take_what_the_plan_says(model: tuple[str, Path], dtype: str) -> None:
    _, directory = model
    source = ModelSource(path=str(directory), dtype=dtype)
    assert planned_weights(source) == loaded_weights(source)


@pytest.mark.parametrize("quantize", [(("", "int8"),), (("", "fp8"), ("text_encoder_2", "int8"))])
def test_quantised_weights_take_what_the_plan_says(flux: Path, quantize: tuple[tuple[str, str], ...]) -> None:
    pytest.importorskip("torchao")
    source = ModelSource(path=str(flux), dtype="bfloat16", quantize=quantize)
    planned = planned_weights(source)
    assert planned == loaded_weights(source)
    assert planned["transformer"] < planned_weights(replace(source, quantize=()))["transformer"]


def planned_weights(source: ModelSource) -> dict[str, int]:
    return {one.name: one.num_bytes for one in Planner.of(source.path).plan(source, 0, SHAPE).components}


def loaded_weights(source: ModelSource) -> dict[str, int]:
    modules = modules_of(load_stock(source))
    return {name: sum(one.nbytes for one in weights_of(module)) for name, module in modules.items()}


def test_a_step_and_a_decode_take_what_the_plan_says(model: tuple[str, Path]) -> None:
    name, directory = model
    source = ModelSource(path=str(directory))
    pipeline = load_stock(source)
    peaks = metered(pipeline, name)
    runs = {one.name: one.run_bytes for one in Planner.of(source.path).plan(source, 0, SHAPE).stages}
    assert runs["encode"] is None
    assert runs["diffuse"] == pytest.approx(peaks["step"], rel=0.05)
    assert runs["decode"] == pytest.approx(peaks["decode"], rel=0.05)


def metered(pipeline: Any, name: str) -> dict[str, int]:
    """The most that the tensors of a step and of the decode of a stock call take on this CPU."""
    denoiser, vae, peaks = getattr(pipeline, "transformer", None) or pipeline.unet, pipeline.vae, dict[str, int]()

    def meter(run: Callable[..., Any], what: str) -> Callable[..., Any]:
        def metered_run(*args: Any, **kwargs: Any) -> Any:
            with TensorMeter(tensors_alone=True) as counted:
                result = run(*args, **kwargs)
            peaks[what] = counted.peak_bytes
            return result

        return metered_run

    denoiser.forward, vae.decode = meter(denoiser.forward, "step"), meter(vae.decode, "decode")
    with torch.no_grad():
        pipeline(**prompt(name, pipeline), height=SIDE, width=SIDE, num_inference_steps=1, guidance_scale=4.0)
    return peaks


def prompt(name: str, pipeline: Any) -> dict[str, Any]:
    """A prompt of as many tokens as those of real models have."""
    if name != "sd3":
        return {"prompt": "a circle"} | ({"max_sequence_length": 512} if name == "flux" else {})
    config = pipeline.transformer.config
    text, pooled = torch.zeros(1, 77 + 256, config.joint_attention_dim), torch.zeros(1, config.pooled_projection_dim)
    names = ("prompt_embeds", "pooled_prompt_embeds")
    given = dict(zip(names, (text, pooled), strict=True))
    return given | {f"negative_{one}": value for one, value in given.items()}


def test_blocks_that_repeat_themselves_take_no_more(flux: Path) -> None:
    whole, short = (read_parts(flux)[2].module for _ in range(2))
    assert type(whole).__name__ == "FluxTransformer2DModel"
    for one in (whole, short):
        for blocks in (one.transformer_blocks, one.single_transformer_blocks):
            blocks.extend([blocks[0]] * 3)
    shorten(short)
    assert len(short.transformer_blocks) == 2 < len(whole.transformer_blocks)
    latents = Latents(1, 16, 16, torch.float32)
    assert step_bytes(whole, latents) == step_bytes(short, latents)


def test_configurations_alone_are_enough(flux: Path, tmp_path: Path) -> None:
    for file in flux.rglob("*.json"):
        (tmp_path / file.relative_to(flux)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(flux)).write_bytes(file.read_bytes())
    plans = [Planner.of(str(one)).plan(ModelSource(path=""), 10**10, SHAPE) for one in (flux, tmp_path)]
    assert plans[0] == plans[1]


def test_weights_of_another_model_are_noticed(flux: Path, tmp_path: Path) -> None:
    directory = saved("flux", tmp_path)
    file = directory / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file(dict(list(weights.items())[:-1]), file)
    with pytest.raises(ModelNotFound, match=r"transformer: its weights have \d+ elements, and its config.json asks"):
        Planner.of(str(directory))


def test_a_model_without_a_known_denoiser_is_named(flux: Path, tmp_path: Path) -> None:
    directory = saved("flux", tmp_path)
    index = json.loads((directory / "model_index.json").read_text())
    (directory / "model_index.json").write_text(json.dumps({**index, "transformer": ["my_module", "Mine"]}))
    with pytest.raises(UnsupportedModel, match="no component is a denoiser"):
        Planner.of(str(directory))


class TestAnyClass:
    """The server plans whatever it serves on cards: what the code of a model does not do is not planned, no error."""

    def planner(self, name: str, directory: Path) -> Planner:
        tiny.prepare()
        build(ZOO[name]).save_pretrained(str(directory), safe_serialization=True)
        return Planner.of(str(directory))

    @pytest.mark.parametrize("name", ["allegro", "cosmos1", "hunyuan-video", "kandinsky22", "kolors", "mochi", "svd"])
    def test_weights_are_planned_and_a_run_as_far_as_it_is_known(self, name: str, tmp_path: Path) -> None:
        planner = self.planner(name, tmp_path)
        plan = planner.plan(ModelSource(path="", dtype="float32"), 10**12)
        assert plan.stages[0].weights_bytes > 0
        assert plan.num_planned < 3
        assert plan.fits

    def test_sound_is_counted_and_pictures_are_what_is_decoded(self, tmp_path: Path) -> None:
        planner = self.planner("ltx2", tmp_path)
        assert {"audio_vae", "connectors", "vocoder"} <= {part.name for part in planner.parts}
        assert planner._autoencoder is next(part.module for part in planner.parts if part.name == "vae")
        assert planner.plan(ModelSource(path="", dtype="float32"), 10**12, Shape(64, 64, 9)).fits


def test_nothing_is_planned_beyond_the_sides_that_a_model_takes() -> None:
    """Stable Diffusion 3 has a table of positions: on a large card more pixels fit than it has places for."""
    path = Path(tilework.__file__).parent / "models/shapes"
    planner, source = Planner.of(str(path)), ModelSource(path=str(path))
    most = planner.largest(planner.plan(source, 10**12))
    assert most == Shape(384, 384), "pos_embed_max_size x patch_size x 4 pixels of a latent"
    with pytest.raises(UnsupportedModel, match="size 64x448: sides of this model are at most 384 px"):
        planner.plan(source, 10**12, Shape(448, 64))


class TestChoices:
    """Of one model, whose runs are planned once."""

    @pytest.fixture(scope="class")
    def planner(self, flux: Path) -> Planner:
        return Planner.of(str(flux))

    def plan(self, planner: Planner, beside_bytes: int, side: int = SIDE, **setup: Any) -> MemoryPlan:
        """A plan for a device with so much for the model."""
        source = ModelSource(path="", dtype=setup.pop("dtype", "float32"), **setup)
        return planner.plan(source, SERVER.num_bytes + beside_bytes, Shape(side, side))

    def test_what_is_there_in_each_stage(self, planner: Planner) -> None:
        sizes = {one.name: one.num_bytes for one in self.plan(planner, 0).components}
        assert {one.weights_bytes for one in self.plan(planner, 0).stages} == {sum(sizes.values())}
        encode, diffuse, decode = self.plan(planner, 0, offload="components").stages
        assert encode.weights_bytes == sizes["text_encoder"] + sizes["text_encoder_2"]
        assert (diffuse.weights_bytes, decode.weights_bytes) == (sizes["transformer"] + sizes["vae"], sizes["vae"])
        _, without, _ = self.plan(planner, 0, offload="components", previews=False).stages
        assert without.weights_bytes == sizes["transformer"]
        _, layer, _ = self.plan(planner, 0, offload="layers").stages
        assert 0 < layer.weights_bytes < sizes["transformer"]

    def test_the_room_for_weights_is_what_runs_leave(self, planner: Planner) -> None:
        plan = self.plan(planner, 10**8, offload="components")
        needed = max(one.weights_bytes for one in plan.stages)
        assert plan.weights_room_bytes == 10**8 - max(one.run_bytes or 0 for one in plan.stages)
        assert plan.weights_room_bytes >= needed
        assert plan.fits

    def test_what_options_let_a_worker_keep_counts(self, planner: Planner) -> None:
        source = ModelSource(path="", offload="components")
        kept = Beside(states_bytes=300, cache_bytes=50, num_cards=2)
        without, beside = (planner.plan(source, 10**10, Shape(SIDE, SIDE), one) for one in (NO_SERVER, kept))
        more = 300 + 50 + NCCL_BYTES
        assert beside.needed_bytes == without.needed_bytes + more
        assert beside.weights_room_bytes == without.weights_room_bytes - more
        assert (SERVER.states_bytes, SERVER.cache_bytes) == (STATES_BYTES, CACHE_BYTES), "those of a worker by default"

    def test_changes_and_sizes_are_tried_beside_the_same(self, planner: Planner) -> None:
        refused = planner.plan(ModelSource(path=""), 10**9, Shape(SIDE, SIDE), Beside(num_cards=2))
        least = planner.plan(ModelSource(path="", dtype="bfloat16"), 0, refused.shape, refused.beside).needed_bytes
        found = cheapest_change(planner, replace(refused, memory_bytes=least))
        assert found is not None
        assert found.needed_bytes == least
        fitting = replace(refused, memory_bytes=refused.needed_bytes)
        assert planner.largest(fitting) == refused.shape

    def test_the_largest_square_fits_and_the_next_one_does_not(self, planner: Planner) -> None:
        beside_bytes = self.plan(planner, 0, 192).needed_bytes - SERVER.num_bytes + 10
        assert planner.largest(self.plan(planner, beside_bytes)) == Shape(192, 192)
        assert not self.plan(planner, beside_bytes, 256).fits
        assert planner.largest(self.plan(planner, 10)) is None

    def test_the_cheapest_change_is_the_first_that_fits(self, planner: Planner) -> None:
        refused = self.plan(planner, 0)
        need = {
            offload: self.plan(planner, 0, dtype="bfloat16", offload=offload).needed_bytes
            for offload in ("none", "components")
        }
        for memory, options in (
            (need["none"], "--dtype bfloat16"),
            (need["components"], "--dtype bfloat16 --offload components"),
        ):
            found = cheapest_change(planner, replace(refused, memory_bytes=memory))
            assert found is not None
            assert found.fits
            assert options_of(found.source, refused.source) == options
            assert found.source.offload != "layers"
        assert cheapest_change(planner, refused) is None, "not even the runs fit"

    def test_every_change_is_worth_its_row(self, planner: Planner) -> None:
        plain = self.plan(planner, 0)
        for change in CHANGES:
            source = replace(plain.source, **change)
            assert planner.plan(source, 0, plain.shape).needed_bytes <= plain.needed_bytes
            assert options_of(source, plain.source), "it has options"
