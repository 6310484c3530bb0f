"""Previews: when they come, that they show what the picture becomes, and that they change nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from commands import MODEL, decode, encode, import_state, steps
from quick import quick_rows
from ranks import Ranks
from stages import DECODE, DIFFUSE
from tilework.comm.groups import Groups
from tilework.core import preview
from tilework.core.comm import Comm
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.preview import preview_shape, shown_frames
from tilework.core.request import Shape
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, Execute, GroupRef
from tilework.core.wire.reports import Ended, Ending, Preview, Progress, Report
from tilework.core.wire.spec import Image
from tilework.pipelines.families.flux import Flux
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.families.sdxl import StableDiffusionXL
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load
from tilework.worker import simulated as modelled
from tilework.worker.models.models import Models
from tilework.worker.simulated import SimulatedFamily
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker
from tilework.worker.works import OpenWorks

JOB = 5
TEXT = {"max_sequence_length": tiny.TEXT_LENGTH}
FAMILIES: dict[str, Callable[[], Family]] = {
    "sd3": lambda: StableDiffusion3(tiny.build_sd3(max_side=512), "tiny", TEXT, ""),
    "sd3-heun": lambda: StableDiffusion3(tiny.build_sd3("heun"), "tiny", TEXT, ""),
    "flux": lambda: Flux(tiny.build_flux(), "tiny", TEXT, ""),
    "sdxl": lambda: StableDiffusionXL(tiny.build_sdxl(), "tiny", {}, ""),
    "sdxl-noisy": lambda: StableDiffusionXL(tiny.build_sdxl("sdxl-ancestral"), "tiny", {}, ""),
    "shapes": lambda: load(ModelSource(path="shapes")),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


@cache
def family(name: str) -> Family:
    return FAMILIES[name]()


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    tiny.prepare()


class Bench:
    """A worker and the reports that it has made."""

    def __init__(self, model: Family, directory: Path, groups: Any = None) -> None:
        self.reports: list[Report] = []
        self._works = OpenWorks()
        self._worker = Worker(
            Models({MODEL: model}, torch.device("cpu")),
            self._works,
            groups or Groups(0, ""),
            StateBlobs(directory, 0),
            self.reports.append,
        )

    def run(self, *commands: Command) -> list[Report]:
        known = len(self.reports)
        for command in commands:
            if isinstance(command, Execute):
                self._works.open(command.work_id, dict(command.members))
            self._worker.execute(command)
        return self.reports[known:]

    def blob(self) -> StateBlob | None:
        """What the latest work has put down."""
        ended = self.reports[-1]
        assert isinstance(ended, Ended), ended
        return ended.blobs.get(JOB)

    @property
    def previews(self) -> list[Preview]:
        return [report for report in self.reports if isinstance(report, Preview)]

    @property
    def picture(self) -> Image:
        ended = self.reports[-1]
        assert isinstance(ended, Ended), ended
        return ended.images[JOB]


def draw(model: Family, directory: Path, **changes: Any) -> Bench:
    """A whole request in one chunk."""
    bench, spec = Bench(model, directory), tiny.spec(**changes)
    bench.run(encode(1, JOB, spec), steps(2, ((JOB, 0),), 99), decode(3, JOB, spec.steps))
    return bench


# How large.


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(64, 64), Shape(64, 64)),
        (Shape(256, 120), Shape(256, 120)),
        (Shape(1024, 1024), Shape(256, 256)),
        (Shape(768, 1360), Shape(144, 256)),
        (Shape(272, 256), Shape(256, 240)),
        (Shape(4096, 64), Shape(256, 16)),
        (Shape(8, 2048), Shape(8, 256)),
        (Shape(480, 832, 81), Shape(144, 256, 17)),
        (Shape(64, 64, 9), Shape(64, 64, 9)),
    ],
    ids=str,
)
def test_the_size_of_a_preview(shape: Shape, expected: Shape) -> None:
    assert preview_shape(shape) == expected
    turned = Shape(shape.width, shape.height, shape.frames)
    assert preview_shape(turned) == Shape(expected.width, expected.height, expected.frames)


def test_the_frames_of_a_preview_are_spread_over_the_clip() -> None:
    assert [shown_frames(num) for num in (1, 4, 5, 6, 17)] == [
        [0],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 4, 5],
        [0, 4, 8, 12, 16],
    ]


def test_a_preview_of_any_picture_is_small_and_has_its_proportions() -> None:
    for height in range(16, 2049, 48):
        for width in range(16, 2049, 16):
            small = preview_shape(Shape(height, width))
            assert small.height <= height
            assert small.width <= width
            assert max(small.height, small.width) == min(256, max(height, width))
            shrink = max(height, width) / max(small.height, small.width)
            for side, whole in ((small.height, height), (small.width, width)):
                assert abs(side - whole / shrink) <= 8 or side == 16
                assert side % 16 == 0


@every_family
def test_a_preview_is_as_large_as_it_was_said_to_be(name: str) -> None:
    model = family(name)
    multiple = model.info.side_multiple
    largest = min(512, model.info.max_side)
    for height, width in ((largest, largest), (largest, 3 * multiple), (multiple, largest), (multiple, 2 * multiple)):
        state = tiny.begin(model, tiny.spec(height=height, width=width))
        image = model.preview(state, torch.zeros_like(state.latents))
        expected = preview_shape(Shape(height, width))
        assert (image.height, image.width) == (expected.height, expected.width)
        assert len(image.pixels) == image.height * image.width * 3


# What it shows.


def distance(image: Image, final: Image) -> float:
    """Root mean square of what differs, after shrinking `final`, which must be a whole number of times as large."""
    factor = final.height // image.height
    large = tiny.pixels(final).astype(float)
    small = large.reshape(image.height, factor, image.width, factor, 3).mean(axis=(1, 3))
    return float(np.sqrt(np.mean((tiny.pixels(image) - small) ** 2)))


@pytest.mark.parametrize(
    ("sampler", "height", "width", "largest"),
    quick_rows(
        [("heun", 128, 128, 256)],
        [("euler", 128, 128, 256), ("heun", 128, 128, 256), ("dpm", 128, 128, 256), ("euler", 128, 192, 96)],
    ),
)
def test_previews_come_to_resemble_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, height: int, width: int, largest: int
) -> None:
    monkeypatch.setattr(preview, "PREVIEW_SIDE", largest)
    model = load(tiny.shapes_with_sampler(tmp_path / "model", sampler))
    bench = draw(model, tmp_path, height=height, width=width, steps=8, preview_every=1)
    distances = [distance(one.image, bench.picture) for one in bench.previews]
    assert len(distances) == 7
    assert distances[-1] < 0.4 * distances[0]
    assert distances[3] < 0.5 * distance(noisy(model, height, width, 4), bench.picture), "it shows the noise"


def noisy(model: Family, height: int, width: int, num_steps: int) -> Image:
    """The latents after so many of eight steps, decoded as they are."""
    state = tiny.begin(model, tiny.spec(height=height, width=width, steps=8))
    while state.steps_done < num_steps:
        tiny.iterate(model, state)
    return tiny.decode(model, state)


@every_family
def test_the_last_prediction_is_the_picture(name: str) -> None:
    """Every sampler here ends with what the model last believed in."""
    model = family(name)
    state = tiny.begin(model, tiny.spec(height=64, width=96))
    while state.steps_done < state.spec.steps:
        prediction = model.predict([state])[0]
        image = model.preview(state, prediction)
        model.advance(state, prediction)
    last, picture = (tiny.pixels(one).astype(int) for one in (image, tiny.decode(model, state)))
    assert np.abs(last - picture).max() <= 1
    assert picture.std() > 10, "a flat picture would prove nothing"


# When they come, and what they leave alone.


def chunks(*first_steps: int) -> list[Execute]:
    """Works from 10 on that begin at these steps, the last of which is the end."""
    return [steps(10 + index, ((JOB, first),), end - first) for index, (first, end) in enumerate(pairwise(first_steps))]


def told(reports: list[Report]) -> list[tuple[str, int, int]]:
    """What was said of denoising: kind, work and steps."""
    return [
        (type(report).__name__, report.work_id, report.steps_done)
        for report in reports
        if isinstance(report, Preview | Progress | Ended) and report.work_id >= 10
    ]


@every_family
def test_the_preview_interval_spans_chunks(name: str, tmp_path: Path) -> None:
    """Every second step of seven, also at the end of a chunk and at the beginning of one, and not at the last."""
    bench = Bench(family(name), tmp_path)
    reports = bench.run(encode(1, JOB, tiny.spec(steps=7, preview_every=2)), *chunks(0, 2, 3, 6, 7))
    assert told(reports) == [
        ("Progress", 10, 1),
        ("Preview", 10, 2),
        ("Ended", 10, 2),
        ("Ended", 11, 1),
        ("Preview", 12, 1),
        ("Progress", 12, 1),
        ("Progress", 12, 2),
        ("Preview", 12, 3),
        ("Ended", 12, 3),
        ("Ended", 13, 1),
    ]
    assert len({one.image.pixels for one in bench.previews}) == 3


def test_the_last_step_has_no_preview_even_if_one_were_due(tmp_path: Path) -> None:
    for every, expected in ((1, [1, 2, 3]), (2, [2]), (4, []), (9, [])):
        bench = draw(family("sd3"), tmp_path, preview_every=every)
        assert [one.steps_done for one in bench.previews] == expected


@every_family
def test_the_preview_interval_moves_with_the_job(name: str, tmp_path: Path) -> None:
    spec = tiny.spec(steps=6, preview_every=2)
    staying = draw(family(name), tmp_path, steps=6, preview_every=2)
    here, there = Bench(family(name), tmp_path), Bench(family(name), tmp_path)
    here.run(encode(1, JOB, spec))
    conditioning = here.blob()
    here.run(steps(2, ((JOB, 0),), 3))
    there.run(import_state(JOB, spec, 3, conditioning, here.blob()), steps(3, ((JOB, 3),), 3), decode(4, JOB, 6))
    assert [one.steps_done for one in here.previews] == [2]
    assert [one.steps_done for one in there.previews] == [1]
    assert [one.image for one in (*here.previews, *there.previews)] == [one.image for one in staying.previews]
    assert there.picture == staying.picture


@every_family
def test_the_picture_is_the_same_with_and_without(name: str, tmp_path: Path) -> None:
    with_previews, without = (draw(family(name), tmp_path, preview_every=every) for every in (1, 0))
    assert (len(with_previews.previews), len(without.previews)) == (3, 0)
    assert with_previews.picture == without.picture


def test_without_previews_none_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LatentState] = []
    monkeypatch.setattr(family("sd3"), "preview", lambda state, prediction: asked.append(state))
    draw(family("sd3"), tmp_path)
    assert not asked
    draw(family("sd3"), tmp_path, preview_every=2)
    assert len(asked) == 1


def test_a_preview_that_fails_does_not_fail_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = family("sd3"), draw(family("sd3"), tmp_path).picture
    num_calls = 0

    def fail_first(state: LatentState, prediction: Tensor) -> Image:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise torch.OutOfMemoryError("no room")
        return type(model).preview(model, state, prediction)

    monkeypatch.setattr(model, "preview", fail_first)
    bench = Bench(model, tmp_path)
    with caplog.at_level(logging.WARNING, "tilework"):
        bench.run(encode(1, JOB, tiny.spec(preview_every=1)), *chunks(0, 2, 4), decode(3, JOB))
    assert [(one.work_id, one.steps_done) for one in bench.previews] == [(11, 1)], "the next work tries again"
    assert [record.getMessage() for record in caplog.records] == [
        f"work 10 continues without previews of job {JOB}: one failed"
    ]
    assert bench.picture == expected


# In a group.


class Joined:
    """Groups that have formed already."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def open(self, ref: GroupRef) -> Comm:
        return self._comm

    def break_off(self, group_id: int) -> None:
        self._comm.abort()

    def rest(self) -> None: ...


