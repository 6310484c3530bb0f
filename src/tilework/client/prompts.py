"""Default prompts, of several lengths, because some encoders pad and others do not."""

from __future__ import annotations

from pathlib import Path

PROMPTS = (
    "a red circle on a blue background",
    "a lighthouse at dusk",
    "a bowl of ramen, studio light",
    "portrait of an old sailor, oil on canvas",
    "a fox asleep in fresh snow, shallow depth of field",
    "an empty railway station at night, long exposure, wet pavement reflecting green signal lights",
    "isometric cutaway of a submarine, technical illustration with thin ink lines and flat colours",
    "a street market in the rain seen from above, dozens of umbrellas in every colour",
    "macro photograph of a dragonfly's wing, every vein visible, morning light from behind",
    "a quiet library in an abandoned greenhouse, ivy over the shelves, dust in slanted sunbeams, wide angle",
    "watercolour of a mountain village with smoke from the chimneys",
    "a robot repairing a bicycle in a cluttered workshop",
)


def read_prompts(path: Path | str) -> tuple[str, ...]:
    """Return the lines of a text file that are not blank.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise ValueError(f"prompts is {str(path)!r}, which holds no text; write one prompt per line")
    return prompts
