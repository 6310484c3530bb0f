"""A stand-in for a decoded clip in a stock call, which passes it to its processor to make images of it.

Rejected: cutting the stock call off at its decode, since what comes behind it differs by class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from tilework.core.comm import Comm
from tilework.pipelines.clips.decoders import Decoder, decoder_of
from tilework.pipelines.clips.decoding import decode

_PROCESSOR = "video_processor"
_WRAPPED = "return_dict"


class Undecoded:
    """The clip that a call of an autoencoder's `decode` asks for. `is_open` until its pixels are made.

    A stock call that does anything else with it raises an error, since it has no other methods.
    """

    def __init__(
        self, vae: Any, decoder: Decoder, comm: Comm | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._vae = vae
        self._comm = comm
        self._decoder = decoder
        self._args = args
        self._kwargs = {name: value for name, value in kwargs.items() if name != _WRAPPED}
        self._is_wrapped = bool(kwargs.get(_WRAPPED, True))
        self.is_open = True

    @property
    def answer(self) -> Any:
        """Result of the call, with this object in place of frames."""
        return DecoderOutput(sample=self) if self._is_wrapped else (self,)

    def pixels(self, postprocess: Any) -> Tensor:
        """Decode to (frames, rows, columns, 3) of 8 bits. The processor turns frames into a list of lists of images."""
        self.is_open = False
        made = decode(
            self._decoder,
            self._vae,
            lambda frames: pixels_of(postprocess(frames)[0]),
            *self._args,
            comm=self._comm,
            **self._kwargs,
        )
        self._args = ()
        return made


def undecoded(vae: Any, comm: Comm | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Undecoded | None:
    """Return the clip of `vae.decode(*args, **kwargs)`, not made yet; None if only that call can make it.

    The ranks of a `comm` will share it.
    """
    decoder = decoder_of(vae)
    if decoder is None or not args or args[0].ndim != 5 or args[0].shape[0] != 1:
        return None
    return Undecoded(vae, decoder, comm, args, kwargs)


def pixels_of(pictures: Any) -> Tensor:
    """Return the pixels (pictures, rows, columns, 3), 8 bits, of pictures of PIL."""
    return torch.from_numpy(np.stack([np.asarray(one.convert("RGB")) for one in pictures]))


def take_undecoded(pipeline: Any) -> None:
    """Let the processor of a pipeline make images of an `Undecoded`. It treats everything else as before."""
    processor = getattr(pipeline, _PROCESSOR, None)
    if processor is None:
        return
    stock = processor.postprocess_video

    def postprocess_video(video: Any, output_type: str = "np", **kwargs: Any) -> Any:
        if not isinstance(video, Undecoded):
            return stock(video, output_type, **kwargs)
        if output_type != "pil":
            raise TypeError(f"a clip that is not decoded becomes images, not {output_type}")
        return [video.pixels(lambda frames: stock(frames, output_type, **kwargs))]

    processor.postprocess_video = postprocess_video
