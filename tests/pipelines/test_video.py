"""The file that the last stage makes of a clip's frames."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import DeviceKind
from tilework.core.model import ModelInfo, ModelSource, SimulatedSource
from tilework.core.wire.spec import File, Spec, VideoCodec, VideoFormat
from tilework.pipelines.errors import LibraryMissing, ModelError
from tilework.pipelines.video.export import EXPORT, EXPORT_WITH_SOUND, Sound, sound_values, video_file
from tilework.pipelines.video.exporter import Exporter, can_export, check_export
from tilework.pipelines.video.stills import thumbnail
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.process import _family as family_of_worker
from tilework.worker.simulated import SimulatedFamily

FRAMES, ROWS, COLUMNS = 7, 32, 48
NAMES = {VideoCodec.H264: "h264", VideoCodec.VP9: "vp9"}
INFO = ModelInfo(
    name="clips",
    family="fake",
    side_multiple=16,
    max_side=64,
    default_height=ROWS,
    default_width=COLUMNS,
    default_steps=4,
    default_guidance_scale=1.0,
    parameters=0,
    library="none",
    stages=(*latent_diffusion("").specs, EXPORT),
)

SPEC = Spec(
    prompt="",
    height=ROWS,
    width=COLUMNS,
    steps=4,
    guidance_scale=1.0,
    seed=0,
    frames=FRAMES,
    video=VideoFormat(8),
)


def clip(frames: int = FRAMES) -> torch.Tensor:
    """Flat colours, another one in each frame."""
    colours = torch.tensor([(200 - 20 * index, 40 + 25 * index, 128) for index in range(frames)], dtype=torch.uint8)
    return colours[:, None, None, :].expand(frames, ROWS, COLUMNS, 3)


def decoded(file: File) -> np.ndarray:
    with av.open(io.BytesIO(file.content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("codec", VideoCodec)
def test_a_video_has_all_frames_in_their_colours(codec: VideoCodec) -> None:
    file = video_file(clip(), VideoFormat(12, codec))
    assert file.media_type == "video/mp4"
    assert np.abs(decoded(file).astype(int) - clip().numpy()).max() <= 6, "a wrong matrix of colours is 15 levels off"
    with av.open(io.BytesIO(file.content)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == (NAMES[codec], 12, FRAMES)
        assert stream.codec_context.colorspace == 1, "players that are not told guess by the size"


@pytest.mark.parametrize("fps", [1.0, 7.5, 24000 / 1001, 29.97, 60.0])
def test_frame_rates(fps: float) -> None:
    with av.open(io.BytesIO(video_file(clip(5), VideoFormat(fps)).content)) as container:
        assert float(container.streams.video[0].average_rate or 0) == pytest.approx(fps, abs=1e-3)


def test_the_head_comes_first_and_the_same_frames_give_the_same_bytes() -> None:
    content = video_file(clip(), VideoFormat(12)).content
    assert content.index(b"moov") < content.index(b"mdat")
    assert video_file(clip(), VideoFormat(12)).content == content
    assert video_file(clip(1), VideoFormat(12)).content != content
    assert decoded(video_file(clip(1), VideoFormat(12))).shape == (1, ROWS, COLUMNS, 3)


def tone(rate: int, channels: int = 2, seconds: float = 0.5) -> Sound:
    """A falling tone, in each channel another one."""
    times = torch.arange(round(rate * seconds)) / rate
    falling = [
        0.5 * torch.sin(2 * torch.pi * (300 + 150 * channel) * times * (1.5 - times)) for channel in range(channels)
    ]
    return Sound(torch.stack(falling), rate)


def heard(file: File) -> tuple[np.ndarray, int]:
    """The samples of a file as its player hears them, (channels, samples), and their rate."""
    with av.open(io.BytesIO(file.content)) as container:
        (stream,) = container.streams.audio
        assert stream.codec_context.name == "aac"
        return np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1), stream.rate


def correlation(samples: np.ndarray, expected: np.ndarray) -> float:
    """Of one channel, at the best of the delays that an encoder of AAC may add."""
    delays = range(max(1, len(samples) - len(expected) + 1))
    return max(float(np.corrcoef(samples[at : at + len(expected)], expected)[0, 1]) for at in delays)


@pytest.mark.parametrize(("rate", "channels"), [(24000, 2), (16000, 2), (48000, 1)])
def test_a_video_has_its_sound(rate: int, channels: int) -> None:
    sound = tone(rate, channels)
    file = video_file(clip(), VideoFormat(14), sound)
    samples, found_rate = heard(file)
    assert (found_rate, len(samples)) == (rate, channels)
    assert 0 <= samples.shape[1] - sound.samples.shape[1] <= 2 * 1024, "AAC has frames of 1024 samples"
    for found, expected in zip(samples, sound.samples.numpy(), strict=True):
        assert correlation(found, expected) > 0.99
    assert np.abs(decoded(file).astype(int) - clip().numpy()).max() <= 6, "and its frames"
    assert file.content.index(b"moov") < file.content.index(b"mdat")


def test_a_rate_that_aac_does_not_know_is_raised() -> None:
    sound = tone(20000)
    samples, rate = heard(video_file(clip(), VideoFormat(14), sound))
    assert rate == 22050
    assert samples.shape[1] / rate == pytest.approx(0.5, abs=2 * 1024 / rate)


def test_without_sound_there_is_no_track() -> None:
    with av.open(io.BytesIO(video_file(clip(), VideoFormat(12)).content)) as container:
        assert not container.streams.audio


def test_a_slot_that_only_exports_needs_no_model() -> None:
    family = Exporter(INFO)
    (outputs,) = family.run(EXPORT.name, [SPEC], [{"picture": clip()}])
    assert family.file(SPEC, outputs) == video_file(clip(), VideoFormat(8))
    assert not family.modules
    sounding = Exporter(replace(INFO, stages=(*INFO.stages[:3], EXPORT_WITH_SOUND)))
    given = {"picture": clip(), **sound_values(tone(24000))}
    (outputs,) = sounding.run(EXPORT.name, [SPEC], [given])
    assert sounding.file(SPEC, outputs) == video_file(clip(), VideoFormat(8), tone(24000))
    others = tuple(replace(one, device_kind=DeviceKind.CPU) if one.name == "decode" else one for one in INFO.stages)
    plain = tuple(replace(one, degrees=(1,), batchable=False) for one in others if one.name == "decode")
    assert not can_export(replace(INFO, stages=(*INFO.stages[:2], *plain, EXPORT)))
    assert can_export(replace(INFO, stages=INFO.stages[:3])), "nothing runs on a slot"
    assert Graph("clips", INFO.stages).needs_slots


def test_a_slot_reads_no_model_that_it_only_exports_for(tmp_path: Path) -> None:
    nowhere, files = ModelSource(path="/nowhere"), SharedWeights(tmp_path)
    assert isinstance(family_of_worker(nowhere, INFO, files), Exporter)
    with pytest.raises(ModelError, match="/nowhere"):
        family_of_worker(nowhere, None, files)


def test_without_pyav_what_makes_videos_is_refused_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    check_export(replace(INFO, stages=INFO.stages[:3]))  # Pictures need none.
    refused = [lambda: check_export(INFO), lambda: video_file(clip(), VideoFormat(8)), lambda: thumbnail(b"")]
    for ask in refused:
        with pytest.raises(LibraryMissing, match=r"-m pip install .*\[serve\]"):
            ask()


@pytest.mark.slow
def test_all_that_serves_pictures_is_imported_without_pyav() -> None:
    names = (
        "tilework.cli.serving",
        "tilework.server.main",
        "tilework.worker.start.preload",
        "tilework.cli.commands.demo",
    )
    line = f"import sys; sys.modules['av'] = None; import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", line], check=True)


@pytest.mark.parametrize("makes_videos", [False, True])
def test_a_simulated_device_makes_clips_if_its_table_has_the_stage(makes_videos: bool) -> None:
    stages = INFO.stages if makes_videos else INFO.stages[:3]
    rows = tuple(
        CostRow(pipeline="clips", stage=one.name, height=side, width=side, frames=FRAMES, degree=1, seconds=0.0001)
        for one in stages
        for side in (32, 64)
    )
    family = SimulatedFamily(SimulatedSource(pipeline="clips", hardware="toy", steps=2, rows=rows, stages=stages))
    info = family.info
    expected = (FRAMES, FRAMES, 16.0) if makes_videos else (1, 1, 0.0)
    assert (info.default_frames, info.max_frames, info.default_fps) == expected
    if makes_videos:
        spec = replace(SPEC, height=64, width=64, video=VideoFormat(info.default_fps))
        (outputs,) = family.run(EXPORT.name, [spec], [{}])
        assert len(decoded(family.file(spec, outputs))) == FRAMES
        assert family.image(spec, outputs).frames == FRAMES
