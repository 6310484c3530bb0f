"""Workflows on worker processes: pictures equal those of their parts called in a row, whatever is lost on the way."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
import torch
from PIL import Image as Picture

import tilework
import tiny
from runtime.rig import PingPong, Rig, assert_nothing_is_left, kill
from tilework.control.log import replay
from tilework.core.actions import Reject
from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource
from tilework.core.request import Refusal, Shape, Status
from tilework.core.wire.spec import Spec, VideoFormat
from tilework.cost.table import CostTable, graphs_of, merged
from tilework.pipelines.draw import draw
from tilework.pipelines.loading import load
from tilework.pipelines.workflow.source import read_workflow
from tilework.policy import registry
from tilework.runtime.ticket import Outcome, Ticket
from tilework.worker.models.weights import KeptWeights
from waiting import until
from zoo.registry import ZOO, build

EXAMPLES = Path(__file__).parents[2] / "examples"
POSTER = f"{EXAMPLES}/poster.py:poster"
ORDER = ["long_prompt", "encode", "diffuse", "decode", "large", "checked"]
SLOT = (2,)
STUDIO = """
import numpy
import torch
from PIL import ImageChops, ImageOps

import tilework


def mirrored(picture):
    return ImageOps.mirror(picture)


@tilework.stage(batch=4)
class softened:
    def __init__(self):
        torch.manual_seed(1)
        self.blur = torch.nn.Conv2d(3, 3, 3, padding=1)

    def __call__(self, picture):
        stacked = torch.stack([torch.from_numpy(numpy.array(one)).permute(2, 0, 1) for one in picture])
        soft = torch.cat([self.blur(one[None] / 255) for one in stacked]).sigmoid() * 255
        return list(soft.permute(0, 2, 3, 1).to(torch.uint8))


@tilework.stage(returns=("light", "words"))
def read(mirrored, softened, prompt):
    if "fail" in prompt:
        raise RuntimeError("out of paint")
    return ImageChops.lighter(mirrored, softened), prompt


@tilework.stage(devices="cpu")
def framed(light, words):
    return ImageOps.expand(light, 8 * (1 + len(words) % 3))