def draw_together(comm: Comm, name: str, directory: Path, every: int) -> tuple[list[Report], bytes]:
    """On each rank: the whole request in two chunks of the group; what was reported, and the picture."""
    bench = Bench(family(name), directory, Joined(comm))
    ref = GroupRef(1, tuple(range(comm.size)))
    bench.run(encode(1, JOB, tiny.spec(preview_every=every)))
    reports = bench.run(steps(10, ((JOB, 0),), 2, ref), steps(11, ((JOB, 2),), 2, ref))
    bench.run(decode(3, JOB))
    return reports, bench.picture.pixels


def break_in_preview(comm: Comm, directory: Path) -> list[Report]:
    """On each rank: the same, but the group breaks off while its leader draws the first preview."""
    model = family("sd3")
    groups = Joined(comm)
    bench = Bench(model, directory, groups)
    bench.run(encode(1, JOB, tiny.spec(preview_every=1)))

    def draw_and_break(state: LatentState, prediction: Tensor) -> Image:
        groups.break_off(1)  # As the thread does that receives commands.
        return type(model).preview(model, state, prediction)

    model.preview = draw_and_break  # type: ignore[method-assign]
    try:
        return bench.run(steps(10, ((JOB, 0),), 4, GroupRef(1, (0, 1))))
    finally:
        del model.preview


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl-noisy"])
def test_in_a_group_the_first_draws_and_nothing_changes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    (leader, drawn), (follower, _) = ranks.run(2, draw_together, name, tmp_path, 1)
    assert told(leader) == [
        ("Preview", 10, 1),
        ("Progress", 10, 1),
        ("Preview", 10, 2),
        ("Ended", 10, 2),
        ("Preview", 11, 1),
        ("Progress", 11, 1),
        ("Ended", 11, 2),
    ]
    assert told(follower) == [("Ended", 10, 2), ("Ended", 11, 2)]
    without = ranks.run(2, draw_together, name, tmp_path, 0)
    assert [pixels for _, pixels in without] == [drawn, drawn]


