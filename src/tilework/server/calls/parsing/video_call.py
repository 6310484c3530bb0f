"""Turns the body of a call for a video into the fields of a call for images, which `image_call` checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from tilework.server.calls.errors import invalid
from tilework.server.calls.parsing.fields import Fields
from tilework.server.calls.parsing.image_call import parsed
from tilework.server.calls.parsing.video_format import AskedVideo
from tilework.server.schema.video_request import NOT_IN_VIDEOS, ONE_IN_VIDEOS, SECONDS, VideoRequest


def video_fields(body: Mapping[str, object]) -> Fields:
    """The fields of a video's clip; those in `extra_body` are as if they were beside it.

    Raises:
        InvalidValue: a field that only videos have is wrong, or the body has one that they have not.
    """
    given = _with_extra({name: value for name, value in body.items() if value is not None})
    ask = parsed(VideoRequest, {"prompt": "", **given}, "prompt", '"..."')
    for name in NOT_IN_VIDEOS & given.keys():
        raise invalid(name, given[name], "Videos have no such field: leave it out.", code="unsupported_value")
    for name in ONE_IN_VIDEOS & given.keys():
        if given[name] != 1:
            remedy = "A call makes one video: leave it out, and send a call for each."
            raise invalid(name, given[name], remedy, code="unsupported_value")
    own = {*VideoRequest.model_fields, *ONE_IN_VIDEOS}
    video = AskedVideo(fps=ask.fps, seconds=_seconds(ask.seconds), given_seconds=ask.seconds)
    return Fields(fields={name: value for name, value in given.items() if name not in own}, video=video)


def _with_extra(given: Mapping[str, object]) -> dict[str, object]:
    """The fields with those in `extra_body`, which forms have as JSON."""
    fields = dict(given)
    extra = fields.pop("extra_body", None)
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            raise invalid("extra_body", given["extra_body"], "Give an object as JSON, or leave it out.") from None
    if extra is None:
        return fields
    if not isinstance(extra, dict):
        raise invalid(
            "extra_body", given["extra_body"], "Give an object with any of the other fields, or leave it out."
        )
    return {**fields, **{name: value for name, value in extra.items() if value is not None}}


def _seconds(given: str | float | None) -> float | None:
    """Clients of OpenAI's send a text."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid("seconds", given, f"Give {SECONDS}.")
    return seconds
