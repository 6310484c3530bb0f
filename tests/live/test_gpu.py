"""The same exactness on a CUDA device, its memory, and what is done there alone. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import tilework
import tiny
from tilework.comm.sender import Sender
from tilework.core.model import ModelSource
from tilework.core.packing import Pack
from tilework.core.wire.spec import Image
from tilework.patches.layout import pack
from tilework.pipelines import serialization
from tilework.pipelines.cuda.copies import CudaStreams, SideCopies
from tilework.pipelines.cuda.graphs import CudaRecorder, record_steps
from tilework.pipelines.draw import begin_steps
from tilework.pipelines.loading import load
from tilework.worker.hardware import memory_in_use
from tilework.worker.models.pinned import bytes_of
from tilework.worker.models.shared_weights import Form, SharedWeights
from tilework.worker.process import _side_stream
from zoo import requests
from zoo.registry import ZOO, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BUILDERS = {"sd3": partial(tiny.build_sd3, "dpm"), "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}


@pytest.fixture(scope="module", params=BUILDERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp(request.param)
    tiny.save(BUILDERS[request.param](), directory, request.param)
    return directory


def test_memory_in_use_is_that_of_the_device() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before = memory_in_use(device)
    ballast = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    after = memory_in_use(device)
    assert before is not None
    assert after is not None
    assert after - before >= ballast.numel()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_and_moved_after_every_step_equals_the_stock_pipeline(directory: Path, dtype: str, graphs: bool) -> None:
    family = load(ModelSource(path=str(directory), device="cuda", dtype=dtype, cuda_graphs=graphs))
    pipeline = tilework.reference(str(directory), device="cuda", dtype=dtype)
    stock = tiny.run_stock(pipeline, tiny.spec())
    state = tiny.begin(family, tiny.spec())
    for latents in stock.latents:
        tiny.iterate(family, state)
        assert torch.equal(state.latents, latents)
        state = tiny.move(family, family, state)
    assert np.array_equal(tiny.pixels(tiny.decode(family, state)), stock.pixels)


@pytest.mark.parametrize("packs", [None, pack], ids=["alone", "packed"])
def test_recorded_steps_are_those_of_eager_passes(directory: Path, packs: Pack | None) -> None:
    sides = ((64, 64), (64, 32)) if packs else ((64, 64),)
    latents = []
    for graphs in (False, True):
        family = load(ModelSource(path=str(directory), device="cuda", dtype="bfloat16", cuda_graphs=graphs))
        states = [begin_steps(family, tiny.spec(height=height, width=width)) for height, width in sides]
        for _ in range(4):
            family.step(states, packs)
        latents.append([state.latents for state in states])
    assert all(map(torch.equal, *latents))


@pytest.mark.parametrize("name", ["qwen-image", "z-image", "wan21", "wan22"])
def test_recorded_steps_of_any_pipeline_are_those_of_eager_passes(name: str, tmp_path: Path) -> None:
    build(ZOO[name]).save_pretrained(str(tmp_path), safe_serialization=True)
    source = ModelSource(path=str(tmp_path), device="cuda", dtype="bfloat16")
    eager, recorded = load(source), load(source)
    graphs = record_steps(recorded, CudaRecorder())
    spec = requests.spec_of(ZOO[name], eager, seed=1)
    assert np.array_equal(requests.alone(recorded, spec), requests.alone(eager, spec))
    assert sum(one.num_graphs for one in graphs) > 0


def test_weights_that_the_device_reads_by_itself_are_the_same_and_stay_registered(tmp_path: Path) -> None:
    weights = [torch.randn(1000, 1000), torch.randn(3)]
    there = [torch.empty(0, device="cuda") for _ in weights]
    shared = SharedWeights(tmp_path)
    shared.keep("weights", weights)
    forms = [replace(Form.of(weight), device=torch.device("cuda", 0)) for weight in weights]
    for _ in range(2):
        file = shared.open("weights", forms)
        for _ in file.bring(there):
            pass
        assert bytes_of(file.mapped).is_pinned()
        assert all(torch.equal(mine.cpu(), weight) for mine, weight in zip(there, weights, strict=True))


def test_weights_that_come_beside_what_runs_are_the_same(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    weights = [torch.randn(4000, 4000) for _ in range(4)]
    there = [torch.empty(0, device=device) for _ in weights]
    shared = SharedWeights(tmp_path, SideCopies(CudaStreams(device)))
    shared.keep("weights", weights)
    forms = [replace(Form.of(weight), device=device) for weight in weights]
    assert shared.send("weights", there, forms) is None, "the file is not registered yet"
    shared.map("weights", there, forms)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        for one in there:
            one.data = torch.empty(0, device=device)
        for _ in range(20):
            matrix @ matrix
        sending = shared.send("weights", there, forms)
        assert sending is not None
        assert len(list(sending.arriving())) > 1
        assert sending.beside_ns >= 0
        assert all(torch.equal(mine.cpu(), weight) for mine, weight in zip(there, weights, strict=True))


def test_states_by_a_stream_of_their_own_are_the_same(directory: Path) -> None:
    device = torch.device("cuda", 0)
    copies = SideCopies(CudaStreams(device))
    family = load(ModelSource(path=str(directory), device="cuda", dtype="bfloat16"))
    stays, moved = (tiny.begin(family, tiny.spec()) for _ in range(2))
    for _ in range(tiny.spec().steps):
        tiny.iterate(family, stays)
        tiny.iterate(family, moved)
        written = serialization.serialize(family.export(moved), copies)
        back = serialization.deserialize(written, device, copies)
        values = {"conditioning": moved.conditioning.tensors}
        moved = family.restore(moved.stage, moved.spec, values, back)
        assert torch.equal(moved.latents, stays.latents)


def test_results_by_a_thread_with_a_stream_of_its_own_are_the_same(directory: Path) -> None:
    family = load(ModelSource(path=str(directory), device="cuda", dtype="bfloat16"))
    pipeline = tilework.reference(str(directory), device="cuda", dtype="bfloat16")
    state = tiny.begin(family, tiny.spec())
    for _ in range(tiny.spec().steps):
        tiny.iterate(family, state)
    values = dict(family.finish(state))
    (outputs,) = family.run(family.info.graph.stages[-1].name, [tiny.spec()], [values])
    torch.cuda.synchronize()  # As a worker does at the end of a run.
    images: list[Image] = []
    sender = Sender(images.append, print, partial(_side_stream, family.device, 0))
    matrix = torch.randn(8192, 8192, device=family.device)
    for _ in range(50):
        matrix @ matrix  # The next run.
    end = torch.cuda.Event()
    end.record()
    sender.send_made(lambda: family.image(tiny.spec(), outputs))
    sender.finish()
    assert not end.query(), "it has waited for the next run"
    assert np.array_equal(tiny.pixels(images[0]), tiny.run_stock(pipeline, tiny.spec()).pixels)
