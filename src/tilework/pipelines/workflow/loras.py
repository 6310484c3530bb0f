"""The LoRAs of a workflow: each changes the pipelines that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tilework.core.lora import UsedLora
from tilework.pipelines.lora import AddedLora, InvalidLora, Loras


class WorkflowLoras:
    """The LoRAs of its pipelines, by the prefix of their names, as one. See `lora.Loras` for the contract."""

    def __init__(self, of_pipelines: Mapping[str, Loras]) -> None:
        assert of_pipelines
        self._of_pipelines = dict(of_pipelines)
        self._fits: dict[str, tuple[str, ...]] = {}

    def add(self, name: str, file: Path) -> AddedLora:
        added: dict[str, AddedLora] = {}
        errors: list[InvalidLora] = []
        try:
            for prefix, loras in self._of_pipelines.items():
                try:
                    added[prefix] = loras.add(name, file)
                except InvalidLora as error:
                    errors.append(error)
            if not added:
                raise errors[0]
        except BaseException:
            for prefix in added:
                self._of_pipelines[prefix].remove(name)
            raise
        self._fits[name] = tuple(added)
        changes = frozenset(prefix + one for prefix, each in added.items() for one in each.changes)
        return AddedLora(changes, sum(each.num_bytes for each in added.values()))

    def remove(self, name: str) -> None:
        for prefix in self._fits.pop(name):
            self._of_pipelines[prefix].remove(name)

    def use(self, used: Sequence[UsedLora]) -> None:
        for prefix, loras in self._of_pipelines.items():
            loras.use([one for one in used if prefix in self._fits[one.name]])
