"""A workflow: the prompt is rewritten, the picture drawn, enlarged to twice its sides, and checked.

Try it: tilework serve examples/poster.py:poster
"""

from __future__ import annotations

from PIL import Image, ImageStat

import tilework

FORBIDDEN = ("secret", "private")


@tilework.stage(devices="cpu")
def long_prompt(prompt: str) -> str:
    """A language model could do this better."""
    if any(word in prompt.lower() for word in FORBIDDEN):
        raise tilework.Refused("the prompt asks for what is not drawn here")
    return f"a large {prompt} on a blue background"


@tilework.stage
def large(picture: Image.Image) -> Image.Image:
    """The picture at twice its sides."""
    return picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.BICUBIC)


@tilework.stage(devices="cpu")
def checked(large: Image.Image) -> Image.Image:
    """A grey picture in place of one that is nearly white; a real check would ask a classifier."""
    is_white = min(ImageStat.Stat(large).mean) > 250
    return Image.new("RGB", large.size, "gray") if is_white else large


poster = tilework.Workflow("poster", long_prompt, tilework.Pipeline("shapes", prompt="long_prompt"), large, checked)
