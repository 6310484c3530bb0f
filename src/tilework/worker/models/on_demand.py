"""Loads a model whose weights come to the device by command: none of them is there when the worker starts.

Each component is read on the host, which keeps its weights; on the device it only has their shapes. Components that no
stage names go to the device and stay. Rejected: the skeletons of models that are added (`skeleton`). They are pickled,
which some pipelines cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from tilework.core.component import Component
from tilework.core.model import ModelSource
from tilework.core.wire.reports import LoadedModel
from tilework.pipelines.family import Family
from tilework.pipelines.loading import device_of, load, load_component
from tilework.worker.models.describe import described
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.weights import KeptWeights, Weights


def load_on_demand(
    source: ModelSource, weights: Weights, loras: WorkerLoras
) -> tuple[Family, LoadedModel, Mapping[str, Component]]:
    """Load a model; return it, its description for the server, and its components by name.

    LoRAs are read one after another.

    Raises:
        ModelError: it cannot be served.
    """
    device = device_of(source)
    kept: dict[nn.Module, KeptWeights] = {}

    def leave(module: nn.Module) -> None:
        if module not in kept:
            kept[module] = weights.leave_on_host(module, device)

    family = load(source, leave)
    for name, module in family.modules.items():
        weights.add_empty(module, kept[module], partial(load_component, source, name))
    for module in kept.keys() - set(family.modules.values()):
        weights.load_to_stay(module, kept[module])
    components = {name: kept[module].component for name, module in family.modules.items()}
    with weights.shaped():  # LoRAs must fit the model's shapes.
        usable, refused = loras.add_all(family, source)
    return family, described(family, source, components, usable, refused), components
