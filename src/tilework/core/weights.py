"""Weights as a policy sees them: the components of stages, and loads. Policies that ignore weights skip this page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tilework.core.component import Component, LoadSource
from tilework.core.graph.stage import Stage
from tilework.core.request import Request


class WeightCosts(Protocol):
    """The components and activations of stages, and the predicted times of loads: `CostModel.weights`."""

    @property
    def all(self) -> tuple[Component, ...]:
        """Components that stages of all pipelines need, each once."""

    @property
    def host_bytes(self) -> int | None:
        """Bytes of components that the host of a node keeps after its devices have read them; None: all."""

    def components(self, stage: Stage) -> tuple[Component, ...]:
        """Return the components that a stage and its LoRAs need, as far as the table knows them."""

    def activation_bytes(self, stage: Stage, requests: Sequence[Request], degree: int) -> int:
        """Return the bytes that a work needs on each of its `degree` devices beyond the weights; 0 if not known."""

    def load_ns(self, num_bytes: int, source: LoadSource | None = None) -> int:
        """Return how long components of this size take to load from a source; None: from the slowest."""

    def quickest_source(self, available: frozenset[LoadSource]) -> LoadSource:
        """Return the source from which loads are quickest, of those that have the components; DISK if none is known."""


class SourcesView(Protocol):
    """The sources from which devices can load components: `ClusterView.sources`."""

    def load_ns(self, device_id: int, stage: Stage) -> int:
        """Return how long an accelerator would load, after its works, the components of a stage that it lacks.

        They come from the quickest sources that have them now. 0 if it lacks none.
        """

    def kept(self, node: int) -> Sequence[Component]:
        """Return the components that the host of a node keeps in memory, the least recently used first."""

    def may_read(self, node: int) -> bool:
        """Return whether the host of a node can read ahead of need now; it does so for one stage at a time."""

    @property
    def unreadable(self) -> Collection[Component]:
        """Components that a host could not read ahead. Devices load them themselves."""
