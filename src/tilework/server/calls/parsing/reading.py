"""Reads values that are written otherwise than the schema has them, if they can mean only one thing.

Rejected: pydantic's lax mode, which takes "yes" and 1 for true, and true for 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from tilework.server.schema.image_request import RANDOM_SEED, ImageRequest, LoraUse

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,30})", re.ASCII)
_TRUTH_VALUES = {"true": True, "True": True, "false": False, "False": False}
_SIZE = re.compile(r"([0-9]{1,6})\s?[xX*\u00d7]\s?([0-9]{1,6})", re.ASCII)


def read_fields(model: type[BaseModel], body: Mapping[str, object]) -> dict[str, object]:
    """Return the body, with texts read as numbers and truth values where fields of the model want them.

    A whole number is an integer where one is wanted, also as 4.0. A word of a fixed set may have capitals. A value that
    cannot be read stays, and is refused by the model. "jpg" is "jpeg". `size` may be written 64X64, 64*64 or with a
    multiplication sign, and a `seed` of -1 is absent: a random one.
    """
    fields = model.model_fields
    read = {
        name: read_value(fields[name].annotation, value) if name in fields else value for name, value in body.items()
    }
    if model is not ImageRequest:
        return read
    if read.get("output_format") == "jpg":
        read["output_format"] = "jpeg"
    if read.get("seed") == RANDOM_SEED:
        del read["seed"]
    if isinstance(size := read.get("size"), str) and (match := _SIZE.fullmatch(size)):
        read["size"] = f"{match[1]}x{match[2]}"
    if isinstance(loras := read.get("lora"), list):
        read["lora"] = [read_fields(LoraUse, one) if isinstance(one, dict) else one for one in loras]
    return read


def read_value(wanted: object, value: object) -> object:
    """Read a value as the `int`, `float`, `bool` or word in small letters that is `wanted`; as it is if that fails."""
    kinds, words = _accepted(wanted)
    if words and isinstance(value, str):
        return value.lower() if value.lower() in words else value
    if not kinds:
        return value
    read = number_or_truth(value) if isinstance(value, str) else value
    if isinstance(read, bool) != (bool in kinds):
        return value
    return int(read) if int in kinds and isinstance(read, float) and read.is_integer() else read


@cache
def _accepted(wanted: object) -> tuple[frozenset[object], frozenset[object]]:
    """Return the types of numbers and truth values that are wanted, none if any text is; and the words allowed."""
    kinds = frozenset((wanted, *get_args(wanted)))
    literals = (word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    words = frozenset(word for word in literals if isinstance(word, str))
    return frozenset() if str in kinds else kinds & {int, float, bool}, words


def number_or_truth(text: str) -> object:
    """Return the value of a text in JSON or in Python if it is a number or a truth value; else the text."""
    if text in _TRUTH_VALUES:
        return _TRUTH_VALUES[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
