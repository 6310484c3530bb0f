"""Size of a model, before it is known how many devices will share it."""

from __future__ import annotations

from dataclasses import replace

from tilework.core.model import ModelSource
from tilework.core.wire.reports import ModelSize
from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.loading import family_of, load_stock
from tilework.worker.models.cell import divided
from tilework.worker.models.shared_weights import Form


def size_of(source: ModelSource) -> ModelSize:
    """Read a model, and return its size; nothing of it is kept.

    Raises:
        ModelError: it cannot be served.
    """
    pipeline = load_stock(replace(source, device="cpu"))
    info = family_of(source, pipeline).info
    components = {
        name: divided(module, [Form.of(one) for one in weights_of(module)])
        for name, module in modules_of(pipeline).items()
    }
    stages = {
        stage.name: tuple(name for name in stage.spec.components if name in components) for stage in info.graph.stages
    }
    return ModelSize(name=info.name, max_degree=info.max_degree, stages=stages, components=components)
