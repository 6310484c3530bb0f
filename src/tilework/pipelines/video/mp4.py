"""An MP4 of the frames of a clip and its sound, by PyAV. Only `export` imports this, when a video is made."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import av
import torch
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from torch import Tensor

from tilework.core.wire.spec import VideoCodec, VideoFormat
from tilework.pipelines.video.export import Sound

_MOST_DENOMINATOR = 1001  # 29.97 frames a second are 30000/1001.
_AAC = "aac"
_AAC_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 64_000, 88_200, 96_000)
_AAC_BITS = 96_000  # Per second and channel.
_LAYOUTS = {1: "mono", 2: "stereo"}
_ENCODERS: Mapping[VideoCodec, tuple[str, dict[str, str]]] = {
    VideoCodec.H264: ("libx264", {"preset": "veryfast", "crf": "18"}),
    VideoCodec.VP9: ("libvpx-vp9", {"crf": "24", "b": "0", "deadline": "realtime", "cpu-used": "6"}),
}
"""Encoder of each codec, at a quality with hardly a visible difference.

Rejected: libx265 and libsvtav1, as in PyAV 18. At small sizes the first ends the process, and the other hangs.
"""


def missing_encoders() -> tuple[str, ...]:
    """Return the names of encoders that the installed PyAV lacks."""
    return tuple(name for name in (*(encoder for encoder, _ in _ENCODERS.values()), _AAC) if not _has_encoder(name))


def _has_encoder(name: str) -> bool:
    try:
        return bool(av.Codec(name, "w").is_encoder)
    except av.codec.codec.UnknownCodecError:
        return False


def mp4(frames: Tensor, video: VideoFormat, sound: Sound | None) -> bytes:
    """See `export.video_file`."""
    with tempfile.TemporaryDirectory(prefix="tilework-video-") as directory:
        path = Path(directory) / "video.mp4"  # A container whose head moves to the front cannot be written to memory.
        with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            stream = _add_pictures(container, frames.shape[1], frames.shape[2], video)
            voice = None if sound is None else _add_sound(container, sound)
            for frame in frames.cpu().numpy():
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(
                    format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
                )
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
            if sound is not None and voice is not None:
                container.mux(voice.encode(_audio_frame(sound)))
                container.mux(voice.encode())
        return path.read_bytes()


def _add_pictures(container: OutputContainer, rows: int, columns: int, video: VideoFormat) -> VideoStream:
    encoder, options = _ENCODERS[video.codec]
    rate = Fraction(video.fps).limit_denominator(_MOST_DENOMINATOR)
    stream = container.add_stream(encoder, rate=rate, options=options)
    assert isinstance(stream, VideoStream)
    stream.height = rows
    stream.width = columns
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count = torch.get_num_threads()
    context.colorspace, context.color_primaries = Colorspace.ITU709, ColorPrimaries.BT709
    context.color_trc, context.color_range = ColorTrc.BT709, ColorRange.MPEG
    return stream


def _add_sound(container: OutputContainer, sound: Sound) -> AudioStream:
    """Add a stream at the rate of the sound; a rate that AAC does not know is raised to the next one that it knows."""
    rate = next((one for one in _AAC_RATES if one >= sound.rate), _AAC_RATES[-1])
    stream = container.add_stream(_AAC, rate=rate)
    assert isinstance(stream, AudioStream)
    stream.codec_context.layout = _LAYOUTS[len(sound.samples)]
    stream.bit_rate = _AAC_BITS * len(sound.samples)
    return stream


def _audio_frame(sound: Sound) -> av.AudioFrame:
    samples = sound.samples.clamp(-1, 1).contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[len(samples)])
    frame.sample_rate = sound.rate
    return frame
