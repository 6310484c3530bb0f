"""The models of a worker."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tilework.core.comm import Comm
from tilework.core.component import Component
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import AddLora, AddModel, GroupRef, ModelChange, RemoveLora, RemoveModel
from tilework.core.wire.reports import LoraAdded, ModelAdded
from tilework.pipelines.errors import describe
from tilework.pipelines.family import Family
from tilework.pipelines.lora import InvalidLora
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.skeleton import exporter_of, take_over
from tilework.worker.models.weights import Weights

_log = logging.getLogger(__name__)


class WeightsMissing(Exception):
    """A work was sent to a worker without the weights of its stage."""


class Models:
    """Families by the names of their models, maybe none, all on one device.

    Without `weights` their components always are on the device; else those that were loaded last. `components` has the
    digest and size of each, by model and name. A CPU slot has no `weights`: a model that is added there must need none.
    `broken` has the reason why other models cannot be served here.
    """

    def __init__(
        self,
        families: dict[str, Family],
        device: torch.device,
        weights: Weights | None = None,
        components: dict[str, Mapping[str, Component]] | None = None,
        broken: Mapping[str, str] | None = None,
        loras: WorkerLoras | None = None,
    ) -> None:
        self._families = families
        self._weights = weights
        self._device = device
        self._components = {} if components is None else components
        self._broken = dict(broken or {})
        self._loras = loras or WorkerLoras(on_demand=False)

    def __getitem__(self, name: str) -> Family:
        return self._families[name]

    def __contains__(self, name: str) -> bool:
        return name in self._families

    def change(self, command: ModelChange) -> ModelAdded | LoraAdded | None:
        """Add or remove a model or LoRA; return the answer, if there is one.

        If it cannot be served, the answer has the reason, and nothing changes.
        """
        match command:
            case AddModel(source, skeleton):
                return self._add(source, skeleton)
            case AddLora(model, one):
                return self._add_lora(model, one)
            case RemoveModel(model):
                self._remove(model)
            case RemoveLora(model, name):
                self._loras.remove(model, name)
        return None

    def _add(self, source: ModelSource, skeleton: bytes) -> ModelAdded:
        family: Family
        components: Mapping[str, Component] = {}
        try:
            if self._weights is None:
                family = exporter_of(skeleton)
            else:
                family, components = take_over(source, skeleton, self._weights, self._loras, self._device)
        except Exception as error:
            _log.exception("%s could not be added", source.path)
            return ModelAdded(source.name, describe(error))
        name = family.info.name
        self._families[name] = family
        self._components[name] = components
        self._broken.pop(name, None)
        return ModelAdded(name)

    def _add_lora(self, model: str, lora: LoraSource) -> LoraAdded:
        if model not in self:
            return LoraAdded(None, self._broken.get(model, f"{model} is not served here"))
        try:
            with self._shaped():
                return LoraAdded(self._loras.add(model, self[model], lora))
        except InvalidLora as error:
            return LoraAdded(None, str(error))
        except Exception as error:
            _log.exception("%s could not be added to %s", lora.path, model)
            return LoraAdded(None, describe(error))

    def _remove(self, model: str) -> None:
        self._broken.pop(model, None)
        self._loras.remove(model)
        family = self._families.pop(model, None)  # None if it could not be added.
        if family is not None and self._weights is not None:
            for module in family.modules.values():
                self._weights.remove(module)
        self._components.pop(model, None)

    @property
    def broken(self) -> Mapping[str, str]:
        """Reasons why models cannot be served here, though other workers may serve them, by name."""
        return self._broken

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def cell_size(self) -> int:
        """Number of devices that count as one here."""
        return 1 if self._weights is None or self._weights.cell is None else self._weights.cell.size

    def running(self, comm: Comm | None, group: GroupRef | None) -> AbstractContextManager[None]:
        """Let a group, if any, run a work while entered. In a cell the blocks of a component are gathered in it."""
        if comm is None or group is None or self._weights is None or self._weights.cell is None:
            return nullcontext()
        return self._weights.cell.running(comm, group.devices)

    def require(self, model: str, stage: str) -> None:
        """Check that the components of a stage are on the device. Raises WeightsMissing otherwise."""
        known = self._components.get(model)
        if self._weights is None or known is None:
            return
        needed = self[model].info.graph.stage(stage).spec.components
        missing = [name for name in needed if not self._weights.has((known[name].digest,))]
        if missing:
            raise WeightsMissing(f"{model} has no weights of {', '.join(missing)} here")

    def changing(self, model: str, stage: str, loras: Sequence[UsedLora]) -> tuple[UsedLora, ...]:
        """Return those of the LoRAs that change a component of the stage."""
        return self._loras.changing(model, self[model].info.graph.stage(stage).spec.components, loras)

    def use(self, model: str, stage: str | None, loras: Sequence[UsedLora]) -> None:
        """Compute with these LoRAs, and no others, until the next call.

        Raises WeightsMissing if a LoRA that changes a component of the stage is not on the device. Without a stage, the
        LoRAs that are there are used.
        """
        family = self[model]
        components = () if stage is None else family.info.graph.stage(stage).spec.components
        missing = self._loras.use(model, family, components, loras)
        if missing and stage is not None:
            raise WeightsMissing(f"{model} has no LoRA {', '.join(missing)} here")

    def needed(self, model: str, stage: str) -> Collection[str]:
        """Return the digests that a stage may need: its components, and all LoRAs of the model."""
        known = self._components.get(model)
        if self._weights is None or not known:
            return ()
        components = self[model].info.graph.stage(stage).spec.components
        return {*(known[name].digest for name in components), *self._loras.digests(model)}

    def load(self, digests: Collection[str]) -> None:
        """Bring components to the device."""
        for digest in digests:
            for _ in self.loading(digest):
                pass

    def begin_load(self, digest: str) -> None:
        """Begin to bring a component to the device beside what runs there, if possible: `loading` waits for it."""
        if self._weights is not None:
            self._weights.begin(digest)

    def loading(self, digest: str, forgets: Sequence[str] = ()) -> Generator[None, None, int]:
        """Bring a component to the device, a block after each `next`: it is there when the iterator has ended.

        If the host lacks room, it forgets `forgets` first. Returns the nanoseconds for which it came beside what ran.
        """
        if self._weights is None:
            return 0
        beside_ns = yield from self._weights.loading(digest, forgets)
        with self._shaped():
            self._loras.load((digest,))
        return beside_ns

    def _shaped(self) -> AbstractContextManager[None]:
        """Give weights their shapes while entered, so that LoRAs can be read: they must fit the model."""
        return nullcontext() if self._weights is None else self._weights.shaped()

    def drop(self, digests: Collection[str]) -> None:
        """Free the memory of components on the device."""
        if self._weights is not None:
            self._weights.drop(digests)
            self._loras.drop(digests)
