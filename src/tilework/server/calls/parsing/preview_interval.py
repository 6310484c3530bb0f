"""The number of steps between previews: as asked for, in steps or in seconds, or as a stream needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilework.core.model import ModelInfo
from tilework.core.wire.spec import Spec
from tilework.server.calls.errors import invalid
from tilework.server.schema.image_request import ImageRequest

AloneSeconds = Callable[[Sequence[Spec]], float | None]


def preview_interval(ask: ImageRequest, spec: Spec, info: ModelInfo, alone_s: AloneSeconds, max_previews: int) -> int:
    """Return the number of steps; 0: never, and never after the last step. `spec` is the request but for its previews.

    A number of seconds becomes the steps that take about as long if the request is alone, so that previews follow the
    time of steps. The interval is then long enough for at most `max_previews`; so it is if that time is not known.

    Raises:
        InvalidValue: that many previews are not allowed, both are given, or the model draws none.
    """
    steps = spec.steps
    if ask.preview_every is None and ask.preview_every_s is None:
        return _of_stream(ask, steps)
    name, value = ("preview_every", ask.preview_every) if ask.preview_every_s is None else _seconds(ask)
    if value and not any(stage.previews for stage in info.stages):
        raise invalid(name, value, f"{info.name} draws no previews: leave it out.", code="unsupported_value")
    least = (steps - 1) // (max_previews + 1) + 1
    if ask.preview_every_s is not None:
        taken_s = alone_s([spec])
        return least if taken_s is None else max(least, round(ask.preview_every_s * steps / taken_s))
    every = ask.preview_every or 0
    if every and (steps - 1) // every > max_previews:
        remedy = f"There are at most {max_previews} previews: give 0, or at least {least} for {steps} steps."
        raise invalid("preview_every", every, remedy)
    return every


def _seconds(ask: ImageRequest) -> tuple[str, float | None]:
    if ask.preview_every is not None:
        remedy = "preview_every is given as well: leave one of them out."
        raise invalid("preview_every_s", ask.preview_every_s, remedy)
    return "preview_every_s", ask.preview_every_s


def _of_stream(ask: ImageRequest, steps: int) -> int:
    """Return the shortest interval with no more previews than unfinished images are wanted: none is wasted.

    It also spreads them most evenly. If no interval gives the exact number (3 in 5 steps), there are fewer.
    """
    return -(-steps // (ask.partial_images + 1)) if ask.partial_images else 0
