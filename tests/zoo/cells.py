"""What a cell draws of a model of the zoo: devices that have its weights together, read as the workers of a cell do."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny
from ranks import Ranks
from tilework.core.comm import Comm
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Spec
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.pipelines.stock.answers import rebuilt
from tilework.worker.models.cell import Cell
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.skeleton import leave_skeleton, take_over
from tilework.worker.models.weights import Weights
from zoo import requests
from zoo.model import ZooModel
from zoo.registry import ZOO, build

SIZE = 2
TOLERANCE = 1e-5


def check(model: ZooModel, ranks: Ranks, directory: Path) -> None:
    """Raises AssertionError if a cell of two does not draw what one device draws, or cannot have the model."""
    place = directory / "model"
    build(model).save_pretrained(str(place), safe_serialization=True)
    source = ModelSource(path=str(place))  # With the adapter that a server would use.
    family = load(source)
    latents, pixels = drawn(family, requests.spec_of(model, family, seed=1))
    found = ranks.run(SIZE, draw_in_cell, model.name, source, directory)
    for ours, ours_pixels in found:
        assert torch.equal(ours, found[0][0]), "ranks would drift apart"
        assert (ours - latents).abs().max() <= TOLERANCE * latents.abs().max(), "other latents"
        assert (ours_pixels - pixels).abs().max() <= 1, "another picture"


def check_all(models: Sequence[ZooModel]) -> None:
    """Print of each whether a cell draws it."""
    ranks = Ranks(SIZE)
    for model in models:
        with tempfile.TemporaryDirectory() as directory:
            try:
                check(model, ranks, Path(directory))
            except AssertionError as error:
                print(f"{model.name}: {error}", flush=True)
            else:
                print(f"{model.name}: as one device", flush=True)
    ranks.close()


def draw_in_cell(comm: Comm, name: str, source: ModelSource, directory: Path) -> tuple[Tensor, Tensor]:
    tiny.prepare()
    ranks = tuple(range(comm.size))
    cell = Cell(ranks, comm.rank)
    weights = Weights(SharedWeights(directory / "weights"), cell)
    _, skeleton = leave_skeleton(source, weights)
    family, parts = take_over(source, skeleton, weights, WorkerLoras(on_demand=True), torch.device("cpu"))
    for part in parts.values():
        for _ in weights.loading(part.digest):
            pass
    spec = requests.spec_of(ZOO[name], family, seed=1)
    with cell.running(comm, ranks):
        family.join(comm, spec)
        try:
            return drawn(family, spec)
        finally:
            family.parallel.leave()


def drawn(family: Family, spec: Spec) -> tuple[Tensor, Tensor]:
    """The last latents of a request, and its pixels."""
    torch.manual_seed(spec.seed)  # Some pipelines draw from torch's own generator.
    values: dict[str, Any] = {}
    for stage in family.info.graph.itinerary(spec.steps).stages:
        if stage.has_steps:
            state = family.begin(stage.name, spec, values)
            while state.steps_done < state.num_steps:
                family.step([state])
            latents = _latents(family.export(state))
            values.update(family.finish(state))
        else:
            values.update(family.run(stage.name, [spec], [values])[0])
    picture = family.image(spec, values)
    return latents, torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).int()


def _latents(exported: dict[str, Any]) -> Tensor:
    if "latents" in exported:
        return exported["latents"]
    answer = rebuilt(exported["samplers"][0])
    return answer[0] if isinstance(answer, tuple) else answer["prev_sample"]
