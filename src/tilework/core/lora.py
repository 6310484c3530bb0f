"""LoRAs: small weights that a request adds to those of its model, by name and scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilework.core.component import Component


@dataclass(frozen=True, slots=True, order=True)
class UsedLora:
    """A LoRA of a request. At `scale` 0 it changes nothing, at 1 as much as it was trained to."""

    name: str
    scale: float

    def __str__(self) -> str:
        return f"{self.name}={self.scale!r}"

    @classmethod
    def parse(cls, text: str) -> UsedLora:
        """Undo `str`. Raises ValueError."""
        name, _, scale = text.rpartition("=")
        return cls(name, float(scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A LoRA that requests for a pipeline may use.

    Attributes:
        changes: the names of the components whose computation it changes; stages without these do not need it.
        component: its weights, which a device must have; None where all devices always have it.
        slowdown: the factor by which a step takes longer with it.
    """

    changes: frozenset[str]
    component: Component | None = None
    slowdown: float = 1.0


def slowdown(loras: Iterable[Lora]) -> float:
    """Return the factor by which a step takes longer with all of these."""
    return 1.0 + sum(one.slowdown - 1.0 for one in loras)
