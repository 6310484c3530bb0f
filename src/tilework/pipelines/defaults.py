"""Request defaults and limits of a model: the optional `tilework.json` beside its `model_index.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tilework.core.model import PromptWords
from tilework.pipelines.errors import InvalidDefaults, UnsupportedModel

FILE = "tilework.json"
MAX_SEQUENCE_LENGTH = 512
_TILING = "vae_tiling"
_WORDS = "words"
_FLAGS = (_TILING, "previews")
_INTEGERS = ("steps", "height", "width", "num_frames", "max_side", "max_frames", "max_sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The values of fields that a request leaves open; sides in pixels.

    Requests cannot choose `max_sequence_length` (tokens of the long text encoder) or `vae_tiling` (the autoencoder
    works in tiles). Without `previews` requests get none, and the steps do not need the autoencoder. `words` are those
    of prompts that the model draws, by kind; empty if it does not say.
    """

    name: str
    steps: int
    guidance_scale: float
    height: int
    width: int
    max_side: int
    max_sequence_length: int
    num_frames: int = 1
    max_frames: int = 1
    vae_tiling: bool = False
    previews: bool = True
    words: PromptWords = ()


def sides_of(sample_size: Any, pixels: int, place: str) -> tuple[int, int]:
    """Return height and width of a configuration's `sample_size`, one number or [height, width] in latents.

    A latent is `pixels` wide and high.

    Raises:
        UnsupportedModel: it is neither; `place` says where it stands.
    """
    sides = sample_size if isinstance(sample_size, list | tuple) else [sample_size] * 2
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UnsupportedModel(f"{place}: sample_size is {sample_size!r}; write one number, or [height, width]")
    return sides[0] * pixels, sides[1] * pixels


def read_overrides(directory: Path) -> dict[str, Any]:
    """Return the keys of the model's `tilework.json`; none if it has no such file.

    Raises:
        InvalidDefaults: the file is not a JSON object, or has a key that is no field of `Defaults`.
    """
    path = directory / FILE
    if not path.is_file():
        return {}
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidDefaults(f"{path}: not JSON ({error}); correct or remove the file") from error
    if not isinstance(overrides, dict):
        raise InvalidDefaults(f"{path}: holds a {type(overrides).__name__}; write a JSON object")
    known = [field.name for field in fields(Defaults)]
    for key in overrides:
        if key not in known:
            raise InvalidDefaults(f"{path}: unknown key {key!r}; known are {', '.join(known)}")
    return overrides


def asks_for_tiles(overrides: Mapping[str, Any]) -> bool:
    """Return whether the autoencoder is to work in tiles. Raises InvalidDefaults if it is neither true nor false."""
    value = overrides.get(_TILING, False)
    _check_type(_TILING, value)
    return bool(value)


def resolve(stock: Defaults, overrides: Mapping[str, Any], side_multiple: int, frame_multiple: int = 1) -> Defaults:
    """Return the `stock` defaults of the family with the model's own `overrides`.

    `stock.max_side` and `stock.max_frames` are the limits of the architecture; an override may only lower them. A side
    of `stock` that the model cannot draw (its configuration may name an odd size) becomes the next smaller one that it
    can. A number of frames is one more than a multiple of `frame_multiple`.

    Raises:
        InvalidDefaults: a value has the wrong type or lies outside its range.
    """
    for key, value in overrides.items():
        _check_type(key, value)
    legal = {key: getattr(stock, key) // side_multiple * side_multiple for key in ("height", "width", "max_side")}
    words = tuple((kind, tuple(of_kind)) for kind, of_kind in overrides.get(_WORDS, {}).items())
    defaults = replace(stock, **legal | dict(overrides) | {_WORDS: words})
    _check_range("steps", defaults.steps, 1, None)
    _check_range("guidance_scale", defaults.guidance_scale, 0, None)
    _check_range("max_sequence_length", defaults.max_sequence_length, 0, MAX_SEQUENCE_LENGTH)
    _check_range("max_side", defaults.max_side, side_multiple, stock.max_side)
    for key in ("height", "width", "max_side"):
        side = getattr(defaults, key)
        _check_range(key, side, side_multiple, defaults.max_side)
        if side % side_multiple:
            raise InvalidDefaults(f"{FILE}: {key} is {side}; choose a multiple of {side_multiple}")
    _check_range("max_frames", defaults.max_frames, 1, stock.max_frames)
    _check_range("num_frames", defaults.num_frames, 1, defaults.max_frames)
    if "num_frames" in overrides and (defaults.num_frames - 1) % frame_multiple:
        remedy = f"choose one more than a multiple of {frame_multiple}"
        raise InvalidDefaults(f"{FILE}: num_frames is {defaults.num_frames}; {remedy}")
    return defaults


def _check_type(key: str, value: Any) -> None:
    if key == "name":
        if not isinstance(value, str) or not value:
            raise InvalidDefaults(f"{FILE}: name is {value!r}; write a text that is not empty")
        return
    if key == _WORDS:
        _check_words(value)
        return
    if key in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidDefaults(f"{FILE}: {key} is {value!r}; write true or false")
        return
    kinds, wanted = (int, "a whole number") if key in _INTEGERS else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise InvalidDefaults(f"{FILE}: {key} is {value!r}; write {wanted}")


def _check_words(value: Any) -> None:
    kinds = value.items() if isinstance(value, dict) else [("", None)]
    for kind, words in kinds:
        texts = [kind, *words] if isinstance(words, list) and words else [None]
        if not all(isinstance(text, str) and text.isalpha() and text.islower() for text in texts):
            remedy = 'write lists of single words in lower case by their kind, as in {"colour": ["red", "blue"]}'
            raise InvalidDefaults(f"{FILE}: words is {value!r}; {remedy}")


def _check_range(key: str, value: float, low: int, high: int | None) -> None:
    if value < low:
        raise InvalidDefaults(f"{FILE}: {key} is {value}; choose at least {low}")
    if high is not None and value > high:
        raise InvalidDefaults(f"{FILE}: {key} is {value}; choose at most {high}")
