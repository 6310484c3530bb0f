"""Colours of requests (hue by size, shades for neighbours of one size), and the grid behind plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from tilework.core.request import Shape
from tilework.formats.json_lines import RequestId

Rgb = tuple[float, float, float]

# Okabe and Ito's colours, which most colour-blind people can distinguish; small sizes get the light ones.
HUES = ("#56B4E9", "#009E73", "#F0C419", "#E69F00", "#D55E00", "#CC79A7", "#0072B2")
SHADES = (0.0, 0.38, 0.2)
PLAIN_HUE = "#999999"
# Ends of requests; the shape of the mark says it too.
GOOD = "#00664B"
BAD = "#B3261E"
NEUTRAL = "#5F6368"


def size_classes(shapes: Iterable[Shape], limit: int = len(HUES)) -> dict[Shape, str]:
    """Name the class of each shape; at most `limit` classes, in order of pixels.

    A shape and its transpose are one class, named "128x96"; where that gives too many, neighbours in size join to one
    named "64x64 to 128x96".
    """
    ordered = sorted(set(shapes), key=lambda shape: (shape.pixels, str(_landscape(shape)), shape))
    names = list(dict.fromkeys(str(_landscape(shape)) for shape in ordered))
    num_classes = min(limit, len(names))
    bounds = [len(names) * i // num_classes for i in range(num_classes + 1)] if names else []
    classes: dict[str, str] = {}
    for first, end in pairwise(bounds):
        label = names[first] if end - first == 1 else f"{names[first]} to {names[end - 1]}"
        classes |= dict.fromkeys(names[first:end], label)
    return {shape: classes[str(_landscape(shape))] for shape in ordered}


def request_colours(ids: Iterable[RequestId], shapes: Mapping[RequestId, Shape]) -> dict[RequestId, Rgb]:
    """Give each request a colour by its size and its place among the requests of that size.

    Without shapes, the hue goes by place alone; a request whose shape alone is unknown is grey.
    """
    ids = list(dict.fromkeys(ids))
    if not shapes:
        return {i: _mix(HUES[n % len(HUES)], SHADES[n // len(HUES) % len(SHADES)]) for n, i in enumerate(ids)}
    hues = class_hues(shapes.values())
    classes = size_classes(shapes.values())
    seen: dict[str, int] = {}
    colours = {}
    for i in ids:
        name = classes[shapes[i]] if i in shapes else ""
        colours[i] = _mix(hues.get(name, PLAIN_HUE), SHADES[seen.get(name, 0) % len(SHADES)])
        seen[name] = seen.get(name, 0) + 1
    return colours


def class_hues(shapes: Iterable[Shape]) -> dict[str, str]:
    """Return the hue of each size class, smallest first."""
    names = list(dict.fromkeys(size_classes(shapes).values()))
    return dict(zip(names, HUES, strict=False))


def darker(colour: Rgb, share: float = 0.35) -> Rgb:
    return (colour[0] * (1 - share), colour[1] * (1 - share), colour[2] * (1 - share))


def ink_on(colour: Rgb) -> str:
    """Return black or white, whichever reads better on `colour`."""
    luminance = sum(weight * part**2.2 for weight, part in zip((0.2126, 0.7152, 0.0722), colour, strict=True))
    return "black" if luminance > 0.18 else "white"


def _landscape(shape: Shape) -> Shape:
    return Shape(min(shape.height, shape.width), max(shape.height, shape.width), shape.frames)


def _mix(hue: str, white: float) -> Rgb:
    red, green, blue = (int(hue[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white)


def show_grid(axes: Any) -> None:
    """Draw a pale grid behind the data, and no frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
