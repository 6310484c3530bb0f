"""The parameters of a workload: their meanings, allowed values, and parsing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import Field, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class BadParameter(ValueError):
    """A parameter of a workload is unknown or has a wrong value; names workload, parameter, value and remedy."""

    def __init__(self, workload: str, name: str, what: str) -> None:
        super().__init__(f"{workload}: {name} {what}")
        self.workload = workload
        self.name = name


def parameter(
    default: Any,
    about: str,
    *,
    type_: type | None = None,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    choices: Iterable[str] = (),
) -> Any:
    """A field of a workload. `type_` is that of the default unless the default is None."""
    rules = {"above": above, "least": least, "most": most, "choices": tuple(choices)}
    return field(default=default, metadata={"about": about, "type": type_ or type(default), **rules})


def check(workload: str, one: Field[Any], value: Any) -> None:
    """Raises BadParameter if the value is not allowed; None is allowed where it is the default."""
    if value is None and one.default is None:
        return
    type_, rules = one.metadata["type"], one.metadata
    if not _is_a(value, type_):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")
    if rules["choices"] and value not in rules["choices"]:
        near = get_close_matches(value, rules["choices"], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadParameter(workload, one.name, f"is {value!r}; {hint}use {_wanted(one)}")
    if type_ in (int, float) and not (rules["least"] <= value <= rules["most"] and value > rules["above"]):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")


def parsed(workload: str, one: Field[Any], text: str) -> Any:
    """The value that a text means; `check` decides whether it is allowed. Raises BadParameter."""
    type_ = one.metadata["type"]
    if type_ is bool:
        if text in ("true", "false"):
            return text == "true"
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}")
    try:
        return type_(text)
    except ValueError:
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}") from None


def unknown(workload: str, name: str, known: Iterable[str]) -> BadParameter:
    """The error for an unknown parameter; names the known one that is nearest in spelling."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return BadParameter(workload, name, f"is not a parameter of this workload; {remedy}")


def _is_a(value: Any, type_: type) -> bool:
    if type_ is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Path) if type_ is Path else type(value) is type_


def _wanted(one: Field[Any]) -> str:
    """Such as "a whole number of at least 1 and at most 8"."""
    rules = one.metadata
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    nouns = {int: "a whole number", float: "a number", bool: "true or false", Path: "the path of a file"}
    noun = nouns.get(rules["type"], "text")
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", rules["above"]), ("of at least", rules["least"]), ("at most", rules["most"]))
        if math.isfinite(bound)
    ]
    return " ".join([noun, " and ".join(bounds)]).strip()
