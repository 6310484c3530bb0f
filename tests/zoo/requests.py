"""Requests for models of the zoo, and what the stock pipelines and the server's family make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from tilework.core.model import ModelInfo, ModelSource
from tilework.core.wire.spec import Image, Spec
from tilework.pipelines.family import LIVE, Family, StepState, Values
from tilework.pipelines.loading import load
from tilework.pipelines.model_index import STOCK
from tilework.pipelines.serialization import deserialize, serialize
from tilework.pipelines.stock.stock_arguments import FRAMES
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo.model import ZooModel
from zoo.registry import build

_OWN = {"prompt", "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", *FRAMES}
CPU = torch.device("cpu")


def family(model: ZooModel, directory: Path) -> Family:
    """A family of the model, loaded from `directory`, where it is saved first, if it can be."""
    if not model.loads:
        return StockPipeline(build(model), model.name, {}, "")
    if not any(directory.iterdir()):
        build(model).save_pretrained(str(directory), safe_serialization=True)
    return load(ModelSource(path=str(directory), adapter=STOCK))


def spec_of(model: ZooModel, made: Family, seed: int) -> Spec:
    """The stock call of a model as a request."""
    given, info = dict(model.inputs), made.info
    pictures = {name: found for name, value in given.items() if (found := _pictures(value))}
    side = next(iter(pictures.values()))[0].size if pictures else (info.default_width, info.default_height)
    whole = given.get("num_inference_steps", info.default_steps)
    arguments = {name: value for name, value in given.items() if name not in _OWN and name not in pictures}
    steps = whole
    for one in info.arguments:
        if one.strength is not None and pictures:
            steps = one.strength.steps(whole, arguments.get(one.name, one.default))
    return Spec(
        prompt=given.get("prompt", ""),
        negative_prompt=given.get("negative_prompt"),
        height=given.get("height", side[1]),
        width=given.get("width", side[0]),
        frames=_frames(given, info),
        steps=steps,
        whole_steps=whole,
        guidance_scale=given.get("guidance_scale", info.default_guidance_scale),
        seed=seed,
        arguments=arguments,
        pictures={name: tuple(map(_image, value)) for name, value in pictures.items()},
    )


def stock_pixels(model: ZooModel, pipeline: Any, seed: int) -> np.ndarray:
    """What the stock call itself gives, as bytes."""
    more = {"output": model.output} if model.modular else {"output_type": "pil"}
    torch.manual_seed(seed)  # Some pipelines draw from torch's own generator.
    result = pipeline(**model.inputs, **more, generator=torch.Generator().manual_seed(seed))
    return _flat(result if model.modular else result[0])


def begin(made: Family, spec: Spec) -> tuple[Values, StepState]:
    encode, loop, *_ = made.info.stages
    (values,) = made.run(encode.name, [spec], [{}])
    return values, made.begin(loop.name, spec, values)


def end(made: Family, state: Any) -> np.ndarray:
    return pixels(made, state.spec, made.finish(state))


def pixels(made: Family, spec: Spec, latents: Values) -> np.ndarray:
    (values,) = made.run(made.info.stages[2].name, [spec], [latents])
    image = made.image(spec, values)
    assert image.frames == spec.frames, f"makes {image.frames} frames, of {spec.frames} that a request asks for"
    return np.frombuffer(image.pixels, np.uint8)


def shipped(values: Values) -> dict[str, Any]:
    """Values as another process gets them."""
    return deserialize(serialize({name: value for name, value in values.items() if name != LIVE}), CPU)


def alone(made: Family, spec: Spec) -> np.ndarray:
    """Drawn without a pause, and nothing beside it."""
    _, state = begin(made, spec)
    while state.steps_done < state.num_steps:
        made.step([state])
    return end(made, state)


def side_by_side(made: Family, first: Spec, second: Spec) -> list[np.ndarray]:
    """Two requests, the second a step behind the first."""
    states = [begin(made, spec)[1] for spec in (first, second)]
    made.step(states[:1])
    while running := [state for state in states if state.steps_done < state.num_steps]:
        for state in running:
            made.step([state])
    return [end(made, state) for state in states]


def moved(here: Family, there: Family, spec: Spec) -> np.ndarray:
    """Drawn by two instances in turns: every stage and every step is another one's than the last."""
    encode, loop, *_ = here.info.stages
    values = shipped(here.run(encode.name, [spec], [{}])[0])
    state = there.begin(loop.name, spec, values)
    here, there = there, here
    while True:
        here.step([state])
        if state.steps_done == state.num_steps:
            return pixels(there, spec, shipped(here.finish(state)))
        state = there.restore(loop.name, spec, values, shipped(here.export(state)))
        here, there = there, here


def _pictures(value: Any) -> list[PIL.Image.Image]:
    """The pictures that an argument is, if it is one or a list of them."""
    values = value if isinstance(value, list) else [value]
    return values if values and all(isinstance(one, PIL.Image.Image) for one in values) else []


def _frames(given: Mapping[str, Any], info: ModelInfo) -> int:
    if info.frames_of in given:
        return len(given[info.frames_of])
    return next((given[name] for name in FRAMES if name in given), info.default_frames)


def _image(picture: PIL.Image.Image) -> Image:
    rgb = picture.convert("RGB")
    return Image(height=rgb.height, width=rgb.width, pixels=rgb.tobytes())


def _flat(result: Any) -> np.ndarray:
    if isinstance(result, list | tuple):
        return np.concatenate([_flat(one) for one in result])
    if isinstance(result, np.ndarray):  # A clip of a modular pipeline: numbers from 0 to 1.
        return (result * 255).round().astype(np.uint8).reshape(-1)
    return np.asarray(result.convert("RGB")).reshape(-1)
