"""Changes of what a simulated server serves, as an operator asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.lora import Lora
from tilework.cost.table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeModel:
    """Serve the one pipeline of a cost table. One that `is_unusable` must be refused."""

    costs: CostTable
    is_unusable: bool = False

    @property
    def pipeline(self) -> str:
        return self.costs.pipelines[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    pipeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLora:
    pipeline: str
    name: str
    lora: Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveLora:
    pipeline: str
    name: str


Change = ServeModel | RemoveModel | AddLora | RemoveLora


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedChange:
    """A change that is asked for at `at_ns`. Its `number` in the scenario stays when others are left out."""

    number: int
    at_ns: int
    change: Change
