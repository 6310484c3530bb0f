"""What an expression of PromQL reads of a server: metrics, labels and their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

from tilework.server.metrics.families import FAMILIES, Kind, MetricFamily

OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds."""
_PARTS = ("lhs", "rhs", "expr", "args", "param", "vector_selector")


def _series() -> dict[str, MetricFamily]:
    """Each metric by the names of its series."""
    found: dict[str, MetricFamily] = {}
    for one in FAMILIES:
        if one.kind is not Kind.HISTOGRAM:
            found[one.name] = one
            continue
        has_sum = one.bounds[0] >= 0
        found |= {f"{one.name}_{part}": one for part in ("bucket", "count", *(["sum"] if has_sum else []))}
    return found


SERIES = _series()


def nodes(expression: str) -> list[Any]:
    """All parts of an expression. Raises ValueError if it is none."""
    return list(_walk(promql_parser.parse(expression)))


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for part in _PARTS:
        inner = getattr(node, part, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if one is not None and type(one).__module__ == type(node).__module__:
                yield from _walk(one)


def read_by(expression: str) -> set[str]:
    """The names of the series that an expression reads."""
    return {node.name for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)}


def strays(expression: str) -> Iterator[str]:
    """What an expression names that no server exports: metrics, labels of these, and values of labels."""
    parts = nodes(expression)
    selectors = [node for node in parts if isinstance(node, promql_parser.VectorSelector)]
    known = {"le"} | OF_PROMETHEUS
    for selector in selectors:
        if selector.name == "up":
            continue
        if selector.name not in SERIES:
            yield f"metric {selector.name}"
            continue
        labels = {label.name: label for label in SERIES[selector.name].labels}
        known |= labels.keys()
        for matcher in selector.matchers.matchers:
            if matcher.name in OF_PROMETHEUS:
                continue
            if matcher.name not in labels:
                yield f"label {matcher.name} of {selector.name}"
                continue
            values = labels[matcher.name].values
            for value in matcher.value.split("|") if values else ():
                if value not in values:
                    yield f"value {value!r} of {matcher.name} of {selector.name}"
    for node in parts:
        modifier = getattr(node, "modifier", None)
        for name in _grouped_by(modifier):
            if name not in known:
                yield f"label {name}"


def _grouped_by(modifier: Any) -> list[str]:
    """The labels of `by`, `without`, `on`, `ignoring`."""
    if modifier is None:
        return []
    grouping = getattr(modifier, "matching", modifier)
    return [] if grouping is None else list(getattr(grouping, "labels", ()))
