"""Models and LoRAs that come and go while requests are served."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import tilework
import tiny
from loras import denoiser_of, save_lora, use_stock
from runtime.rig import Rig, assert_nothing_is_left
from tilework.control.log import replay
from tilework.core.actions import Reject
from tilework.core.lora import UsedLora
from tilework.core.model import LoraSource, ModelSource, NewModel
from tilework.core.request import OnMiss, Status, Terms
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import Spec
from tilework.cost.profiles import Profiles
from tilework.runtime.executor import ModelRefused
from tilework.runtime.models.costs import CostCache
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

ADAPTER = """
from tilework.pipelines.families.sd3 import StableDiffusion3

class WithoutComponents(StableDiffusion3):
    modules = {}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one architecture, a model of another, one without its denoiser, and a LoRA of the second."""
    tiny.prepare()
    root = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        pipeline = tiny.build_sd3()
        with torch.no_grad():
            for weight in denoiser_of(pipeline).parameters():
                weight.mul_(1.0 if name == "first" else 1.5)
        tiny.save(pipeline, root / name, name)
    tiny.save(tiny.build_sdxl(), root / "other", "other")
    shutil.copytree(root / "first", root / "broken")
    shutil.rmtree(root / "broken" / "transformer")
    save_lora(tiny.build_sd3(), root / "ink.safetensors", 1, text_encoder=True)
    return {path.stem: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def stock(places: dict[str, Path]) -> Callable[[str, Spec], np.ndarray]:
    def draw(name: str, spec: Spec) -> np.ndarray:
        pipeline = tilework.reference(str(places[name]))
        if spec.loras:
            use_stock(pipeline, {"ink": places["ink"]}, {one.name: one.scale for one in spec.loras})
        return tiny.run_stock(pipeline, spec).pixels

    return draw


@contextmanager
def serving(places: dict[str, Path], num_workers: int = 1) -> Iterator[Rig]:
    files = places["first"].rglob("*.safetensors")
    budget = int(1.7 * sum(file.stat().st_size for file in files))
    rig = Rig((ModelSource(path=str(places["first"]), name="first"),), "tilework", num_workers, weights_bytes=budget)
    rig.start()
    try:
        yield rig
        rig.wait_until_idle()
        assert_nothing_is_left(rig.engine)
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()


def source(places: dict[str, Path], name: str) -> NewModel:
    return NewModel(path=str(places[name]), name=name)


async def drawn(rig: Rig, model: str, spec: Spec) -> np.ndarray:
    ticket = rig.submit(spec, f"{model}-{spec.seed}-{len(rig.log.getvalue())}", model=model)
    assert not isinstance(ticket, Reject), ticket.reason
    outcome = await ticket.outcome
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    return tiny.pixels(outcome.image)


@pytest.mark.slow
def test_a_checkpoint_of_a_known_architecture_comes_and_goes(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> list[np.ndarray]:
            running = [drawn(rig, "first", tiny.spec(seed=seed, exact=True)) for seed in range(3)]
            beside = asyncio.gather(*running)
            await rig.engine.catalog.add(source(places, "second"), measure=False)
            pictures = [await drawn(rig, name, tiny.spec(exact=True)) for name in ("second", "first", "second")]
            await rig.engine.catalog.remove("second")
            assert list(rig.engine.models) == ["first"]
            return [*await beside, *pictures, await drawn(rig, "first", tiny.spec(exact=True))]

        pictures = rig.run(scenario())
        specs = [tiny.spec(seed=seed, exact=True) for seed in range(3)] + [tiny.spec(exact=True)] * 4
        names = ["first"] * 3 + ["second", "first", "second", "first"]
        for picture, name, spec in zip(pictures, names, specs, strict=True):
            assert np.array_equal(picture, stock(name, spec)), name


@pytest.mark.slow
def test_one_of_an_unknown_architecture_is_measured_if_that_is_allowed(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            with pytest.raises(ModelRefused, match="the cost of requests for other is not known here; set measure"):
                await rig.engine.catalog.add(source(places, "other"), measure=False)
            assert list(rig.engine.models) == ["first"]
            await rig.engine.catalog.add(source(places, "other"), measure=True)
            return await drawn(rig, "other", tiny.spec(exact=True))

        assert np.array_equal(rig.run(scenario()), stock("other", tiny.spec(exact=True)))


@pytest.mark.slow
def test_requests_are_served_and_promises_kept_while_a_model_is_measured(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places, num_workers=2) as rig:

        async def scenario() -> list[Outcome]:
            adding, outcomes = asyncio.ensure_future(rig.engine.catalog.add(source(places, "other"), measure=True)), []
            while not adding.done():
                number, promise = len(outcomes), Terms(on_miss=OnMiss.REJECT) if len(outcomes) % 2 else Terms()
                deadline_ns = rig.engine.now_ns() + 60 * NS_PER_S
                spec = tiny.spec(seed=number, exact=True)
                ticket = rig.submit(spec, f"r{number}", model="first", deadline_ns=deadline_ns, terms=promise)
                assert isinstance(ticket, Ticket), ticket
                outcomes.append(await ticket.outcome)
                assert outcomes[-1].finished_ns <= deadline_ns
            await adding
            return outcomes

        outcomes = rig.run(scenario())
        for number, outcome in enumerate(outcomes):
            assert outcome.status is Status.DONE, outcome.reason
            assert outcome.image is not None
            if number < 3:
                expected = stock("first", tiny.spec(seed=number, exact=True))
                assert np.array_equal(tiny.pixels(outcome.image), expected)
        (added,) = (line for line in rig.log.getvalue().splitlines() if '"ModelServed"' in line)
        degrees = {row.get("degree", 1) for row in json.loads(json.loads(added)["event"]["costs"])["rows"]}
        assert degrees == {1, 2}
        assert '"is":"Measure"' in rig.log.getvalue()
        assert len(outcomes) > 3
        assert np.array_equal(
            rig.run(drawn(rig, "other", tiny.spec(exact=True))), stock("other", tiny.spec(exact=True))
        )


@pytest.mark.slow
def test_a_change_that_is_cancelled_while_it_measures_leaves_nothing(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            adding = asyncio.ensure_future(rig.engine.catalog.add(source(places, "other"), measure=True))
            await until(lambda: rig.engine._dispatcher.turns.devices)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            assert list(rig.engine.models) == ["first"]
            assert not rig.engine._dispatcher.turns.devices
            assert rig.engine._controller.tracker.devices[0].works == []
            await rig.engine.catalog.add(source(places, "other"), measure=True)
            return await drawn(rig, "other", tiny.spec(exact=True))

        assert np.array_equal(rig.run(scenario()), stock("other", tiny.spec(exact=True)))


@pytest.mark.slow
def test_a_model_is_added_to_a_server_whose_stages_have_no_weights(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How fast weights are loaded is measured with the model, also if its steps are known."""
    (tmp_path / "adapter_without.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    first = ModelSource(path=str(places["first"]), adapter="adapter_without:WithoutComponents")
    cache, is_known = CostCache(Profiles(tmp_path / "costs.sqlite")), False
    for _ in range(2):
        rig = Rig((first,), "tilework", 1, weights_bytes=1 << 26, cache=cache)
        rig.start()

        async def scenario(rig: Rig = rig, is_known: bool = is_known) -> np.ndarray:
            what = "the speed of loading weights" if is_known else "the cost of requests for other"
            with pytest.raises(ModelRefused, match=f"{what} is not known here; set measure"):
                await rig.engine.catalog.add(source(places, "other"), measure=False)
            await rig.engine.catalog.add(source(places, "other"), measure=True)
            return await drawn(rig, "other", tiny.spec(exact=True))

        assert np.array_equal(rig.run(scenario()), stock("other", tiny.spec(exact=True)))
        log = rig.log.getvalue().splitlines()
        (served,) = (json.loads(line) for line in log if '"ModelServed"' in line)
        assert json.loads(served["event"]["costs"])["load_bytes_per_s"].keys() == {"disk", "host"}
        assert replay(log)[1] is None
        rig.close()
        is_known = True


@pytest.mark.slow
def test_a_broken_model_is_refused_and_disturbs_nobody(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            running = asyncio.ensure_future(drawn(rig, "first", tiny.spec(exact=True)))
            with pytest.raises(ModelRefused, match="transformer"):
                await rig.engine.catalog.add(source(places, "broken"), measure=True)
            with pytest.raises(ModelRefused, match="first is served already"):
                await rig.engine.catalog.add(source(places, "first"), measure=True)
            with pytest.raises(ModelRefused, match="first is the only model"):
                await rig.engine.catalog.remove("first")
            return await running

        assert np.array_equal(rig.run(scenario()), stock("first", tiny.spec(exact=True)))


@pytest.mark.slow
def test_loras_come_and_go(places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]) -> None:
    with_ink = tiny.spec(exact=True, loras=(UsedLora("ink", 0.8),))
    with serving(places) as rig:

        async def scenario() -> list[np.ndarray]:
            catalog = rig.engine.catalog
            with pytest.raises(ModelRefused, match="is no file"):
                await catalog.add_lora("first", LoraSource("ink", str(places["first"])))
            await catalog.add_lora("first", LoraSource("ink", str(places["ink"])))
            with pytest.raises(ModelRefused, match="has a LoRA ink already"):
                await catalog.add_lora("first", LoraSource("ink", str(places["ink"])))
            assert rig.engine.models["first"].loras == ("ink",)
            pictures = [await drawn(rig, "first", spec) for spec in (with_ink, tiny.spec(exact=True))]
            await catalog.remove_lora("first", "ink")
            assert rig.engine.models["first"].loras == ()
            refused = rig.submit(with_ink, "late", model="first")
            assert isinstance(refused, Reject)
            return pictures

        pictures = rig.run(scenario())
        for picture, spec in zip(pictures, (with_ink, tiny.spec(exact=True)), strict=True):
            assert np.array_equal(picture, stock("first", spec))


@pytest.mark.slow
def test_a_worker_that_is_lost_while_a_model_is_measured_costs_that_model_alone(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            adding = asyncio.ensure_future(rig.engine.catalog.add(source(places, "other"), measure=True))
            await until(lambda: rig.engine._dispatcher.turns.devices)
            os.kill(rig.executor.pids.get("0") or 0, signal.SIGKILL)
            with pytest.raises(ModelRefused, match="a worker was lost while other was measured"):
                await adding
            assert list(rig.engine.models) == ["first"]
            return await drawn(rig, "first", tiny.spec(exact=True))

        assert np.array_equal(rig.run(scenario()), stock("first", tiny.spec(exact=True)))


@pytest.mark.slow
def test_a_name_that_the_model_itself_brings_is_checked_as_well(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray], tmp_path: Path
) -> None:
    shutil.copytree(places["second"], tmp_path / "second")
    tiny.write_defaults(tmp_path / "second", name="first")
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            with pytest.raises(ModelRefused, match="first is served already"):
                await rig.engine.catalog.add(NewModel(path=str(tmp_path / "second")), measure=True)
            return await drawn(rig, "first", tiny.spec(exact=True))

        assert np.array_equal(rig.run(scenario()), stock("first", tiny.spec(exact=True)))


@pytest.mark.slow
def test_a_worker_that_is_started_again_serves_what_was_added(
    places: dict[str, Path], stock: Callable[[str, Spec], np.ndarray]
) -> None:
    with serving(places) as rig:

        async def scenario() -> np.ndarray:
            await rig.engine.catalog.add(source(places, "second"), measure=False)
            await rig.engine.catalog.add_lora("second", LoraSource("ink", str(places["ink"])))
            os.kill(rig.executor.pids.get("0") or 0, signal.SIGKILL)
            return await drawn(rig, "second", tiny.spec(exact=True, loras=(UsedLora("ink", 1.0),)))

        expected = stock("second", tiny.spec(exact=True, loras=(UsedLora("ink", 1.0),)))
        assert np.array_equal(rig.run(scenario()), expected)


@pytest.mark.slow
def test_without_a_limit_of_weights_nothing_comes_or_goes(places: dict[str, Path]) -> None:
    rig = Rig((ModelSource(path=str(places["first"]), name="first"),), "tilework", 1)
    rig.start()
    try:
        with pytest.raises(ModelRefused, match="start the server with --weights-memory"):
            rig.run(rig.engine.catalog.add(source(places, "second"), measure=False))
    finally:
        rig.close()
