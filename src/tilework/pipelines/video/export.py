"""The last stage of requests for a video: it compresses the frames of a clip into a file. It needs no accelerator."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import av
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from torch import Tensor

from tilework.core.graph.stage import DeviceKind, ResultKind, StageSpec
from tilework.core.wire import File, Spec, VideoCodec, VideoFormat
from tilework.pipelines.family import Values

EXPORT = StageSpec(
    name="export",
    inputs=("picture",),
    outputs=("video",),
    device_kind=DeviceKind.CPU,
    result=ResultKind.VIDEO,
)
"""It reads what a decode has written, (frames, rows, columns, 3) of 8 bits. diffusers has the name, as a function."""
_MOST_DENOMINATOR = 1001  # 29.97 frames a second are 30000/1001.
_ENCODERS: Mapping[VideoCodec, tuple[str, dict[str, str]]] = {
    VideoCodec.H264: ("libx264", {"preset": "veryfast", "crf": "18"}),
    VideoCodec.VP9: ("libvpx-vp9", {"crf": "24", "b": "0", "deadline": "realtime", "cpu-used": "6"}),
}
"""The encoder of each codec, and a quality at which hardly a difference can be seen.

Rejected: libx265 and libsvtav1, as PyAV 18 brings them. At small sizes the first ends the process, and the other hangs.
"""


def video_file(frames: Tensor, video: VideoFormat) -> File:
    """An MP4 of the frames, (frames, rows, columns, 3) of 8 bits, whose sides are even.

    Its head comes first, so that a player can begin before it has all. The same frames give the same bytes, with the
    same number of threads (`torch.get_num_threads`). Colours are those of BT.709, at half of the resolution.
    """
    _, rows, columns, _ = frames.shape
    encoder, options = _ENCODERS[video.codec]
    rate = Fraction(video.fps).limit_denominator(_MOST_DENOMINATOR)
    with tempfile.TemporaryDirectory(prefix="tilework-video-") as directory:
        path = Path(directory) / "video.mp4"  # A container whose head moves to the front cannot be written to memory.
        with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream(encoder, rate=rate, options=options)
            assert isinstance(stream, VideoStream)
            stream.height, stream.width, stream.pix_fmt = rows, columns, "yuv420p"
            context = stream.codec_context
            context.thread_count = torch.get_num_threads()
            context.colorspace, context.color_primaries = Colorspace.ITU709, ColorPrimaries.BT709
            context.color_trc, context.color_range = ColorTrc.BT709, ColorRange.MPEG
            for frame in frames.cpu().numpy():
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(
                    format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
                )
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        return File(path.read_bytes(), "video/mp4")


def exported(spec: Spec, values: Values) -> Values:
    """The outputs of the stage."""
    assert spec.video is not None, "the request is for pixels"
    (read,), (written,) = EXPORT.inputs, EXPORT.outputs
    return {written: video_file(values[read], spec.video)}


def exported_file(values: Values) -> File:
    """The file among the outputs of the stage."""
    (written,) = EXPORT.outputs
    file: File = values[written]
    return file
