"""The last stage of requests for a video: it compresses the frames of a clip, and its sound if it has any, into a file.

It needs no accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tilework.core.graph.stage import DeviceKind, ResultKind, StageSpec
from tilework.core.wire.spec import File, Spec, VideoFormat
from tilework.pipelines.family import Values
from tilework.pipelines.video.pyav import pyav

EXPORT = StageSpec(
    name="export",
    inputs=("picture",),
    outputs=("video",),
    device_kind=DeviceKind.CPU,
    result=ResultKind.VIDEO,
)
"""Stage that reads the output of a decode, (frames, rows, columns, 3) of 8 bits.

diffusers uses the name for a function.
"""
SOUND = "sound"
"""Name of the output of a decode beside the frames, if the model makes sound: see `sound_values`."""
EXPORT_WITH_SOUND = replace(EXPORT, inputs=(*EXPORT.inputs, SOUND))


@dataclass(frozen=True, slots=True)
class Sound:
    """The samples of each channel, (1 or 2, samples), from -1 to 1, with `rate` of them per second."""

    samples: Tensor
    rate: int


def video_file(frames: Tensor, video: VideoFormat, sound: Sound | None = None) -> File:
    """Return an MP4 of the frames, (frames, rows, columns, 3) of 8 bits with even sides, and of their sound as AAC.

    Its head comes first, so that a player can begin before it has everything. The same frames give the same bytes, with
    the same number of threads (`torch.get_num_threads`). Colours are those of BT.709, at half of the resolution.

    Raises:
        LibraryMissing: PyAV is not installed.
    """
    pyav()
    from tilework.pipelines.video.mp4 import mp4

    return File(mp4(frames, video, sound), "video/mp4")


def sound_values(sound: Sound) -> Values:
    """Return a sound in the form of a decode's outputs."""
    return {SOUND: {"samples": sound.samples, "rate": sound.rate}}


def exported(spec: Spec, values: Values) -> Values:
    """Return the outputs of the stage."""
    assert spec.video is not None, "the request is for pixels"
    (read,) = EXPORT.inputs
    (written,) = EXPORT.outputs
    sound = Sound(**values[SOUND]) if SOUND in values else None
    return {written: video_file(values[read], spec.video, sound)}


def exported_file(values: Values) -> File:
    """Return the file among the outputs of the stage."""
    (written,) = EXPORT.outputs
    file: File = values[written]
    return file
