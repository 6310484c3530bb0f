"""The weights that devices hold while models are measured, one model after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.lora import UsedLora
from tilework.core.time import NS_PER_S
from tilework.core.wire.commands import DropWeights, LoadWeights
from tilework.core.wire.reports import Loaded, LoadedModel, WeightsLoaded


@dataclass(slots=True)
class CalibrationWeights:
    """Commands for each device before it measures a model, and its speed of loading.

    `total_bytes` None: all weights are there. Its loads have the id 0; those of the controller count from 1.
    """

    total_bytes: int | None
    _models: dict[str, LoadedModel] = field(default_factory=dict)
    _held: tuple[Component, ...] = ()
    _asked_bytes: int = 0
    _read_bytes_per_s: float = 0.0
    _loads_ns: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)

    def know(self, loaded: Loaded) -> None:
        """Record models that may be measured if each of their stages fits (`lacks_room`).

        The first models that have weights give the speed at which weights are read.
        """
        self._models |= {model.info.name: model for model in loaded.models}
        everything = num_bytes({one for model in loaded.models for one in model.components.values()})
        self._read_bytes_per_s = self._read_bytes_per_s or everything * NS_PER_S / loaded.load_ns

    def forget(self, model: str) -> None:
        """Forget a model, which is measured no more."""
        self._models.pop(model, None)

    def commands(self, model: str, loras: Sequence[UsedLora] = ()) -> Iterator[LoadWeights | DropWeights]:
        """Yield the commands for a device before it measures this model with these LoRAs.

        If it has no room for all stages, it loads the largest stage; `by_stage` has the components of the others.
        """
        if self.total_bytes is None:
            return
        stages = self._stages(model, loras)
        declared = self._declared_bytes(model)
        needed = _all(stages)
        if needed == self._held:
            return
        yield from self.last_commands()
        if needed:
            first = needed if self._has_room(needed, declared) else max(stages.values(), key=num_bytes)
            self._held = needed
            self._asked_bytes = num_bytes(first)
            yield LoadWeights(0, _digests(first))

    def turn(
        self, model: str, loras: Sequence[UsedLora] = ()
    ) -> tuple[tuple[LoadWeights, ...], tuple[DropWeights, ...]]:
        """Return the commands for a device that serves before it measures this model, and after. Nothing is held."""
        assert not self._held
        before = tuple(one for one in self.commands(model, loras) if isinstance(one, LoadWeights))
        return before, tuple(self.last_commands())

    def by_stage(self, model: str, loras: Sequence[UsedLora] = ()) -> dict[str, tuple[str, ...]]:
        """Return the digests of the components of each stage, by its name; empty if a device has room for all."""
        stages = self._stages(model, loras)
        if self._has_room(_all(stages), self._declared_bytes(model)):
            return {}
        return {stage: _digests(needed) for stage, needed in stages.items()}

    def last_commands(self) -> Iterator[DropWeights]:
        """Yield the command that drops all that was loaded."""
        if self._held:
            yield DropWeights(_digests(self._held))
        self._held = ()

    def loaded(self, report: WeightsLoaded) -> None:
        """Record that a device has done the latest load."""
        self._loads_ns.append(report.run_ns)
        self._sizes.append(self._asked_bytes)

    def speeds(self) -> dict[LoadSource, float]:
        """Return bytes per second, as far as loads were measured: from the host, and from directories at the start."""
        if not self._loads_ns:
            return {}
        speeds = [size * NS_PER_S / max(1, run_ns) for size, run_ns in zip(self._sizes, self._loads_ns, strict=True)]
        host = median(speeds)
        return {LoadSource.HOST: host, LoadSource.DISK: min(host, self._read_bytes_per_s or host)}

    def _stages(self, model: str, loras: Sequence[UsedLora]) -> Mapping[str, tuple[Component, ...]]:
        return self._models[model].needed([one.name for one in loras])

    def _declared_bytes(self, model: str) -> int:
        """Return the most bytes that a stage declares to need beyond its weights."""
        return max(stage.spec.memory_bytes for stage in self._models[model].info.graph.stages)

    def _has_room(self, needed: Sequence[Component], beside_bytes: int) -> bool:
        return self.total_bytes is None or num_bytes(needed) + beside_bytes <= self.total_bytes


def lacks_room(model: LoadedModel, room_bytes: int | None) -> str:
    """Return why a device with this room for weights cannot run a model, if it cannot. None: it has all weights."""
    stage, size = model.largest_stage()
    if room_bytes is None or size <= room_bytes:
        return ""
    return (
        f"its stage {stage} needs {size} bytes with its weights, and a device has {room_bytes}; give it more "
        "(--weights-memory), choose a dtype of 16 bits, or let several devices be one (--cell auto)"
    )


def _all(stages: Mapping[str, tuple[Component, ...]]) -> tuple[Component, ...]:
    """Return the components of all stages, each once, sorted."""
    return tuple(sorted({one for needed in stages.values() for one in needed}))


def _digests(components: Sequence[Component]) -> tuple[str, ...]:
    return tuple(component.digest for component in components)
