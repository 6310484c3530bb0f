"""The blocks of a denoiser as a layout runs them: which of their arguments have a row for each patch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.core.packing import Layout, Take

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The arguments of a block's forward, grouped by the content of their rows.

    Attributes:
        states: a row for each patch, with content of the image; the first is a tensor. Tuples hold several.
        per_patch: a row for each patch, depending on the time.
        joint: a row for each token of all texts and, behind them, of all patches; a pair of such tensors.
        has_text: True if texts go through the block, too; then it returns them before the image.
    """

    states: tuple[str, ...]
    per_patch: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    has_text: bool = False


TRANSFORMER = BlockRows(states=("hidden_states",), joint=("image_rotary_emb",), has_text=True)
U_NET = BlockRows(states=("hidden_states", "res_hidden_states_tuple"), per_patch=("temb",))


def run_through(index: int, rows: BlockRows, block: Any) -> Callable[..., Any]:
    """Return the function that runs a block in packed passes, by way of the layout (`packing._substitute`)."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]

    def instead(layout: Layout, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        states = [state for name in rows.states if name in given for state in _all(given[name])]
        others: list[Any] = []

        def run(take: Take) -> list[Tensor]:
            outputs = forward(**given | _taken(given, rows, take, num_patches=len(states[0])))
            if rows.has_text:
                text, outputs = outputs
                others.append(text)
            # Blocks that lead down return (last, all), others the last alone.
            return [one for output in _all(outputs) for one in _all(output)]

        last, *several = layout.run_block(index, states, run, rows.has_text)
        if rows.has_text:
            return others[0], last
        return (last, tuple(several)) if several else last

    return instead


def _all(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else (value,)


def _taken(given: dict[str, Any], rows: BlockRows, take: Take, num_patches: int) -> dict[str, Any]:
    """Return the arguments that have rows of patches, with the rows that are taken."""
    taken = {
        name: tuple(map(take, value)) if isinstance(value, tuple) else take(value)
        for name in (*rows.states, *rows.per_patch)
        if (value := given.get(name)) is not None
    }
    for name in rows.joint:
        if (pair := given.get(name)) is not None:
            num_tokens = num_patches * given[rows.states[0]].shape[1]
            taken[name] = tuple(_joint(table, num_tokens, num_patches, take) for table in pair)
    return taken


def _joint(table: Tensor, num_tokens: int, num_patches: int, take: Take) -> Tensor:
    texts, tokens = table[:-num_tokens], table[-num_tokens:]
    return torch.cat([texts, take(torch.unflatten(tokens, 0, (num_patches, -1))).flatten(0, 1)])
