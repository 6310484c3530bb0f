"""The parameters of a workload: what each means, what it may be, and how a text becomes one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import Field, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class BadParameter(ValueError):
    """A parameter of a workload is unknown or not of its kind; names workload, parameter, value and remedy."""

    def __init__(self, workload: str, name: str, what: str) -> None:
        super().__init__(f"{workload}: {name} {what}")
        self.workload = workload
        self.name = name


def parameter(
    default: Any,
    about: str,
    *,
    kind: type | None = None,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    choices: Iterable[str] = (),
) -> Any:
    """A field of a workload. `kind` is that of the default unless the default is None."""
    rules = {"above": above, "least": least, "most": most, "choices": tuple(choices)}
    return field(default=default, metadata={"about": about, "kind": kind or type(default), **rules})


def check(workload: str, one: Field[Any], value: Any) -> None:
    """Raises BadParameter if the value is not what the parameter may be; None is, where it is the default."""
    if value is None and one.default is None:
        return
    kind, rules = one.metadata["kind"], one.metadata
    if not _is_a(value, kind):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")
    if rules["choices"] and value not in rules["choices"]:
        near = get_close_matches(value, rules["choices"], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadParameter(workload, one.name, f"is {value!r}; {hint}use {_wanted(one)}")
    if kind in (int, float) and not (rules["least"] <= value <= rules["most"] and value > rules["above"]):
        raise BadParameter(workload, one.name, f"is {value!r}; use {_wanted(one)}")


def parsed(workload: str, one: Field[Any], text: str) -> Any:
    """The value that a text means; whether it is allowed is for `check`. Raises BadParameter."""
    kind = one.metadata["kind"]
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}")
    try:
        return kind(text)
    except ValueError:
        raise BadParameter(workload, one.name, f"is {text!r}; use {_wanted(one)}") from None


def unknown(workload: str, name: str, known: Iterable[str]) -> BadParameter:
    """What to raise for a parameter that there is not; names the nearest in spelling."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return BadParameter(workload, name, f"is not a parameter of this workload; {remedy}")


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Path) if kind is Path else type(value) is kind


def _wanted(one: Field[Any]) -> str:
    """Such as "a whole number of at least 1 and at most 8"."""
    rules = one.metadata
    if rules["choices"]:
        return f"one of {', '.join(rules['choices'])}"
    nouns = {int: "a whole number", float: "a number", bool: "true or false", Path: "the path of a file"}
    noun = nouns.get(rules["kind"], "text")
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", rules["above"]), ("of at least", rules["least"]), ("at most", rules["most"]))
        if math.isfinite(bound)
    ]
    return " ".join([noun, " and ".join(bounds)]).strip()