def test_a_group_that_breaks_while_its_leader_draws_does_not_wait(ranks: Ranks, tmp_path: Path) -> None:
    leader, follower = ranks.run(2, break_in_preview, tmp_path)
    assert told(leader) == [("Preview", 10, 1), ("Progress", 10, 1), ("Ended", 10, 1)]
    assert told(follower) == [("Ended", 10, 1)]
    for ended in (leader[-1], follower[-1]):
        assert isinstance(ended, Ended)
        assert ended.ending is Ending.BROKEN
        assert ended.blobs


# Pretended.


STEP_NS, DECODE_NS = 10_000_000, 4_000_000
ROWS = tuple(
    CostRow(
        pipeline="pretended", stage=stage, height=side, width=side, degree=degree, seconds=ns / 1e9 * (side / 256) ** 2
    )
    for side in (256, 1024)
    for stage, degree, ns in ((DIFFUSE, 1, STEP_NS), (DIFFUSE, 2, STEP_NS), (DECODE, 1, DECODE_NS))
)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**15
        fake = SimpleNamespace(monotonic_ns=lambda: self.now_ns, sleep=self._sleep)
        monkeypatch.setattr(modelled, "time", fake)

    def _sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class SlowLeader:
    """A group of two of which this is the second; the first one's step ends `delay_ns` later than this one's."""

    rank, size = 1, 2

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns = delay_ns

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        output.view(2, -1)[:] = source
        output[0] += self._delay_ns


