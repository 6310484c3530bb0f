"""Memory that stages need, and the time that components take to load: bytes over the speed of a source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tilework.core.component import Component, LoadSource, num_bytes
from tilework.core.graph.stage import Stage
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.cost.activations import Activations
from tilework.cost.table import CostTable

_MOST = 4.0  # Largest factor by which a measurement counts as longer or shorter than expected.


class TableWeights:
    """The `WeightCosts` of a table, corrected by what was measured: an exponentially weighted mean.

    Each measurement has the weight `weight` in it. A source without a speed is not used. Without any speed loads take
    no time. A device with `most_bytes` never drops a component: all that stages need, and the largest activation known.
    """

    def __init__(self, table: CostTable, weight: float) -> None:
        self.host_bytes = table.host_bytes
        self._weight = weight
        self._factors: dict[LoadSource, float] = {}
        self._quickest: dict[frozenset[LoadSource], LoadSource] = {}
        self.use(table)

    def use(self, table: CostTable) -> None:
        """Use the components and speeds of this table from now on, and keep the corrections."""
        self.all = table.all_components
        self.activations = Activations(table)
        self.most_bytes = num_bytes(self.all) + self.activations.largest
        self._bytes_per_s = table.load_bytes_per_s
        self._quickest.clear()
        self._loras = table.loras
        self._components = {
            (pipeline, stage.name): tuple(named[name] for name in stage.spec.components if name in named)
            for pipeline, named in table.components.items()
            for stage in table.graph(pipeline).stages
        }
        self._named: defaultdict[Component, list[tuple[str, str]]] = defaultdict(list)
        for pipeline, named in table.components.items():
            for name, one in named.items():
                self._named[one].append((pipeline, name))
        for pipeline, loras in table.loras.items():
            for name, lora in loras.items():
                if lora.component is not None:
                    self._named[lora.component].append((pipeline, name))

    @property
    def named(self) -> Mapping[Component, Sequence[tuple[str, str]]]:
        """Pipelines that use each component, each with the component's name there; a LoRA has its own name."""
        return self._named

    def components(self, stage: Stage) -> tuple[Component, ...]:
        """Return the components that a stage and its LoRAs need, as far as the table knows them.

        A work of a cancelled request may end after its model or its LoRA was removed; these are then left out.
        """
        components = self._components.get((stage.pipeline, stage.name), ())
        if not stage.loras:
            return components
        known = self._loras.get(stage.pipeline, {})
        used = [known[one.name].component for one in stage.loras if one.name in known]
        return (*components, *(one for one in used if one is not None))

    def activation_bytes(self, stage: Stage, requests: Sequence[Request], degree: int) -> int:
        """See `WeightCosts.activation_bytes`, and `Activations` for sizes between rows."""
        return self.activations.num_bytes(stage, [one.shape for one in requests], degree) if self.activations else 0

    def load_ns(self, num_bytes: int, source: LoadSource | None = None) -> int:
        """Return how long components of this size take to load from a source; None: from the slowest."""
        if source is None:
            return max([self.load_ns(num_bytes, one) for one in self._bytes_per_s], default=0)
        return round(num_bytes / self._bytes_per_s[source] * self._factors.get(source, 1.0) * NS_PER_S)

    def quickest_source(self, available: frozenset[LoadSource]) -> LoadSource:
        """Return the quickest of these sources; DISK if none has a speed."""
        found = self._quickest.get(available)
        if found is None:
            known = [source for source in LoadSource if source in available and source in self._bytes_per_s]
            found = min(known, key=lambda source: self.load_ns(1 << 30, source), default=LoadSource.DISK)
            self._quickest[available] = found
        return found

    def observe(self, num_bytes: int, source: LoadSource, run_ns: int) -> bool:
        """Learn from the time of a load; returns whether a prediction of loads changes. Those of works do not."""
        speed = self._bytes_per_s.get(source)
        if speed is None or not num_bytes or run_ns <= 0:
            return False
        before = self._factors.get(source)
        self._quickest.clear()
        measured = min(_MOST, max(1 / _MOST, run_ns * speed / (num_bytes * NS_PER_S)))
        after = self._factors[source] = measured if before is None else before + self._weight * (measured - before)
        return after != (1.0 if before is None else before)
