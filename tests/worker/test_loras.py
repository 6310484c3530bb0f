"""LoRAs of a worker: which are on its device, and works whose members use different ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from commands import MODEL, decode_all, encode, steps
from loras import save_lora
from tilework.core.component import Component
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource
from tilework.core.wire.reports import Ended, Failed
from tilework.core.wire.spec import Spec
from tilework.pipelines.components import weights_of
from tilework.pipelines.draw import draw
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.lora import InvalidLora
from tilework.worker.models.loras import LoraChanged, WorkerLoras
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.weights import Weights
from worker.worker_bench import WorkerBench

INK, CHALK = UsedLora("ink", 1.0), UsedLora("chalk", 0.5)
TEXT, DENOISER, VAE = ("text_encoder", "text_encoder_2"), ("transformer",), ("vae",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """`ink` changes a text encoder, too."""
    tiny.prepare()
    root = tmp_path_factory.mktemp("loras")
    return {
        "ink": save_lora(tiny.build_sd3(), root / "ink.safetensors", 1, text_encoder=True),
        "chalk": save_lora(tiny.build_sd3(), root / "chalk.safetensors", 2),
    }


@pytest.fixture
def family() -> StableDiffusion3:
    return StableDiffusion3(tiny.build_sd3(), MODEL, {"max_sequence_length": tiny.TEXT_LENGTH}, "")


def added(
    family: StableDiffusion3, files: Mapping[str, Path], *, on_demand: bool = True
) -> tuple[WorkerLoras, dict[str, Lora]]:
    loras = WorkerLoras(on_demand=on_demand)
    return loras, {name: loras.add(MODEL, family, LoraSource(name, str(file))) for name, file in files.items()}


def digest(lora: Lora) -> str:
    assert lora.component is not None
    return lora.component.digest


def num_bytes(family: StableDiffusion3) -> int:
    """What all components hold, with their LoRAs."""
    return sum(weight.nbytes for module in family.modules.values() for weight in module.parameters())


# Loads and drops.


def test_what_is_added_names_components_and_size(family: StableDiffusion3, files: Mapping[str, Path]) -> None:
    _, known = added(family, files)
    assert known["ink"].changes == {"transformer", "text_encoder"}
    assert known["chalk"].changes == {"transformer"}
    assert isinstance(known["ink"].component, Component)
    assert known["ink"].component.num_bytes > known["chalk"].component.num_bytes > 0  # type: ignore[union-attr]
    _, again = added(StableDiffusion3(tiny.build_sd3(), MODEL, {}, ""), files)
    assert {name: one.component for name, one in again.items()} == {name: one.component for name, one in known.items()}


def test_loras_come_and_go_with_their_memory(family: StableDiffusion3, files: Mapping[str, Path]) -> None:
    before = num_bytes(family)
    loras, known = added(family, files)
    assert num_bytes(family) == before, "on demand none is on the device at first"
    loras.load([digest(known["chalk"]), "of no model here"])
    assert num_bytes(family) == before + known["chalk"].component.num_bytes  # type: ignore[union-attr]
    loras.load([digest(known["chalk"])])
    assert loras.use(MODEL, family, DENOISER, [CHALK]) == []
    loras.drop([digest(known["chalk"]), digest(known["ink"]), "of no model here"])
    assert num_bytes(family) == before
    assert loras.use(MODEL, family, DENOISER, [CHALK]) == ["chalk"]


def test_a_lora_is_read_while_the_weights_that_it_changes_are_not_here(tmp_path: Path) -> None:
    """For FLUX diffusers compares its shape with theirs."""
    tiny.prepare()
    file = save_lora(tiny.build_flux(), tmp_path / "ink.safetensors", 1)
    family = Flux(tiny.build_flux(), MODEL, {}, "")
    transformer, weights = family.modules["transformer"], Weights(SharedWeights(tmp_path / "weights"))
    before = [weight.detach().clone() for weight in weights_of(transformer)]
    component = weights.add(transformer, lambda: transformer)
    loras = WorkerLoras(on_demand=True)
    with weights.shaped():
        lora = loras.add(MODEL, family, LoraSource("ink", str(file)))
        loras.load([digest(lora)])
    assert loras.use(MODEL, family, DENOISER, [INK]) == []
    for _ in weights.loading(component.digest):
        pass
    loras.drop([digest(lora)])
    assert all(map(torch.equal, weights_of(transformer), before))


def test_only_stages_that_a_lora_changes_miss_it(family: StableDiffusion3, files: Mapping[str, Path]) -> None:
    loras, known = added(family, files)
    assert loras.use(MODEL, family, VAE, [INK, CHALK]) == []
    assert loras.use(MODEL, family, TEXT, [INK, CHALK]) == ["ink"]
    assert loras.use(MODEL, family, DENOISER, [INK, CHALK]) == ["ink", "chalk"]
    loras.load([digest(known["ink"])])
    assert loras.use(MODEL, family, TEXT, [INK, CHALK]) == []
    assert loras.use(MODEL, family, DENOISER, [INK, CHALK]) == ["chalk"]
    assert loras.use(MODEL, family, VAE, [UsedLora("wax", 1.0)]) == ["wax"], "an unknown one may change anything"


def test_where_one_is_missing_none_is_used(family: StableDiffusion3, files: Mapping[str, Path]) -> None:
    plain = tiny.pixels(draw(family, tiny.spec(steps=2)))
    loras, known = added(family, files)
    loras.load([digest(known["ink"])])
    assert loras.use(MODEL, family, DENOISER, [INK]) == []
    assert not np.array_equal(tiny.pixels(draw(family, tiny.spec(steps=2))), plain)
    assert loras.use(MODEL, family, DENOISER, [INK, CHALK]) == ["chalk"]
    assert np.array_equal(tiny.pixels(draw(family, tiny.spec(steps=2))), plain)


def test_without_a_limit_they_are_always_there(family: StableDiffusion3, files: Mapping[str, Path]) -> None:
    loras, _ = added(family, files, on_demand=False)
    assert loras.use(MODEL, family, DENOISER, [INK, CHALK]) == []


def test_one_whose_file_has_changed_is_not_loaded_nor_those_beside_it(
    family: StableDiffusion3, files: Mapping[str, Path], tmp_path: Path
) -> None:
    before = num_bytes(family)
    copies = {name: tmp_path / file.name for name, file in files.items()}
    for name, copy in copies.items():
        copy.write_bytes(files[name].read_bytes())
    loras, known = added(family, copies)
    copies["ink"].write_bytes(files["chalk"].read_bytes())
    with pytest.raises(LoraChanged, match="is another file now than when 'ink' was added"):
        loras.load([digest(known["chalk"]), digest(known["ink"])])
    assert num_bytes(family) == before
    copies["ink"].write_bytes(files["ink"].read_bytes())
    loras.load([digest(known["ink"])])
    assert loras.use(MODEL, family, DENOISER, [INK]) == []


def test_a_simulated_model_takes_none(files: Mapping[str, Path]) -> None:
    class Simulated:
        loras = None

    with pytest.raises(InvalidLora, match="is simulated, and takes no LoRAs"):
        WorkerLoras(on_demand=True).add(MODEL, Simulated(), LoraSource("ink", str(files["ink"])))  # type: ignore[arg-type]


# Works.


SPECS = {1: tiny.spec(seed=1, loras=(INK,)), 2: tiny.spec(seed=2, loras=(CHALK,)), 3: tiny.spec(seed=3, loras=(INK,))}


def alone(family: StableDiffusion3, spec: Spec) -> np.ndarray:
    family.loras.use(spec.loras)
    return tiny.pixels(draw(family, spec))


@pytest.fixture
def bench(family: StableDiffusion3, files: Mapping[str, Path], tmp_path: Path) -> WorkerBench:
    """One on which all are encoded."""
    loras, _ = added(family, files, on_demand=False)
    bench = WorkerBench(family, tmp_path, loras=loras)
    for job_id, spec in SPECS.items():
        (report,) = bench.run(encode(100 + job_id, job_id, spec))
        assert isinstance(report, Ended), report
    return bench


def test_requests_with_different_loras_share_no_steps(bench: WorkerBench) -> None:
    (report,) = bench.run(steps(1, ((1, 0), (2, 0)), 4))
    assert isinstance(report, Failed)
    assert "requests with different LoRAs share work 1" in report.reason


def test_requests_with_equal_loras_share_steps(bench: WorkerBench) -> None:
    reports = bench.run(steps(1, ((1, 0), (3, 0)), 4))
    assert isinstance(reports[-1], Ended), reports[-1]


def test_requests_with_different_loras_share_a_decode_that_none_changes(
    bench: WorkerBench, family: StableDiffusion3
) -> None:
    bench.run(steps(1, ((1, 0),), 4), steps(2, ((2, 0),), 4))
    (report,) = bench.run(decode_all(3, {1: 4, 2: 4}))
    assert isinstance(report, Ended), report
    for job_id, image in report.images.items():
        expected = alone(family, SPECS[job_id]).astype(float)
        assert np.abs(tiny.pixels(image).astype(float) - expected).max() <= 1


def test_a_work_with_an_unknown_lora_fails_alone(bench: WorkerBench) -> None:
    (report,) = bench.run(encode(1, 9, tiny.spec(loras=(UsedLora("wax", 1.0),))))
    assert isinstance(report, Failed)
    assert "has no LoRA wax here" in report.reason
    reports = bench.run(steps(2, ((1, 0),), 4))
    assert isinstance(reports[-1], Ended)


def test_requests_in_turn_get_their_own_loras(bench: WorkerBench, family: StableDiffusion3) -> None:
    """Steps of one between those of another."""
    bench.run(steps(1, ((1, 0),), 2), steps(2, ((2, 0),), 3), steps(3, ((1, 2),), 2), steps(4, ((2, 3),), 1))
    with torch.no_grad():
        for work_id, job_id in ((5, 1), (6, 2)):
            (report,) = bench.run(decode_all(work_id, {job_id: 4}))
            assert isinstance(report, Ended), report
            (image,) = report.images.values()
            assert np.array_equal(tiny.pixels(image), alone(family, SPECS[job_id]))
