"""Warnings about a prompt for a model that draws few words, and says which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from tilework.core.model import ModelInfo

_ARTICLES = frozenset({"a", "an", "the"})


def prompt_warnings(prompt: str, info: ModelInfo) -> Iterator[str]:
    """Yield one warning if the model draws no word of the prompt, else one for each kind with an unknown word.

    A word can stand before the name of its kind: "blue background" asks for the background "blue". No warning repeats a
    word of the prompt, since records and webhooks have warnings, and no prompts.
    """
    kinds = dict(info.words)
    words = re.findall(r"\w+", prompt.lower())
    if words and kinds and {word for of_kind in kinds.values() for word in of_kind}.isdisjoint(words):
        drawn = "; ".join(f"{kind}: {', '.join(of_kind)}" for kind, of_kind in kinds.items())
        yield f"{info.name} draws no word of this prompt. It draws {drawn}."
        return
    named = dict.fromkeys((kind, before) for before, kind in pairwise(words) if kind in kinds)
    lacking = [kind for kind, word in named if word not in {*kinds[kind], *kinds, *_ARTICLES}]
    for kind in dict.fromkeys(lacking):
        yield f"{info.name} does not draw the {kind} of this prompt. It draws {', '.join(kinds[kind])}."
