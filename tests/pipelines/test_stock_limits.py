"""What the server takes for a stock pipeline is what its call makes: sizes, numbers of frames, passes of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import PIL.Image
import pytest
import torch

import tiny
from quick import quick
from tilework.core.model import TRUE_SCALE, ModelInfo
from tilework.core.request import DEFAULT_TERMS, Refusal
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.errors import InvalidDefaults, RequestRefused
from tilework.pipelines.model_index import ADAPTERS
from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.stock_arguments import FRAMES
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.pipelines.support.record import served_classes
from tilework.runtime.ticket import Wanted
from zoo import requests
from zoo.model import ZooModel
from zoo.registry import ZOO, build

QUICK = ("flux-kontext", "cogvideox")
GUIDED = ("qwen-image", "flux2-klein-base", "flux2-klein", "z-image", "chroma", "sana", "lcm", "hunyuan-video-guided")
_SMALL = Image(height=32, width=32, pixels=bytes(32 * 32 * 3))
_ODD_SIZES = {
    "sd2-upscale": "it makes four pixels of each",
    "longcat-image-edit": "it makes pictures of one area",
    "bria-fibo": "its pipeline takes 16 px for a latent, whatever the VAE",
    "bria-fibo-edit": "the same",
    **dict.fromkeys(
        ("sana", "sana-pag", "sana-control", "sana-sprint", "sana-sprint-image", "sana-video", "sana-video-image"),
        "the tiny model has no size that binning knows",
    ),
}
_STRICT = {
    "bria": "half of the multiple is made as well",
    "kandinsky3-image": "the same, but the quarter breaks",
    "cosmos25": "more frames are made, and cut",
}


def _one_of_each_class() -> list[str]:
    served = served_classes() - ADAPTERS.keys()
    models = [model for model in ZOO.values() if model.class_name in served and not model.modular]
    return list({model.class_name: model.name for model in reversed(models)}.values())


CLASSES = tuple(dict.fromkeys((*QUICK, *_one_of_each_class())))


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


@pytest.mark.parametrize("name", quick(QUICK, [each for each in CLASSES if each not in _ODD_SIZES]))
def test_a_size_that_is_taken_is_made_and_the_least_that_is_not_is_not(name: str) -> None:
    model, pipeline = ZOO[name], build(ZOO[name])
    info = StockPipeline(build(model), name, {}, "").info
    unit = info.side_multiple
    if unit == info.max_side:
        return  # It makes its default alone.
    height = unit * (max(3, model.inputs.get("height", 64) // unit) // 2 * 2 + 1)
    size = (height, height + 2 * unit)
    assert made(pipeline, _sized(model, *size))[:2] == size
    assert name in _STRICT or made(pipeline, _sized(model, height + unit // 2, size[1]))[:2] != (
        height + unit // 2,
        size[1],
    )


@pytest.mark.parametrize("name", quick(QUICK, CLASSES))
def test_a_number_of_frames_that_is_taken_is_made_and_the_next_is_not(name: str) -> None:
    model, pipeline = ZOO[name], build(ZOO[name])
    info = StockPipeline(build(model), name, {}, "").info
    assert (info.default_frames - 1) % info.frame_multiple == 0
    if info.default_frames in (1, info.max_frames):
        return
    frames = 3 * info.frame_multiple + 1 if 3 * info.frame_multiple < info.max_frames else info.frame_multiple + 1
    assert made(pipeline, _lasting(model, info, frames))[2] == frames
    if info.frame_multiple > 1 and name not in _STRICT:
        assert made(pipeline, _lasting(model, info, frames + 1))[2] != frames + 1


def test_a_model_may_say_how_many_frames_it_makes() -> None:
    pipeline = build(ZOO["wan21"])

    def info(**overrides: int) -> ModelInfo:
        return StockPipeline(pipeline, "wan21", overrides, "").info

    own, short = info(), info(num_frames=9, max_frames=13)
    assert (own.default_frames, own.frame_multiple) == (81, 4)
    assert (short.default_frames, short.max_frames, short.frame_multiple) == (9, 13, 4)
    with pytest.raises(InvalidDefaults, match="num_frames is 8; choose one more than a multiple of 4"):
        info(num_frames=8)
    with pytest.raises(InvalidDefaults, match="num_frames is 17; choose at most 13"):
        info(num_frames=17, max_frames=13)
    with pytest.raises(InvalidDefaults, match=f"max_frames is 9999; choose at most {own.max_frames}"):
        info(max_frames=9999)


def test_the_default_number_of_frames_is_read_as_the_call_reads_it() -> None:
    found = {name: _info(name).default_frames for name in ("cogvideox", "allegro", "svd", "ltx2", "latte", "sd2")}
    assert found == {"cogvideox": 9, "allegro": 32, "svd": 25, "ltx2": 121, "latte": 16, "sd2": 1} | {
        "svd": ZOO["svd"].components()["unet"].config.num_frames
    }


@pytest.mark.parametrize("name", quick(("qwen-image", "sana", "lcm"), GUIDED))
def test_the_passes_of_a_step_are_those_that_are_counted(name: str) -> None:
    model = ZOO[name]
    family = StockPipeline(build(model), name, {}, "")
    info = family.info
    spec = requests.spec_of(model, family, 1)
    arguments = {name: value for name, value in spec.arguments.items() if name != TRUE_SCALE}
    plain = replace(spec, guidance_scale=info.guided_above, negative_prompt=None, arguments=arguments)
    guided = replace(plain, guidance_scale=max(info.default_guidance_scale, 2.0))
    negative = replace(guided, negative_prompt="blurry" if info.takes_negative else "")
    true = replace(negative, arguments=arguments | ({TRUE_SCALE: 3.0} if info.argument(TRUE_SCALE) else {}))
    alone = rows(family, plain) * (1 if info.two_passes else 1 / _passes(plain, info))
    for spec in (plain, guided, negative, true):
        assert rows(family, spec) == alone * _passes(spec, info)


def _passes(spec: Spec, info: ModelInfo) -> float:
    """The passes of a step, of which one without guidance has one."""
    wanted = Wanted(uid="a", model="", spec=spec, arrival_ns=0, deadline_ns=None, terms=DEFAULT_TERMS).request(info)
    return wanted.passes * (2 if wanted.guided and info.two_passes else 1)


def rows(family: StockPipeline, spec: Spec) -> int:
    """The rows of all calls of the denoiser in a step."""
    counted: list[int] = []

    def ask(call: ComponentCall) -> Any:
        answer = call.run()
        if call.role is not Role.DENOISER:
            return answer
        first = answer[0] if isinstance(answer, tuple) else answer.sample
        counted.append(len(first))
        return answer

    _, state = requests.begin(family, spec)
    state.walk.iterate(ask)
    return sum(counted)


def made(pipeline: Any, inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Height, width and frames of what the stock call makes; zeros if it refuses."""
    try:
        result = pipeline(**inputs, output_type="pil", generator=torch.Generator().manual_seed(0))[0]
    except Exception:  # Pipelines raise what comes.
        return (0, 0, 0)
    frames = 1
    while isinstance(result, list):
        frames, result = len(result), result[0]
    return result.height, result.width, frames


