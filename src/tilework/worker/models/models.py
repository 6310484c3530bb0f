"""The models of a worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from tilework.core.component import Component
from tilework.core.lora import UsedLora
from tilework.pipelines.family import Family
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.weights import Weights


class WeightsMissing(Exception):
    """A work was sent to a worker without the weights of its stage."""


class Models:
    """Families by the names of their models, all on one device.

    Without `weights` their components always lie there; else those that were loaded last, by `components`: the digest
    and size of each, by model and name. `broken` says of other models why they cannot be served here.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        weights: Weights | None = None,
        components: Mapping[str, Mapping[str, Component]] | None = None,
        broken: Mapping[str, str] | None = None,
        loras: WorkerLoras | None = None,
    ) -> None:
        self._families = families
        self._weights = weights
        self._components = components or {}
        self.broken = broken or {}
        self._loras = loras or WorkerLoras(on_demand=False)

    def __getitem__(self, name: str) -> Family:
        return self._families[name]

    @property
    def device(self) -> torch.device:
        return next(iter(self._families.values())).device

    def require(self, model: str, stage: str) -> None:
        """Raises WeightsMissing if a component of the stage is not on the device."""
        known = self._components.get(model)
        if self._weights is None or known is None:
            return
        needed = self[model].info.graph.stage(stage).spec.components
        missing = [name for name in needed if not self._weights.has((known[name].digest,))]
        if missing:
            raise WeightsMissing(f"{model} has no weights of {', '.join(missing)} here")

    def changing(self, model: str, stage: str, loras: Sequence[UsedLora]) -> tuple[UsedLora, ...]:
        """Those of the LoRAs that change a component of the stage."""
        return self._loras.changing(model, self[model].info.graph.stage(stage).spec.components, loras)

    def use(self, model: str, stage: str | None, loras: Sequence[UsedLora]) -> None:
        """Compute with these LoRAs, and no others, until the next call.

        Raises WeightsMissing if one is not on the device that changes a component of the stage. Without a stage those
        that are there are used.
        """
        family = self[model]
        components = () if stage is None else family.info.graph.stage(stage).spec.components
        missing = self._loras.use(model, family, components, loras)
        if missing and stage is not None:
            raise WeightsMissing(f"{model} has no LoRA {', '.join(missing)} here")

    def load(self, digests: Collection[str]) -> None:
        """Bring components to the device."""
        if self._weights is not None:
            self._weights.load(digests)
            self._loras.load(digests)

    def drop(self, digests: Collection[str]) -> None:
        """Give back the memory of components on the device."""
        if self._weights is not None:
            self._weights.drop(digests)
            self._loras.drop(digests)
