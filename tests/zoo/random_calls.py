"""Random calls over all that a model's clients may give, and the stock calls that they mean."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

import numpy as np
import PIL.Image
import torch

from tilework.core.model import Argument, ArgumentKind, ModelInfo, PictureInput
from tilework.core.wire.spec import Spec
from tilework.pipelines.arguments import SIZES
from tilework.pipelines.stock.stock_arguments import StockArguments
from tilework.server.calls.parsing.image_call import image_call
from tilework.server.calls.parsing.pictures import decoded, taken_pictures
from tilework.server.calls.parsing.specs import Rules
from tilework.server.config import ServerConfig
from tilework.server.tenants import Tenant, Tenants
from zoo.registry import ZOO, build

_SIDES = (32, 48, 64, 96)
_MOST_FRAMES = 9
_PROMPTS = ("", "a red fox", "two blue squares, and a green circle on them")
_SHARES = ((0.9, 0.6015, 0.3, 0.1), (0.999, 0.5), (0.75, 0.5, 0.25))
"""Schedules, as shares of the largest value."""


@dataclass(frozen=True, slots=True)
class RandomCall:
    """The fields of a body but for its pictures, and these by the model's argument."""

    fields: Mapping[str, Any]
    pictures: Mapping[str, list[PIL.Image.Image]] = field(default_factory=dict)


def random_call(info: ModelInfo, rng: Random) -> RandomCall:
    """A call with any of the fields that decide a picture; of some values the model may have none."""
    multiple = info.side_multiple
    sides = [side for side in _SIDES if side % multiple == 0] or [multiple]
    height, width = rng.choice(sides), rng.choice(sides)
    fields: dict[str, Any] = {
        "prompt": rng.choice(_PROMPTS),
        "seed": rng.randrange(1 << 32),
        "num_inference_steps": rng.choice((1, 2, 3, 5)),
    }
    pictures = {
        one.name: _pictures(one, info, rng, height, width)
        for one in info.pictures
        if one.required or rng.random() < 0.5
    }
    if info.takes_size:
        fields["size"] = f"{width}x{height}"
    if info.max_frames > 1 and not info.frames_of:
        fields["num_frames"] = 1 + info.frame_multiple * rng.randint(0, (_MOST_FRAMES - 1) // info.frame_multiple)
    if info.frames_of in pictures:
        fields["num_frames"] = len(pictures[info.frames_of])
    if info.takes_negative and rng.random() < 0.6:
        fields["negative_prompt"] = rng.choice(_PROMPTS)
    # The guider of a modular pipeline has the scale, not its call.
    if info.takes_guidance and not info.family.endswith("ModularPipeline") and rng.random() < 0.6:
        fields["guidance_scale"] = rng.choice((0.0, 0.5, 1.0, 1.5, 4.0))
    for one in info.arguments:
        if one.required or rng.random() < 0.3:
            fields[one.name] = _value(one, rng)
    schedules = [one.name for one in info.arguments if one.kind is ArgumentKind.SCHEDULE and one.name in fields]
    if schedules:
        del fields["num_inference_steps"]
        for name in schedules[1:]:
            del fields[name]
    return RandomCall(fields, pictures)


def spec_of(call: RandomCall, info: ModelInfo) -> Spec:
    """What the server makes of the call. Raises InvalidValue: it refuses it."""
    config = ServerConfig()
    files = {name: [_file(one) for one in given] for name, given in call.pictures.items()}
    body = {**call.fields, **{name: given if len(given) > 1 else given[0] for name, given in files.items()}}
    rest, given = taken_pictures(body, info)
    rules = Rules(info=info, config=config, tenants=Tenants(), tenant=Tenant(), now=datetime(2030, 1, 1, tzinfo=UTC))
    return image_call(rest, rules, Random(0), pictures=decoded(given, config, keeps_files=False)).specs[0]


def stock_pixels(name: str, call: RandomCall) -> bytes:
    """What the stock call of a model of the zoo gives for it: only what it gives is passed on."""
    model, fields = ZOO[name], dict(call.fields)
    pipeline = build(model)
    known = StockArguments(pipeline)
    torch.manual_seed(fields["seed"])  # Some pipelines draw from torch's own generator.
    generator = torch.Generator().manual_seed(fields.pop("seed"))
    fields.pop("generator_device", None)
    if "size" in fields:
        fields["width"], fields["height"] = map(int, fields.pop("size").split("x"))
        fields |= known.of_area(fields["width"] * fields["height"])
    if "num_frames" in fields and known.frames is not None:
        fields[known.frames] = fields.pop("num_frames")
    clips = {"video", "control_video", "conditioning_frames"}
    for argument, given in call.pictures.items():
        fields[argument] = given if len(given) > 1 or argument in clips else given[0]
    fields = {one: tuple(value) if one in SIZES else value for one, value in fields.items()}
    more = {"output": model.output} if model.modular else {"output_type": "pil"}
    result = pipeline(**{one: value for one, value in fields.items() if one in known}, **more, generator=generator)
    return _flat(result if model.modular else result[0]).tobytes()


def _value(one: Argument, rng: Random) -> Any:
    low, high = one.low, min(one.high, 1000)
    match one.kind:
        case ArgumentKind.TEXT:
            return rng.choice(_PROMPTS)
        case ArgumentKind.CHOICE:
            return rng.choice(one.choices)
        case ArgumentKind.NUMBER:
            return rng.choice((low, high, low + (min(high, 10) - low) * rng.random()))
        case ArgumentKind.INTEGER:
            return rng.choice((int(low), int(high), rng.randint(int(low), int(high))))
        case ArgumentKind.INTEGERS:
            return [rng.randint(int(low), int(min(high, 128))) for _ in range(one.count or rng.randint(1, 2))]
        case ArgumentKind.SCHEDULE:
            largest = 10.0 if one.name == "sigmas" and one.high > 10 else one.high
            values = [share * largest for share in rng.choice(_SHARES)]
            whole = one.name == "timesteps" and rng.random() < 0.5
            return [*(map(int, values) if whole else values), *([0.0] if one.more else [])]


def _pictures(one: PictureInput, info: ModelInfo, rng: Random, height: int, width: int) -> list[PIL.Image.Image]:
    """Of the size that is asked for, or of another one; masks are as large as the picture."""
    if one.is_clip:
        number = 1 + info.frame_multiple * rng.randint(0, (min(one.most, _MOST_FRAMES) - 1) // info.frame_multiple)
    else:
        number = rng.randint(1, min(one.most, 2))
    if not one.is_mask and rng.random() < 0.4:
        height, width = rng.choice(_SIDES), rng.choice(_SIDES)
    noise = np.random.default_rng(rng.randrange(1 << 32))
    if one.is_mask:
        return [PIL.Image.fromarray((noise.random((height, width)) < 0.5).astype(np.uint8) * 255)]
    return [PIL.Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(number)]


def _file(picture: PIL.Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def _flat(result: Any) -> np.ndarray:
    if isinstance(result, list | tuple):
        return np.concatenate([_flat(one) for one in result])
    if isinstance(result, np.ndarray):  # A clip of a modular pipeline: numbers from 0 to 1.
        return (result * 255).round().astype(np.uint8).reshape(-1)
    return np.asarray(result.convert("RGB")).reshape(-1)