studio = tilework.Workflow("studio", tilework.Pipeline("shapes"), read, mirrored, softened, framed)
simple = tilework.Workflow("simple", tilework.Pipeline("shapes"), softened)
"""


def costs_of(path: str, frames: int = 1) -> CostTable:
    """Made-up costs, so that nothing need be measured."""
    info = load(ModelSource(path=path)).info
    rows = [
        CostRow.of(
            (Shape(side, side, frames),) * num,
            pipeline=info.name,
            stage=stage.name,
            degree=degree,
            seconds=0.02 * num**0.2 / degree,
        )
        for stage in info.graph.stages
        for side in (32, 64, 128)
        for num, degree in ((1, 1), (2, 1), (4, 1), (1, 2))
        if (num == 1 or stage.spec.batchable) and (degree == 1 or stage.is_parallel)
    ]
    speeds = dict.fromkeys(LoadSource, 1e9)
    return CostTable(hardware="here", rows=tuple(rows), graphs=graphs_of(info.graph), load_bytes_per_s=speeds)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Rig]]:
    """Starts rigs with two devices and a CPU slot; all of them end with the module."""
    rigs: list[Rig] = []
    registry._GIVEN["ping-pong"] = PingPong

    def start(*paths: str, policy: str = "tilework", frames: int = 1, **options: int) -> Rig:
        tiny.prepare()
        costs = merged([costs_of(path, frames) for path in paths])
        sources = tuple(ModelSource(path=path) for path in paths)
        rigs.append(rig := Rig(sources, policy, costs=costs, **options))
        rig.start()
        return rig

    yield start
    for rig in rigs:
        rig.close()
    del registry._GIVEN["ping-pong"]


@pytest.fixture(scope="module")
def poster() -> Callable[[Spec], np.ndarray]:
    tiny.prepare()
    stock = tilework.reference("shapes")
    return lambda spec: np.asarray(tiny.poster(stock, POSTER, spec))


def specs_of(prefix: str, steps: int = 4) -> dict[str, Spec]:
    sizes, words = [(64, 64), (64, 96), (128, 64)], ("red circle", "green square", "yellow triangle")
    return {
        f"{prefix}{index}": tiny.spec(prompt=word, height=height, width=width, seed=index, steps=steps, exact=True)
        for index, ((height, width), word) in enumerate(zip(sizes, words, strict=True))
    }


def assert_posters(outcomes: list[Outcome], specs: dict[str, Spec], poster: Callable[[Spec], np.ndarray]) -> None:
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(tiny.pixels(outcome.image), poster(specs[outcome.uid])), f"{outcome.uid} differs"
        assert list(dict.fromkeys(segment.stage for segment in outcome.segments)) == ORDER
        on_slot = {segment.stage for segment in outcome.segments if segment.devices == SLOT}
        assert on_slot == {"long_prompt", "checked"}


@pytest.mark.slow
def test_pictures_equal_the_parts_in_a_row_while_they_move_after_every_step(
    start: Callable[..., Rig], poster: Callable[[Spec], np.ndarray]
) -> None:
    rig, specs = start(POSTER, policy="ping-pong"), specs_of("moved")
    assert_posters(rig.outcomes(specs), specs, poster)
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_requests_survive_the_loss_of_a_device_and_of_the_cpu_slot(
    start: Callable[..., Rig], poster: Callable[[Spec], np.ndarray], victim: int
) -> None:
    rig, specs = start(POSTER, policy="edf"), specs_of("lost", steps=16)

    async def scenario() -> list[Outcome]:
        tickets = [rig.submit(spec, uid) for uid, spec in specs.items()]
        await until(lambda: any(ticket.steps_done > 2 for ticket in tickets if isinstance(ticket, Ticket)))
        kill(rig, victim)
        return [await ticket.outcome for ticket in tickets if isinstance(ticket, Ticket)]

    outcomes = rig.run(scenario())
    assert len(outcomes) == len(specs)
    assert_posters(outcomes, specs, poster)
    assert_nothing_is_left(rig.engine)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Rig]) -> tuple[str, Rig]:
    file = tmp_path_factory.mktemp("studio") / "studio.py"
    file.write_text(STUDIO)
    path = f"{file}:studio"
    family = load(ModelSource(path=path))
    steps = family.info.graph.stage("diffuse").spec.components
    size = sum(KeptWeights.of(family.modules[name]).component.num_bytes for name in steps)
    return path, start(path, f"{file}:simple", weights_bytes=size)


@pytest.mark.slow
def test_branches_join_and_a_class_has_weights_that_are_loaded_and_dropped(studio: tuple[str, Rig]) -> None:
    path, rig = studio
    stock, functions = tilework.reference("shapes"), {one.name: one.make for one in read_workflow(path).functions}
    specs, soften = specs_of("joined"), functions["softened"]()
    for outcome in rig.outcomes(specs):
        assert outcome.status is Status.DONE, outcome.reason
        spec = specs[outcome.uid]
        picture = Picture.fromarray(tiny.run_stock(stock, spec, max_sequence_length=0).pixels)
        with torch.no_grad():
            (soft,) = soften([picture])
        mirrored, softened = functions["mirrored"](picture), Picture.fromarray(soft.numpy())
        expected = functions["framed"](*functions["read"](mirrored, softened, spec.prompt))
        assert outcome.image is not None
        assert np.array_equal(tiny.pixels(outcome.image), np.asarray(expected))
    assert any(segment.load_ns for outcome in rig.outcomes(specs_of("again")) for segment in outcome.segments)
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.slow
def test_workflows_share_the_weights_of_a_pipeline_and_of_a_class(studio: tuple[str, Rig]) -> None:
    path, rig = studio
    spec = tiny.spec(height=64, width=64, steps=2, exact=True)
    (outcome,) = rig.run(_outcomes_of(rig, "simple", {"one": spec}))
    stock, soften = tilework.reference("shapes"), read_workflow(path).functions[2].make()
    with torch.no_grad():
        (soft,) = soften([Picture.fromarray(tiny.run_stock(stock, spec, max_sequence_length=0).pixels)])
    assert outcome.image is not None
    assert np.array_equal(tiny.pixels(outcome.image), soft.numpy())
    costs = rig.engine._controller.costs
    needed = [
        {one for stage in costs.graph(name).stages for one in costs.weights.components(stage)}
        for name in ("studio", "simple")
    ]
    assert needed[0] == needed[1]
    assert len(needed[0]) > 4


async def _outcomes_of(rig: Rig, model: str, specs: dict[str, Spec]) -> list[Outcome]:
    tickets = rig.engine.submit(specs, model=model)
    assert not isinstance(tickets, Reject)
    return [await ticket.outcome for ticket in tickets]


@pytest.mark.slow
def test_requests_share_a_stage_with_a_batch(studio: tuple[str, Rig], start: Callable[..., Rig]) -> None:
    rig = start(studio[0], policy="tridentserve")
    specs = {f"shared{seed}": tiny.spec(height=64, width=64, seed=seed, steps=4) for seed in range(8)}
    outcomes = rig.outcomes(specs)
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    segments = [segment for outcome in outcomes for segment in outcome.segments]
    assert max(segment.batch for segment in segments if segment.stage == "softened") > 1


@pytest.mark.slow
def test_an_error_of_a_stage_fails_its_request_alone_and_names_the_stage(studio: tuple[str, Rig]) -> None:
    _, rig = studio
    specs = specs_of("others")
    failing = {"failing": replace(specs["others0"], prompt="fail")}
    failed, *others = rig.outcomes(failing | specs)
    assert (failed.status, {one.status for one in others}) == (Status.FAILED, {Status.DONE})
    assert "stage 'read' raises RuntimeError: out of paint" in failed.reason
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example, with a tiny model beside it."""
    tiny.prepare()
    folder = tmp_path_factory.mktemp("film")
    build(ZOO["wan21-image"]).save_pretrained(folder / "wan")
    shutil.copy(EXAMPLES / "film.py", folder)
    return f"{folder}/film.py:film"


