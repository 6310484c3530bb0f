"""The vocabulary holds: names and prose use one word for one thing, and it is the one that the field knows.

Each banned word comes with the one to use. `ALLOWED` lists places where such a word has a plain other meaning.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tilework

SRC = Path(tilework.__file__).parent
ROOT = SRC.parents[1]
CODE = (SRC, ROOT / "lab" / "src" / "tilework_lab", ROOT / "tools")

NAMES = {
    "analyser": "BatchLatencyModel",
    "calm": "slack",
    "cargo": "StateRegistry",
    "census": "ClassStats",
    "certificate": "FeasibilityProof",
    "clairvoyant": "bound",
    "crowd": "DeviceQueue",
    "doom": "drop to best effort",
    "doomed": "drop to best effort",
    "door": "admission_limits",
    "doubt": "prediction error",
    "experience": "eta_correction",
    "flight": "InFlightWork; in_flight is fine",
    "floor": "WorkDispatcher",
    "foresight": "rollout",
    "foretell": "predict",
    "foretold": "predicted",
    "freight": "SerializedState",
    "gpu": "device",
    "gpus": "devices",
    "homing": "node_assignment",
    "intake": "CallSubmitter",
    "landing": "WorkResult",
    "ledger": "CallRegistry",
    "lookout": "StuckWorkMonitor",
    "muster": "sync_members",
    "outlook": "RolloutResult",
    "parcel": "StateBlob",
    "parcels": "StateBlob",
    "plane": "list_schedule",
    "pretended": "simulated",
    "ride": "JobForecast",
    "rides": "JobForecast",
    "roster": "RequestTable",
    "scene": "what_if",
    "settle": "synchronize, or the noun",
    "settled": "synchronized, or the noun",
    "story": "RequestTimeline",
}
"""Words of identifiers: names of files, classes, functions, parameters, variables and attributes."""

PHRASES = {
    "set_aside": "drop_to_best_effort",
    "set_back": "park",
    "bring_back": "unpark",
    "put_down": "serialize",
    "take_down": "serialize",
    "promised_block": "reservation",
}
"""Runs of words in identifiers."""

PROSE = {
    r"whoever|whomever|whom|whosever|whose turn": "the noun it stands for",
    r"nobody|somebody|everybody|anybody": "no request, a job, each client",
    r"he|him|his|himself": "it",
    r"foret(?:old|ells?|elling)": "predicted",
    r"clairvoyants?": "a scheduler that knows the future",
    r"pretend(?:ed|s|ing)?": "simulated",
    r"parcels?|cargo|freight": "state blob, serialized state",
    r"musters?|mustered|roll call": "members agree",
    r"set(?:s|ting)? aside": "dropped to best effort",
    r"certificates?": "feasibility proof",
    r"ledger|roster|lookout": "call registry, request table, stuck-work monitor",
    r"homing|crowds?|census": "node assignment, device queue, class statistics",
    r"let in": "accepted",
    r"puts? down|putting down|taken down": "serialized, written",
    r"so many|so much": "the number",
    r"brings? about|brought about": "the verb",
    r"of ours": "the noun",
    r"nothing comes|comes of it|becomes of it": "the result",
    r"set back|puts? back|brought back": "parked, unparked, restored",
    r"design section \d+|design\.md": "a file of this repository",
}
"""Regular expressions for whole words of docstrings, comments, messages and pages, case-insensitive."""

FIRST = re.compile(
    r"(?:what|whether|whom|whose|who|which|where|when|why|how|that|those|these|this|of|in|by|at|as|from|for|on|onto|over"
    r"|under|with|without|within|until|after|before|to|into|if|while|its?|they|them|their|there|than|then|so|not|only"
    r"|also|but|and|or|since|unless|because|through|between|among|besides?|behind|beyond|about|like|none|here|such|once"
    r"|whenever|wherever|whatever|even|nor|yet|both|neither|either|never|always)\b",
    re.IGNORECASE,
)
"""Words with which no docstring begins: it begins with a noun, its article or adjective, or a verb."""

ALLOWED: dict[str, dict[str, str]] = {
    "floor": {"src/tilework/client/demo_workload.py": "a lower bound"},
    "gpu": {"src/tilework/server/metrics/*.py": "the memory of GPUs alone"},
    r"nobody|somebody|everybody|anybody": {"src/tilework/patches/*.py": "the constant NOBODY"},
    r"certificates?": {"src/tilework/client/*.py": "of TLS"},
}
"""By banned word: files (globs from the repository's root), each with the other meaning that the word has there."""


_WITH_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def python_files() -> tuple[Path, ...]:
    return tuple(sorted(path for folder in CODE for path in folder.rglob("*.py")))


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lab/**/*.md"), *ROOT.glob("*/README.md")])


def is_allowed(word: str, path: Path) -> bool:
    place = path.relative_to(ROOT)
    return any(place.match(glob) for glob in ALLOWED.get(word, {}))


@cache
def words_of(identifier: str) -> tuple[str, ...]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return tuple(word for word in spaced.lower().split("_") if word)


@cache
def identifiers(path: Path) -> tuple[tuple[int, str], ...]:
    """Names that the file defines or assigns, by line; what it only uses is defined elsewhere."""
    return tuple(_identifiers(path))


def _identifiers(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, path.stem
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


@cache
def prose(path: Path) -> tuple[tuple[int, str], ...]:
    """Comments and texts of a Python file, or all paragraphs of a page, by line."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return tuple(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    wanted = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    return tuple(
        (token.start[0] + index, line)
        for token in tokens
        if token.type in wanted
        for index, line in enumerate(token.string.splitlines())
    )


@pytest.mark.parametrize("word", sorted(NAMES))
def test_no_name_uses_the_word(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files()
        if not is_allowed(word, path)
        for line, name in identifiers(path)
        if word in words_of(name) and not (word == "flight" and "in_flight" in "_".join(words_of(name)))
    ]
    assert not found, f"use {NAMES[word]} instead of {word}:\n" + "\n".join(found)


@pytest.mark.parametrize("phrase", sorted(PHRASES))
def test_no_name_uses_the_phrase(phrase: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files()
        if not is_allowed(phrase, path)
        for line, name in identifiers(path)
        if f"_{phrase}_" in f"_{'_'.join(words_of(name))}_"
    ]
    assert not found, f"use {PHRASES[phrase]} instead of {phrase}:\n" + "\n".join(found)


@pytest.mark.parametrize("pattern", sorted(PROSE))
def test_no_prose_uses_the_word(pattern: str) -> None:
    word = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()}"
        for path in [*python_files(), *pages()]
        if path.exists() and not is_allowed(pattern, path)
        for line, text in prose(path)
        if word.search(text)
    ]
    assert not found, f"write {PROSE[pattern]}:\n" + "\n".join(found)


@cache
def docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    """Texts that stand alone in a body, by line: of modules, classes and functions, and those below attributes."""
    bodies = [node.body for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, _WITH_BODY)]
    return tuple(
        (each.lineno, each.value.value.strip())
        for body in bodies
        for each in body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
    )


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in python_files()
        for line, text in docstrings(path)
        if FIRST.match(text.lstrip("`("))
    ]
    assert not found, "begin with a noun or a verb (What it holds -> Bytes that it holds):\n" + "\n".join(found)
