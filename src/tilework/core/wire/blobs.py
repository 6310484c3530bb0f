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
    """What a stage has written of a request: its outputs, or the state between two of its steps.

    `position` is where the request is after it (`core.graph.itinerary.Itinerary`), `index` that of the stage.
    """

    index: Count
    position: Count
    blob: StateBlob