@pytest.mark.slow
def test_the_picture_of_one_pipeline_begins_the_clip_of_another(film: str, start: Callable[..., Rig]) -> None:
    rig, spec = start(film, policy="ping-pong", frames=5), film_spec()
    pixels, file = rig.outcomes({"pixels": spec, "file": replace(spec, video=VideoFormat(8.0))})
    assert pixels.status is file.status is Status.DONE, pixels.reason + file.reason
    still = tiny.run_stock(tilework.reference("shapes"), spec, max_sequence_length=0).pixels
    clip = moved(tilework.reference(str(Path(film).parent / "wan")), still, spec)
    assert pixels.image is not None
    assert np.array_equal(np.frombuffer(pixels.image.pixels, np.uint8).reshape(clip.shape), clip)
    assert file.file is not None
    with av.open(io.BytesIO(file.file.content)) as container:
        assert len(list(container.decode(video=0))) == spec.frames
    assert file.segments[-1].devices == SLOT
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.slow
def test_several_devices_share_the_steps_of_both_pipelines(film: str, start: Callable[..., Rig]) -> None:
    rig = start(film, policy="fixed-sp2", frames=5)
    alone, spec = load(ModelSource(path=film)), replace(film_spec(), exact=False)
    (outcome,) = rig.outcomes({"shared": spec})
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    stages = {segment.stage for segment in outcome.segments if len(segment.devices) == 2}
    assert stages == {"still.diffuse", "wan.diffuse"}
    clips = [np.frombuffer(image.pixels, np.uint8).astype(int) for image in (outcome.image, draw(alone, spec))]
    assert np.abs(clips[0] - clips[1]).max() <= 2, "the same but for rounding"


def film_spec() -> Spec:
    return replace(tiny.spec(prompt="red circle", height=32, width=48, steps=3, seed=3, exact=True), frames=5)


def moved(stock: Any, still: np.ndarray, spec: Spec) -> np.ndarray:
    """What the pipeline of clips makes of a picture: 8 bits, as its own `export_to_video` would have them."""
    stock.set_progress_bar_config(disable=True)
    (clip,) = stock(
        image=Picture.fromarray(still),
        prompt=f"{spec.prompt}, moving slowly",
        height=spec.height,
        width=spec.width,
        num_frames=spec.frames,
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(spec.seed),
    ).frames
    return (clip * 255).round().astype(np.uint8)


@pytest.mark.slow
def test_a_refused_request_ends_once_with_the_reason(start: Callable[..., Rig]) -> None:
    rig = start(POSTER)
    specs = {"good": tiny.spec(steps=2), "bad": tiny.spec(prompt="a secret plan", steps=2)}
    good, bad = rig.outcomes(specs)
    assert (good.status, good.refusal) == (Status.DONE, None)
    assert (bad.status, bad.refusal) == (Status.CANCELLED, Refusal.CONTENT)
    assert bad.reason == "stage 'long_prompt' has refused it: the prompt asks for what is not drawn here"
    assert replay(rig.log.getvalue().splitlines())[1] is None
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)


@pytest.mark.slow
def test_a_server_serves_a_workflow_under_its_name() -> None:
    command = [sys.executable, "-m", "tilework", "serve", POSTER, "--port", "0", "--workers", "1", "--exact", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        client = openai.OpenAI(base_url=f"{json.loads(line)['url']}/v1", api_key="not needed", max_retries=0)
        assert [model.id for model in client.models.list()] == ["poster"]
        options = {"seed": 5, "num_inference_steps": 4, "slo_s": 60, "on_miss": "reject"}
        answer = client.images.generate(prompt="red circle", model="poster", size="128x64", extra_body=options)
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.generate(prompt="a secret plan", model="poster")
    finally:
        process.terminate()
        process.wait(30)
    assert answer.data is not None
    (picture,) = answer.data
    assert Picture.open(io.BytesIO(base64.b64decode(picture.b64_json or ""))).size == (256, 128)
    stages = [segment["stage"] for segment in picture.model_extra["tilework"]["segments"]]  # type: ignore[index]
    assert list(dict.fromkeys(stages)) == ORDER
    assert caught.value.code == "content_policy_violation"
    assert "stage 'long_prompt' has refused it: the prompt asks for what is not drawn here" in str(caught.value)
