"""Requests whose denoisers are asked alike share a forward pass, whatever their loops are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor, cat

from tilework.pipelines.stock.component_calls import ComponentCall
from tilework.pipelines.stock.walk import Walk


def iterate_together(walks: Sequence[Walk]) -> None:
    """Make one iteration of each walk. Calls of a denoiser that fit each other become one, row by row.

    Each iteration runs up to its next call of a denoiser. When all have come so far, the calls are made; a walk with
    two passes for guidance meets the others twice. If an error is raised, the walks that are not torn can go on.
    """
    hub = getcurrent()
    waiting: dict[greenlet, ComponentCall] = {}

    def ask(call: ComponentCall) -> Any:
        waiting[getcurrent()] = call
        return hub.switch()

    for walk in walks:
        greenlet(lambda walk=walk: walk.iterate(ask)).switch()
    while waiting:
        groups: dict[Hashable, list[greenlet]] = {}
        for iteration, call in waiting.items():
            groups.setdefault(_kind(call), []).append(iteration)
        answers: dict[greenlet, Any] = {}
        for iterations in groups.values():
            calls = [waiting[iteration] for iteration in iterations]
            answers.update(zip(iterations, _answers(calls), strict=True))
        waiting.clear()
        for iteration, answer in answers.items():
            iteration.switch(answer)


def _kind(call: ComponentCall) -> Hashable:
    """Calls of one kind can become one. Rows may differ in their numbers; all else must be equal."""
    size = _num_rows(call)
    if size is None:
        return id(call)

    def node(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            if value.ndim == 0 or len(value) == size:  # A time without dimensions becomes one per row.
                return "rows", tuple(value.shape[1:]), value.dtype
            return "whole", tuple(value.shape), value.dtype, value.cpu().numpy().tobytes()
        if isinstance(value, dict):
            return tuple((name, node(part)) for name, part in value.items())
        if isinstance(value, list) and len(value) == size:  # Each is a row, without the first dimension.
            return "list", *(
                (tuple(part.shape), part.dtype) if isinstance(part, Tensor) else node(part) for part in value
            )
        if isinstance(value, list | tuple):
            return tuple(node(part) for part in value)
        return value if isinstance(value, Hashable) else id(value)

    return call.component, call.method, node(list(call.args)), node(dict(call.kwargs))


def _num_rows(call: ComponentCall) -> int | None:
    """The rows of its first tensor, or pictures in its first list; None if it has neither."""
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, Tensor | list) and (not isinstance(value, Tensor) or value.ndim):
            return len(value)
    return None


def _answers(calls: Sequence[ComponentCall]) -> list[Any]:
    if len(calls) == 1:
        return [calls[0].run()]
    size = _num_rows(calls[0])
    assert size is not None
    args = [_joined(values, size) for values in zip(*(call.args for call in calls), strict=True)]
    kwargs = _joined([dict(call.kwargs) for call in calls], size)
    answer = calls[0].stock(*args, **kwargs)
    return [_part(answer, slice(index * size, (index + 1) * size)) for index in range(len(calls))]


def _joined(values: Sequence[Any], size: int) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and (first.ndim == 0 or len(first) == size):
        return cat([value if value.ndim else value.expand(size) for value in values])
    if isinstance(first, list) and len(first) == size:
        return [part for value in values for part in value]
    if isinstance(first, dict):
        return {name: _joined([value[name] for value in values], size) for name in first}
    return first


def _part(answer: Any, rows: slice) -> Any:
    """These rows of an answer, in an answer of the same form."""
    if isinstance(answer, Tensor | list):
        return answer[rows]
    if isinstance(answer, tuple):
        return tuple(_part(value, rows) for value in answer)
    return type(answer)(**{name: _part(value, rows) for name, value in answer.items()})
