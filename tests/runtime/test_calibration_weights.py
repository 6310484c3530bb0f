"""What devices hold while models are measured: all of a model that fits, else the weights of one stage at a time."""

from __future__ import annotations

from dataclasses import replace

from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.component import Component, LoadSource
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.lora import Lora, UsedLora
from tilework.core.time import NS_PER_S
from tilework.core.wire.commands import DropWeights, LoadWeights
from tilework.core.wire.reports import Loaded, LoadedModel, WeightsLoaded
from tilework.runtime.models.calibration_weights import CalibrationWeights, lacks_room
from worker.test_calibrate import INFO

PARTS = {"text_encoder": 50, "denoiser": 80, "vae": 10}
INK = UsedLora("ink", 1.0)


def model(name: str = "m") -> LoadedModel:
    return LoadedModel(
        info=replace(INFO, name=name, stages=latent_diffusion(name).specs),
        components={part: Component(f"{name} {part}", size) for part, size in PARTS.items()},
        loras={"ink": Lora(changes=frozenset({"denoiser"}), component=Component(f"{name} ink", 15))},
    )


def weights(total_bytes: int | None) -> CalibrationWeights:
    found = CalibrationWeights(total_bytes)
    found.know(Loaded((model(),), load_ns=NS_PER_S))
    return found


def test_a_model_that_fits_is_loaded_as_a_whole() -> None:
    one = weights(200)
    assert list(one.commands("m")) == [LoadWeights(0, ("m denoiser", "m text_encoder", "m vae"))]
    assert list(one.commands("m")) == [], "it is there already"
    assert one.by_stage("m") == {}
    assert list(one.last_commands()) == [DropWeights(("m denoiser", "m text_encoder", "m vae"))]


def test_of_a_model_that_does_not_fit_the_largest_stage_is_loaded_first_and_each_in_its_turn() -> None:
    one = weights(100)
    assert list(one.commands("m")) == [LoadWeights(0, ("m denoiser",))]
    assert one.by_stage("m") == {ENCODE: ("m text_encoder",), DIFFUSE: ("m denoiser",), DECODE: ("m vae",)}
    one.loaded(WeightsLoaded(0, NS_PER_S // 2))
    assert one.speeds()[LoadSource.HOST] == 160, "80 bytes in half a second"
    (drop,) = one.last_commands()
    assert set(drop.components) == {"m denoiser", "m text_encoder", "m vae"}, "whichever stage was the last"


def test_a_lora_belongs_to_the_stages_that_it_changes() -> None:
    one = weights(100)
    assert one.by_stage("m", (INK,))[DIFFUSE] == ("m denoiser", "m ink")
    assert one.by_stage("m", (INK,))[DECODE] == ("m vae",)
    assert model().largest_stage() == (DIFFUSE, 80)
    assert model().largest_stage(("ink",)) == (DIFFUSE, 95)
    assert weights(145).by_stage("m") == {}
    assert weights(145).by_stage("m", (INK,)), "it fits without the LoRA only"


def test_a_stage_that_does_not_fit_is_named() -> None:
    assert lacks_room(model(), 79).startswith(
        "its stage diffuse needs 80 bytes with its weights, and a device has 79; give it more (--weights-memory), "
    )
    assert lacks_room(model(), 80) == lacks_room(model(), None) == ""


def test_what_a_stage_declares_beyond_its_weights_needs_room_too() -> None:
    stages = tuple(replace(one, memory_bytes=75 if one.name == DECODE else 0) for one in model().info.stages)
    declaring = replace(model(), info=replace(model().info, stages=stages))
    assert declaring.largest_stage() == (DECODE, 85)
    one = CalibrationWeights(200)
    one.know(Loaded((declaring,), load_ns=NS_PER_S))
    assert one.by_stage("m"), "beside all weights there is no room for it"
    assert lacks_room(declaring, 84).startswith("its stage decode needs 85 bytes")


def test_without_a_limit_nothing_is_loaded() -> None:
    one = weights(None)
    assert list(one.commands("m")) == []
    assert one.by_stage("m") == {}
    assert one.speeds() == {}


def test_the_first_models_that_have_weights_say_how_fast_they_are_read() -> None:
    """A server whose stages are functions has none until a model is added."""
    one = CalibrationWeights(200)
    one.know(Loaded((replace(model("functions"), components={}, loras={}),), load_ns=NS_PER_S))
    one.know(Loaded((model(),), load_ns=2 * NS_PER_S))
    list(one.commands("m"))
    one.loaded(WeightsLoaded(0, NS_PER_S))
    assert one.speeds() == {LoadSource.HOST: 140, LoadSource.DISK: 70}