def _info(name: str) -> ModelInfo:
    return StockPipeline(build(ZOO[name]), name, {}, "").info


def _sized(model: ZooModel, height: int, width: int) -> Mapping[str, Any]:
    def fit(value: Any) -> Any:
        if isinstance(value, PIL.Image.Image):
            return value.resize((width, height))
        return [fit(one) for one in value] if isinstance(value, list) else value

    inputs = {name: fit(value) for name, value in model.inputs.items()}
    sizes = {"height": height, "width": width, "max_area": height * width}
    return inputs | {name: value for name, value in sizes.items() if name in inputs}


def _lasting(model: ZooModel, info: ModelInfo, frames: int) -> Mapping[str, Any]:
    clips = {one.name for one in info.pictures if one.is_clip}
    inputs = dict(model.inputs)
    for name in clips & inputs.keys():
        given = inputs[name]
        inputs[name] = [given[index % len(given)] for index in range(frames)] if len(given) > 1 else given
    return inputs | {name: frames for name in FRAMES if name in inputs}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("sd1-control", {"arguments": {"control_guidance_end": 0.0}}, "control guidance start: 0.0 cannot be larger"),
        ("sd1-control-two", {"pictures": {"image": (_SMALL,)}}, "For multiple controlnets"),
        ("flux2-klein-edit", {"pictures": {"image": (_SMALL,)}}, "Image too small"),
    ],
)
def test_what_the_stock_call_does_not_take_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    """Before its loop, between components, it only looks at what it is given."""
    model = ZOO[name]
    family = StockPipeline(build(model), name, {}, "")
    with pytest.raises(RequestRefused, match=reason) as raised:
        requests.begin(family, replace(requests.spec_of(model, family, 1), **changes))
    assert raised.value.refusal is Refusal.VALUE
