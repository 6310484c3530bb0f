"""Models without their weights, which running workers can take over in a moment, and cells can read if they are large.

A separate process reads a model that is added while the server runs, keeps its weights on the host, and leaves the
rest of it in a file. A worker of a cell reads its models in the same way: no device of a cell could hold one whole.
The file is pickled, since it consists of the libraries' own objects; it lies in the server's own directory, to which
no other user can write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilework.comm.messages import from_bytes, to_bytes
from tilework.core.component import Component
from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.reports import LoadedModel
from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.family import Family
from tilework.pipelines.loading import family_of, load_component, load_stock
from tilework.pipelines.video.exporter import Exporter, can_export
from tilework.worker.models.describe import described
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.weights import KeptWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A stock pipeline without weights, as bytes, and what is known of its weights and LoRAs, by name."""

    pipeline: bytes
    weights: Mapping[str, KeptWeights]
    loras: Mapping[str, tuple[LoraSource, Lora, str]]
    model: LoadedModel


def leave_skeleton(source: ModelSource, weights: Weights) -> tuple[LoadedModel, bytes]:
    """Read a model, and keep its weights on the host; return its description for the server, and the skeleton.

    Raises:
        ModelError: it cannot be served.
    """
    pipeline = load_stock(replace(source, device="cpu"))
    modules = modules_of(pipeline)
    kept = {name: KeptWeights.of(module) for name, module in modules.items()}
    components = {name: weights.component(module, kept[name]) for name, module in modules.items()}
    for name, module in modules.items():
        weights.keep(kept[name], weights_of(module))
    pickled = _without_weights(pipeline)
    family = family_of(source, pipeline)
    loras = WorkerLoras(on_demand=True)
    usable, refused = loras.add_all(family, source)
    model = described(family, source, components, usable, refused)
    if weights.cell is not None:
        model = replace(model, info=weights.cell.serves(model.info))
    name = family.info.name
    known = {
        one.name: (one, usable[one.name], loras.content(name, one.name)) for one in source.loras if one.name in usable
    }
    skeleton = Skeleton(pipeline=pickled, weights=kept, loras=known, model=model)
    return model, to_bytes(skeleton)


def _without_weights(pipeline: Any) -> bytes:
    """Return the pipeline as bytes, and restore its weights."""
    held = [(one, one.data) for module in modules_of(pipeline).values() for one in weights_of(module)]
    try:
        for one, _ in held:
            one.data = torch.empty(0, dtype=one.dtype)
        return to_bytes(pipeline)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(pipeline).__name__} can neither be added while the server runs nor served by cells, since it is no "
            f"data ({type(error).__name__}: {error}); name it when the server is started, without --cell"
        ) from error
    finally:
        for one, data in held:
            one.data = data


def take_over(
    source: ModelSource, skeleton: bytes, weights: Weights, loras: WorkerLoras, device: torch.device
) -> tuple[Family, Mapping[str, Component]]:
    """Take over the model of a skeleton. None of its weights and LoRAs is on the device."""
    left: Skeleton = from_bytes(skeleton)
    pipeline = from_bytes(left.pipeline)
    pipeline.to(device)  # Brings tensors that are no weights of a component.
    family = family_of(source, pipeline)
    for name, module in modules_of(pipeline).items():
        weights.add_empty(module, left.weights[name].on(device), partial(load_component, source, name))
    for one, lora, content in left.loras.values():
        loras.add_known(family.info.name, family, one, lora, content)
    return family, {name: kept.component for name, kept in left.weights.items()}


def exporter_of(skeleton: bytes) -> Exporter:
    """Return the part of a skeleton's model that a CPU slot needs.

    Raises:
        UnsupportedModel: it needs more than to write videos.
    """
    left: Skeleton = from_bytes(skeleton)
    info = left.model.info
    if not can_export(info):
        raise UnsupportedModel(f"a stage of {info.name} on CPU slots needs weights; name it when the server is started")
    return Exporter(info)
