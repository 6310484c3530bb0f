"""All labels and metrics as two Markdown tables: `python tools/metrics_table.py` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from tilework.server.metrics.families import FAMILIES, OPEN_LABELS, Label, MetricFamily


def tables() -> Iterator[str]:
    """Yield the lines of the tables: labels, then metrics."""
    yield from ("| label | values |", "|---|---|")
    yield from (f"| `{label.name}` | {label.text} |" for label in OPEN_LABELS)
    yield from ("", "| name | type | labels | meaning |", "|---|---|---|---|")
    yield from map(_row, FAMILIES)


def _row(family: MetricFamily) -> str:
    labels = ", ".join(map(_label, family.labels))
    return f"| `{family.name}` | {family.kind} | {labels} | {family.text} |".replace("|  |", "| |")


def _label(label: Label) -> str:
    """Return the name of a label, with its values if these are not described for all metrics."""
    values = ", ".join(f"`{value}`" for value in label.values)
    return f"{label.name} ({values})" if values else label.name


if __name__ == "__main__":
    print("\n".join(tables()))
