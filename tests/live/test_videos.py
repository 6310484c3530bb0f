"""Videos of a real model: the last stage on a CPU slot makes a file of the frames that the pictures' route gives."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

import tiny
from runtime.rig import Rig, assert_nothing_is_left, kill
from tilework.control.log import replay
from tilework.core.component import LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.model import ModelSource, NewModel
from tilework.core.request import OnMiss, Status, Terms
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import File, Spec, VideoFormat
from tilework.cost.table import CostTable
from tilework.pipelines.video.export import EXPORT
from tilework.runtime.ticket import Outcome, Ticket, TicketPreview
from waiting import until
from zoo.registry import ZOO, build

pytestmark = pytest.mark.slow
FRAMES, FPS = 9, 12.5
SLOT = 2
STAGES = ["encode", "diffuse", "decode", EXPORT.name]
LEVELS = 4.0  # Of 255, on average: what is lost of clips that are noise, more or less.


NAME = "tiny-wan"
GRAPH = Graph(NAME, (*latent_diffusion("").specs, EXPORT))
ROWS = [
    CostRow(pipeline=NAME, stage=stage.name, height=side, width=side, frames=FRAMES, degree=1, seconds=seconds)
    for stage, seconds in zip(GRAPH.stages, (0.01, 0.05, 0.05, 0.02), strict=True)
    for side in (16, 64)
]
COSTS = CostTable(hardware="here", rows=tuple(ROWS), graphs={NAME: GRAPH})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    path = tmp_path_factory.mktemp("wan") / NAME
    build(ZOO["wan21"]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rig(directory: Path) -> Iterator[Rig]:
    rig = Rig(ModelSource(path=str(directory)), "tilework", costs=COSTS)
    rig.start()
    yield rig
    rig.close()


def spec_of(seed: int, **fields: object) -> Spec:
    spec = tiny.spec(height=32, width=48, seed=seed, steps=3)
    return replace(spec, frames=FRAMES, video=VideoFormat(FPS), **fields)  # type: ignore[arg-type]


def decoded(file: File) -> np.ndarray:
    """(frames, rows, columns, 3) of a video, whose head must come first."""
    assert file.media_type == "video/mp4"
    assert file.content.index(b"moov") < file.content.index(b"mdat")
    with av.open(io.BytesIO(file.content)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, float(stream.average_rate or 0)) == ("h264", "yuv420p", FPS)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])


def blocks(frames: np.ndarray) -> np.ndarray:
    """The means of 2 x 2 pixels: colours have half of the resolution in a video."""
    count, rows, columns, channels = frames.shape
    return frames.reshape(count, rows // 2, 2, columns // 2, 2, channels).mean(axis=(2, 4))


def frames_of(outcome: Outcome) -> np.ndarray:
    assert outcome.image is not None
    image = outcome.image
    return np.frombuffer(image.pixels, np.uint8).reshape(image.frames, image.height, image.width, 3)


def test_a_video_shows_the_frames_of_the_pictures_route(rig: Rig) -> None:
    video, pictures = rig.outcomes({"video": spec_of(7), "pictures": replace(spec_of(7), video=None)})
    assert (video.status, pictures.status) == (Status.DONE, Status.DONE), f"{video.reason} {pictures.reason}"
    assert video.image is None
    assert video.file is not None
    assert pictures.file is None
    found, expected = decoded(video.file), frames_of(pictures)
    assert found.shape == expected.shape == (FRAMES, 32, 48, 3)
    errors = np.abs(blocks(found)[:, None] - blocks(expected)[None]).mean(axis=(2, 3, 4))
    assert errors.argmin(axis=1).tolist() == list(range(FRAMES)), "each frame is in its place"
    assert errors.diagonal().max() < LEVELS
    assert [segment.stage for segment in pictures.segments if segment.stage != "diffuse"] == ["encode", "decode"]
    assert list(dict.fromkeys(segment.stage for segment in video.segments)) == STAGES
    assert [segment.devices for segment in video.segments if segment.stage == EXPORT.name] == [(SLOT,)]


def test_a_video_is_shown_while_it_is_made_and_stays_the_same(rig: Rig) -> None:
    async def scenario() -> tuple[list[TicketPreview], Outcome]:
        ticket = rig.submit(replace(spec_of(7), preview_every=1), "shown")
        assert isinstance(ticket, Ticket)
        shown: list[TicketPreview] = []
        ticket.watch(lambda: shown.append(ticket.preview) if ticket.preview not in [None, *shown] else None)
        return shown, await ticket.outcome

    shown, outcome = rig.run(scenario())
    assert [one.steps_done for one in shown] == [1, 2]
    assert {(one.image.height, one.image.width, one.image.frames) for one in shown} == {(32, 48, 5)}
    assert shown[0].image != shown[1].image
    assert outcome.file == rig.run(rig.outcome(spec_of(7), "not shown")).file


def test_promised_videos_are_on_time_and_the_log_replays(rig: Rig) -> None:
    async def scenario() -> list[Outcome]:
        deadline_ns = rig.engine.now_ns() + 50 * NS_PER_S
        terms = Terms(on_miss=OnMiss.REJECT)
        tickets = [
            rig.submit(spec_of(seed), f"promised{seed}", deadline_ns=deadline_ns, terms=terms) for seed in range(3)
        ]
        assert all(isinstance(ticket, Ticket) for ticket in tickets), "there is time enough"
        return [await ticket.outcome for ticket in tickets if isinstance(ticket, Ticket)]

    outcomes = rig.run(scenario())
    assert all(outcome.status is Status.DONE and outcome.file is not None for outcome in outcomes)
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


def test_a_video_survives_the_loss_of_the_slot(rig: Rig) -> None:
    async def scenario() -> Outcome:
        ticket = rig.submit(spec_of(1), "survivor")
        assert isinstance(ticket, Ticket)
        await until(lambda: ticket.steps_done > 0)
        kill(rig, SLOT)
        return await ticket.outcome

    outcome = rig.run(scenario())
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.file is not None
    again = rig.run(rig.outcome(spec_of(1), "again")).file
    assert again is not None
    assert again.content == outcome.file.content, "the same frames give the same bytes"


def test_a_model_that_is_added_gets_its_videos_from_the_slot_that_is_there(directory: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(directory, second)
    costs = replace(COSTS, load_bytes_per_s=dict.fromkeys(LoadSource, 1e9))
    rig = Rig(ModelSource(path=str(directory), name=NAME), "tilework", 1, costs=costs, weights_bytes=1 << 30)
    slot = 1

    async def video(uid: str) -> Outcome:
        ticket = rig.submit(spec_of(5), uid, model="second")
        assert isinstance(ticket, Ticket), ticket.reason
        return await ticket.outcome

    try:
        rig.start()
        rig.run(rig.engine.catalog.add(NewModel(path=str(second), name="second"), measure=False))
        first = rig.run(video("added"))
        assert first.status is Status.DONE, first.reason
        kill(rig, slot)
        again = rig.run(video("after the slot has started again"))
        assert again.file == first.file
        rig.run(rig.engine.catalog.remove("second"))
        assert list(rig.engine.models) == [NAME]
        assert rig.run(rig.outcome(spec_of(5), "the other")).status is Status.DONE
    finally:
        rig.close()
