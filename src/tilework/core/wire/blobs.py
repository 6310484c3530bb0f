"""Serialized states of jobs, in a place that all workers of a node can read."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.wire.ranges import Count, Name


@dataclass(frozen=True, slots=True)
class StateBlob:
    """The name and size of a serialized state, in the directory of blobs of its node."""

    name: Name
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class SavedState:
    """A serialized state of a request: the outputs of a stage, or the state between two of its steps.

    `index` is that of the stage, `position` that of the request after it (`core.graph.itinerary.Itinerary`).
    """

    index: Count
    position: Count
    blob: StateBlob