@pytest.fixture
def pretended() -> SimulatedFamily:
    return SimulatedFamily(SimulatedSource(pipeline="pretended", hardware="none", steps=4, rows=ROWS))


def test_a_modelled_preview_takes_as_long_as_a_decode_of_its_size(
    pretended: SimulatedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    bench = Bench(pretended, tmp_path)
    for every, expected_ns in ((0, 4 * 16 * STEP_NS), (1, 4 * 16 * STEP_NS + 3 * DECODE_NS)):
        bench.run(encode(1, JOB, tiny.spec(height=1024, width=1024, preview_every=every)))
        start_ns = clock.now_ns
        bench.run(steps(2, ((JOB, 0),), 4))
        assert clock.now_ns - start_ns == pytest.approx(expected_ns, abs=10)
    bench.run(decode(3, JOB))
    for one in bench.previews:
        assert (one.image.height, one.image.width) == (256, 256)
        assert one.image.pixels == bench.picture.pixels[: 256 * 256 * 3], "the colour of the picture"


def test_in_a_modelled_group_all_wait_for_the_one_that_draws(
    pretended: SimulatedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    state = tiny.begin(pretended, tiny.spec(height=256, width=256))
    pretended.parallel.join(SlowLeader(DECODE_NS), guided=False)  # type: ignore[arg-type]
    for num_steps in (1, 2, 3):
        pretended.step([state])
        assert clock.now_ns == 10**15 + num_steps * (STEP_NS + DECODE_NS)
