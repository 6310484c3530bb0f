"""Samples of what a server exports."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every value, by name and labels."""
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]
