"""The weights that devices hold while models are measured, one model after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.lora import Lora, UsedLora
from tilework.core.time import NS_PER_S
from tilework.core.wire import DropWeights, Loaded, LoadedModel, LoadWeights, WeightsLoaded
from tilework.runtime.executor import WorkerStartFailed


@dataclass(slots=True)
class CalibrationWeights:
    """What each device is told before it measures a model, and how fast it loads. `total_bytes` None: all is there.

    Its loads have the id 0; those of the controller count from 1.
    """

    total_bytes: int | None
    _components: dict[str, tuple[Component, ...]] = field(default_factory=dict)
    _loras: dict[str, Mapping[str, Lora]] = field(default_factory=dict)
    _held: tuple[Component, ...] = ()
    _read_bytes_per_s: float = 0.0
    _loads_ns: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)

    def add(self, loaded: Loaded) -> None:
        """The models of the devices.

        Raises:
            WorkerStartFailed: one does not fit into a device.
        """
        for model in loaded.models:
            name, needed = model.info.name, tuple(sorted(set(model.components.values())))
            if self.total_bytes is not None and num_bytes(needed) > self.total_bytes:
                raise WorkerStartFailed(
                    f"the weights of {name} are {num_bytes(needed)} bytes, and a device has {self.total_bytes} for "
                    "weights; give it more (--weights-memory), or choose a dtype of 16 bits"
                )
            self.know(model)
        everything = num_bytes({one for needed in self._components.values() for one in needed})
        self._read_bytes_per_s = everything * NS_PER_S / loaded.load_ns

    def know(self, model: LoadedModel) -> None:
        """Another model that may be measured; it fits."""
        name = model.info.name
        self._components[name] = tuple(sorted(set(model.components.values())))
        self._loras[name] = model.loras

    def commands(self, model: str, loras: Sequence[UsedLora] = ()) -> Iterator[LoadWeights | DropWeights]:
        """What a device is told before it measures this model with these LoRAs."""
        if self.total_bytes is None:
            return
        used = [self._loras[model][one.name].component for one in loras]
        needed = (*self._components.get(model, ()), *(one for one in used if one is not None))
        if needed == self._held:
            return
        yield from self.last_commands()
        if needed:
            self._held = needed
            yield LoadWeights(0, _digests(needed))

    def last_commands(self) -> Iterator[DropWeights]:
        """What gives back all that was loaded."""
        if self._held:
            yield DropWeights(_digests(self._held))
        self._held = ()

    def loaded(self, report: WeightsLoaded) -> None:
        """A device has loaded what was named last."""
        self._loads_ns.append(report.run_ns)
        self._sizes.append(num_bytes(self._held))

    def speeds(self) -> dict[LoadSource, float]:
        """Bytes per second, as far as loads were seen: of the copies on the host, and of directories at the start."""
        if not self._loads_ns:
            return {}
        speeds = [size * NS_PER_S / max(1, run_ns) for size, run_ns in zip(self._sizes, self._loads_ns, strict=True)]
        host = median(speeds)
        return {LoadSource.HOST: host, LoadSource.DISK: min(host, self._read_bytes_per_s)}


def _digests(components: Sequence[Component]) -> tuple[str, ...]:
    return tuple(component.digest for component in components)
