"""The contents of a request, and of its result: images, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pickle import PickleBuffer
from typing import SupportsIndex

from tilework.core.cache import CacheChoice
from tilework.core.graph.stage import ResultKind
from tilework.core.lora import UsedLora
from tilework.core.model import ArgumentValue
from tilework.core.request import Shape
from tilework.core.wire.ranges import Name


@dataclass(frozen=True, slots=True)
class Image:
    """Pixels of an image: RGB, 8 bits, row by row. Those of a clip's `frames` follow each other.

    Where they are pickled beside the image, not into it, they are not copied, and arrive as a memoryview. The type does
    not say so, since pydantic, which reads images from the journal, has no type for it.
    """

    height: int
    width: int
    pixels: bytes = field(repr=False)
    frames: int = 1

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Image], tuple[int, int, object, int]]:
        pixels = PickleBuffer(self.pixels) if int(protocol) >= 5 else bytes(self.pixels)
        return Image, (self.height, self.width, pixels, self.frames)


@dataclass(frozen=True, slots=True)
class File:
    """A result as a file."""

    content: bytes = field(repr=False)
    media_type: Name


class VideoCodec(StrEnum):
    """Compression of the frames of a video. Its file is an MP4 in any case."""

    H264 = "h264"
    VP9 = "vp9"


@dataclass(frozen=True, slots=True)
class VideoFormat:
    """Format of a clip as a video, with `fps` frames a second."""

    fps: float
    codec: VideoCodec = VideoCodec.H264


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The part of a request that a worker needs to draw it. The scheduler never sees prompts.

    After every `preview_every` denoising steps, but not after the last one, the client gets a preview; 0: never.
    Previews cost time and leave the image unchanged. `arguments` are those of `ModelInfo.arguments` that the client
    gave, by name, and `pictures` those of `ModelInfo.pictures`. A clip has `frames`. `loras` are used in this order.

    Without a `negative_prompt` the stock call gets none; many models then draw otherwise than for an empty one.

    With a `video` format the result is a file, else pixels.

    `steps` are made. `whole_steps` is the number that the stock call gets; None: the same number. It is larger where
    the denoising of a given picture begins in the middle (see `core.model.StrengthRule`).

    A worker refuses works that would run the steps of an `exact` spec in a group or together with others, or slice its
    decode: see `core.request.Request`.

    Without a `cache` each step is computed whole. `spare_cache`: see `core.request.Request`.

    The server has checked the values against `ModelInfo`.
    """

    prompt: str
    negative_prompt: str | None = None
    height: int
    width: int
    steps: int
    guidance_scale: float
    seed: int
    preview_every: int = 0
    exact: bool = False
    frames: int = 1
    whole_steps: int | None = None
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict, hash=False)
    pictures: Mapping[str, tuple[Image, ...]] = field(default_factory=dict, hash=False)
    loras: tuple[UsedLora, ...] = ()
    video: VideoFormat | None = None
    cache: CacheChoice | None = None
    spare_cache: CacheChoice | None = None

    @property
    def with_spare_cache(self) -> Spec:
        """Same spec, with its spare cache as the cache of its steps."""
        return self if self.spare_cache is None else replace(self, cache=self.spare_cache, spare_cache=None)

    @property
    def shape(self) -> Shape:
        return Shape(self.height, self.width, self.frames)

    @property
    def result(self) -> ResultKind:
        return ResultKind.PIXELS if self.video is None else ResultKind.VIDEO
