"""The number of a video's frames, their rate, and how they are compressed."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.graph.stage import ResultKind
from tilework.core.model import ModelInfo
from tilework.core.wire.spec import VideoCodec, VideoFormat
from tilework.server.calls.errors import invalid
from tilework.server.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedVideo:
    """The wishes of a client about a video; None leaves the choice. `given_seconds` is `seconds` as it was given."""

    fps: float | None = None
    seconds: float | None = None
    given_seconds: object = None


def format_of(asked: AskedVideo, info: ModelInfo, config: ServerConfig) -> VideoFormat:
    """Return the format of a video.

    Raises:
        InvalidValue: the model makes no videos.
    """
    if not info.graph.makes(ResultKind.VIDEO):
        remedy = "It makes images: use POST /v1/images/generations, or name a model that makes clips, or no model."
        raise invalid("model", info.name, remedy, code="unsupported_value")
    fps = info.default_fps if asked.fps is None else asked.fps
    return VideoFormat(fps, VideoCodec(config.video_codec))


def num_frames_of(asked: AskedVideo, num_frames: int | None, info: ModelInfo) -> int | None:
    """Return the number of frames: as asked, or the legal one nearest to the seconds; None leaves it to the model.

    However short a video is, it has the fewest frames that the model makes of more than one.

    Raises:
        InvalidValue: both are given, or the model's longest clip is shorter.
    """
    if asked.seconds is None:
        return num_frames
    if num_frames is not None:
        raise invalid("seconds", asked.given_seconds, "num_frames is given as well: leave one of them out.")
    fps = info.default_fps if asked.fps is None else asked.fps
    multiple = info.frame_multiple
    wanted = asked.seconds * fps
    most = info.max_frames - (info.max_frames - 1) % multiple
    if wanted >= most + multiple / 2:
        longest = int(most / fps * 100) / 100
        remedy = f"{info.name} makes at most {most} frames, {longest:g} seconds at {fps:g} frames a second: give less."
        raise invalid("seconds", asked.given_seconds, remedy)
    return min(1 + multiple * max(1, int((wanted - 1) / multiple + 0.5)), most)
