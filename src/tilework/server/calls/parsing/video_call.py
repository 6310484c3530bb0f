"""Turns the body of a call for a video into the fields of a call for images, which `image_call` checks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.fields import Fields, spread
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.calls.parsing.reading import read_value
from tilework.server.calls.parsing.video_format import AskedVideo
from tilework.server.schema.video_request import NOT_IN_VIDEOS, ONE_IN_VIDEOS, SECONDS, VideoRequest


def video_fields(body: Mapping[str, object], _max_prompt_chars: int) -> Fields:
    """Return the fields of a video's clip.

    Raises:
        InvalidValue: a field that only videos have is wrong, or the body has one that videos do not have.
    """
    given = {name: value for name, value in spread(body).items() if value is not None}
    ask = parsed(VideoRequest, {"prompt": "", **given}, "prompt", '"..."')
    for name in NOT_IN_VIDEOS & given.keys():
        raise invalid(name, given[name], "Videos have no such field: leave it out.", code="unsupported_value")
    for name in ONE_IN_VIDEOS & given.keys():
        if read_value(int, given[name]) != 1:
            remedy = "A call makes one video: leave it out, and send a call for each."
            raise invalid(name, given[name], remedy, code="unsupported_value")
    own = {*VideoRequest.model_fields, *ONE_IN_VIDEOS}
    video = AskedVideo(fps=ask.fps, seconds=_seconds(ask.seconds), given_seconds=ask.seconds)
    return Fields(fields={name: value for name, value in given.items() if name not in own}, video=video)


def _seconds(given: str | float | None) -> float | None:
    """Read a number of seconds; clients of OpenAI's API send a text."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid("seconds", given, f"Give {SECONDS}.")
    return seconds
